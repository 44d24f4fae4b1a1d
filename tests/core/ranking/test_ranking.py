"""Ranks are those of exact arithmetic, whatever the blocks, the world, the dtype and the size of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from exact_scores import (
    COSINES,
    EXACT,
    NOT_WHOLE,
    SINES,
    UNIT,
    Place,
    SmallGraph,
    oracle,
    small_dim,
    small_graph,
)
from ranking_functions import rank_on_threads, sharded
from worlds import ThreadWorld

import kgshard.ranking.ranker
from kgshard.errors import NonFiniteError, RankFailureError
from kgshard.exchange import Exchange, SingleExchange
from kgshard.known import KnownLinks
from kgshard.models import SCORING
from kgshard.models.link import SIDES, LinkModel, Side
from kgshard.models.metric import L2_NORM
from kgshard.models.scoring import Scoring
from kgshard.ranking.metrics import Ranks
from kgshard.ranking.ranker import Ranker

NAMES = sorted(SCORING)
WHOLE = sorted(set(EXACT) & set(SCORING))
Doubles = npt.NDArray[np.float64]


def listed(places: list[Place]) -> list[list[int]]:
    return [[place.higher, place.ties, place.candidates] for place in places]


def test_every_model_has_an_exact_score_or_a_reason_why_not() -> None:
    assert set(SCORING) == set(EXACT) | set(NOT_WHOLE)
    assert not set(EXACT) & set(NOT_WHOLE)
    assert COSINES[1] / UNIT == pytest.approx(np.cos(1), rel=1e-15)
    assert SINES[1] / UNIT == pytest.approx(np.sin(1), rel=1e-15)


@pytest.mark.parametrize("name", WHOLE)
def test_every_model_ranks_as_whole_numbers_do(name: str) -> None:
    """Filtered and raw, both sides, worlds 1 to 4, ties and more ranks than entities included."""
    num_tied = 0
    for seed in range(8):
        graph = small_graph(name, seed)
        for filtered in (True, False):
            found = rank_on_threads(graph, 1 + seed % 4, filtered=filtered)
            for side in SIDES:
                places = oracle(graph, side, graph.known_set if filtered else set())
                assert found[side] == listed(places), (seed, side, filtered)
                num_tied += sum(place.ties > 0 for place in places)
    assert num_tied > 5


def drawn_graph(name: str, num_entities: int, dim: int, num_triples: int, seed: int) -> SmallGraph:
    """Return a graph whose tables and shared parameters are normal, so that nothing ties."""
    random = np.random.default_rng(seed)
    reciprocal = not SCORING[name].has_head_queries
    model = LinkModel(name, small_dim(name, dim), num_entities, 3, reciprocal)
    shared = {
        key: random.standard_normal(how.shape).astype(np.float32)
        for key, how in model.scoring.shared_init(model.dim).items()
    }
    triples = random.integers(0, [num_entities, 3, num_entities], (num_triples, 3)).astype(np.int32)
    return SmallGraph(
        model,
        random.standard_normal((num_entities, model.dim)).astype(np.float32),
        random.standard_normal((model.num_relation_rows, model.relation_dim)).astype(np.float32),
        triples,
        triples,
        shared,
    )


def brute_force_scores(graph: SmallGraph, side: Side, triple: npt.NDArray[np.int32]) -> Doubles:
    """Return float64[N]: every candidate's score, by the model's own formula in numpy."""
    model, (head, relation, tail) = graph.model, triple.tolist()
    entities = graph.entities.astype(np.float64)
    anchor = entities[[head if side == "tail" else tail]]
    row = graph.relations[[model.relation_row(side, relation)]].astype(np.float64)
    shared = {name: values.astype(np.float64) for name, values in graph.shared.items()}
    query = model.queries(side, anchor, row, shared)
    scores: Doubles = model.metric.score_pairs(query, model.candidates(side, entities))
    return scores


@pytest.mark.parametrize("name", NAMES)
def test_ranks_lie_where_a_brute_force_in_float64_allows(name: str) -> None:
    """For models without whole-number scores this is the oracle: scores closer than 1e-9 may tie."""
    graph = drawn_graph(name, 60, 8, 30, seed=3)
    found = rank_on_threads(graph, 2, filtered=False)
    for side in SIDES:
        for triple, (higher, ties, candidates) in zip(graph.triples, found[side], strict=True):
            scores = brute_force_scores(graph, side, triple)
            answer = triple[2] if side == "tail" else triple[0]
            others = np.delete(scores, answer) - scores[answer]
            assert (others > 1e-9).sum() <= higher <= (others > -1e-9).sum()
            assert higher + ties <= (others > -1e-9).sum()
            assert candidates == 60


@pytest.fixture(params=[(1, 1, 1), (3, 2, 2), (7, 5, 1)])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in zip(("QUERY_BLOCK", "ROW_BLOCK", "BLOCKS_ASKED"), request.param, strict=True):
        monkeypatch.setattr(kgshard.ranking.ranker, name, size)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["distmult", "cp", "mure", "transe", "transe-l1", "transh", "rotate"])
def test_ranks_do_not_depend_on_blocks(name: str) -> None:
    """Every metric, lifted candidates, and sides whose candidates differ."""
    for seed in range(100, 102):
        graph = small_graph(name, seed)
        for world_size in (1, 3):
            found = rank_on_threads(graph, world_size, filtered=True)
            for side in SIDES:
                assert found[side] == listed(oracle(graph, side, graph.known_set))


def test_more_entities_and_triples_than_a_block_holds() -> None:
    """At the real block sizes: two blocks of rows, seventeen of queries, in two turns."""
    num_entities, num_triples = kgshard.ranking.ranker.ROW_BLOCK + 500, 8300
    assert num_triples > kgshard.ranking.ranker.QUERY_BLOCK * kgshard.ranking.ranker.BLOCKS_ASKED
    graph = drawn_graph("distmult", num_entities, 4, num_triples, seed=10)
    found = rank_on_threads(graph, 1, filtered=False)["tail"]
    for i in [0, 1, num_triples - 1, *range(500, num_triples, 400)]:
        scores = brute_force_scores(graph, "tail", graph.triples[i])
        assert found[i] == [int((scores > scores[graph.triples[i, 2]]).sum()), 0, num_entities]


def float64_ranks(graph: SmallGraph, side: Side) -> list[float]:
    """Return unfiltered ranks in plain float64, for tables without ties."""
    entities, relations = graph.entities.astype(np.float64), graph.relations.astype(np.float64)
    middle = graph.model.relation_dim // 2
    ranks = []
    for h, r, t in graph.triples:
        anchor, target, relation = (
            (entities[h], t, relations[r]) if side == "tail" else (entities[t], h, relations[r])
        )
        if graph.model.name == "transe":
            query = anchor + relation if side == "tail" else anchor - relation
        elif graph.model.name == "complex":
            relation = relation[:middle] + 1j * relation[middle:]
            product = (anchor[:middle] + 1j * anchor[middle:]) * (
                relation if side == "tail" else relation.conj()
            )
            query = np.concatenate([product.real, product.imag])
        else:
            query = anchor * relation
        difference = entities - query
        scores = -(difference**2).sum(1) if graph.model.name == "transe" else entities @ query
        ranks.append(1.0 + float((scores > scores[target]).sum()))
    return ranks


def wide_graph(name: str, scale: float) -> SmallGraph:
    """Return 300 entities with normal rows of dimension 64 times `scale`, and 40 triples."""
    graph = drawn_graph(name, 300, 64, 40, seed=0)
    entities = (graph.entities.astype(np.float64) * scale).astype(np.float32)
    relations = graph.relations.astype(np.float64) * (scale if name == "transe" else 1)
    return replace(graph, entities=entities, relations=relations.astype(np.float32))


@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e-20, 1e-8, 1.0, 1e8, 1e16, 1e19, 1e25])
@pytest.mark.parametrize("name", ["distmult", "complex", "transe"])
def test_ranks_do_not_depend_on_the_size_of_the_numbers(name: str, scale: float) -> None:
    """Scores beyond float32's range must not become ranks by accident: infinity and NaN beat nothing."""
    graph = wide_graph(name, scale)
    found = rank_on_threads(graph, 2, filtered=False)
    for side in SIDES:
        assert [1.0 + higher + ties / 2 for higher, ties, _ in found[side]] == float64_ranks(graph, side)


