"""The sampled softmax loss against its formula in float64, and what its correction is for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kgshard.losses import find_hits, n3, sampled_softmax

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
NO_HITS = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def pairs(flags: Tensor) -> tuple[Tensor, Tensor]:
    queries, negatives = flags.nonzero(as_tuple=True)
    return queries, negatives


def oracle(positives: Values, negatives: Values, is_positive: Flags, num_candidates: int) -> float:
    """Sum over queries of -log(e^p / (e^p + N/K sum of e^n over negatives that are not the positive))."""
    total = 0.0
    for positive, row, hits in zip(positives, negatives, is_positive, strict=True):
        counted = row[~hits]
        shift = max(positive, counted.max(initial=-math.inf))
        others = sum(math.exp(score - shift) for score in counted)
        denominator = math.exp(positive - shift) + num_candidates / len(row) * others
        total += shift + math.log(denominator) - positive
    return total


def loss(positives: Values, negatives: Values, is_positive: Flags, num_candidates: int) -> float:
    return float(
        sampled_softmax(
            torch.tensor(positives),
            torch.tensor(negatives),
            hits=pairs(torch.tensor(is_positive)),
            num_candidates=num_candidates,
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_queries=st.integers(1, 6),
    num_negatives=st.integers(1, 9),
    num_candidates=st.integers(1, 10**9),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
)
def test_equals_the_formula(
    seed: int, num_queries: int, num_negatives: int, num_candidates: int, scale: float
) -> None:
    random = np.random.default_rng(seed)
    positives = random.standard_normal(num_queries) * scale
    negatives = random.standard_normal((num_queries, num_negatives)) * scale
    is_positive = random.random((num_queries, num_negatives)) < 0.3
    # The same candidate by another path: its score differs in the last digits.
    noise = 1e-5 * scale * random.standard_normal(negatives.shape)
    negatives = np.where(is_positive, positives[:, None] + noise, negatives)
    expected = oracle(positives, negatives, is_positive, num_candidates)
    found = loss(positives, negatives, is_positive, num_candidates)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_negative_that_is_the_positive_itself_counts_as_nothing() -> None:
    without = loss(np.array([1.0]), np.array([[0.5, -1.0]]), np.array([[False, False]]), 2)
    hit = loss(np.array([1.0]), np.array([[0.5, 99.0, -1.0]]), np.array([[False, True, False]]), 3)
    assert hit == pytest.approx(without, rel=1e-12)
    assert loss(np.array([1.0]), np.array([[5.0, 7.0]]), np.array([[True, True]]), 100) == pytest.approx(
        0, abs=1e-12
    )


def test_a_hit_gets_no_gradient() -> None:
    positives = torch.tensor([0.2, 0.1], requires_grad=True)
    negatives = torch.tensor([[0.2, 0.4], [0.5, 0.6]], requires_grad=True)
    hits = torch.tensor([[True, False], [False, False]])
    value = sampled_softmax(positives, negatives, hits=pairs(hits), num_candidates=10)
    up, down = torch.autograd.grad(value, (positives, negatives))
    assert (down == 0).tolist() == hits.tolist()
    assert bool((down[~hits] > 0).all())
    assert bool((up < 0).all())


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_queries=st.integers(0, 5),
    num_negatives=st.integers(1, 8),
    scale=st.floats(0.1, 9),
)
def test_gradients_are_those_of_the_plain_formula(
    seed: int, num_queries: int, num_negatives: int, scale: float
) -> None:
    random = np.random.default_rng(seed)
    positives = torch.tensor(random.standard_normal(num_queries) * scale, requires_grad=True)
    negatives = torch.tensor(random.standard_normal((num_queries, num_negatives)) * scale, requires_grad=True)
    is_hit = torch.tensor(random.random((num_queries, num_negatives)) < 0.3)
    counted = torch.exp(negatives).masked_fill(is_hit, 0).sum(1) * (1000 / num_negatives)
    plain = (torch.log(torch.exp(positives) + counted) - positives).sum() * 0.5
    loss = sampled_softmax(positives, negatives, hits=pairs(is_hit), num_candidates=1000)
    expected = torch.autograd.grad(plain, (positives, negatives))
    for ours, theirs in zip(torch.autograd.grad(loss * 0.5, (positives, negatives)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    targets=st.lists(st.integers(0, 9), max_size=12),
    negatives=st.lists(st.integers(0, 9), min_size=1, max_size=12),
)
def test_hits_are_all_pairs_of_equal_ids(targets: list[int], negatives: list[int]) -> None:
    ids = torch.tensor(targets, dtype=torch.int64)
    found = [part.tolist() for part in find_hits(ids, torch.tensor(negatives))]
    pairs = [(q, k) for q, t in enumerate(targets) for k, n in enumerate(negatives) if t == n]
    assert sorted(zip(*found, strict=True)) == pairs


def test_scores_are_left_as_they_were() -> None:
    positives, negatives = torch.tensor([0.5]), torch.tensor([[1.0, 2.0]])
    sampled_softmax(positives, negatives, hits=NO_HITS, num_candidates=9)
    assert positives.tolist() == [0.5]
    assert negatives.tolist() == [[1.0, 2.0]]


def test_the_estimated_denominator_is_unbiased() -> None:
    """Over all samples that can be drawn, it is the full softmax's denominator on average."""
    scores = np.array([0.3, -1.2, 2.0, 0.7])
    true, num_negatives = 2, 3
    estimates = []
    for sample in itertools.product(range(len(scores)), repeat=num_negatives):
        ids = np.array(sample)
        one = loss(scores[[true]], scores[ids][None], (ids == true)[None], len(scores))
        estimates.append(math.exp(one + scores[true]))
    assert len(estimates) == 64
    assert float(np.mean(estimates)) == pytest.approx(float(np.exp(scores).sum()), rel=1e-12)
    assert float(np.std(estimates)) > 1.0  # A control: samples do differ.


