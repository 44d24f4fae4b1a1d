"""How a query is compared with candidates. Scores: higher is more plausible.

    dot         <q, e>                          l1       -||q - e||_1
    l2          -||q - e||_2                    moduli   -sum_i |q_i - e_i| over complex coordinates
    hyperplane  -||q - (e - <w, e> w)||_2, for a query [q | w] with ||w||_2 = 1 and q orthogonal to w

Searches rank by a comparison value, which orders the candidates of one query as the score does and is
what fast float32 arithmetic yields with a known error: the score itself, but the negative squared distance
for `l2` and `hyperplane`.

Shape letters: B queries, N candidates, E floats for each candidate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kgshard.models.arrays import Array, add_product, distances, halves, moduli, moduli_distances, norm


class Metric(ABC):
    """A way to compare queries with candidates, for torch tensors and numpy arrays alike."""

    name: str
    """A key of METRICS."""
    uses_squares = False
    """Whether `compare_all` looks at the candidates' squared norms."""

    @abstractmethod
    def score_pairs(self, queries: Array, candidates: Array) -> Array:
        """Return float[...]: each query [..., E] against its own candidate [..., E], broadcast."""

    @abstractmethod
    def score_all(self, queries: Array, candidates: Array, *, exact: bool = True) -> Array:
        """Return float[B, N]: each query [B, E] against every candidate [N, E].

        Args:
            queries: float[B, E].
            candidates: float[N, E].
            exact: False allows torch the matmul form of the 2-norm: several times faster, but in float32
                percents off for a candidate very close to its query.
        """

    def compare_pairs(self, queries: Array, candidates: Array) -> Array:
        """Return comparison values [...] of queries [..., E] with their own candidates [..., E]."""
        return self.score_pairs(queries, candidates)

    def compare_all(self, queries: Array, candidates: Array, squares: Array) -> Array:
        """Return comparison values [B, N], each less its query's `constant`.

        Args:
            queries: float[B, E].
            candidates: float[N, E].
            squares: float[N] squared 2-norms of the candidates.
        """
        return self.score_all(queries, candidates)

    def constant(self, queries: Array) -> Array:
        """Return float[B]: what `compare_all` leaves out of a query's comparison values."""
        return self.lengths(queries) * 0

    def comparison(self, score: Any) -> Any:
        """Return the comparison value of a score (a float or an array of them)."""
        return score

    def score(self, comparison: Any) -> Any:
        """Return the score whose comparison value this is (a float or an array of them)."""
        return comparison

    def lengths(self, queries: Array) -> Array:
        """Return float[B]: the 2-norms that bound rounding."""
        return norm(queries)

    def slack(self, dim: int, query_lengths: Array, longest: float) -> Array:
        """Bound the rounding error of float32 comparison values, whatever the order of summation.

        The classical bound, n u sum |a_i b_i| for an inner product of n terms (Higham, 2002, section
        3.1), with Cauchy-Schwarz for the sum, doubled because queries, and candidates that a model
        derives from rows, are rounded to float32 too.

        Args:
            dim: E.
            query_lengths: float64[B], as `lengths` returns.
            longest: The largest 2-norm among the candidates.

        Returns:
            float64[B].
        """
        reach = query_lengths + longest
        return self._slack(2 * (dim + 8) * 2.0**-24, reach * reach)

    def _slack(self, unit: float, squared_reach: Array) -> Array:
        return squared_reach * unit


class Dot(Metric):
    """Inner product."""

    name = "dot"

    def score_pairs(self, queries: Array, candidates: Array) -> Array:
        return (queries * candidates).sum(-1)

    def score_all(self, queries: Array, candidates: Array, *, exact: bool = True) -> Array:
        return queries @ candidates.T

    def slack(self, dim: int, query_lengths: Array, longest: float) -> Array:
        return query_lengths * (2 * (dim + 8) * 2.0**-24 * longest)


