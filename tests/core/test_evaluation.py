"""Ranks are those of exact arithmetic, whatever the blocks, the world, and the model's health."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ranking_functions import (
    Floats,
    begin_run,
    chain,
    evaluate_run,
    random_tables,
    rank_both_sides,
    save_on_threads,
)
from worlds import GlooPool, ThreadWorld

import kgshard.evaluation
from kgshard.errors import DataError, NonFiniteError
from kgshard.models import SCORING
from kgshard.models.link import SIDES, LinkModel, Side
from kgshard.runs import Run

NAMES = sorted(SCORING)
Ids = npt.NDArray[np.int32]
Triple = tuple[int, int, int]


def _series(first_term: int) -> int:
    """Return cos(1) or sin(1), scaled by UNIT, from its power series."""
    value, term, k = 0, UNIT // max(first_term, 1), first_term
    while term:
        value += term if (k // 2) % 2 == 0 else -term
        term //= (k + 1) * (k + 2)
        k += 2
    return value


UNIT = 10**60
COSINES = {0: UNIT, 1: _series(0), -1: _series(0)}
SINES = {0: 0, 1: _series(1), -1: -_series(1)}
"""Of the angles that rotations take here, in radians. cos 1 and sin 1 are algebraically independent of
whole numbers over whole numbers, so two scores are equal only if they are the same combination of them."""


def _times(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _pairs(row: list[int]) -> list[tuple[int, int]]:
    middle = len(row) // 2
    return list(zip(row[:middle], row[middle:], strict=True))


def _distmult(h: list[int], r: list[int], t: list[int]) -> int:
    return sum(a * b * c for a, b, c in zip(h, r, t, strict=True))


def _complex(h: list[int], r: list[int], t: list[int]) -> int:
    triples = zip(_pairs(h), _pairs(r), _pairs(t), strict=True)
    return sum(_times(_times(a, b), (c[0], -c[1]))[0] for a, b, c in triples)


def _transe(h: list[int], r: list[int], t: list[int]) -> int:
    return -sum((a + b - c) ** 2 for a, b, c in zip(h, r, t, strict=True))


def _transe_l1(h: list[int], r: list[int], t: list[int]) -> int:
    return -sum(abs(a + b - c) for a, b, c in zip(h, r, t, strict=True))


def _rotate(h: list[int], r: list[int], t: list[int]) -> int:
    """-|h e^(i r) - t|^2 = 2 Re(h e^(i r) conj(t)) - |h|^2 - |t|^2, scaled."""
    value = -UNIT * sum(x * x for x in h + t)
    for a, angle, c in zip(_pairs(h), r, _pairs(t), strict=True):
        turned = _times(a, (COSINES[angle], SINES[angle]))
        value += 2 * _times(turned, (c[0], -c[1]))[0]
    return value


EXACT: dict[str, Callable[[list[int], list[int], list[int]], int]] = {
    "distmult": _distmult,
    "complex": _complex,
    "transe": _transe,
    "transe-l1": _transe_l1,
    "rotate": _rotate,
}
"""Whole numbers that order and equal each other as the scores do."""


@dataclass(frozen=True)
class SmallGraph:
    """Whole-number tables, so that ties are real, and triples that are partly known."""

    model: LinkModel
    entities: Floats
    relations: Floats
    triples: Ids
    """The ranked triples."""
    known: Ids
    """The ranked triples and others."""


def small_graph(name: str, seed: int) -> SmallGraph:
    random = np.random.default_rng(seed)
    num_entities, num_relations = int(random.integers(1, 31)), int(random.integers(1, 4))
    model = LinkModel(
        name=name, dim=4, num_entities=num_entities, num_relations=num_relations, reciprocal=seed % 2 == 0
    )
    largest = 1 if name == "rotate" else 2
    entities = random.integers(-2, 3, (num_entities, model.dim)).astype(np.float32)
    relations = random.integers(-largest, largest + 1, (model.num_relation_rows, model.relation_dim)).astype(
        np.float32
    )
    size = int(random.integers(1, 60))
    drawn = np.stack(
        [random.integers(0, n, size) for n in (num_entities, num_relations, num_entities)], axis=1
    ).astype(np.int32)
    known = np.unique(drawn, axis=0)
    return SmallGraph(model, entities, relations, known[random.permutation(len(known))[:8]], known)


def oracle_ranks(graph: SmallGraph, side: Side, known: set[Triple]) -> list[Fraction]:
    """Rank by scoring every candidate in whole numbers, one at a time."""
    entities = [[int(x) for x in row] for row in graph.entities]
    relations = [[int(x) for x in row] for row in graph.relations]
    score, reciprocal = EXACT[graph.model.name], graph.model.reciprocal

    def of(h: int, r: int, t: int) -> int:
        if side == "head" and reciprocal:
            return score(entities[t], relations[r + graph.model.num_relations], entities[h])
        return score(entities[h], relations[r], entities[t])

    ranks = []
    for h, r, t in graph.triples.tolist():
        true, higher, ties = of(h, r, t), 0, 0
        for e in range(len(entities)):
            candidate = (e, r, t) if side == "head" else (h, r, e)
            if candidate == (h, r, t) or candidate in known:
                continue
            other = of(*candidate)
            higher, ties = higher + (other > true), ties + (other == true)
        ranks.append(1 + higher + Fraction(ties, 2))
    return ranks


def ranks_of(graph: SmallGraph, world_size: int, *, filtered: bool) -> dict[str, list[float]]:
    """Rank on threads; every rank must return the same."""
    known = graph.known if filtered else None
    outcomes = ThreadWorld(world_size).run(
        rank_both_sides, graph.model, graph.entities, graph.relations, graph.triples, known
    )
    assert all(outcome == outcomes[0] for outcome in outcomes)
    ranks: dict[str, list[float]] = outcomes[0]
    return ranks


def known_set(graph: SmallGraph) -> set[Triple]:
    return {(h, r, t) for h, r, t in graph.known.tolist()}


def test_every_model_has_an_exact_score() -> None:
    assert set(EXACT) == set(SCORING)
    assert float(Fraction(COSINES[1], UNIT)) == pytest.approx(float(np.cos(1)), rel=1e-15)
    assert float(Fraction(SINES[1], UNIT)) == pytest.approx(float(np.sin(1)), rel=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_equal_exact_arithmetic_on_sixty_graphs(name: str) -> None:
    """Filtered and raw, both sides, worlds 1 to 4, ties and more ranks than entities included."""
    num_tied = 0
    for seed in range(60):
        graph, world_size = small_graph(name, seed), 1 + seed % 4
        for filtered in (True, False):
            known = known_set(graph) if filtered else set()
            found = ranks_of(graph, world_size, filtered=filtered)
            for side in SIDES:
                expected = oracle_ranks(graph, side, known)
                assert [Fraction(rank) for rank in found[side]] == expected, (seed, side, filtered)
                num_tied += sum(rank.denominator == 2 for rank in expected)
    assert num_tied > 100


def test_the_oracle_notices_optimistic_ties_and_missing_filters() -> None:
    """A control: on these graphs, other protocols give other ranks."""
    graphs = [small_graph("distmult", seed) for seed in range(20)]
    honest = [oracle_ranks(graph, "tail", known_set(graph)) for graph in graphs]
    unfiltered = [oracle_ranks(graph, "tail", set()) for graph in graphs]
    optimistic = [[Fraction(int(rank)) for rank in ranks] for ranks in honest]
    assert honest != unfiltered
    assert honest != optimistic


@pytest.fixture(params=[(1, 1), (3, 2), (7, 5)])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, rows = request.param
    monkeypatch.setattr(kgshard.evaluation, "QUERY_BLOCK", queries)
    monkeypatch.setattr(kgshard.evaluation, "ROW_BLOCK", rows)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", NAMES)
def test_ranks_do_not_depend_on_blocks(name: str) -> None:
    for seed in range(100, 106):
        graph = small_graph(name, seed)
        for world_size in (1, 3):
            found = ranks_of(graph, world_size, filtered=True)
            for side in SIDES:
                assert [Fraction(r) for r in found[side]] == oracle_ranks(graph, side, known_set(graph))


def float64_ranks(graph: SmallGraph, side: Side) -> list[float]:
    """Return unfiltered ranks in plain float64, for tables without ties."""
    entities, relations = graph.entities.astype(np.float64), graph.relations.astype(np.float64)
    scoring, middle = graph.model.scoring, graph.model.relation_dim // 2
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
        scores = -(difference**2).sum(1) if scoring.metric == "l2" else entities @ query
        ranks.append(1.0 + float((scores > scores[target]).sum()))
    return ranks


def wide_graph(name: str, scale: float, seed: int = 0) -> SmallGraph:
    """Return 300 entities with normal rows of dimension 64 times `scale`, and 40 triples."""
    random = np.random.default_rng(seed)
    model = LinkModel(name=name, dim=64, num_entities=300, num_relations=3, reciprocal=False)
    entities = (random.standard_normal((300, 64)) * scale).astype(np.float32)
    relations = random.standard_normal((3, 64)) * (scale if name == "transe" else 1)
    triples = np.stack([random.integers(0, n, 40) for n in (300, 3, 300)], axis=1).astype(np.int32)
    return SmallGraph(model, entities, relations.astype(np.float32), triples, triples)


@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e-20, 1e-8, 1.0, 1e8, 1e16, 1e19, 1e25])
@pytest.mark.parametrize("name", ["distmult", "complex", "transe"])
def test_ranks_do_not_depend_on_the_size_of_the_numbers(name: str, scale: float) -> None:
    """Scores beyond float32's range must not become ranks by accident: infinity and NaN beat nothing."""
    graph = wide_graph(name, scale)
    found = ranks_of(graph, 2, filtered=False)
    for side in SIDES:
        assert found[side] == float64_ranks(graph, side)


