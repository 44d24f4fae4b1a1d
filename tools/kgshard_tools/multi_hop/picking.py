"""The rows for which a tree is truest, and whether they would be so with nobody left out.

Rows that may be among the best, by the bounds of their blocks, are computed exactly; ties fall to the lower
row. Where no bound on what beams left out reaches the last answer, the answers are the best of all for
certain.

Shape letters: N rows, n rows of a block, K rows picked.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kgshard.known import Ids
from kgshard_tools.multi_hop.blocks import Tables
from kgshard_tools.multi_hop.evaluators import Evaluator, Truth
from kgshard_tools.multi_hop.truth import FALSE, TRUE, Degrees

_EXACT_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Picked:
    """The best rows, the truest first."""

    ids: Ids
    """int64[K]."""
    degrees: Degrees
    """float64[K], exact."""
    outside: float
    """No other row is truer, whatever was left out."""
    is_certain: bool
    """Whether these would be the best with nobody left out."""


class _Contest:
    """The rows that may be among the best, while blocks come by."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ids: Ids = np.empty(0, np.int64)
        self._low: Degrees = np.empty(0)
        self._high: Degrees = np.empty(0)
        self._most: Degrees = np.empty(0)
        self.floor = FALSE
        """So many rows as are wanted are at least so true."""
        self.lost = FALSE
        """No row that was let go is truer, whatever was left out."""
        self.open = -np.inf
        """No row is truer for which an entity that was left out may matter."""

    def offer(self, ids: Ids, truth: Truth) -> None:
        """Take rows int64[n] and how true they are."""
        self.open = max(self.open, float(truth.most[truth.is_open].max(initial=-np.inf)))
        ids = np.concatenate([self._ids, ids])
        low, high, most = (
            np.concatenate(pair)
            for pair in ((self._low, truth.low), (self._high, truth.high), (self._most, truth.most))
        )
        if len(low) > self._count:
            self.floor = float(np.partition(low, len(low) - self._count)[len(low) - self._count])
        kept = (high >= self.floor) & ~self._surplus(low, high)
        self.lost = max(self.lost, float(most[~kept].max(initial=FALSE)))
        self._ids = ids[kept]
        self._low, self._high, self._most = low[kept], high[kept], most[kept]

    def _surplus(self, low: Degrees, high: Degrees) -> npt.NDArray[np.bool_]:
        """Return which rows tie for certain, being all false or all true, behind as many as are wanted."""
        surplus = np.zeros(len(low), bool)
        for end in (FALSE, TRUE):
            surplus[np.flatnonzero((low == end) & (high == end))[self._count :]] = True
        return surplus

    def decide(self, evaluator: Evaluator, floor: float) -> Picked:
        """Return the best of all rows, by their exact degrees."""
        parts = range(0, len(self._ids), _EXACT_ROWS)
        exact = [evaluator.exact(self._ids[start : start + _EXACT_ROWS], floor) for start in parts]
        degrees = np.concatenate([np.empty(0), *exact])
        order = np.lexsort((self._ids, -degrees))
        best, others = order[: self._count], order[self._count :]
        outside = max(self.lost, float(self._most[others].max(initial=FALSE)))
        last = degrees[best[-1]] if len(best) else FALSE
        return Picked(self._ids[best], degrees[best], outside, bool(self.open < last))


def pick(
    evaluator: Evaluator,
    tables: Tables,
    count: int,
    *,
    floor: float | None = None,
    excluded: npt.NDArray[np.bool_] | None = None,
) -> Picked:
    """Return the `count` rows for which a tree is truest, ties by lower row.

    Args:
        evaluator: The tree.
        tables: What is searched.
        count: How many; all, where there are no more.
        floor: That so many rows are known to be at least so true; None: every degree is wanted, those of
            rows that are not picked too, to bound them.
        excluded: bool[N], rows that are not to be picked.
    """
    contest = _Contest(count)
    for block in tables.blocks():
        sought = FALSE if floor is None else max(floor, contest.floor)
        truth, ids = evaluator.truth(block, sought), block.ids
        if excluded is not None:
            kept = ~excluded[ids]
            ids, truth = ids[kept], truth.mapped(itemgetter(kept), itemgetter(kept))
        contest.offer(ids, truth)
    return contest.decide(evaluator, FALSE if floor is None else floor)
