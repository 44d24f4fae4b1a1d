"""Losses over all rows of a sharded table: queries move, rows stay (1-vs-all and KvsAll).

Every rank sees every query of the batch and scores its own rows, block by block; what travels is the
queries, four numbers a query (the largest score, the sum of exponentials, two sums for labels), and the
queries' gradients. The softmax is exact: each rank's share of the denominator is combined as
log-sum-exp. No rank holds questions x entities, but for as many blocks as a budget allows, which saves
scoring them again for the gradient.

Shape letters: q queries of this rank, Q of all ranks, M labels of rows owned here, N rows owned here, R rows
of a block, E floats for each candidate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from kgshard.memory import BLOCK_NUMBERS, KEPT_NUMBERS
from kgshard.models.metric import DOT, Metric
from kgshard.stages import stage
from kgshard.table import ShardedTable
from kgshard.training.batches import Labels

_DISTANCE_STEPS = 6
"""Arrays as large as the scores that a distance makes and autograd keeps; a product needs no more."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The rows to score, and how."""

    table: ShardedTable
    metric: Metric
    lift: Callable[[Tensor], Tensor]
    """Entity rows to candidates; see `LinkModel.candidates`."""


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; zeros where the loss of an empty part did not touch it."""
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)


class FullLoss(ABC):
    """A loss on the scores of all rows, summed over questions."""

    def __init__(self, smoothing: float = 0.0) -> None:
        """Smooth labels: what is left of a question's labels is spread over all rows.

        Args:
            smoothing: In [0, 1).
        """
        self.smoothing = smoothing

    def __call__(
        self, queries: Tensor, labels: Labels, candidates: Candidates, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the loss and the gradient of the rows owned here. A collective call.

        Args:
            queries: float32[q, E], of this rank, with their graph.
            labels: All questions' answers.
            candidates: The rows.
            scale: A factor on the loss.

        Returns:
            A scalar whose backward pass reaches `queries`, and float32[N, dim], already scaled.
        """
        table = candidates.table
        rows_gradient = torch.zeros(table.weight.shape, dtype=torch.float32, device=queries.device)
        with stage("loss over all rows") as work:
            loss: Tensor = _FullLoss.apply(queries, self, labels, candidates, scale, rows_gradient)
            # Scores, and their gradients in queries and rows.
            work.multiplies(6 * sum(labels.counts) * rows_gradient.numel())
            work.moves(table.weight.nbytes + 2 * rows_gradient.nbytes)
        return loss, rows_gradient

    @abstractmethod
    def forward_backward(
        self, blocks: list[_Block], labels: _OwnedLabels, table: ShardedTable, scale: float
    ) -> Tensor:
        """Return the scaled loss float32[Q] of all questions, equal on all ranks; run each block backward."""


class FullSoftmax(FullLoss):
    """Cross-entropy of the softmax over all rows with the questions' labels, each question's summing to 1."""

    def forward_backward(
        self, blocks: list[_Block], labels: _OwnedLabels, table: ShardedTable, scale: float
    ) -> Tensor:
        num_rows = table.num_rows
        local = torch.stack(self._sums(blocks, labels), dim=1)
        top, total, labelled, everything = _gather(table, local).unbind(dim=2)
        highest = top.amax(dim=0)
        normaliser = highest + (total * (top - highest).exp()).sum(dim=0).log()
        kept, spread = 1 - self.smoothing, self.smoothing / num_rows
        for index, block in enumerate(blocks):
            weights = block.exponentials(normaliser, scale)
            weights.index_put_(labels.inside(index), -labels.shares(index) * (kept * scale), accumulate=True)
            if spread:
                weights -= spread * scale
            block.backward(weights)
        return (normaliser - kept * labelled.sum(dim=0) - spread * everything.sum(dim=0)) * scale

    def _sums(self, blocks: list[_Block], labels: _OwnedLabels) -> list[Tensor]:
        """Return float32[Q] each: largest score, sum of exponentials less it, labels' scores, all scores."""
        top = torch.full_like(labels.template, -torch.inf)
        total, labelled, everything = (torch.zeros_like(top) for _ in range(3))
        for index, block in enumerate(blocks):
            scores = block.scores()
            which, rows = labels.inside(index)
            labelled.index_add_(0, which, labels.shares(index) * scores[which, rows])
            if self.smoothing:
                everything += scores.sum(dim=1)
            highest = torch.maximum(top, scores.amax(dim=1))
            total = total * (top - highest).exp() + block.exponentiate(highest)
            top = highest
        return [top, total, labelled, everything]


class FullBinaryCrossEntropy(FullLoss):
    """Sum over all rows of the binary cross-entropy with labels (1 - smoothing) y + smoothing / rows."""

    def forward_backward(
        self, blocks: list[_Block], labels: _OwnedLabels, table: ShardedTable, scale: float
    ) -> Tensor:
        kept, spread = 1 - self.smoothing, self.smoothing / table.num_rows
        loss = torch.zeros_like(labels.template)
        for index, block in enumerate(blocks):
            scores, (which, rows) = block.scores(), labels.inside(index)
            loss += softplus(scores).sum(dim=1) - spread * scores.sum(dim=1)
            loss.index_add_(0, which, -kept * scores[which, rows])
            weights = scores.sigmoid().sub_(spread)
            weights.index_put_((which, rows), weights.new_full((len(which),), -kept), accumulate=True)
            block.backward(weights.mul_(scale))
        return table.exchange.all_reduce(loss) * scale


