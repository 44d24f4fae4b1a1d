"""Comparing queries with candidates: right values, and a bound on float32's error that holds."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard.models.metric import (
    Metric,
    compare_pairs,
    comparison_slack,
    score_all,
    score_from_comparison,
    score_pairs,
)

METRICS: tuple[Metric, ...] = get_args(Metric)
Rows = npt.NDArray[Any]


def exact_comparison(metric: Metric, query: Rows, candidate: Rows) -> Fraction:
    """Return the comparison value in rational arithmetic."""
    pairs = [(Fraction(float(a)), Fraction(float(b))) for a, b in zip(query, candidate, strict=True)]
    if metric == "dot":
        return sum((a * b for a, b in pairs), Fraction(0))
    if metric == "l1":
        return -sum((abs(a - b) for a, b in pairs), Fraction(0))
    return -sum(((a - b) ** 2 for a, b in pairs), Fraction(0))


@st.composite
def queries_and_candidates(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Return a float64 query and float32[3, D] candidates: large, small, and next to the query."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    dim = draw(st.sampled_from([1, 2, 3, 8, 33, 200]))
    size, other_size = (10.0 ** draw(st.integers(-8, 12)) for _ in range(2))
    skew = draw(st.floats(0, 4))
    query = random.standard_normal(dim) * size * 10 ** (skew * random.standard_normal(dim))
    query = np.clip(query, -1e15, 1e15)
    candidate = (random.standard_normal(dim) * other_size).astype(np.float32)
    near = (query * (1 + 1e-6 * random.standard_normal(dim))).astype(np.float32)
    return query, np.stack([candidate, near, -near])


@pytest.mark.parametrize("metric", METRICS)
@settings(max_examples=60, deadline=None)
@given(rows=queries_and_candidates())
def test_slack_bounds_the_error_of_float32(metric: Metric, rows: tuple[Rows, Rows]) -> None:
    query, candidates = rows
    longest = float(np.linalg.norm(candidates.astype(np.float64), axis=1).max())
    length = np.linalg.norm(query[None], axis=1)
    slack = Fraction(float(comparison_slack(metric, len(query), length, longest)[0]))
    rounded = query.astype(np.float32)
    in_numpy = compare_pairs(metric, rounded, candidates)
    in_torch = compare_pairs(metric, torch.from_numpy(rounded), torch.from_numpy(candidates))
    assert in_numpy.dtype == np.float32
    for row, candidate in enumerate(candidates):
        exact = exact_comparison(metric, query, candidate)
        for value in (in_numpy[row], in_torch[row]):
            assert abs(Fraction(float(value)) - exact) <= slack


@settings(max_examples=60, deadline=None)
@given(rows=queries_and_candidates())
def test_slack_also_bounds_matrix_products(rows: tuple[Rows, Rows]) -> None:
    """Searches take `dot` by a matrix product, and `l2` as |q|^2 - |q - e|^2 = 2 q.e - |e|^2."""
    query, candidates = rows
    wide = candidates.astype(np.float64)
    longest = float(np.linalg.norm(wide, axis=1).max())
    lengths = np.linalg.norm(query[None], axis=1)
    rounded = torch.tensor(query[None].astype(np.float32))
    bias = -torch.tensor((wide**2).sum(axis=1)).float()
    product = score_all("dot", rounded, torch.from_numpy(candidates))[0]
    expanded = torch.addmm(bias, rounded, torch.from_numpy(candidates).T, alpha=2)[0]
    squared_length = -exact_comparison("l2", query, np.zeros_like(query))
    for row, candidate in enumerate(candidates):
        dot_slack = Fraction(float(comparison_slack("dot", len(query), lengths, longest)[0]))
        assert abs(Fraction(float(product[row])) - exact_comparison("dot", query, candidate)) <= dot_slack
        l2_slack = Fraction(float(comparison_slack("l2", len(query), lengths, longest)[0]))
        exact = squared_length + exact_comparison("l2", query, candidate)
        assert abs(Fraction(float(expanded[row])) - exact) <= l2_slack


@pytest.mark.parametrize("metric", METRICS)
def test_slack_is_not_so_wide_that_everything_is_unsure(metric: Metric) -> None:
    random = np.random.default_rng(1)
    queries, candidates = random.standard_normal((2, 200, 64))
    longest = float(np.linalg.norm(candidates, axis=1).max())
    slack = comparison_slack(metric, 64, np.linalg.norm(queries, axis=1), longest)
    spread = np.std(compare_pairs(metric, queries, candidates))
    assert slack.shape == (200,)
    assert slack.max() < 0.01 * spread


@pytest.mark.parametrize("metric", METRICS)
def test_a_tenth_of_the_unit_roundoff_would_not_do(metric: Metric) -> None:
    """A control: the laws above would notice a bound that forgets to grow."""
    random = np.random.default_rng(2)
    worst = 0.0
    for _ in range(300):
        query, drawn = random.standard_normal((2, 2)) * 1e3
        candidate = drawn.astype(np.float32)
        value: np.float32 = compare_pairs(metric, query.astype(np.float32), candidate)
        error = abs(Fraction(float(value)) - exact_comparison(metric, query, candidate))
        length = np.array([np.linalg.norm(query)])
        longest = float(np.linalg.norm(candidate))
        slack = Fraction(float(comparison_slack(metric, 2, length, longest)[0]))
        worst = max(worst, float(error / slack))
    assert 0.02 < worst <= 1


@pytest.mark.parametrize("metric", METRICS)
def test_comparison_values_order_candidates_as_scores_do(metric: Metric) -> None:
    random = np.random.default_rng(3)
    query, candidates = random.standard_normal(16), random.standard_normal((50, 16))
    values = compare_pairs(metric, query, candidates)
    scores = score_pairs(metric, query, candidates)
    assert np.argsort(values).tolist() == np.argsort(scores).tolist()
    recovered = [score_from_comparison(metric, float(value)) for value in values]
    np.testing.assert_allclose(recovered, scores, rtol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("num_queries", "num_candidates"), [(0, 3), (1, 1), (4, 0), (3, 5)])
def test_every_query_meets_every_candidate(
    metric: Metric, num_queries: int, num_candidates: int, exact: bool
) -> None:
    random = np.random.default_rng(4)
    queries = random.standard_normal((num_queries, 6))
    candidates = random.standard_normal((num_candidates, 6))
    expected = np.empty((num_queries, num_candidates))
    for i, query in enumerate(queries):
        for j, candidate in enumerate(candidates):
            value = float(exact_comparison(metric, query, candidate))
            expected[i, j] = -np.sqrt(-value) if metric == "l2" else value
    in_numpy = score_all(metric, queries, candidates, exact=exact)
    in_torch = score_all(metric, torch.tensor(queries), torch.tensor(candidates), exact=exact)
    np.testing.assert_allclose(in_numpy, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(in_torch, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("metric", ["l2", "l1"])
def test_close_pairs_keep_their_distance_in_float32(metric: Metric) -> None:
    """torch's default cdist is percents off here, so exact searches must not use it."""
    random = np.random.default_rng(5)
    queries = random.standard_normal((30, 200)).astype(np.float32)
    shift = np.float32(1e-3) * random.standard_normal((30, 200)).astype(np.float32)
    candidates = queries + shift
    power = 2 if metric == "l2" else 1
    difference = queries.astype(np.float64) - candidates.astype(np.float64)
    expected = -np.linalg.norm(difference, ord=power, axis=1)
    scores = score_all(metric, torch.tensor(queries), torch.tensor(candidates)).diagonal()
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    if metric == "l2":
        loose = score_all(metric, torch.tensor(queries), torch.tensor(candidates), exact=False).diagonal()
        assert not np.allclose(loose, expected, rtol=1e-3)


def test_higher_is_more_plausible_for_every_metric() -> None:
    query = np.array([1.0, 2.0])
    same, opposite = query, -query
    for metric in METRICS:
        assert score_pairs(metric, query, same) > score_pairs(metric, query, opposite)
