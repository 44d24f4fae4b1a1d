"""How a query is compared with candidates: `dot`, `l2` or `l1`. Scores: higher is more plausible.

    dot   <q, e>            l2   -||q - e||_2            l1   -||q - e||_1

Shape letters: B batch, N candidates, D floats for each entity.
"""

from __future__ import annotations

from typing import Literal

from kgshard.models.arrays import Array, distances, norm

Metric = Literal["dot", "l2", "l1"]


def score_pairs(metric: Metric, queries: Array, candidates: Array) -> Array:
    """Score each query against its own candidate.

    Args:
        metric: How to compare.
        queries: float[..., D].
        candidates: float[..., D], broadcast against `queries`.

    Returns:
        float[...] scores.
    """
    if metric == "dot":
        return (queries * candidates).sum(-1)
    difference = queries - candidates
    if metric == "l1":
        return -abs(difference).sum(-1)
    return -norm(difference)


def score_all(metric: Metric, queries: Array, candidates: Array, *, exact: bool = True) -> Array:
    """Score each query against every candidate.

    Args:
        metric: How to compare.
        queries: float[B, D].
        candidates: float[N, D].
        exact: False allows torch the matmul form of the 2-norm: several times faster, but in float32
            percents off for a candidate very close to its query.

    Returns:
        float[B, N] scores.
    """
    if metric == "dot":
        return queries @ candidates.T
    return -distances(metric, queries, candidates, exact=exact)
