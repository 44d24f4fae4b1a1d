"""Metrics are right: rational arithmetic, dead, random and broken models, any batch and any world.

The figures are those promised: 200 graphs of at most 30 entities, raw and filtered, both directions, equal to
an oracle in fractions; a constant model within 1 % of the realistic rank's MRR; a random one within three
standard errors of H_N / N; NaN an error; the same for batches of 1, 7 and all, and worlds 1 to 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from exact_scores import EXACT, Place, SmallGraph, oracle, small_dim, small_graph
from ranking_functions import rank_both_sides, rank_on_threads
from worlds import ThreadWorld

import kgshard.ranking.ranker
from kgshard.errors import NonFiniteError
from kgshard.exchange import SingleExchange
from kgshard.models import SCORING
from kgshard.models.link import SIDES, LinkModel
from kgshard.ranking.metrics import TIES, Ranks, ranking_metrics

NAMES = sorted(SCORING)
WHOLE = sorted(set(EXACT) & set(SCORING))
NUM_GRAPHS = 200


def fraction_metrics(places: Iterable[Place], ties: str) -> dict[str, Fraction]:
    """Return every metric as its definition has it."""
    places = list(places)
    ranks, count = [place.rank(ties) for place in places], len(places)
    metrics = {"mrr": sum(1 / rank for rank in ranks) / count, "mr": sum(ranks) / count}
    metrics |= {f"hits@{k}": Fraction(sum(rank <= k for rank in ranks), count) for k in (1, 3, 10)}
    expected = sum(Fraction(place.candidates + 1, 2) for place in places) / count
    metrics["amr"] = metrics["mr"] / expected
    metrics["amri"] = 1 - (metrics["mr"] - 1) / (expected - 1) if expected > 1 else Fraction(0)
    return metrics


@pytest.mark.parametrize("quarter", range(4))
def test_metrics_equal_rational_arithmetic_on_two_hundred_graphs(quarter: int) -> None:
    """Every model with whole-number scores has its turn; every tie rule is checked."""
    num_tied = 0
    for seed in range(quarter, NUM_GRAPHS, 4):
        graph = small_graph(WHOLE[seed // 4 % len(WHOLE)], seed)
        for filtered in (True, False):
            found = rank_on_threads(graph, 1 + seed % 4, filtered=filtered)
            both: list[Place] = []
            for side in SIDES:
                places = oracle(graph, side, graph.known_set if filtered else set())
                assert found[side] == [[p.higher, p.ties, p.candidates] for p in places], (seed, side)
                both += places
            ranks = Ranks(*np.array(found["head"] + found["tail"]).T)
            for ties in TIES:
                metrics, expected = ranking_metrics(ranks, ties), fraction_metrics(both, ties)
                assert metrics == pytest.approx({name: float(v) for name, v in expected.items()}, rel=1e-12)
            num_tied += sum(place.ties > 0 for place in both)
    assert num_tied > 200


def test_the_oracle_tells_other_protocols_apart() -> None:
    """A control: on these graphs optimistic ties, missing filters, and one direction give other metrics."""
    graphs = [small_graph(WHOLE[seed % len(WHOLE)], seed) for seed in range(40)]
    honest, unfiltered, tails_only = [], [], []
    for graph in graphs:
        tails = oracle(graph, "tail", graph.known_set)
        honest += tails + oracle(graph, "head", graph.known_set)
        unfiltered += oracle(graph, "tail", set()) + oracle(graph, "head", set())
        tails_only += tails
    figures = [
        fraction_metrics(honest, "realistic"),
        fraction_metrics(honest, "optimistic"),
        fraction_metrics(honest, "pessimistic"),
        fraction_metrics(unfiltered, "realistic"),
        fraction_metrics(tails_only, "realistic"),
    ]
    for name in ("mrr", "mr", "amri"):
        assert len({figure[name] for figure in figures}) == len(figures)


def test_float32_alone_would_rank_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: without its float64 referee the ranking is caught by the oracle."""
    monkeypatch.setattr("kgshard.ranking.comparing.CandidateBlock._settle", lambda *arguments: None)
    wrong = 0
    for seed in range(10):
        graph = small_graph("distmult", seed)
        found = rank_on_threads(graph, 1, filtered=True)["tail"]
        wrong += found != [[p.higher, p.ties, p.candidates] for p in oracle(graph, "tail", graph.known_set)]
    assert wrong >= 5


