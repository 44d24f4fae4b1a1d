"""Losses on scores, and the N3 regulariser. All return sums; the trainer divides by the global batch.

Shape letters: Q queries, K negatives, M pairs, D floats for each row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sampled_softmax(
    positives: Tensor, negatives: Tensor, *, hits: tuple[Tensor, Tensor], num_candidates: int
) -> Tensor:
    """Sum over queries of the softmax cross-entropy, its denominator estimated from shared negatives.

    The negatives are a uniform sample (with replacement) of all candidates, so each stands for
    num_candidates / K of them: log(num_candidates / K) is added to its score, which makes the estimated
    denominator unbiased (Bengio and Senecal, 2008; Jean et al., 2015). A negative that is the query's
    own positive counts as nothing.

    Args:
        positives: float[Q] scores of the true candidates.
        negatives: float[Q, K] scores of the shared negatives.
        hits: Pairs (int64[M] query, int64[M] negative) where the negative is the query's own positive;
            see `find_hits`.
        num_candidates: How many candidates there are in all.

    Returns:
        A scalar, >= 0.
    """
    correction = math.log(num_candidates / negatives.shape[1])
    loss: Tensor = _SampledSoftmax.apply(positives, negatives, *hits, correction)
    return loss


def find_hits(target_ids: Tensor, negative_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return all pairs (int64[M] query, int64[M] negative) of equal ids, without a Q x K comparison.

    Args:
        target_ids: int64[Q].
        negative_ids: int64[K], repeats allowed.

    Example:
        >>> [part.tolist() for part in find_hits(torch.tensor([5, 9, 7]), torch.tensor([7, 5, 7]))]
        [[0, 2, 2], [1, 0, 2]]
    """
    ordered, order = negative_ids.sort(stable=True)
    starts = torch.searchsorted(ordered, target_ids)
    counts = torch.searchsorted(ordered, target_ids, right=True) - starts
    queries = torch.repeat_interleave(counts)
    first = torch.cumsum(counts, 0) - counts
    within = torch.arange(len(queries), device=counts.device) - first[queries]
    return queries, order[starts[queries] + within]


class _SampledSoftmax(torch.autograd.Function):
    """The loss in as few passes over the Q x K scores as torch allows: five, and one for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        positives: Tensor,
        negatives: Tensor,
        hit_queries: Tensor,
        hit_negatives: Tensor,
        correction: float,
    ) -> Tensor:
        top = torch.maximum(negatives.amax(dim=1) + correction, positives)
        weights = (negatives - (top - correction)[:, None]).exp_()
        weights[hit_queries, hit_negatives] = 0
        positive_weight = (positives - top).exp_()
        total = weights.sum(dim=1).add_(positive_weight)
        ctx.save_for_backward(weights, positive_weight, total)
        return (total.log() + (top - positives)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, positive_weight, total = ctx.saved_tensors
        scale = gradient / total
        return positive_weight * scale - gradient, weights * scale[:, None], None, None, None


def n3(*magnitudes: Tensor) -> Tensor:
    """Sum of cubed magnitudes: the nuclear 3-norm (Lacroix et al., 2018).

    Args:
        magnitudes: float[Q, ...] non-negative sizes of coordinates, as `Scoring.magnitudes` returns.
    """
    return torch.stack([(size * size * size).sum() for size in magnitudes]).sum()