class L2(Metric):
    """Negative 2-norm of the difference."""

    name = "l2"
    uses_squares = True

    def score_pairs(self, queries: Array, candidates: Array) -> Array:
        return -norm(queries - candidates)

    def score_all(self, queries: Array, candidates: Array, *, exact: bool = True) -> Array:
        return -distances("l2", queries, candidates, exact=exact)

    def compare_pairs(self, queries: Array, candidates: Array) -> Array:
        difference = queries - candidates
        return -(difference * difference).sum(-1)

    def compare_all(self, queries: Array, candidates: Array, squares: Array) -> Array:
        return add_product(-squares, queries, candidates, factor=2)

    def constant(self, queries: Array) -> Array:
        return -(queries * queries).sum(-1)

    def comparison(self, score: Any) -> Any:
        return -score * score

    def score(self, comparison: Any) -> Any:
        return -((-comparison) ** 0.5)


class L1(Metric):
    """Negative sum of absolute differences."""

    name = "l1"

    def score_pairs(self, queries: Array, candidates: Array) -> Array:
        return -abs(queries - candidates).sum(-1)

    def score_all(self, queries: Array, candidates: Array, *, exact: bool = True) -> Array:
        return -distances("l1", queries, candidates, exact=exact)

    def slack(self, dim: int, query_lengths: Array, longest: float) -> Array:
        return (query_lengths + longest) * (2 * (dim + 8) * 2.0**-24 * dim**0.5)


class Moduli(L1):
    """Negative sum of the moduli of complex differences. Rows are halves [real | imaginary]."""

    name = "moduli"

    def score_pairs(self, queries: Array, candidates: Array) -> Array:
        return -moduli(queries - candidates).sum(-1)

    def score_all(self, queries: Array, candidates: Array, *, exact: bool = True) -> Array:
        return -moduli_distances(queries, candidates)

    def slack(self, dim: int, query_lengths: Array, longest: float) -> Array:
        # Squares below float32's smallest number are lost: those of coordinates up to 1.1e-19.
        return super().slack(dim, query_lengths, longest) + dim * 1e-18


class Hyperplane(L2):
    """Negative distance of the query from the candidate's projection on the query's own hyperplane.

    A query is twice as wide as a candidate: a point q of the hyperplane, then its unit normal w.
    """

    name = "hyperplane"

    def score_pairs(self, queries: Array, candidates: Array) -> Array:
        return -norm(self._difference(queries, candidates))

    def score_all(self, queries: Array, candidates: Array, *, exact: bool = True) -> Array:
        if exact:
            return self.score_pairs(queries[:, None], candidates[None])
        values = self.compare_all(queries, candidates, (candidates * candidates).sum(-1))
        values = values + self.constant(queries)[:, None]
        return -((-values).clip(1e-12, None) ** 0.5)

    def compare_pairs(self, queries: Array, candidates: Array) -> Array:
        difference = self._difference(queries, candidates)
        return -(difference * difference).sum(-1)

    def compare_all(self, queries: Array, candidates: Array, squares: Array) -> Array:
        points, normals = halves(queries)
        heights = normals @ candidates.T
        return add_product(-squares, points, candidates, factor=2) + heights * heights

    def constant(self, queries: Array) -> Array:
        return super().constant(halves(queries)[0])

    def lengths(self, queries: Array) -> Array:
        return norm(halves(queries)[0])

    def _difference(self, queries: Array, candidates: Array) -> Array:
        points, normals = halves(queries)
        height = (normals * candidates).sum(-1)
        return points - candidates + height[..., None] * normals

    def _slack(self, unit: float, squared_reach: Array) -> Array:
        return squared_reach * (3 * unit)  # The square of <w, e> doubles that product's error.


DOT, L2_NORM, L1_NORM, MODULI, HYPERPLANE = Dot(), L2(), L1(), Moduli(), Hyperplane()
METRICS: dict[str, Metric] = {metric.name: metric for metric in (DOT, L2_NORM, L1_NORM, MODULI, HYPERPLANE)}
"""Every metric by the name that JSON files give it."""


def is_beyond_float32(dim: int, query_lengths: Array, longest: float) -> Array:
    """Tell where float32 comparison values may overflow, or round everything away.

    There `Metric.slack` bounds nothing, and float64 must decide.

    Args:
        dim: Floats for each candidate.
        query_lengths: float64[B], 2-norms of the queries.
        longest: The largest 2-norm among the candidates.

    Returns:
        bool[B].
    """
    reach = query_lengths + longest
    smallest = dim * 2.0**-24 * query_lengths * longest
    return (reach * reach > 1e30) | (smallest < 1e-30)
