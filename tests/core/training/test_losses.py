"""Sampled losses against their formulas in float64, and what their corrections are for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from kgshard.training.losses import LOSSES, LossName, Softmax, sampled_loss
from kgshard.training.negatives import Negatives

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
MARGIN, TEMPERATURE, SMOOTHING, NUM_CANDIDATES = 1.5, 0.7, 0.2, 40
NOTHING = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def negatives(
    num_negatives: int,
    log_weights: Tensor | float = 0.0,
    excluded: Flags | None = None,
    allowed: Flags | None = None,
) -> Negatives:
    pairs = torch.tensor(excluded).nonzero(as_tuple=True) if excluded is not None else NOTHING
    return Negatives(
        questions=None,
        num_heads=0,
        ids=torch.arange(num_negatives),
        log_weights=log_weights,
        excluded=(pairs[0], pairs[1]),
        allowed=torch.tensor(allowed) if allowed is not None else None,
    )


def loss_of(name: LossName, positives: Tensor, scores: Tensor, group: Negatives) -> Tensor:
    loss = sampled_loss(
        name,
        margin=MARGIN,
        temperature=TEMPERATURE,
        smoothing=SMOOTHING,
        num_candidates=NUM_CANDIDATES,
    )
    return loss(positives, scores, group)


# --- the formulas, for one question: its score, the scores of negatives left, and how many each stands for


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x - math.log1p(math.exp(x))


def softmax_formula(true: float, scores: Values, weights: Values) -> float:
    top = max(true, scores.max(initial=-math.inf))
    others = float((weights * np.exp(scores - top)).sum())
    return float(top + math.log(math.exp(true - top) + others) - true)


def self_adversarial_formula(true: float, scores: Values, weights: Values) -> float:
    shifted = TEMPERATURE * (scores - scores.max(initial=-math.inf))
    shares = weights * np.exp(shifted)
    shares = shares / shares.sum() if len(shares) else shares
    terms = [-share * log_sigmoid(-MARGIN - score) for share, score in zip(shares, scores, strict=True)]
    return float(-log_sigmoid(MARGIN + true) + sum(terms))


def margin_formula(true: float, scores: Values, weights: Values) -> float:
    shares = weights / weights.sum() if len(weights) else weights
    return float((shares * np.maximum(0.0, MARGIN - true + scores)).sum())


def bce_formula(true: float, scores: Values, weights: Values) -> float:
    def term(label: float, score: float) -> float:
        return -label * log_sigmoid(score) - (1 - label) * log_sigmoid(-score)

    low = SMOOTHING / NUM_CANDIDATES
    shares = weights / weights.sum() if len(weights) else weights
    others = [share * term(low, score) for share, score in zip(shares, scores, strict=True)]
    return float(term(1 - SMOOTHING + low, true) + sum(others))


FORMULAS: dict[LossName, Callable[[float, Values, Values], float]] = {
    "softmax": softmax_formula,
    "self-adversarial": self_adversarial_formula,
    "margin": margin_formula,
    "bce": bce_formula,
}


def oracle(name: LossName, positives: Values, scores: Values, weights: Values, counted: Flags) -> float:
    """Sum the formula over questions; `weights` say how many candidates each negative stands for."""
    return sum(
        FORMULAS[name](float(true), row[left], weights[left])
        for true, row, left in zip(positives, scores, counted, strict=True)
    )


def test_every_loss_has_its_formula_here() -> None:
    assert set(FORMULAS) == set(LOSSES)


# --- random cases


def draw(seed: int, num_questions: int, num_negatives: int, scale: float, kind: str) -> tuple[Any, ...]:
    """Return true scores, negatives' scores, their group, weights, and which are counted."""
    random = np.random.default_rng(seed)
    positives = random.standard_normal(num_questions) * scale
    scores = random.standard_normal((num_questions, num_negatives)) * scale
    excluded = random.random(scores.shape) < 0.3
    # The same candidate by another path: its score differs in the last digits.
    noise = 1e-5 * scale * random.standard_normal(scores.shape)
    scores = np.where(excluded, positives[:, None] + noise, scores)
    allowed = random.random(scores.shape) < 0.6 if kind == "typed" else None
    logs = random.uniform(-2, 3, num_negatives) if kind != "uniform" else np.full(num_negatives, 1.3)
    group = negatives(
        num_negatives, torch.tensor(logs) if kind != "uniform" else 1.3, excluded=excluded, allowed=allowed
    )
    counted = ~excluded if allowed is None else ~excluded & allowed
    return positives, scores, group, np.exp(logs), counted


