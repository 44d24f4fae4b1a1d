"""The k best rows for a query, exactly.

Candidates come from float32 arithmetic (a scan over the shards, or a FAISS index) and are scored again
in float64. The answer is accepted only when the worst candidate is so much worse than the k-th answer
that rounding cannot have hidden a better row; else more candidates are fetched. So answers are those of
float64 arithmetic on the stored rows, ties by lower row, whatever fetched the candidates.

Shape letters: N rows, D floats for each row, F fetched candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kgshard.models.metric import Metric, compare_pairs, comparison_slack, score_from_comparison
from kgshard.shards import StoredTable

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
Vector = npt.NDArray[np.floating[Any]]

_SPARE = 32
"""Candidates fetched beyond k at first."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The best candidates by float32 comparison values (kgshard.models.metric)."""

    ids: Ids
    """int64[F], distinct."""
    worst: float
    """No row that was not fetched has a higher comparison value; -inf where all rows were fetched."""
    longest: float
    """The largest 2-norm among all rows, to bound rounding."""


class CandidateSource(Protocol):
    """Something that finds the best rows, nearly."""

    metric: Metric

    def fetch(self, query: npt.NDArray[np.float32], count: int, excluded: Ids) -> Fetched:
        """Return at least the `count` best rows but `excluded`, or all there are."""

    def rows(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Return float64[I, D]: the rows that scores are defined on."""

    def __len__(self) -> int:
        """Return N."""


def search(source: CandidateSource, query: Vector, k: int, excluded: Ids) -> tuple[Ids, Scores]:
    """Return the ids int64[n] and scores float64[n] of the best rows, best first; n < k where rows run out.

    Args:
        source: Where candidates come from.
        query: float64[D].
        k: How many, >= 1.
        excluded: int64 rows that are no answers.
    """
    excluded = np.unique(excluded)
    num_left = len(source) - len(excluded)
    k = min(k, num_left)
    count = k + _SPARE
    while k > 0:
        fetched = source.fetch(query.astype(np.float32), min(count, num_left), excluded)
        values = compare_pairs(source.metric, query.astype(np.float64)[None], source.rows(fetched.ids))
        order = np.lexsort((fetched.ids, -values))[:k]
        length = np.array([np.linalg.norm(query)])
        slack = float(comparison_slack(source.metric, len(query), length, fetched.longest)[0])
        if fetched.worst == -np.inf or fetched.worst + slack < values[order[-1]]:
            scores = [score_from_comparison(source.metric, value) for value in values[order].tolist()]
            return fetched.ids[order], np.array(scores)
        count *= 4
    return np.empty(0, np.int64), np.empty(0)


class Scan:
    """Candidates from one pass over the rows as they are stored, block by block."""

    def __init__(self, table: StoredTable, metric: Metric, *, normalized: bool = False) -> None:
        """Scan `table`; with `normalized`, every row divided by its 2-norm (rows of zeros stay)."""
        self.table = table
        self.metric = metric
        self.normalized = normalized

    def __len__(self) -> int:
        return self.table.num_rows

    def rows(self, ids: Ids) -> npt.NDArray[np.float64]:
        rows = self.table.gather(ids).astype(np.float64)
        return unit_rows(rows) if self.normalized else rows

    def fetch(self, query: npt.NDArray[np.float32], count: int, excluded: Ids) -> Fetched:
        ids, values, longest = np.empty(0, np.int64), np.empty(0, np.float32), 0.0
        num_seen = 0
        for block, rows in self.table.blocks():
            lengths = np.linalg.norm(rows, axis=1)
            longest = max(longest, 1.0 if self.normalized else float(lengths.max(initial=0)) * (1 + 1e-5))
            block_values = self._compare(query, rows, lengths)
            inside = excluded[(excluded >= block.start) & (excluded < block.stop)] - block.start
            block_values[inside] = -np.inf
            num_seen += len(block) - len(inside)
            ids = np.concatenate([ids, np.arange(block.start, block.stop)])
            values = np.concatenate([values, block_values])
            if len(ids) > count:
                best = np.argpartition(-values, count - 1)[:count]
                ids, values = ids[best], values[best]
        kept = values > -np.inf
        all_fetched = int(kept.sum()) == num_seen
        worst = -np.inf if all_fetched else float(values[kept].min())
        return Fetched(ids[kept], worst, longest)

    def _compare(
        self, query: npt.NDArray[np.float32], rows: npt.NDArray[np.float32], lengths: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        if self.metric == "dot":
            values: npt.NDArray[np.float32] = rows @ query
            if self.normalized:
                values /= np.where(lengths > 0, lengths, 1)
            return values
        return compare_pairs(self.metric, query[None], rows).astype(np.float32, copy=False)


def unit_rows(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return rows [I, D] divided by their 2-norms; rows of zeros stay zeros."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)