@pytest.mark.parametrize("name", ["distmult", "transe", "transe-l1"])
def test_near_ties_are_decided_in_float64(name: str) -> None:
    """Candidates one float32 step away from the true answer are not taken for equal to it."""
    model = LinkModel(name=name, dim=8, num_entities=4, num_relations=1, reciprocal=False)
    head = np.full(8, 1.0, np.float32)
    relation = np.ones((1, 8), np.float32) if name == "distmult" else np.zeros((1, 8), np.float32)
    true = head * np.float32(3)
    closer, same, farther = true.copy(), true.copy(), true.copy()
    towards = np.float32(np.inf) if name == "distmult" else np.float32(-np.inf)
    closer[3] = np.nextafter(true[3], towards)
    farther[3] = np.nextafter(true[3], -towards)
    entities = np.stack([true, closer, same, farther])
    graph = SmallGraph(
        model,
        np.concatenate([entities, head[None]]),
        relation,
        np.array([[4, 0, 0]], np.int32),
        np.empty((0, 3), np.int32),
    )
    # Higher: `closer`, and for distances also the head itself, which is at distance 0.
    assert ranks_of(graph, 1, filtered=False)["tail"] == [2.5 if name == "distmult" else 3.5]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_constant_model_ranks_in_the_middle(name: str, world_size: int) -> None:
    """All rows identical: rank (1 + N) / 2, not 1 (B61). The row is no round number."""
    random = np.random.default_rng(7)
    model = LinkModel(name=name, dim=16, num_entities=1000, num_relations=2, reciprocal=False)
    entities = np.tile(random.standard_normal(16).astype(np.float32), (1000, 1))
    relations = random.standard_normal((2, model.relation_dim)).astype(np.float32)
    triples = np.array([[0, 0, 999], [5, 1, 5], [400, 0, 2]], np.int32)
    graph = SmallGraph(model, entities, relations, triples, triples)
    for side in SIDES:
        assert ranks_of(graph, world_size, filtered=False)[side] == [500.5] * 3


