"""Losses on scores, and the N3 regulariser. All return sums; the trainer divides by the global batch.

Shape letters: Q queries, K negatives, D floats for each row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sampled_softmax(
    positives: Tensor, negatives: Tensor, *, is_positive: Tensor, num_candidates: int
) -> Tensor:
    """Sum over queries of the softmax cross-entropy, its denominator estimated from shared negatives.

    The negatives are a uniform sample (with replacement) of all candidates, so each stands for
    num_candidates / K of them: log(num_candidates / K) is added to its score, which makes the estimated
    denominator unbiased (Bengio and Senecal, 2008; Jean et al., 2015). A negative that is the query's
    own positive counts as nothing.

    Args:
        positives: float[Q] scores of the true candidates.
        negatives: float[Q, K] scores of the shared negatives. May be overwritten.
        is_positive: bool[Q, K], True where negative k is the true candidate of query q.
        num_candidates: How many candidates there are in all.

    Returns:
        A scalar, >= 0.
    """
    correction = math.log(num_candidates / negatives.shape[1])
    others = (negatives + correction).masked_fill(is_positive, -torch.inf)
    return torch.logsumexp(torch.cat([positives[:, None], others], dim=1), dim=1).sub(positives).sum()


def n3(*magnitudes: Tensor) -> Tensor:
    """Sum of cubed magnitudes: the nuclear 3-norm (Lacroix et al., 2018).

    Args:
        magnitudes: float[Q, ...] non-negative sizes of coordinates, as `Scoring.magnitudes` returns.
    """
    return torch.stack([(size * size * size).sum() for size in magnitudes]).sum()