def one_triple(model: LinkModel, entities: list[Any], relation: list[float], triple: list[int]) -> SmallGraph:
    triples = np.array([triple], np.int32)
    rows = np.array(entities, np.float32)
    return SmallGraph(model, rows, np.array([relation], np.float32), triples, triples)


@pytest.mark.parametrize("name", ["distmult", "transe", "transe-l1"])
def test_near_ties_are_decided_in_float64(name: str) -> None:
    """Candidates one float32 step away from the true answer are not taken for equal to it."""
    model = LinkModel(name=name, dim=8, num_entities=5, num_relations=1, reciprocal=False)
    head = np.full(8, 1.0, np.float32)
    relation = [1.0] * 8 if name == "distmult" else [0.0] * 8
    true = head * np.float32(3)
    closer, same, farther = true.copy(), true.copy(), true.copy()
    towards = np.float32(np.inf) if name == "distmult" else np.float32(-np.inf)
    closer[3] = np.nextafter(true[3], towards)
    farther[3] = np.nextafter(true[3], -towards)
    graph = one_triple(model, [true, closer, same, farther, head], relation, [4, 0, 0])
    # Higher: `closer`, and for distances also the head itself, which is at distance 0.
    higher = 1 if name == "distmult" else 2
    assert rank_on_threads(graph, 1, filtered=False)["tail"] == [[higher, 1, 5]]


