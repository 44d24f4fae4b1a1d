"""The sampled softmax with queries moved to the negatives' rows, rather than rows to the questions.

All ranks see all queries, and each scores the negatives that it owns. What travels is a query and its
gradient for each question and, for the exact sum of exponentials, two numbers a question and rank: less than
a row and its gradient for each negative, where negatives outnumber questions.

Shape letters: q questions of this rank, Q of all ranks, K negatives, O of them owned here, M pairs, E floats
a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kgshard.routing import RowGradient, sum_by_row
from kgshard.stages import stage
from kgshard.training.full_losses import Candidates, gradient_of
from kgshard.training.negatives import Negatives


def moves_fewer_bytes(*, num_questions: int, query_width: int, num_negatives: int, row_bytes: int) -> bool:
    """Whether queries take fewer bytes than rows: both go there, and their gradients come back.

    Args:
        num_questions: Q.
        query_width: E; float32, and two numbers more that are summed over ranks.
        num_negatives: K.
        row_bytes: Of one row on its way.
    """
    return num_questions * 4 * (query_width + 2) < num_negatives * row_bytes


@dataclass(slots=True)
class MovedSoftmax:
    """The loss of one step, and afterwards the gradient of negatives' rows."""

    negatives: Negatives
    """Of this rank's questions, all of them; their ids are the same on all ranks."""
    candidates: Candidates
    scale: float
    """A factor on the loss."""
    gradient: RowGradient | None = None
    """Of the negatives' rows that are owned here, once the loss was computed."""

    def __call__(self, queries: Tensor, positives: Tensor) -> Tensor:
        """Return this rank's share of the loss, a scalar. A collective call.

        Args:
            queries: float32[q, E], with their graph.
            positives: float32[q], the scores of true answers, with theirs.
        """
        with stage("loss where negatives lie") as work:
            loss: Tensor = _MovedSoftmax.apply(queries, positives, self)
            work.multiplies(6 * queries.numel() * len(self.negatives.ids))
        return loss


class _MovedSoftmax(torch.autograd.Function):
    """All of it in the forward pass: the gradient of a scalar loss is known up to a factor there."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, positives: Tensor, loss: MovedSoftmax) -> Tensor:
        table, negatives, scale = loss.candidates.table, loss.negatives, loss.scale
        exchange = table.exchange
        parts = exchange.all_gather(torch.cat([queries, positives[:, None]], dim=1), kind="rows")
        counts = [len(part) for part in parts]
        everything = torch.cat(parts)
        everyone, truths = everything[:, :-1].contiguous().requires_grad_(), everything[:, -1]

        local = negatives.ids - table.rows.start
        owned = (local >= 0) & (local < len(table.rows))
        rows = local[owned]
        leaf = table.weight.index_select(0, rows).float().requires_grad_()
        with torch.enable_grad():
            scores = loss.candidates.metric.score_all(everyone, loss.candidates.lift(leaf), exact=False)
        weights = scores.detach() + _of(owned, negatives.log_weights)
        weights[_excluded(exchange.rank, counts, owned, loss)] = -torch.inf

        top = weights.amax(dim=1) if len(rows) else torch.full_like(truths, -torch.inf)
        highest = torch.maximum(top, truths)
        total = weights.sub_(highest[:, None]).exp_().sum(dim=1)
        everywhere = torch.stack(
            exchange.all_gather(torch.stack([highest, total], dim=1), [len(truths)] * len(counts), kind="sum")
        )
        tops, totals = everywhere.unbind(dim=2)
        base = tops.amax(dim=0)
        normaliser = base + ((truths - base).exp() + (totals * (tops - base).exp()).sum(dim=0)).log()

        torch.autograd.backward(scores, weights.mul_(((highest - normaliser).exp() * scale)[:, None]))
        loss.gradient = sum_by_row(rows, gradient_of(leaf))
        back = gradient_of(everyone)
        shares, _ = exchange.swap(back, counts, [len(queries)] * len(counts), kind="gradients")
        first = sum(counts[: exchange.rank])
        mine = normaliser[first : first + len(queries)]
        of_queries = shares.view(len(counts), *queries.shape).sum(dim=0)
        ctx.save_for_backward(of_queries, ((positives - mine).exp() - 1) * scale)
        return (mine - positives).sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        of_queries, of_positives = ctx.saved_tensors
        return of_queries * gradient, of_positives * gradient, None


def _excluded(rank: int, counts: list[int], owned: Tensor, loss: MovedSoftmax) -> tuple[Tensor, Tensor]:
    """Return pairs (int64[M] of Q questions, int64[M] of O negatives) that are no negatives."""
    questions, negatives = loss.negatives.excluded
    pairs = torch.stack([questions + sum(counts[:rank]), negatives], dim=1)
    everyone = torch.cat(loss.candidates.table.exchange.all_gather(pairs, kind="ids"))
    here = everyone[owned[everyone[:, 1]]]
    return here[:, 0], (torch.cumsum(owned, 0) - 1)[here[:, 1]]


def _of(owned: Tensor, log_weights: Tensor | float) -> Tensor | float:
    return log_weights[owned] if isinstance(log_weights, Tensor) else log_weights
