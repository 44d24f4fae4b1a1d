"""The k best rows for a query, exactly.

Candidates come from float32 arithmetic (a scan over the shards, or a FAISS index) and are scored again
in float64. The answer is accepted only when the worst candidate is so much worse than the k-th answer
that rounding cannot have hidden a better row; else more candidates are fetched. Where float32 cannot be
trusted at all, float64 looks at every row. So answers are those of float64 arithmetic on the stored rows,
ties by lower row, whatever fetched the candidates.

Shape letters: N rows, D floats for each row, E floats for each candidate made of one, Q floats for a query
(as many as E, or what the metric wants), F fetched candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.errors import NonFiniteError
from kgshard.models.metric import Metric, is_beyond_float32
from kgshard.shards import Floats, StoredTable, first_non_finite
from kgshard_tools.lifts import AS_STORED, Lift, squares

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
    """The largest 2-norm among all candidates, to bound rounding."""


class CandidateSource(ABC):
    """Something that finds the best rows of a table, nearly."""

    def __init__(
        self, table: StoredTable, metric: Metric, lift: Lift = AS_STORED, *, labels: Sequence[str] = ()
    ) -> None:
        """Search `table`.

        Args:
            table: The rows.
            metric: How to compare.
            lift: What queries are compared with, made from the rows.
            labels: Names of the rows, for messages.
        """
        self.table = table
        self.metric = metric
        self.lift = lift
        self.width = lift.width(table.dim)
        """E."""
        self.labels = labels

    def __len__(self) -> int:
        return self.table.num_rows

    @abstractmethod
    def fetch(self, query: Scores, count: int, excluded: Ids) -> Fetched:
        """Return the `count` best rows for a query float64[Q] but `excluded`; there are more than `count`."""

    def candidates(self, ids: Ids) -> Scores:
        """Return float64[I, E]: what scores are defined on.

        Raises:
            NonFiniteError: A row, or what is made of it, is NaN or infinite.
        """
        return self._lifted(self.table.gather(ids), ids)

    def _lifted(self, rows: Floats, ids: Ids | range) -> Scores:
        """Return float64[I, E] of rows float32[I, D] whose ids are given; see `candidates`."""
        wide = rows.astype(np.float64)
        self._check_finite(wide, ids)
        lifted = self.lift(wide)
        self._check_finite(lifted, ids)
        return lifted

    def _check_finite(self, rows: Scores, ids: Ids | range) -> None:
        bad = first_non_finite(rows)
        if bad is not None:
            row = int(ids[bad])
            name = f" ({self.labels[row]!r})" if len(self.labels) else ""
            raise NonFiniteError(f"entity {row}{name} is not finite; such a run cannot be searched")


def search(source: CandidateSource, query: Scores, k: int, excluded: Ids) -> tuple[Ids, Scores]:
    """Return the ids int64[n] and scores float64[n] of the best rows, best first; n < k where rows run out.

    Args:
        source: Where candidates come from.
        query: float64[Q], finite.
        k: How many, >= 1.
        excluded: int64 rows that are no answers.

    Raises:
        NonFiniteError: A row of the table is NaN or infinite.
    """
    excluded, query = np.unique(excluded), np.asarray(query, np.float64)
    num_left = len(source) - len(excluded)
    k = min(k, num_left)
    count = k + _SPARE
    while count < num_left:
        fetched = source.fetch(query, count, excluded)
        slack = _slack(source, query, fetched.longest)
        if slack is None:
            break
        ids, values = _best(source, query, k, fetched.ids)
        if fetched.worst + slack < values[-1]:
            return ids, _scores(source.metric, values)
        count *= 4
    ids, values = _best_of_all(source, query, k, excluded)
    return ids, _scores(source.metric, values)


def _slack(source: CandidateSource, query: Scores, longest: float) -> float | None:
    """Return how far a float32 comparison value may be off, or None where that cannot be told."""
    length = source.metric.lengths(query[None])
    if not np.isfinite(longest) or is_beyond_float32(source.width, length, longest)[0]:
        return None
    return float(source.metric.slack(source.width, length, longest)[0])


def _best(source: CandidateSource, query: Scores, k: int, ids: Ids) -> tuple[Ids, Scores]:
    """Return the k best of some rows and their float64 comparison values, best first, ties by lower row."""
    values = source.metric.compare_pairs(query[None], source.candidates(ids))
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
    return np.array([metric.score(value) for value in values.tolist()])


class Scan(CandidateSource):
    """Candidates from one pass over the rows as they are stored, block by block."""

    def fetch(self, query: Scores, count: int, excluded: Ids) -> Fetched:
        ids, values, longest = np.empty(0, np.int64), np.empty(0, np.float32), 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # `search` sees to both.
            narrow = query[None].astype(np.float32)
            for block, rows in self.table.blocks(size=_BLOCK_ROWS):
                block_values, block_longest = self._compare(narrow, rows, block)
                longest = max(longest, block_longest)
                allowed = np.setdiff1d(np.arange(block.start, block.stop), excluded, assume_unique=True)
                ids = np.concatenate([ids, allowed])
                values = np.concatenate([values, block_values[allowed - block.start]])
                if len(ids) > count:
                    best = np.argpartition(-values, count - 1)[:count]
                    ids, values = ids[best], values[best]
            worst = float(values.min()) + float(self.metric.constant(query[None])[0])
        return Fetched(ids, worst, longest)

    def _compare(self, query: Floats, rows: Floats, block: range) -> tuple[Floats, float]:
        """Return float32[n] comparison values less the query's constant, and the largest 2-norm."""
        candidates = self.lift.rounded(rows)
        lengths = squares(candidates)
        if not np.isfinite(lengths).all():
            self._lifted(rows, block)  # Finite in float64, or an error.
        values = self.metric.compare_all(query, candidates, lengths)[0]
        # In float32 a sum of E squares may come out low.
        longest = float(lengths.max()) ** 0.5 * (1 + self.width * 2.0**-23)
        return values.astype(np.float32, copy=False), longest
