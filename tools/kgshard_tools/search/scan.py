"""Candidates from one pass over all rows: blocks of matrix products, from which few values are picked.

Shape letters: B queries, N rows, n rows of a block, E floats for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kgshard.models.metric import Metric
from kgshard.shards import Floats, StoredTable
from kgshard_tools.lifts import AS_STORED, Lift, squares
from kgshard_tools.search.best import BestRows
from kgshard_tools.search.exclusions import Exclusions, Ids
from kgshard_tools.search.source import CandidateSource, Fetched, Scores

_PART_QUERIES = 256
_BLOCK_VALUES = 1 << 21
"""Comparison values of a block: so many are still in the processor's cache when they are looked at."""
_BLOCK_FLOATS = 1 << 22
_LEAST_ROWS = 256


class Scan(CandidateSource):
    """Candidates from the rows as they are stored, all or some of them."""

    def __init__(
        self,
        table: StoredTable,
        metric: Metric,
        lift: Lift = AS_STORED,
        *,
        labels: Sequence[str] = (),
        rows: Ids | None = None,
    ) -> None:
        """Search `table`; with `rows` (int64[N], distinct, ascending) only those."""
        super().__init__(table, metric, lift, labels=labels)
        self._rows = rows
        self._longest: float | None = None

    def __len__(self) -> int:
        return self.table.num_rows if self._rows is None else len(self._rows)

    def ids(self, places: range) -> Ids:
        if self._rows is None:
            return np.arange(places.start, places.stop)
        return self._rows[places.start : places.stop]

    def applicable(self, excluded: Exclusions) -> Exclusions:
        return excluded if self._rows is None else excluded.among(self._rows)

    def fetch(self, queries: Scores, count: int, excluded: Exclusions) -> Fetched:
        best, longest = BestRows(len(queries), count), 0.0
        if self._rows is not None:
            excluded = excluded.renumbered(self._rows)
        with np.errstate(over="ignore", invalid="ignore"):  # `search` sees to both.
            narrow = queries.astype(np.float32)

        parts = _parts(len(queries))
        for block in self._blocks(len(parts[0])):
            candidates, lengths = self._candidates(block)
            longest = max(longest, float(lengths.max(initial=0.0)))
            for asked in parts:
                with np.errstate(over="ignore", invalid="ignore"):
                    values = self.metric.compare_all(narrow[asked], candidates, lengths)
                values = values.astype(np.float32, copy=False)
                if excluded:
                    values[excluded.within(block, asked)] = -np.inf
                best.offer(asked, block.start, values)
        if self._longest is None:
            # In float32 a sum of E squares may come out low.
            self._longest = longest**0.5 * (1 + self.width * 2.0**-23)
        worst = best.worst.astype(np.float64) + self.metric.constant(queries)
        found = best.ids if self._rows is None else np.where(best.ids < 0, -1, self._rows[best.ids])
        return Fetched(found, best.values, worst, self._longest)

    def _blocks(self, num_queries: int) -> Iterator[range]:
        """Yield all places, in blocks."""
        size = max(_LEAST_ROWS, min(_BLOCK_VALUES // num_queries, _BLOCK_FLOATS // self.width))
        for start in range(0, len(self), size):
            yield range(start, min(start + size, len(self)))

    def _candidates(self, block: range) -> tuple[Floats, Floats]:
        """Return candidates float32[n, E] and their squared 2-norms; none where nobody asks for those."""
        rows = self.table.read(block) if self._rows is None else self.table.gather(self.ids(block))
        candidates = self.lift.rounded(rows)
        if self._longest is not None and not self.metric.uses_squares:
            return candidates, np.empty(0, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            lengths: Floats = squares(candidates)
        if not np.isfinite(lengths).all():
            self.check_finite(self.ids(block))  # Finite in float64, or an error.
        return candidates, lengths


def _parts(num_queries: int) -> list[Ids]:
    size = _PART_QUERIES
    return [np.arange(start, min(start + size, num_queries)) for start in range(0, num_queries, size)]
