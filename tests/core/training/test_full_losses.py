"""Losses over all rows of a sharded table are those of the whole table: 1e-6 relative, on any world.

The truth is plain torch autograd in float64 over questions x entities, which kgshard never makes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_training import plain_step, relative_errors
from rank_functions import Floats, Ints
from training_functions import (
    FullLossCase,
    FullLossResult,
    Job,
    Recorded,
    Tables,
    full_loss,
    random_job,
    random_tables,
    record_gradients,
    record_in_blocks,
)
from worlds import GlooPool, ThreadWorld

import kgshard.training.full_losses
from kgshard.models.metric import DOT, L2_NORM, Metric
from kgshard.partition import RowPartition
from kgshard.training.full_losses import FULL_LOSSES, FullBinaryCrossEntropy, FullLoss, FullSoftmax

EXACT = 1e-6
MODELS = ("complex", "transe", "mure", "tucker")
"""An inner product, a distance, a model with candidates of its own, and one with shared parameters."""
SMOOTHED: list[FullLoss] = [FullSoftmax(0.1), FullBinaryCrossEntropy(0.1)]
BUDGETS = {"whole": (1 << 24, 1 << 26), "blocks kept": (60, 1 << 26), "blocks scored again": (60, 0)}
"""BLOCK_NUMBERS and KEPT_NUMBERS: at most 60 numbers are one or two rows of a block here."""


def set_budget(monkeypatch: pytest.MonkeyPatch, budget: str) -> None:
    block_numbers, kept_numbers = BUDGETS[budget]
    monkeypatch.setattr(kgshard.training.full_losses, "BLOCK_NUMBERS", block_numbers)
    monkeypatch.setattr(kgshard.training.full_losses, "KEPT_NUMBERS", kept_numbers)


# --- a whole step: every row's gradient, relations and shared parameters


@cache
def one_step(
    model: str, train_type: str, loss: str, smoothing: float, num_entities: int = 13
) -> tuple[Job, Tables, Any]:
    """Return a step on 11 triples (22 questions), from which tables, and its true loss and gradient."""
    job = random_job(
        11 if num_entities > 3 else 4,
        num_entities,
        num_steps=1,
        model=model,
        train_type=train_type,
        loss=loss,
        label_smoothing=smoothing,
    )
    tables = random_tables(job, scale=0.5)
    return job, tables, plain_step(job, tables)


def assert_exact(found: list[Recorded], truth: Any) -> None:
    for recorded in found:
        errors = relative_errors(recorded, truth)
        assert max(errors.values()) < EXACT, errors


WORLDS = [(1, "whole"), (2, "blocks kept"), (3, "blocks scored again"), (4, "blocks scored again")]
CASES = [
    (model, train_type, loss, smoothing)
    for model in MODELS
    for train_type in ("1vsall", "kvsall")
    for loss in FULL_LOSSES
    for smoothing in (0.0, 0.1)
]


@pytest.mark.parametrize(("model", "train_type", "loss", "smoothing"), CASES)
def test_a_step_is_that_of_the_whole_table(
    monkeypatch: pytest.MonkeyPatch, model: str, train_type: str, loss: str, smoothing: float
) -> None:
    job, tables, truth = one_step(model, train_type, loss, smoothing)
    for world_size, budget in WORLDS:
        set_budget(monkeypatch, budget)
        assert_exact(ThreadWorld(world_size).run(record_gradients, job, tables), truth)


@pytest.mark.parametrize("num_entities", [2, 3])
@pytest.mark.parametrize(("train_type", "loss"), [("1vsall", "softmax"), ("kvsall", "bce")])
def test_ranks_that_own_no_rows_take_part(train_type: str, loss: str, num_entities: int) -> None:
    job, tables, truth = one_step("complex", train_type, loss, 0.1, num_entities)
    assert len(RowPartition(num_entities, 5).rows_of(4)) == 0
    assert_exact(ThreadWorld(5).run(record_gradients, job, tables), truth)


@pytest.mark.processes
@pytest.mark.parametrize("model", ["complex", "transe", "mure"])
def test_gloo_ranks_make_the_step_of_the_whole_table(gloo_pool: GlooPool, tmp_path: Path, model: str) -> None:
    for train_type, loss in (("1vsall", "softmax"), ("kvsall", "softmax"), ("kvsall", "bce")):
        job, tables, truth = one_step(model, train_type, loss, 0.1)
        assert_exact(gloo_pool.run(2, tmp_path, record_in_blocks, job, tables, 40, 0), truth)


def test_the_comparison_sees_every_setting() -> None:
    """Negative control: smoothing, the loss or the kind of training changed, and it is not exact."""
    job, tables, _ = one_step("complex", "kvsall", "softmax", 0.1)
    [found] = ThreadWorld(1).run(record_gradients, job, tables)
    for changed in ({"label_smoothing": 0.11}, {"loss": "bce"}, {"train_type": "1vsall"}):
        assert max(relative_errors(found, plain_step(job.but(**changed), tables)).values()) > 1e-3


# --- the loss alone: queries of uneven ranks, answers in every block


def case(
    loss: FullLoss, metric: Metric = DOT, *, sizes: tuple[int, ...] = (3, 0, 4), num_rows: int = 17
) -> FullLossCase:
    """Return queries of three ranks, the second without any; two to four answers each, at the edges too."""
    source = np.random.default_rng(5)
    queries = [source.normal(size=(size, 4)).astype(np.float32).astype(np.float64) for size in sizes]
    rows = source.normal(size=(num_rows, 4)).astype(np.float32).astype(np.float64)
    labels = [
        (question, row)
        for question in range(sum(sizes))
        for row in sorted({0, num_rows - 1, *source.integers(0, num_rows, 2).tolist()})
        if (question + row) % 3
    ]
    return FullLossCase(loss, metric, queries, rows, np.array(labels, np.int64), scale=0.25)


def truth_of(asked: FullLossCase) -> tuple[float, Floats, Floats]:
    """Return the loss, and its gradient by all queries and by all rows, from questions x rows in float64."""
    queries = torch.tensor(np.concatenate(asked.queries), requires_grad=True)
    rows = torch.tensor(asked.rows, requires_grad=True)
    scores = asked.metric.score_pairs(queries[:, None], rows[None])
    labels = torch.zeros_like(scores)
    labels[tuple(asked.labels.T)] = 1.0
    smoothing = asked.loss.smoothing
    if isinstance(asked.loss, FullSoftmax):
        shares = (1 - smoothing) * labels / labels.sum(1, keepdim=True) + smoothing / len(rows)
        loss = -(shares * torch.log_softmax(scores, 1)).sum()
    else:
        shares = (1 - smoothing) * labels + smoothing / len(rows)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, shares, reduction="sum")
    loss = loss * asked.scale
    loss.backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert rows.grad is not None
    return loss.item(), queries.grad.numpy(), rows.grad.numpy()


def assert_close(found: Floats, truth: Floats) -> None:
    assert found.shape == truth.shape
    assert np.abs(found - truth).max() <= EXACT * np.abs(truth).max()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("metric", [DOT, L2_NORM], ids=lambda metric: metric.name)
@pytest.mark.parametrize("loss", [FullSoftmax(), *SMOOTHED], ids=["softmax", "smoothed softmax", "bce"])
def test_uneven_ranks_share_the_loss_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, loss: FullLoss, metric: Metric, budget: str
) -> None:
    set_budget(monkeypatch, budget)
    asked = case(loss, metric)
    found: list[FullLossResult] = ThreadWorld(3).run(full_loss, asked)
    loss_truth, queries_truth, rows_truth = truth_of(asked)
    assert sum(part.loss for part in found) == pytest.approx(loss_truth, rel=EXACT)
    assert found[1].loss == 0.0
    assert_close(np.concatenate([part.queries_gradient for part in found]), queries_truth)
    assert_close(np.concatenate([part.rows_gradient for part in found]), rows_truth)


def test_scores_of_thousands_neither_overflow_nor_vanish() -> None:
    for loss in SMOOTHED:
        asked = case(loss)
        asked = FullLossCase(loss, DOT, [part * 1e4 for part in asked.queries], asked.rows, asked.labels)
        found: list[FullLossResult] = ThreadWorld(3).run(full_loss, asked)
        loss_truth, queries_truth, _ = truth_of(asked)
        assert sum(part.loss for part in found) == pytest.approx(loss_truth, rel=1e-5)
        assert_close(np.concatenate([part.queries_gradient for part in found]), queries_truth)


# --- memory


def crowd(loss: FullLoss, metric: Metric) -> FullLossCase:
    """Return 60 questions over 400 rows of 4 floats: 24,000 scores, where everything else is small."""
    return case(loss, metric, sizes=(20, 40), num_rows=400)


@pytest.mark.parametrize("metric", [DOT, L2_NORM], ids=lambda metric: metric.name)
@pytest.mark.parametrize("loss", SMOOTHED, ids=["softmax", "bce"])
def test_no_rank_makes_questions_times_entities(
    monkeypatch: pytest.MonkeyPatch, loss: FullLoss, metric: Metric
) -> None:
    """Blocks of 680 numbers are ten rows, or one; the largest tensors are the rows owned here, and blocks."""
    asked = crowd(loss, metric)
    num_labels = 2 * len(asked.labels)
    monkeypatch.setattr(kgshard.training.full_losses, "BLOCK_NUMBERS", 680)
    monkeypatch.setattr(kgshard.training.full_losses, "KEPT_NUMBERS", 0)
    for part in ThreadWorld(2).run(full_loss, asked):
        assert part.largest <= max(200 * 4, 2 * 60 * 4, num_labels, 680) < 60 * 200


def test_the_largest_tensor_is_seen() -> None:
    """Negative control: with an ample budget a rank does make its questions x rows at once."""
    for part in ThreadWorld(2).run(full_loss, crowd(FullSoftmax(), DOT)):
        assert part.largest >= 60 * 200


@pytest.mark.parametrize(
    ("loss", "kept_numbers", "passes"),
    [(FullSoftmax(), 68 * 200, 1), (FullSoftmax(), 68 * 200 - 1, 2), (FullBinaryCrossEntropy(), 0, 1)],
)
def test_scores_are_made_again_only_where_they_were_not_kept(
    monkeypatch: pytest.MonkeyPatch, loss: FullLoss, kept_numbers: int, passes: int
) -> None:
    """A row has 60 scores, 4 floats and their gradient. Binary cross-entropy takes one pass."""
    monkeypatch.setattr(kgshard.training.full_losses, "BLOCK_NUMBERS", 680)
    monkeypatch.setattr(kgshard.training.full_losses, "KEPT_NUMBERS", kept_numbers)
    for part in ThreadWorld(2).run(full_loss, crowd(loss, DOT)):
        assert part.num_lifts == 20 * passes


def test_a_distance_counts_its_scores_six_times_because_it_keeps_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kgshard.training.full_losses, "BLOCK_NUMBERS", 3680)
    for kept_numbers, passes in ((368 * 200, 1), (368 * 200 - 1, 2)):
        monkeypatch.setattr(kgshard.training.full_losses, "KEPT_NUMBERS", kept_numbers)
        for part in ThreadWorld(2).run(full_loss, crowd(FullSoftmax(), L2_NORM)):
            assert part.num_lifts == 20 * passes


def test_labels_of_a_hub_add_up() -> None:
    """One question that every row answers, another that one row does."""
    source = np.random.default_rng(0)
    labels: Ints = np.array([(0, row) for row in range(9)] + [(1, 4)], np.int64)
    queries, rows = source.normal(size=(2, 4)), source.normal(size=(9, 4))
    for loss in (FullSoftmax(), FullBinaryCrossEntropy()):
        asked = FullLossCase(loss, DOT, [queries[:1], queries[1:]], rows, labels)
        found: list[FullLossResult] = ThreadWorld(2).run(full_loss, asked)
        assert sum(part.loss for part in found) == pytest.approx(truth_of(asked)[0], rel=1e-5)
