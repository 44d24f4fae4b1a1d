"""Ranking metrics from counts of better and equal candidates, in float64. No torch here.

A true answer's rank is 1 + (candidates that score higher) + its share of the candidates that score the same:

    realistic     half of them, the expected rank when ties are broken at random; the default
    optimistic    none
    pessimistic   all

(Berrendorf et al., 2020). Under realistic ranks a constant model gets the middle, not rank 1. How far the
other two lie apart says how much of a figure the ties decide.

Every metric is a sum over queries divided by a sum over queries. With n candidates a random scorer has the
expected rank (n + 1) / 2, so that

    mrr, mr, hits@k    means over queries of 1 / rank, of the rank, and of whether the rank is <= k
    amr                mean rank / mean of (n + 1) / 2: 1 is chance, and less is better
    amri               1 - (mean rank - 1) / (mean of (n + 1) / 2 - 1): 0 is chance, and 1 is perfect

Shape letters: Q queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HITS_AT = (1, 3, 10)
TIES = ("realistic", "optimistic", "pessimistic")
_SHARE = {"realistic": 0.5, "optimistic": 0.0, "pessimistic": 1.0}
"""How much of the ties counts as better."""
NORMAL_95 = 1.959963984540054
"""A normal variable lies within so many standard deviations of its mean in 95 % of cases."""

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the true answers to Q queries stand among their candidates."""

    higher: Counts
    """int64[Q]: candidates that score higher."""
    ties: Counts
    """int64[Q]: other candidates that score the same."""
    candidates: Counts
    """int64[Q]: all candidates, the true answer counted; known answers are none where ranks are filtered."""

    def __len__(self) -> int:
        return len(self.higher)

    def under(self, ties: str = "realistic") -> Values:
        """Return float64[Q] ranks, ties as TIES says."""
        return 1.0 + self.higher + self.ties * _SHARE[ties]

    def take(self, queries: npt.NDArray[np.int64]) -> Ranks:
        """Return the ranks of some of the queries, in their order."""
        return Ranks(self.higher[queries], self.ties[queries], self.candidates[queries])

    @staticmethod
    def join(parts: Sequence[Ranks]) -> Ranks:
        """Return the ranks of several parts, one after the other; there may be none."""
        columns = ("higher", "ties", "candidates")
        nothing = np.empty(0, np.int64)
        return Ranks(*(np.concatenate([nothing, *(getattr(p, name) for p in parts)]) for name in columns))


def ranking_metrics(ranks: Ranks, ties: str = "realistic") -> dict[str, float]:
    """Return "mrr", "mr", "hits@k", "amr" and "amri".

    "amri" is 0 where no query has a second candidate: nothing could be told from chance.

    Raises:
        ValueError: There are no ranks.
    """
    if len(ranks) == 0:
        raise ValueError("no ranks, so no metrics")
    return {name: _ratio(above, below) for name, above, below in _terms(ranks, ties)}


def metric_intervals(
    ranks: Ranks, ties: str, triples: npt.NDArray[np.int64], *, num_drawn: int, num_triples: int
) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of every metric, estimated from triples drawn without replacement.

    With the residual e_i of a triple (its queries' numerators less the metric times their denominators),
    n of N triples drawn, and d the queries' denominators summed and divided by n, the standard error is

        sqrt((1 - n / N) * sum_i e_i^2 / (n - 1) / n) / d

    (Cochran, 1977, sections 2.5 and 6.4: the finite population correction, and the variance of a ratio). For
    means over all queries of a triple this is the unbiased estimate of the variance; for "amr", "amri", and
    groups of queries, a linear approximation. The interval is the metric plus and minus 1.96 such errors:
    normal theory, so it may leave a metric's range, and says too little where n is small.

    Args:
        ranks: Of all queries, or of the queries of one group.
        ties: See TIES.
        triples: int64[Q], in [0, num_drawn): the triple that each query is about.
        num_drawn: n, at least 2.
        num_triples: N.
    """
    intervals = {}
    for name, above, below in _terms(ranks, ties):
        value = _ratio(above, below)
        residuals = np.bincount(triples, weights=above - value * below)
        variance = (1 - num_drawn / num_triples) * float(residuals @ residuals) / (num_drawn - 1) / num_drawn
        width = NORMAL_95 * variance**0.5 * _ratio(num_drawn, below)
        intervals[name] = (value - width, value + width)
    return intervals


def _terms(ranks: Ranks, ties: str) -> Iterator[tuple[str, Values, Values]]:
    """Yield each metric's name, and the float64[Q] terms of its numerator and its denominator."""
    places = ranks.under(ties)
    ones, chance = np.ones(len(places)), (ranks.candidates + 1) / 2
    yield "mrr", 1 / places, ones
    yield "mr", places, ones
    for k in HITS_AT:
        yield f"hits@{k}", (places <= k).astype(np.float64), ones
    yield "amr", places, chance
    yield "amri", chance - places, chance - 1


def _ratio(above: Values | float, below: Values) -> float:
    total = float(np.sum(below))
    return float(np.sum(above)) / total if total else 0.0