def drawn_graph(name: str, num_entities: int, num_triples: int, *, constant: bool = False) -> SmallGraph:
    """Return normal tables and uniform triples; of a constant model all entities are one row."""
    random = np.random.default_rng(11)
    reciprocal = not SCORING[name].has_head_queries
    model = LinkModel(name, small_dim(name, 16), num_entities, 5, reciprocal)
    entities = random.standard_normal((1 if constant else num_entities, model.dim))
    relations = random.standard_normal((model.num_relation_rows, model.relation_dim))
    shared = {
        key: random.standard_normal(how.shape).astype(np.float32)
        for key, how in model.scoring.shared_init(model.dim).items()
    }
    triples = random.integers(0, [num_entities, 5, num_entities], (num_triples, 3)).astype(np.int32)
    rows = np.broadcast_to(entities, (num_entities, model.dim)).astype(np.float32)
    return SmallGraph(model, rows, relations.astype(np.float32), triples, triples, shared)


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_model_ranks_in_the_middle(name: str) -> None:
    """All rows identical: every rank is (1 + N) / 2, and not 1 (B61). The row is no round number."""
    graph = drawn_graph(name, 1000, 3, constant=True)
    for ranks in ThreadWorld(3).run(rank_both_sides, graph)[0].values():
        assert ranking_metrics(ranks)["mrr"] == pytest.approx(1 / 500.5, rel=0.01)
        assert ranks.under("realistic").tolist() == [(1 + n) / 2 for n in ranks.candidates.tolist()]
        assert ranks.under("optimistic").tolist() == [1.0] * 3
        assert ranks.under("pessimistic").tolist() == ranks.candidates.tolist()
        assert ranking_metrics(ranks)["amri"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_random_model_has_the_mrr_of_chance(name: str) -> None:
    """1,000 entities, 500 triples: MRR within three standard errors of H_N / N = 0.0075 (B67)."""
    num_entities, num_triples = 1000, 500
    graph = drawn_graph(name, num_entities, num_triples)
    places = 1 / np.arange(1, num_entities + 1)
    mean, sigma = float(places.mean()), float(places.std()) / num_triples**0.5
    assert mean == pytest.approx(0.0075, abs=1e-4)
    for ranks in rank_both_sides(SingleExchange(), replace(graph, known=graph.known[:0])).values():
        assert abs(ranking_metrics(ranks)["mrr"] - mean) < 3 * sigma


@pytest.mark.parametrize("table", ["entities", "relations"])
@pytest.mark.parametrize("name", NAMES)
def test_one_nan_is_an_error_and_never_a_metric(name: str, table: str) -> None:
    graph = drawn_graph(name, 30, 4)
    getattr(graph, table)[-1, -1] = np.nan
    with pytest.raises(NonFiniteError, match=r"(entity 29|relation row \d+) is not finite"):
        rank_both_sides(SingleExchange(), graph)


@pytest.mark.parametrize("name", ["complex", "mure", "transe-l1", "transh", "rotate-moduli"])
def test_batches_and_worlds_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model for every metric, lifted candidates, and tables without ties and with them."""
    graph = drawn_graph(name, 13, 11)
    graph.entities[5:9] = graph.entities[4]
    expected = rank_on_threads(graph, 1, filtered=True)
    assert any(ties for _, ties, _ in expected["head"] + expected["tail"])
    for batch in (1, 7, len(graph.triples)):
        monkeypatch.setattr(kgshard.ranking.ranker, "QUERY_BLOCK", batch)
        monkeypatch.setattr(kgshard.ranking.ranker, "ROW_BLOCK", batch)
        for world_size in (1, 2, 3, 4):
            assert rank_on_threads(graph, world_size, filtered=True) == expected
