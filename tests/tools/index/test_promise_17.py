"""Promise 17: answers of every exact source are those of float64 brute force, ties by lower row.

200 random sets, each with a metric, ties, exclusions and k of its own, as a scan, a flat index, or by norm.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exact_search import CASES, FLAT, Wide, asked, open_source
from graphs import make_run
from kgshard_tools.answers import load
from kgshard_tools.index.build import build_index
from kgshard_tools.search import Exclusions, search

from kgshard.models.metric import METRICS, Metric

NUM_SETS = 200


def brute_force(
    metric: Metric, queries: Wide, rows: Wide, k: int, excluded: list[set[int]]
) -> list[list[int]]:
    """Return the k best rows for each query by its formula in float64, ties by lower row."""
    best = []
    for query, out in zip(queries, excluded, strict=True):
        width = rows.shape[1]
        point, normal = query[:width], query[width:]
        if metric.name == "dot":
            scores = (rows * point).sum(1)
        elif metric.name == "l1":
            scores = -np.abs(rows - point).sum(1)
        elif metric.name == "moduli":
            real, imaginary = np.split(rows - point, 2, axis=1)
            scores = -np.sqrt(real * real + imaginary * imaginary).sum(1)
        else:
            left = rows if metric.name == "l2" else rows - (rows * normal).sum(1)[:, None] * normal
            scores = -((left - point) ** 2).sum(1)
        order = np.lexsort((np.arange(len(rows)), -scores))
        best.append([row for row in order.tolist() if row not in out][:k])
    return best


@pytest.mark.parametrize("number", range(NUM_SETS))
def test_answers_are_those_of_brute_force(tmp_path: Path, number: int) -> None:
    metric, kind = CASES[number % len(CASES)]
    draw = np.random.default_rng(number)
    num_rows, half = int(draw.integers(2, 700)), int(draw.integers(1, 20))
    if number % 3:
        rows = draw.standard_normal((num_rows, 2 * half)).astype(np.float32)
    else:  # Small whole numbers: ties.
        rows = draw.integers(-2, 3, (num_rows, 2 * half)).astype(np.float32)
    if number % 5 == 0:
        rows *= np.exp(draw.normal(0, 1, (num_rows, 1))).round(2).astype(np.float32)
    points = draw.integers(-3, 4, (9, 2 * half)).astype(np.float64)
    if metric.name == "moduli":  # Sums of roots tie only where the terms do; whole moduli sum exactly.
        rows, points = (
            np.concatenate([3 * x, 4 * x], axis=1)[:, :] for x in (np.round(rows[:, :half]), points[:, :half])
        )
        rows = rows.astype(np.float32)
    queries = np.stack([asked(metric, point, np.eye(2 * half)[0]) for point in points])
    excluded = [set(draw.integers(0, num_rows, draw.integers(0, 12)).tolist()) for _ in queries]
    pairs = [(query, row) for query, out in enumerate(excluded) for row in out]
    exclusions = Exclusions(
        [query for query, _ in pairs], [row for _, row in pairs], num_queries=9, num_rows=num_rows
    )
    k = int(draw.integers(1, num_rows + 20))
    found = search(open_source(tmp_path, rows, metric, kind), queries, k, exclusions)
    wanted = brute_force(metric, queries, rows.astype(np.float64), k, excluded)
    assert [found.of(query)[0].tolist() for query in range(9)] == wanted
    assert found.exact.all()


def test_every_metric_and_kind_is_among_the_sets() -> None:
    assert {metric.name for metric, _ in CASES} == set(METRICS)
    assert len(CASES) * 10 < NUM_SETS
    assert FLAT.is_exact


@pytest.mark.nightly
def test_the_default_index_of_100_000_rows_finds_enough(tmp_path: Path) -> None:
    """10^5 x 64 random directions, which no index likes: auto stays exact, or ivf reaches .95."""
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((100_001, 64)).astype(np.float32)
    triples = [(f"e{i}", "r", f"e{i + 1}") for i in range(100_000)]
    run = make_run(tmp_path, triples, entities=rows, dim=64, model="transe")
    queries = [f"e{i}" for i in range(0, 100_000, 500)]
    truth = load(run.folder).most_similar_many(queries, 10)
    for type in ("auto", "ivf"):
        build_index(run.folder, "neighbors", type=type)
        found = load(run.folder).most_similar_many(queries, 10)
        same = [len(set(a.labels) & set(b.labels)) / 10 for a, b in zip(found, truth, strict=True)]
        assert np.mean(same) >= 0.95