def test_every_candidate_once_is_the_full_softmax() -> None:
    scores = np.random.default_rng(1).standard_normal(20)
    everyone = loss(scores[[4]], scores[None], (np.arange(20) == 4)[None], 20)
    assert everyone == pytest.approx(float(np.log(np.exp(scores).sum()) - scores[4]), rel=1e-12)


def test_queries_add_up() -> None:
    random = np.random.default_rng(2)
    positives, negatives = random.standard_normal(5), random.standard_normal((5, 7))
    none = np.zeros((5, 7), bool)
    together = loss(positives, negatives, none, 50)
    apart = sum(loss(positives[[q]], negatives[[q]], none[[q]], 50) for q in range(5))
    assert together == pytest.approx(apart, rel=1e-12)


def test_no_queries_cost_nothing() -> None:
    assert loss(np.empty(0), np.empty((0, 4)), np.empty((0, 4), bool), 10) == 0.0


def test_is_never_negative_and_falls_as_the_positive_rises() -> None:
    negatives, none = np.zeros((1, 3)), np.zeros((1, 3), bool)
    losses = [loss(np.array([p]), negatives, none, 30) for p in (-50.0, 0.0, 5.0, 80.0)]
    assert losses == sorted(losses, reverse=True)
    assert min(losses) >= 0.0


def test_huge_scores_do_not_overflow_in_float32() -> None:
    value = sampled_softmax(torch.tensor([-1e4]), torch.tensor([[1e4, 0.0]]), hits=NO_HITS, num_candidates=2)
    assert float(value) == pytest.approx(2e4, rel=1e-6)


def test_n3_sums_cubes() -> None:
    random = np.random.default_rng(3)
    parts = [np.abs(random.standard_normal(shape)) for shape in ((4, 6), (4, 3), (2,))]
    expected = sum(float((part**3).sum()) for part in parts)
    assert float(n3(*(torch.tensor(part) for part in parts))) == pytest.approx(expected, rel=1e-12)
