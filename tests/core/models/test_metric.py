"""Comparing queries with candidates: right values, and a bound on float32's error that holds."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard.models.metric import METRICS, Metric

Rows = npt.NDArray[Any]

every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))


def root(square: Fraction) -> Fraction:
    """Return the square root to 400 bits."""
    scale = 1 << 800
    return Fraction(isqrt(square.numerator * scale // square.denominator), 1 << 400)


def fractions(row: Rows) -> list[Fraction]:
    return [Fraction(float(value)) for value in row]


def exact_comparison(metric: Metric, query: Rows, candidate: Rows) -> Fraction:
    """Return the comparison value in rational arithmetic."""
    q, e = fractions(query), fractions(candidate)
    if metric.name == "hyperplane":
        q, w = q[: len(e)], q[len(e) :]
        height = sum((a * b for a, b in zip(w, e, strict=True)), Fraction(0))
        e = [b - height * a for a, b in zip(w, e, strict=True)]
    if metric.name == "dot":
        return sum((a * b for a, b in zip(q, e, strict=True)), Fraction(0))
    differences = [a - b for a, b in zip(q, e, strict=True)]
    if metric.name == "l1":
        return -sum((abs(part) for part in differences), Fraction(0))
    if metric.name == "moduli":
        middle = len(e) // 2
        pairs = zip(differences[:middle], differences[middle:], strict=True)
        return -sum((root(real**2 + imaginary**2) for real, imaginary in pairs), Fraction(0))
    return -sum((part**2 for part in differences), Fraction(0))


def as_query(metric: Metric, points: Rows, seed: int = 6) -> Rows:
    """Return float64[..., width] queries made of any points [..., D]."""
    if metric.name != "hyperplane":
        return points
    normals = np.random.default_rng(seed).standard_normal(points.shape)
    normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
    heights = (points * normals).sum(-1, keepdims=True)
    return np.concatenate([points - heights * normals, normals], axis=-1)


@st.composite
def points_and_candidates(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Return a float64 point and float32[3, D] candidates: large, small, and next to the point."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    dim = draw(st.sampled_from([2, 4, 8, 34, 200]))
    size, other_size = (10.0 ** draw(st.integers(-8, 12)) for _ in range(2))
    skew = draw(st.floats(0, 4))
    point = random.standard_normal(dim) * size * 10 ** (skew * random.standard_normal(dim))
    point = np.clip(point, -1e15, 1e15)
    candidate = (random.standard_normal(dim) * other_size).astype(np.float32)
    near = (point * (1 + 1e-6 * random.standard_normal(dim))).astype(np.float32)
    return point, np.stack([candidate, near, -near])


def slack_of(metric: Metric, query: Rows, candidates: Rows) -> Fraction:
    longest = float(np.linalg.norm(candidates.astype(np.float64), axis=1).max())
    lengths = metric.lengths(query[None])
    return Fraction(float(metric.slack(candidates.shape[1], lengths, longest)[0]))


@every_metric
@settings(max_examples=60, deadline=None)
@given(rows=points_and_candidates())
def test_slack_bounds_the_error_of_float32(metric: Metric, rows: tuple[Rows, Rows]) -> None:
    query, candidates = as_query(metric, rows[0]), rows[1]
    slack = slack_of(metric, query, candidates)
    rounded = query.astype(np.float32)
    in_numpy = metric.compare_pairs(rounded, candidates)
    in_torch = metric.compare_pairs(torch.from_numpy(rounded), torch.from_numpy(candidates))
    assert in_numpy.dtype == np.float32
    for row, candidate in enumerate(candidates):
        exact = exact_comparison(metric, query, candidate)
        for value in (in_numpy[row], in_torch[row]):
            assert abs(Fraction(float(value)) - exact) <= slack


@every_metric
@settings(max_examples=60, deadline=None)
@given(rows=points_and_candidates())
def test_slack_also_bounds_what_searches_multiply_out(metric: Metric, rows: tuple[Rows, Rows]) -> None:
    """Such as |q|^2 - |q - e|^2 = 2 q.e - |e|^2: comparison values less the query's own constant."""
    query, candidates = as_query(metric, rows[0]), rows[1]
    slack = slack_of(metric, query, candidates)
    squares = (candidates.astype(np.float64) ** 2).sum(axis=1).astype(np.float32)
    rounded = query.astype(np.float32)[None]
    in_numpy = metric.compare_all(rounded, candidates, squares)[0]
    in_torch = metric.compare_all(*map(torch.from_numpy, (rounded, candidates, squares)))[0]
    point = fractions(query[: candidates.shape[1]])
    squared = metric.name in ("l2", "hyperplane")
    constant = -sum((part**2 for part in point), Fraction(0)) if squared else Fraction(0)
    for row, candidate in enumerate(candidates):
        exact = exact_comparison(metric, query, candidate) - constant
        for value in (in_numpy[row], in_torch[row]):
            assert abs(Fraction(float(value)) - exact) <= slack
    assert float(metric.constant(query[None])[0]) == pytest.approx(float(constant), rel=1e-12)