def test_candidates_that_a_projection_makes_equal_are_equal() -> None:
    """Rows along a hyperplane's normal all fall on one point; what rounding leaves of them is no order."""
    model = LinkModel(name="transh", dim=3, num_entities=6, num_relations=1, reciprocal=False)
    rows = [[k, k, k] for k in (1, 2, 3, 7, 11, -5)]
    graph = one_triple(model, rows, [0, 0, 0, 1, 1, 1], [0, 0, 1])
    found = rank_on_threads(graph, 1, filtered=False)
    assert found == {"head": [[0, 5, 6]], "tail": [[0, 5, 6]]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["distmult", "mure", "transe", "rotate-moduli"])
def test_tables_of_any_dtype_rank_as_their_values_in_float32_do(name: str, dtype: torch.dtype) -> None:
    """The trainer's tables may be bfloat16; candidates are lifted from their exact values."""
    graph = drawn_graph(name, 80, 12, 40, seed=5)
    stored = [torch.tensor(table).to(dtype) for table in (graph.entities, graph.relations)]

    def rank(exchange: Exchange, tables: list[torch.Tensor]) -> list[list[int]]:
        table = sharded(exchange, graph.entities)
        table.weight = tables[0][table.rows.start : table.rows.stop]
        ranks = Ranker(graph.model, table, tables[1]).rank("tail", graph.triples, None)
        return [ranks.higher.tolist(), ranks.ties.tolist()]

    found = ThreadWorld(2).run(rank, stored)
    assert found == ThreadWorld(1).run(rank, [table.float() for table in stored]) * 2


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_relations_may_be_sharded_too(world_size: int) -> None:
    """More ranks than relation rows included; a row that is not finite is named by its place in the table."""
    graph = drawn_graph("complex", 30, 8, 20, seed=9)

    def rank(exchange: Exchange, relations: npt.NDArray[np.float32]) -> list[int] | str:
        tables = [sharded(exchange, table) for table in (graph.entities, relations)]
        try:
            return Ranker(graph.model, *tables).rank("head", graph.triples, None).higher.tolist()
        except (NonFiniteError, RankFailureError) as error:
            return str(error)

    expected = [higher for higher, _, _ in rank_on_threads(graph, 1, filtered=False)["head"]]
    assert ThreadWorld(world_size).run(rank, graph.relations) == [expected] * world_size
    spoilt = graph.relations.copy()
    spoilt[2, 3] = np.nan
    for words in ThreadWorld(world_size).run(rank, spoilt):
        assert "relation row 2 is not finite" in words


def test_ranks_follow_a_table_that_changes() -> None:
    graph = drawn_graph("distmult", 50, 8, 20, seed=6)
    table = sharded(SingleExchange(), graph.entities)
    ranker = Ranker(graph.model, table, torch.tensor(graph.relations))
    before = ranker.rank("tail", graph.triples, None).under()
    table.weight.neg_()
    # <h r, t> keeps its sign, so that all ranks stay; with one row made small they do not.
    np.testing.assert_array_equal(ranker.rank("tail", graph.triples, None).under(), before)
    table.weight[int(graph.triples[0, 2])] *= 1e-3
    assert (ranker.rank("tail", graph.triples, None).under() != before).any()


def test_known_links_may_hold_a_triple_twice_and_lack_the_ranked_one() -> None:
    graph = small_graph("distmult", 8)
    doubled = np.concatenate([graph.known, graph.known])
    lacking = np.array([row for row in graph.known.tolist() if row not in graph.triples.tolist()], np.int32)
    expected = rank_on_threads(graph, 2, filtered=True)
    assert len(lacking) < len(graph.known)
    assert rank_on_threads(replace(graph, known=doubled), 2, filtered=True) == expected
    for side in SIDES:
        links = replace(graph, known=lacking)
        found = rank_on_threads(links, 2, filtered=True)[side]
        assert found == listed(oracle(links, side, links.known_set))


def test_no_triples_have_no_ranks() -> None:
    graph = small_graph("distmult", 3)
    ranker = Ranker(graph.model, sharded(SingleExchange(), graph.entities), torch.tensor(graph.relations))
    known = KnownLinks(graph.known, "tail", num_relations=graph.model.num_relations)
    assert len(ranker.rank("tail", graph.triples[:0], known)) == 0