@pytest.mark.parametrize("kind", ["uniform", "degree", "typed"])
@pytest.mark.parametrize("name", LOSSES)
@hypothesis_settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_questions=st.integers(0, 5),
    num_negatives=st.integers(1, 8),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
)
def test_equals_the_formula(
    name: LossName, kind: str, seed: int, num_questions: int, num_negatives: int, scale: float
) -> None:
    positives, scores, group, weights, counted = draw(seed, num_questions, num_negatives, scale, kind)
    found = float(loss_of(name, torch.tensor(positives), torch.tensor(scores), group))
    expected = oracle(name, positives, scores, weights, counted)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", ["uniform", "degree", "typed"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_formula_sees_a_weight_or_an_exclusion_go(name: LossName, kind: str) -> None:
    """Negative control. Only softmax knows how many candidates all negatives stand for together."""
    positives, scores, group, weights, counted = draw(1, 5, 8, 1.0, kind)
    found = float(loss_of(name, torch.tensor(positives), torch.tensor(scores), group))
    assert abs(found - oracle(name, positives, scores, weights, np.ones_like(counted))) > 1e-3
    if name == "softmax" or kind != "uniform":
        assert abs(found - oracle(name, positives, scores, np.ones_like(weights), counted)) > 1e-3


def plain(name: LossName, positives: Tensor, scores: Tensor, weights: Tensor, counted: Tensor) -> Tensor:
    """The formulas again, as torch differentiates them; every question has a negative left."""
    weights = weights * counted
    shares = weights / weights.sum(dim=1, keepdim=True)
    if name == "softmax":
        return (torch.log(torch.exp(positives) + (weights * torch.exp(scores)).sum(1)) - positives).sum()
    if name == "margin":
        return (shares * torch.clamp(MARGIN - positives[:, None] + scores, min=0)).sum()
    if name == "self-adversarial":
        chosen = (weights * torch.exp(TEMPERATURE * scores)).detach()
        chosen = chosen / chosen.sum(dim=1, keepdim=True)
        true = torch.log(torch.sigmoid(MARGIN + positives))
        return -true.sum() - (chosen * torch.log(torch.sigmoid(-MARGIN - scores))).sum()
    low = SMOOTHING / NUM_CANDIDATES
    high, probability, others = 1 - SMOOTHING + low, torch.sigmoid(positives), torch.sigmoid(scores)
    true = high * torch.log(probability) + (1 - high) * torch.log(1 - probability)
    return -true.sum() - (shares * (low * torch.log(others) + (1 - low) * torch.log(1 - others))).sum()