def test_squares_too_small_for_float32_are_part_of_the_slack_of_moduli() -> None:
    metric, point = METRICS["moduli"], np.array([0.0, 1e-25])
    candidates = np.zeros((1, 2), np.float32)
    error = Fraction(float(metric.compare_pairs(torch.tensor(point, dtype=torch.float32), torch.zeros(2))))
    error -= exact_comparison(metric, point, candidates[0])
    assert 0 < abs(error) <= slack_of(metric, point, candidates)


@every_metric
def test_slack_is_not_so_wide_that_everything_is_unsure(metric: Metric) -> None:
    points, candidates = np.random.default_rng(1).standard_normal((2, 200, 64))
    queries = as_query(metric, points)
    longest = float(np.linalg.norm(candidates, axis=1).max())
    slack = metric.slack(64, metric.lengths(queries), longest)
    spread = np.std(metric.compare_pairs(queries, candidates))
    assert slack.shape == (200,)
    assert slack.max() < 0.01 * spread


@every_metric
def test_a_fraction_of_the_slack_would_not_do(metric: Metric) -> None:
    """A control: the laws above would notice a bound that forgets to grow."""
    random = np.random.default_rng(2)
    worst = 0.0
    for seed in range(300):
        point, drawn = random.standard_normal((2, 2)) * 1e3
        query, candidate = as_query(metric, point, seed), drawn.astype(np.float32)
        value = metric.compare_pairs(query.astype(np.float32), candidate)
        error = abs(Fraction(float(value)) - exact_comparison(metric, query, candidate))
        worst = max(worst, float(error / slack_of(metric, query, candidate[None])))
    assert 0.02 < worst <= 1