def test_a_table_of_zeros_has_the_middle_mrr(tmp_path: Path) -> None:
    run = begin_run(tmp_path, train=chain(1000), test=[("e3", "next", "e900")])
    save_on_threads(run, 2, np.zeros((1000, 4), np.float32), np.zeros((1, 4), np.float32))
    [result] = ThreadWorld(1).run(evaluate_run, str(run.folder), "test", False)
    assert result["metrics"]["mr"] == 500.5
    assert result["metrics"]["mrr"] == pytest.approx(1 / 500.5)
    assert result["metrics"]["hits@10"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_random_model_has_the_mrr_of_chance(name: str) -> None:
    """1,000 entities, 500 triples: MRR within three standard errors of H_N / N = 0.0075 (B67)."""
    num_entities, num_triples = 1000, 500
    random = np.random.default_rng(11)
    model = LinkModel(name=name, dim=32, num_entities=num_entities, num_relations=5, reciprocal=False)
    entities = random.standard_normal((num_entities, 32)).astype(np.float32)
    relations = random.standard_normal((5, model.relation_dim)).astype(np.float32)
    triples = np.stack([random.integers(0, n, num_triples) for n in (1000, 5, 1000)], axis=1).astype(np.int32)
    ranks = ranks_of(SmallGraph(model, entities, relations, triples, triples), 2, filtered=False)
    places = 1 / np.arange(1, num_entities + 1)
    mean, sigma = float(places.mean()), float(places.std()) / num_triples**0.5
    assert mean == pytest.approx(0.0075, abs=1e-4)
    # For distances a triple (h, r, h) or a central row is better than chance; one side is enough noise.
    for side in SIDES:
        assert abs(float(np.mean(1 / np.array(ranks[side]))) - mean) < 3 * sigma


def ranked_run(folder: Path, splits: dict[str, list[tuple[str, str, str]]]) -> Run:
    """Save a distmult run whose true tails stand by their number: e0 above e1 above e2 ..."""
    run = begin_run(folder, train=splits["train"], valid=splits["valid"], test=splits["test"])
    names = run.dataset.entities
    entities = np.zeros((len(names), 4), np.float32)
    for row, name in enumerate(names):
        entities[row] = [1, 1, 1, 1 - int(name[1:]) / 100]
    save_on_threads(run, 1, entities, np.ones((run.model.num_relation_rows, 4), np.float32))
    return run


GRAPH = {
    "train": [*chain(10), ("e9", "r", "e0")],
    "valid": [("e9", "r", "e1")],
    "test": [("e9", "r", "e2")],
}


def tail_rank(run: Run, split: str, *, filtered: bool) -> float:
    [result] = ThreadWorld(1).run(evaluate_run, str(run.folder), split, filtered)
    return float(result["tail"]["mr"])


def test_valid_triples_are_no_candidates_of_test(tmp_path: Path) -> None:
    """B64: train a-r-b, valid a-r-c, test a-r-d with scores b > c > d: the filtered rank of d is 1."""
    run = ranked_run(tmp_path, GRAPH)
    assert tail_rank(run, "test", filtered=True) == 1
    assert tail_rank(run, "test", filtered=False) == 3


def test_test_triples_are_candidates_of_valid(tmp_path: Path) -> None:
    """What is chosen on valid must not have looked at test."""
    swapped = GRAPH | {"valid": GRAPH["test"], "test": GRAPH["valid"]}
    run = ranked_run(tmp_path, swapped)
    assert tail_rank(run, "valid", filtered=True) == 2
    assert tail_rank(run, "valid", filtered=False) == 3
    assert tail_rank(run, "test", filtered=True) == 1


def test_the_protocol_is_written_beside_the_metrics(tmp_path: Path) -> None:
    run = ranked_run(tmp_path, GRAPH)
    results = [
        ThreadWorld(1).run(evaluate_run, str(run.folder), split, filtered)[0]
        for split, filtered in (("test", True), ("valid", True), ("train", True), ("test", False))
    ]
    protocols = [result["protocol"] for result in results]
    assert [p["filter"] for p in protocols] == [
        ["train", "valid", "test"],
        ["train", "valid"],
        ["train", "valid"],
        [],
    ]
    assert [p["filtered"] for p in protocols] == [True, True, True, False]
    assert [(p["triples"], p["queries"], p["candidates"]) for p in protocols[1:3]] == [
        (1, 2, 10),
        (10, 20, 10),
    ]
    both = results[2]
    assert both["metrics"]["mrr"] == pytest.approx((both["head"]["mrr"] + both["tail"]["mrr"]) / 2)
    json.dumps(results)


def test_661_triples_count_661_in_every_world(tmp_path: Path) -> None:
    """Metrics must not change with the number of ranks: no padding, no triple twice (B68)."""
    random = np.random.default_rng(13)
    links = {
        (f"e{a}", f"r{b}", f"e{c}") for a, b, c in random.integers(0, [135, 46, 135], (3000, 3)).tolist()
    }
    ordered = sorted(links)
    run = begin_run(tmp_path, model="complex", dim=8, train=[*chain(135), *ordered[661:]], test=ordered[:661])
    save_on_threads(run, 3, *random_tables(run, 14))
    results = []
    for world_size in (1, 2, 3, 4):
        outcomes = ThreadWorld(world_size).run(evaluate_run, str(run.folder))
        assert all(outcome == outcomes[0] for outcome in outcomes)
        results.append(outcomes[0])
    assert results[0]["protocol"]["triples"] == 661
    assert results[0]["protocol"]["queries"] == 1322
    assert results[1:] == results[:1] * 3


@pytest.mark.processes
def test_gloo_ranks_give_the_same_metrics(tmp_path: Path, gloo_pool: GlooPool) -> None:
    run = begin_run(
        tmp_path, model="rotate", dim=6, train=chain(40), test=[("e3", "next", "e8"), ("e1", "next", "e7")]
    )
    save_on_threads(run, 2, *random_tables(run, 15))
    [alone] = ThreadWorld(1).run(evaluate_run, str(run.folder))
    assert gloo_pool.run(3, tmp_path, evaluate_run, str(run.folder)) == [alone] * 3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_row_that_is_not_finite_is_an_error_on_every_rank(
    tmp_path: Path, world_size: int, value: float
) -> None:
    """Every comparison with NaN is false, so nothing would rank above it (B60)."""
    run = begin_run(tmp_path, train=chain(9), test=[("e0", "next", "e5")])
    entities, relations = random_tables(run, 16)
    entities[7, 2] = value
    save_on_threads(run, 2, entities, relations)
    errors = errors_of(world_size, run)
    name = run.dataset.entities[7]
    assert all(f"entity 7 ({name!r}) is not finite" in str(error) for error in errors)
    assert any(isinstance(error, NonFiniteError) for error in errors)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_relation_row_that_is_not_finite_is_named_too(tmp_path: Path, world_size: int) -> None:
    run = begin_run(tmp_path, train=[*chain(9), ("e0", "odd", "e1")], test=[("e0", "next", "e5")])
    entities, relations = random_tables(run, 17)
    odd = run.dataset.relations.id_of("odd")
    relations[odd, 0] = np.nan
    save_on_threads(run, 2, entities, relations)
    for error in errors_of(world_size, run):
        assert f"relation row {odd} ('odd') is not finite" in str(error)
        assert isinstance(error, NonFiniteError)


def errors_of(world_size: int, run: Run) -> list[BaseException]:
    """Return the errors of all ranks; every rank must have one of its own, not a broken barrier."""
    outcomes: list[Any] = ThreadWorld(world_size).run(catch_evaluation, str(run.folder))
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    return outcomes


def catch_evaluation(exchange: Any, folder: str) -> object:
    try:
        return evaluate_run(exchange, folder)
    except Exception as error:
        return error


def test_an_empty_split_is_refused_by_name(tmp_path: Path) -> None:
    run = begin_run(tmp_path, train=chain(5))
    save_on_threads(run, 1, *random_tables(run, 18))
    with pytest.raises(DataError, match="split 'test' holds no triples"):
        ThreadWorld(1).run(evaluate_run, str(run.folder))
    with pytest.raises(DataError, match="no split 'dev'"):
        ThreadWorld(1).run(evaluate_run, str(run.folder), "dev")


@pytest.mark.parametrize("reciprocal", [False, True])
def test_one_entity_is_always_first(reciprocal: bool) -> None:
    model = LinkModel(name="distmult", dim=4, num_entities=1, num_relations=1, reciprocal=reciprocal)
    relations = np.ones((model.num_relation_rows, 4), np.float32)
    triples = np.array([[0, 0, 0]], np.int32)
    graph = SmallGraph(model, np.ones((1, 4), np.float32), relations, triples, triples)
    assert ranks_of(graph, 4, filtered=True) == {"head": [1.0], "tail": [1.0]}