@pytest.mark.parametrize("reciprocal", [False, True])
def test_one_entity_is_always_first(reciprocal: bool) -> None:
    model = LinkModel(name="distmult", dim=4, num_entities=1, num_relations=1, reciprocal=reciprocal)
    relations = np.ones((model.num_relation_rows, 4), np.float32)
    triples = np.array([[0, 0, 0]], np.int32)
    graph = SmallGraph(model, np.ones((1, 4), np.float32), relations, triples, triples)
    assert rank_on_threads(graph, 4, filtered=True) == {"head": [[0, 0, 1]], "tail": [[0, 0, 1]]}


def rank_tails(exchange: Exchange, graph: SmallGraph) -> Ranks | Exception:
    shared = {name: torch.tensor(values) for name, values in graph.shared.items()}
    ranker = Ranker(graph.model, sharded(exchange, graph.entities), torch.tensor(graph.relations), shared)
    try:
        return ranker.rank("tail", graph.triples, None)
    except (NonFiniteError, RankFailureError) as error:
        return error


def errors_of(graph: SmallGraph, world_size: int) -> list[Any]:
    """Rank; return the errors of all ranks. Each must have one of its own, not a broken barrier."""
    outcomes = ThreadWorld(world_size).run(rank_tails, graph)
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    return outcomes


def spoil_entity(graph: SmallGraph, value: float) -> str:
    graph.entities[17, 2] = value
    return "entity 17 is not finite"


def spoil_relation(graph: SmallGraph, value: float) -> str:
    graph.relations[2, 1] = value
    return "relation row 2 is not finite"


def spoil_shared(graph: SmallGraph, value: float) -> str:
    graph.shared["core"][0, 1, 2] = value
    return "shared parameter 'core' is not finite"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("spoil", [spoil_entity, spoil_relation, spoil_shared])
def test_a_number_that_is_not_finite_is_an_error_on_every_rank(
    spoil: Callable[[SmallGraph, float], str], world_size: int, value: float
) -> None:
    """Every comparison with NaN is false, so nothing would rank above it (B60)."""
    graph = drawn_graph("tucker", 20, 4, 10, seed=7)
    triples = graph.triples
    triples[triples == 17] = 3  # It need not be asked for: it is a candidate.
    words = spoil(graph, value)
    errors = errors_of(graph, world_size)
    assert all(words in str(error) for error in errors)
    assert any(isinstance(error, NonFiniteError) for error in errors)


class Odd(Scoring):
    """-||exp(h r) + exp(t)||: finite rows may have no finite query, candidate or score."""

    metric = L2_NORM
    has_head_queries = False

    def query_tails(self, heads: Any, relations: Any) -> Any:
        return (heads * relations).exp()

    def candidates(self, side: Side, rows: Any) -> Any:
        return -rows.exp()


HALF = 354.5
"""exp of it is 9e153; the square of that is finite, the square of twice that is not."""


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("entity", "value", "words"),
    [
        (19, 1000.0, "entity 19 makes a candidate that is not finite"),
        (1, 1000.0, "entity 2 as tail of entity 1 and relation 0 has no finite score"),
        (19, HALF, "entity 19 as an answer has no finite score"),
        (2, HALF, "entity 2 as tail of entity 1 and relation 0 has no finite score"),
    ],
)
def test_a_score_that_is_not_finite_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, world_size: int, entity: int, value: float, words: str
) -> None:
    graph = odd_graph(monkeypatch, HALF)
    graph.entities[entity, 0] = value
    errors = errors_of(graph, world_size)
    assert all(words in str(error) for error in errors), errors
    assert any(isinstance(error, NonFiniteError) for error in errors)


def odd_graph(monkeypatch: pytest.MonkeyPatch, exponent: float) -> SmallGraph:
    """Return 20 equal entities and one triple, whose query is exp(exponent)."""
    monkeypatch.setitem(SCORING, "odd", Odd())
    model = LinkModel(name="odd", dim=2, num_entities=20, num_relations=1, reciprocal=True)
    triples = np.array([[1, 0, 2]], np.int32)
    relations = np.array([[exponent, 0.0]] * 2, np.float32)
    return SmallGraph(model, np.ones((20, 2), np.float32), relations, triples, triples)


def test_finite_scores_of_any_size_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control for the above, far beyond float32's range: one candidate is better, 18 are equal."""
    graph = odd_graph(monkeypatch, 300.0)
    graph.entities[:, 0] = 300.0
    graph.entities[1] = 1.0
    [ranks] = ThreadWorld(1).run(rank_tails, graph)
    assert [ranks.higher.tolist(), ranks.ties.tolist()] == [[1], [18]]