class _FullLoss(torch.autograd.Function):
    """All of it in the forward pass: the gradient of a scalar loss is known up to a factor there."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        loss: FullLoss,
        labels: Labels,
        candidates: Candidates,
        scale: float,
        rows_gradient: Tensor,
    ) -> Tensor:
        table = candidates.table
        exchange, counts = table.exchange, labels.counts
        everyone = torch.cat(exchange.all_gather(queries, counts, kind="rows")).requires_grad_()
        blocks = _blocks(everyone, candidates, rows_gradient)
        owned = _OwnedLabels(labels, table, blocks, everyone.new_zeros(len(everyone)))
        losses = loss.forward_backward(blocks, owned, table, scale)
        shares = exchange.all_to_all(
            gradient_of(everyone).split(counts), [len(queries)] * exchange.world_size, kind="rows"
        )
        ctx.save_for_backward(torch.stack(shares).sum(dim=0))
        first = sum(counts[: exchange.rank])
        return losses[first : first + len(queries)].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (queries,) = ctx.saved_tensors
        return queries * gradient, None, None, None, None, None


class _Block:
    """Some rows, scored against all queries; again for the gradient, where the scores were not kept."""

    def __init__(
        self, queries: Tensor, candidates: Candidates, rows: range, gradient: Tensor, *, keep: bool
    ) -> None:
        """Score rows (positions in the table's own) later.

        Args:
            queries: float32[Q, E], a leaf whose gradient grows.
            candidates: The table.
            rows: Which rows.
            gradient: float32[N, dim], where their gradient goes.
            keep: Score once.
        """
        self.rows = rows
        self._queries = queries
        self._candidates = candidates
        self._gradient = gradient
        self._keep = keep
        self._graph: tuple[Tensor, Tensor] | None = None
        self._exponentials: tuple[Tensor, Tensor] | None = None

    def _score(self) -> tuple[Tensor, Tensor]:
        """Return the rows as a leaf, and their scores float32[Q, R] with the graph."""
        if self._graph is None:
            stored = self._candidates.table.weight[self.rows.start : self.rows.stop]
            with torch.enable_grad():
                leaf = stored.detach().float().requires_grad_()
                lifted = self._candidates.lift(leaf)
                self._graph = (leaf, self._candidates.metric.score_all(self._queries, lifted, exact=False))
        return self._graph

    def scores(self) -> Tensor:
        """Return float32[Q, R]."""
        return self._score()[1].detach()

    def exponentiate(self, highest: Tensor) -> Tensor:
        """Return float32[Q]: the sums of exp(score - highest); the scores are gone after it."""
        exponentials = self._exponentials_of(highest)
        if self._keep:
            self._exponentials = (exponentials, highest)
        else:
            self._graph = None
        return exponentials.sum(dim=1)

    def _exponentials_of(self, base: Tensor) -> Tensor:
        # A product does not need its own values for its gradient, a distance does.
        scores, in_place = self.scores(), self._candidates.metric is DOT
        return (scores.sub_(base[:, None]) if in_place else scores - base[:, None]).exp_()

    def exponentials(self, normaliser: Tensor, scale: float) -> Tensor:
        """Return float32[Q, R]: scale * exp(score - normaliser)."""
        if self._exponentials is not None:
            values, highest = self._exponentials
            return values.mul_(((highest - normaliser).exp() * scale)[:, None])
        return self._exponentials_of(normaliser).mul_(scale)

    def backward(self, weights: Tensor) -> None:
        """Add the gradient of sum(weights * scores) to the queries' and to the rows'."""
        leaf, scores = self._score()
        torch.autograd.backward(scores, weights)
        assert leaf.grad is not None
        self._gradient[self.rows.start : self.rows.stop] += leaf.grad
        self._graph = self._exponentials = None


def _blocks(queries: Tensor, candidates: Candidates, gradient: Tensor) -> list[_Block]:
    num_rows, width = candidates.table.weight.shape
    scores_a_row = len(queries) * (1 if candidates.metric is DOT else _DISTANCE_STEPS)
    numbers_a_row = scores_a_row + 2 * width  # The row in float32, lifted or not, and its gradient.
    size = max(1, BLOCK_NUMBERS // numbers_a_row)
    keep = num_rows * numbers_a_row <= KEPT_NUMBERS
    starts = range(0, num_rows, size)
    blocks = [range(start, min(start + size, num_rows)) for start in starts]
    return [_Block(queries, candidates, rows, gradient, keep=keep) for rows in blocks]


class _OwnedLabels:
    """The labels whose rows are owned here, block by block."""

    def __init__(self, labels: Labels, table: ShardedTable, blocks: list[_Block], template: Tensor) -> None:
        """Find them; `template` is float32[Q] zeros."""
        self.template = template
        per_question = torch.bincount(labels.questions, minlength=len(template)).clamp_(min=1)
        self._shares = per_question.reciprocal()
        local = labels.answers - table.rows.start
        self._inside = []
        for block in blocks:
            inside = (local >= block.rows.start) & (local < block.rows.stop)
            self._inside.append((labels.questions[inside], local[inside] - block.rows.start))

    def inside(self, block: int) -> tuple[Tensor, Tensor]:
        """Return int64[M] questions, and int64[M] rows of the block."""
        return self._inside[block]

    def shares(self, block: int) -> Tensor:
        """Return float32[M]: one over the number of labels of the label's question."""
        return self._shares[self._inside[block][0]]


def _gather(table: ShardedTable, local: Tensor) -> Tensor:
    """Return float32[world_size, Q, 4]: every rank's sums."""
    counts = [len(local)] * table.exchange.world_size
    return torch.stack(table.exchange.all_gather(local, counts, kind="sum"))


FULL_LOSSES: dict[str, type[FullLoss]] = {"softmax": FullSoftmax, "bce": FullBinaryCrossEntropy}
"""Losses over all rows, by the name that `--loss` takes."""