@pytest.mark.parametrize("kind", ["uniform", "degree", "typed"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(6))
def test_gradients_are_those_of_the_plain_formula(name: LossName, kind: str, seed: int) -> None:
    drawn = draw(seed, 4, 7, 1.0 + seed, kind)
    positives, scores = (torch.tensor(values, requires_grad=True) for values in drawn[:2])
    counted = torch.tensor(drawn[4])
    assert counted.any(dim=1).all()
    weights = torch.tensor(drawn[3]).expand(4, 7)
    expected = torch.autograd.grad(
        0.5 * plain(name, positives, scores, weights, counted), (positives, scores)
    )
    found = torch.autograd.grad(0.5 * loss_of(name, positives, scores, drawn[2]), (positives, scores))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert (found[1][~counted] == 0).all()


# --- edges


@pytest.mark.parametrize("how", ["excluded", "not allowed", "both"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_question_without_a_negative_left_costs_what_its_answer_does(name: LossName, how: str) -> None:
    excluded, allowed = np.zeros((2, 3), bool), np.ones((2, 3), bool)
    excluded[0, :] = how == "excluded"
    allowed[0, :] = how == "excluded"
    if how == "both":
        excluded[0, :2], allowed[0] = True, [True, True, False]
    logs = torch.tensor([0.3, 1.0, -1.0], dtype=torch.float64)
    group = negatives(3, logs, excluded=excluded, allowed=allowed)
    positives = torch.tensor([0.4, -0.2], dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([[90.0, 2.0, 3.0], [0.1, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    loss = loss_of(name, positives, scores, group)
    counted = allowed & ~excluded
    expected = oracle(
        name, positives.detach().numpy(), scores.detach().numpy(), np.exp(logs.numpy()), counted
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    up, down = torch.autograd.grad(loss, (positives, scores))
    assert torch.isfinite(up).all()
    assert torch.isfinite(down).all()
    assert (down[0] == 0).all()
    assert (down[1] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_known_answers_that_score_far_higher_change_nothing(name: LossName, dtype: torch.dtype) -> None:
    """Filtered negatives are known answers: a trained model scores them hundreds above the rest."""
    positives = torch.tensor([0.5], dtype=dtype, requires_grad=True)
    plain_scores = torch.tensor([[1.0, -2.0]], dtype=dtype)
    scores = torch.tensor([[1.0, 900.0, -2.0]], dtype=dtype, requires_grad=True)
    without = loss_of(name, positives, plain_scores, negatives(2, 1.0))
    loss = loss_of(name, positives, scores, negatives(3, 1.0, excluded=np.array([[False, True, False]])))
    assert loss.item() == pytest.approx(without.item(), rel=1e-6)
    up, down = torch.autograd.grad(loss, (positives, scores))
    assert up.item() == pytest.approx(torch.autograd.grad(without, positives)[0].item(), rel=1e-6)
    assert torch.isfinite(down).all()
    assert down[0, 1] == 0


@pytest.mark.parametrize("log_weights", [0.7, torch.tensor([0.2, 0.4])])
@pytest.mark.parametrize("name", LOSSES)
def test_inputs_are_not_overwritten(name: LossName, log_weights: Tensor | float) -> None:
    """They are part of a graph that has not run backward yet."""
    positives, scores = torch.tensor([0.5]), torch.tensor([[1.0, 2.0]])
    loss_of(name, positives, scores, negatives(2, log_weights, excluded=np.array([[True, False]])))
    assert positives.tolist() == [0.5]
    assert scores.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("name", LOSSES)
def test_questions_add_up(name: LossName) -> None:
    positives, scores, group, *_ = draw(2, 5, 7, 1.0, "uniform")
    excluded = np.zeros((5, 7), bool)
    excluded[group.excluded] = True
    apart = [
        loss_of(
            name,
            torch.tensor(positives[[q]]),
            torch.tensor(scores[[q]]),
            negatives(7, 1.3, excluded=excluded[[q]]),
        )
        for q in range(5)
    ]
    together = loss_of(name, torch.tensor(positives), torch.tensor(scores), group)
    assert together.item() == pytest.approx(float(sum(apart)), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_huge_scores_do_not_overflow_in_float32(name: LossName) -> None:
    positives = torch.tensor([-1e4], requires_grad=True)
    scores = torch.tensor([[1e4, 0.0]], requires_grad=True)
    loss = loss_of(name, positives, scores, negatives(2))
    expected = FORMULAS[name](-1e4, np.array([1e4, 0.0]), np.ones(2))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(loss, (positives, scores)))


# --- softmax stands for all candidates


def softmax(true: float, scores: Values, is_true: Flags, num_candidates: int) -> float:
    log_weight = math.log(num_candidates / len(scores))
    group = negatives(len(scores), log_weight, excluded=is_true[None])
    return float(Softmax()(torch.tensor([true]).double(), torch.tensor(scores[None]), group))


def test_the_estimated_denominator_is_unbiased() -> None:
    """Over all samples that can be drawn, it is the full softmax's denominator on average."""
    scores = np.array([0.3, -1.2, 2.0, 0.7])
    true, num_negatives = 2, 3
    estimates = []
    for sample in itertools.product(range(len(scores)), repeat=num_negatives):
        ids = np.array(sample)
        one = softmax(scores[true], scores[ids], ids == true, len(scores))
        estimates.append(math.exp(one + scores[true]))
    assert len(estimates) == 64
    assert float(np.mean(estimates)) == pytest.approx(float(np.exp(scores).sum()), rel=1e-6)
    assert float(np.std(estimates)) > 1.0  # A control: samples do differ.


def test_every_candidate_once_is_the_full_softmax() -> None:
    scores = np.random.default_rng(1).standard_normal(20)
    everyone = softmax(scores[4], scores, np.arange(20) == 4, 20)
    assert everyone == pytest.approx(float(np.log(np.exp(scores).sum()) - scores[4]), rel=1e-6)


def test_the_softmax_is_never_negative_and_falls_as_the_true_score_rises() -> None:
    losses = [softmax(true, np.zeros(3), np.zeros(3, bool), 30) for true in (-50.0, 0.0, 5.0, 80.0)]
    assert losses == sorted(losses, reverse=True)
    assert min(losses) >= 0.0


def test_smoothed_labels_lose_to_all_candidates_together() -> None:
    """Where every candidate is a negative or the answer, what is lost is what they gain."""
    low = SMOOTHING / NUM_CANDIDATES
    assert (1 - SMOOTHING + low) + (NUM_CANDIDATES - 1) * low == pytest.approx(1.0)
    for true in (-3.0, 4.0):
        loss = loss_of("bce", torch.tensor([true]), torch.tensor([[-60.0]]), negatives(1))
        label = 1 - SMOOTHING + low
        expected = -label * log_sigmoid(true) - (1 - label) * log_sigmoid(-true) + 60 * low
        assert loss.item() == pytest.approx(expected, rel=1e-5)