@every_metric
def test_comparison_values_order_candidates_as_scores_do(metric: Metric) -> None:
    random = np.random.default_rng(3)
    query, candidates = as_query(metric, random.standard_normal(16)), random.standard_normal((50, 16))
    values = metric.compare_pairs(query, candidates)
    scores = metric.score_pairs(query, candidates)
    assert np.argsort(values).tolist() == np.argsort(scores).tolist()
    np.testing.assert_allclose([metric.score(float(value)) for value in values], scores, rtol=1e-12)
    np.testing.assert_allclose(metric.comparison(scores), values, rtol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
@every_metric
@pytest.mark.parametrize(("num_queries", "num_candidates"), [(0, 3), (1, 1), (4, 0), (3, 5)])
def test_every_query_meets_every_candidate(
    metric: Metric, num_queries: int, num_candidates: int, exact: bool
) -> None:
    random = np.random.default_rng(4)
    queries = as_query(metric, random.standard_normal((num_queries, 6)))
    candidates = random.standard_normal((num_candidates, 6))
    expected = np.empty((num_queries, num_candidates))
    for i, query in enumerate(queries):
        for j, candidate in enumerate(candidates):
            value = float(exact_comparison(metric, query, candidate))
            expected[i, j] = -np.sqrt(-value) if metric.name in ("l2", "hyperplane") else value
    in_numpy = metric.score_all(queries, candidates, exact=exact)
    in_torch = metric.score_all(torch.tensor(queries), torch.tensor(candidates), exact=exact)
    np.testing.assert_allclose(in_numpy, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(in_torch, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["l2", "l1", "moduli", "hyperplane"])
def test_close_pairs_keep_their_distance_in_float32(name: str) -> None:
    """torch's default cdist is percents off here, so exact searches must not use it."""
    metric, random = METRICS[name], np.random.default_rng(5)
    queries = as_query(metric, random.standard_normal((30, 200))).astype(np.float32)
    candidates = queries[:, :200] + np.float32(1e-3) * random.standard_normal((30, 200)).astype(np.float32)
    wide = queries.astype(np.float64), candidates.astype(np.float64)
    expected = [metric.score(float(exact_comparison(metric, *pair))) for pair in zip(*wide, strict=True)]
    scores = metric.score_all(torch.tensor(queries), torch.tensor(candidates)).diagonal()
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    if name in ("l2", "hyperplane"):
        loose = metric.score_all(torch.tensor(queries), torch.tensor(candidates), exact=False).diagonal()
        assert not np.allclose(loose, expected, rtol=1e-3)


@every_metric
def test_higher_is_more_plausible(metric: Metric) -> None:
    query = as_query(metric, np.array([1.0, 2.0]))
    same = query[:2]
    assert metric.score_pairs(query, same) > metric.score_pairs(query, -same)


def test_a_hyperplane_sees_nothing_of_what_is_along_its_normal() -> None:
    metric, random = METRICS["hyperplane"], np.random.default_rng(7)
    query = as_query(metric, random.standard_normal(8))
    candidate = random.standard_normal(8)
    moved = candidate + 3 * query[8:]
    assert metric.score_pairs(query, moved) == pytest.approx(metric.score_pairs(query, candidate))
    assert metric.score_pairs(query, query[:8] + 5 * query[8:]) == pytest.approx(0, abs=1e-12)


@every_metric
@pytest.mark.parametrize("exact", [True, False])
def test_gradients_are_those_of_the_plain_formula(metric: Metric, exact: bool) -> None:
    random = np.random.default_rng(8)
    free = torch.tensor(
        random.standard_normal((4, 12 if metric.name == "hyperplane" else 6)), requires_grad=True
    )
    candidates = torch.tensor(random.standard_normal((5, 6)), requires_grad=True)
    weights = torch.tensor(random.standard_normal((4, 5)))
    queries = free
    if metric.name == "hyperplane":  # A form that holds on the plane only has gradients along it only.
        points, normals = free[:, :6], torch.nn.functional.normalize(free[:, 6:])
        heights = (points * normals).sum(-1, keepdim=True)
        queries = torch.cat([points - heights * normals, normals], dim=1)
    plain = plain_scores(metric.name, queries, candidates)
    wanted = torch.autograd.grad((plain * weights).sum(), (free, candidates), retain_graph=True)
    crowd = metric.score_all(queries, candidates, exact=exact)
    pairs = metric.score_pairs(queries[:, None], candidates[None])
    for values in (crowd, pairs):
        found = torch.autograd.grad((values * weights).sum(), (free, candidates), retain_graph=True)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def plain_scores(name: str, queries: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return scores [B, N] by torch's own operations."""
    q, e = queries[:, None], candidates[None]
    if name == "hyperplane":
        q, w = q[..., :6], q[..., 6:]
        e = e - torch.einsum("bd,nd->bn", w[:, 0], candidates)[..., None] * w
    if name == "dot":
        return torch.einsum("bd,nd->bn", queries, candidates)
    if name == "l1":
        return -(q - e).abs().sum(-1)
    if name == "moduli":
        return -torch.complex(*(q - e).chunk(2, dim=-1)).abs().sum(-1)
    return -((q - e) ** 2).sum(-1).sqrt()


@every_metric
@pytest.mark.parametrize("exact", [True, False])
def test_gradients_are_finite_where_a_distance_is_nothing(metric: Metric, exact: bool) -> None:
    """sqrt has an infinite slope at 0."""
    for point in (np.zeros((3, 8)), np.ones((3, 8))):
        values = (
            np.zeros((3, 16)) if metric.name == "hyperplane" and not point.any() else as_query(metric, point)
        )
        queries = torch.tensor(values, dtype=torch.float32, requires_grad=True)
        candidates = torch.tensor(values[:, :8], dtype=torch.float32, requires_grad=True)
        total = metric.score_pairs(queries, candidates).sum()
        total = total + metric.score_all(queries, candidates, exact=exact).sum()
        for gradient in torch.autograd.grad(total, (queries, candidates)):
            assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("numbers", [1, 7, 40, 1 << 20])
def test_moduli_are_the_same_however_many_are_held_at_once(
    monkeypatch: pytest.MonkeyPatch, numbers: int
) -> None:
    monkeypatch.setattr("kgshard.moduli.SLICE_NUMBERS", numbers)
    random = np.random.default_rng(9)
    queries, candidates = (
        torch.tensor(random.standard_normal((rows, 6)), requires_grad=True) for rows in (5, 4)
    )
    weights = torch.tensor(random.standard_normal((5, 4)))
    results = []
    for scores in (
        METRICS["moduli"].score_all(queries, candidates),
        plain_scores("moduli", queries, candidates),
    ):
        gradients = torch.autograd.grad((scores * weights).sum(), (queries, candidates))
        results.append((scores, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_every_metric_is_known_by_its_own_name() -> None:
    assert {name: metric.name for name, metric in METRICS.items()} == {name: name for name in METRICS}
