"""The k best rows for a query, exactly.

Candidates come from float32 arithmetic (a scan over the shards, or a FAISS index) and are scored again
in float64. The answer is accepted only when the worst candidate is so much worse than the k-th answer
that rounding cannot have hidden a better row; else more candidates are fetched. Where float32 cannot be
trusted at all, float64 looks at every row. So answers are those of float64 arithmetic on the stored rows,
ties by lower row, whatever fetched the candidates.

Shape letters: N rows, D floats for each row, F fetched candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.errors import NonFiniteError
from kgshard.models.metric import (
    Metric,
    compare_pairs,
    comparison_slack,
    is_beyond_float32,
    score_from_comparison,
)
from kgshard.shards import Floats, StoredTable, first_non_finite

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

_SPARE = 32
"""Candidates fetched beyond k at first."""
_BLOCK_ROWS = 16384


@dataclass(frozen=True, slots=True)
class Fetched:
    """The best candidates by float32 comparison values (kgshard.models.metric)."""

    ids: Ids
    """int64[F], distinct."""
    worst: float
    """No row that was not fetched has a higher comparison value."""
    longest: float
    """The largest 2-norm among all rows, to bound rounding."""


class CandidateSource(ABC):
    """Something that finds the best rows of a table, nearly."""

    def __init__(
        self, table: StoredTable, metric: Metric, *, normalized: bool = False, labels: Sequence[str] = ()
    ) -> None:
        """Search `table`.

        Args:
            table: The rows.
            metric: How to compare.
            normalized: Compare with every row divided by its 2-norm; rows of zeros stay.
            labels: Names of the rows, for messages.
        """
        self.table = table
        self.metric = metric
        self.normalized = normalized
        self.labels = labels

    def __len__(self) -> int:
        return self.table.num_rows

    @abstractmethod
    def fetch(self, query: Floats, count: int, excluded: Ids) -> Fetched:
        """Return the `count` best rows but `excluded`; there are more than `count`."""

    def rows(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Return float64[I, D]: the rows that scores are defined on.

        Raises:
            NonFiniteError: One of them is NaN or infinite.
        """
        rows = self.table.gather(ids).astype(np.float64)
        bad = first_non_finite(rows)
        if bad is not None:
            raise self.not_finite(int(ids[bad]))
        return unit_rows(rows) if self.normalized else rows

    def not_finite(self, row: int) -> NonFiniteError:
        """Return the error that names a row."""
        name = f" ({self.labels[row]!r})" if len(self.labels) else ""
        return NonFiniteError(f"entity {row}{name} is not finite; such a run cannot be searched")


def search(source: CandidateSource, query: Scores, k: int, excluded: Ids) -> tuple[Ids, Scores]:
    """Return the ids int64[n] and scores float64[n] of the best rows, best first; n < k where rows run out.

    Args:
        source: Where candidates come from.
        query: float64[D], finite.
        k: How many, >= 1.
        excluded: int64 rows that are no answers.

    Raises:
        NonFiniteError: A row of the table is NaN or infinite.
    """
    excluded, query = np.unique(excluded), np.asarray(query, np.float64)
    num_left = len(source) - len(excluded)
    k = min(k, num_left)
    count = k + _SPARE
    with np.errstate(over="ignore"):  # `_slack` sees to that.
        narrow = query.astype(np.float32)
    while count < num_left:
        fetched = source.fetch(narrow, count, excluded)
        slack = _slack(source.metric, query, fetched.longest)
        if slack is None:
            break
        ids, values = _best(source, query, k, fetched.ids)
        if fetched.worst + slack < values[-1]:
            return ids, _scores(source.metric, values)
        count *= 4
    ids, values = _best_of_all(source, query, k, excluded)
    return ids, _scores(source.metric, values)


def _slack(metric: Metric, query: Scores, longest: float) -> float | None:
    """Return how far a float32 comparison value may be off, or None where that cannot be told."""
    length = np.array([np.linalg.norm(query)])
    if is_beyond_float32(len(query), length, longest)[0]:
        return None
    return float(comparison_slack(metric, len(query), length, longest)[0])


def _best(source: CandidateSource, query: Scores, k: int, ids: Ids) -> tuple[Ids, Scores]:
    """Return the k best of some rows and their float64 comparison values, best first, ties by lower row."""
    values = compare_pairs(source.metric, query[None], source.rows(ids))
    order = np.lexsort((ids, -values))[:k]
    return ids[order], values[order]


def _best_of_all(source: CandidateSource, query: Scores, k: int, excluded: Ids) -> tuple[Ids, Scores]:
    """Return the same of all rows but `excluded`, in float64, block by block."""
    best, values = np.empty(0, np.int64), np.empty(0)
    for start in range(0, len(source), _BLOCK_ROWS):
        block = np.arange(start, min(start + _BLOCK_ROWS, len(source)))
        ids, block_values = _best(source, query, k, np.setdiff1d(block, excluded, assume_unique=True))
        best, values = np.concatenate([best, ids]), np.concatenate([values, block_values])
        order = np.lexsort((best, -values))[:k]
        best, values = best[order], values[order]
    return best, values


def _scores(metric: Metric, values: Scores) -> Scores:
    return np.array([score_from_comparison(metric, value) for value in values.tolist()])


class Scan(CandidateSource):
    """Candidates from one pass over the rows as they are stored, block by block."""

    def fetch(self, query: Floats, count: int, excluded: Ids) -> Fetched:
        ids, values, longest = np.empty(0, np.int64), np.empty(0, np.float32), 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # `search` sees to both.
            for block, rows in self.table.blocks(size=_BLOCK_ROWS):
                block_values, block_longest = self._compare(query, rows, block)
                longest = max(longest, block_longest)
                allowed = np.setdiff1d(np.arange(block.start, block.stop), excluded, assume_unique=True)
                ids = np.concatenate([ids, allowed])
                values = np.concatenate([values, block_values[allowed - block.start]])
                if len(ids) > count:
                    best = np.argpartition(-values, count - 1)[:count]
                    ids, values = ids[best], values[best]
        return Fetched(ids, float(values.min()), longest)

    def _compare(self, query: Floats, rows: Floats, block: range) -> tuple[Floats, float]:
        """Return comparison values float32[n], and the largest 2-norm of what was compared."""
        lengths = np.linalg.norm(rows, axis=1)
        bad = first_non_finite(rows) if not np.isfinite(lengths).all() else None
        if bad is not None:
            raise self.not_finite(block.start + bad)
        if self.normalized:
            if not ((lengths > 1e-15) & (lengths < 1e15)).all():
                # Squares of these leave float32.
                rows = unit_rows(rows.astype(np.float64)).astype(np.float32)
                return rows @ query, 1.0
            return (rows @ query) / lengths, 1.0
        values = rows @ query if self.metric == "dot" else compare_pairs(self.metric, query[None], rows)
        return values.astype(np.float32, copy=False), float(lengths.max()) * (1 + 1e-5)


def unit_rows(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return rows [I, D] divided by their 2-norms; rows of zeros stay zeros."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)
