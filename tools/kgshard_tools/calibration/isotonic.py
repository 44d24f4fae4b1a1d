"""The non-decreasing function of a score that fits outcomes best, by pooling adjacent violators.

Shape letters: n pairs, K knots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kgshard_tools.calibration.logistic import log_odds
from kgshard_tools.search import Scores


@dataclass(frozen=True, slots=True)
class Pools:
    """Neighbouring scores with one mean; the means rise."""

    scores: Scores
    """float64[K]: weighted means of the scores of each pool, ascending."""
    true: Scores
    """float64[K]: weight of what is true."""
    total: Scores
    """float64[K]: weight of all."""

    def log_odds(self) -> Scores:
        """Return float64[K], non-decreasing: half a true and half a false outcome are added to every pool.

        So that no pool, however small, is certain (Krichevsky and Trofimov's estimate).
        """
        raised: Scores = np.maximum.accumulate(log_odds((self.true + 0.5) / (self.total + 1.0)))
        return raised


def pool_violators(scores: Scores, outcomes: Scores, weights: Scores) -> Pools:
    """Fit outcomes float64[n] in [0, 1] by a non-decreasing function of scores float64[n], least squares.

    The same function maximises the likelihood. Equal scores get equal values.
    """
    distinct, which = np.unique(scores, return_inverse=True)
    total = np.bincount(which, weights)
    true = np.bincount(which, weights * outcomes)
    sums = distinct * total
    # Among neighbours without a true outcome nothing can be out of order: they are one pool from the start.
    starts = np.flatnonzero((true > 0) | np.concatenate([[True], true[:-1] > 0]))
    columns = (np.add.reduceat(column, starts).tolist() for column in (sums, true, total))
    pools: list[tuple[float, float, float]] = []
    for pool in zip(*columns, strict=True):
        while pools and pools[-1][1] * pool[2] >= pool[1] * pools[-1][2]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    sums, true, total = np.array(pools, np.float64).T
    return Pools(sums / total, true, total)
