"""How a query is compared with candidates: `dot`, `l2` or `l1`. Scores: higher is more plausible.

    dot   <q, e>            l2   -||q - e||_2            l1   -||q - e||_1

Searches rank by a comparison value, which orders candidates as the score does and is what fast float32
arithmetic yields with a known error: the score itself, but -||q - e||_2^2 for `l2`.

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


def compare_pairs(metric: Metric, queries: Array, candidates: Array) -> Array:
    """Return the comparison values [...] of queries [..., D] with their own candidates [..., D]."""
    if metric == "l2":
        difference = queries - candidates
        return -(difference * difference).sum(-1)
    return score_pairs(metric, queries, candidates)


def comparison_slack(metric: Metric, dim: int, query_lengths: Array, longest: float) -> Array:
    """Bound the rounding error of float32 comparison values, whatever the order of summation.

    The classical bound, n u sum |a_i b_i| for an inner product of n terms (Higham, 2002, section 3.1),
    with Cauchy-Schwarz for the sum, doubled because queries are rounded to float32 too.

    Args:
        metric: What is compared.
        dim: Floats for each entity.
        query_lengths: float64[Q], 2-norms of the queries.
        longest: The largest 2-norm among the candidates.

    Returns:
        float64[Q].
    """
    unit = 2 * (dim + 8) * 2.0**-24
    if metric == "dot":
        return query_lengths * (unit * longest)
    if metric == "l1":
        return (query_lengths + longest) * (unit * dim**0.5)
    reach = query_lengths + longest
    return reach * reach * unit


def is_beyond_float32(dim: int, query_lengths: Array, longest: float) -> Array:
    """Tell where float32 comparison values may overflow, or round everything away.

    There `comparison_slack` bounds nothing, and float64 must decide.

    Args:
        dim: Floats for each entity.
        query_lengths: float64[Q], 2-norms of the queries.
        longest: The largest 2-norm among the candidates.

    Returns:
        bool[Q].
    """
    reach = query_lengths + longest
    smallest = dim * 2.0**-24 * query_lengths * longest
    return (reach * reach > 1e30) | (smallest < 1e-30)


def score_from_comparison(metric: Metric, value: float) -> float:
    """Return the score whose comparison value this is."""
    return -((-value) ** 0.5) if metric == "l2" else value
