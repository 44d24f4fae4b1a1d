"""The k best rows for each query, exactly, or as good as an approximate index finds them.

Candidates come from float32 arithmetic (a scan over the shards, or a FAISS index) and are scored again
in float64. An exact source's answer is accepted only when the worst candidate is so much worse than the
k-th answer that rounding cannot have hidden a better row; else more candidates are fetched. Where float32
cannot be trusted at all, float64 looks at every row. So answers are those of float64 arithmetic on the
stored rows, ties by lower row, whatever fetched the candidates. An approximate source's candidates are scored
the same way, but what it did not find is not known.

Shape letters: B queries, Q floats for a query, F fetched candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.models.metric import is_beyond_float32
from kgshard_tools.search.exclusions import Exclusions, Ids
from kgshard_tools.search.source import CandidateSource, Fetched, Scores

_SCORED_FLOATS = 1 << 18
"""Floats of candidates that are scored at once: they stay in the processor's cache."""
_BLOCK_ROWS = 16384


@dataclass(frozen=True, slots=True)
class Found:
    """The best rows for B queries, best first."""

    ids: Ids
    """int64[B, K]; what lies beyond `counts` is no row."""
    scores: Scores
    """float64[B, K]."""
    counts: Ids
    """int64[B]: how many there are; fewer than k only where rows run out."""
    exact: npt.NDArray[np.bool_]
    """bool[B]: whether these are the best of all, for certain."""

    def of(self, query: int) -> tuple[Ids, Scores]:
        """Return the rows and scores found for one query."""
        count = int(self.counts[query])
        return self.ids[query, :count], self.scores[query, :count]


def search(source: CandidateSource, queries: Scores, k: int, excluded: Exclusions | None = None) -> Found:
    """Return the best rows for each query, best first, ties by lower row.

    Args:
        source: Where candidates come from.
        queries: float64[B, Q], finite.
        k: How many, >= 1; where fewer are left, all come back.
        excluded: Rows that are no answers to a query.

    Raises:
        NonFiniteError: A row of the table is NaN or infinite.
    """
    queries = np.asarray(queries, np.float64)
    excluded = source.applicable(excluded or Exclusions.none(len(queries)))
    left = len(source) - excluded.counts
    counts = np.minimum(k, left)
    width = int(counts.max(initial=0))
    found = Found(
        np.full((len(queries), width), -1, np.int64),
        np.full((len(queries), width), -np.inf),
        counts,
        np.ones(len(queries), bool),
    )
    pending, count = np.arange(len(queries)), source.first_count(k)
    while len(pending):
        few = left[pending] <= count
        for query in pending[few].tolist():
            found.ids[query, : counts[query]], found.scores[query, : counts[query]] = _best_of_all(
                source, queries[query], int(counts[query]), excluded.of(query)
            )
        pending = pending[~few]
        if len(pending):
            pending = _settle(source, queries, counts, pending, count, excluded.take(pending), found)
        count *= 4
    found.scores[:] = source.metric.score(found.scores)
    return found


def _settle(
    source: CandidateSource,
    queries: Scores,
    counts: Ids,
    pending: Ids,
    count: int,
    excluded: Exclusions,
    found: Found,
) -> Ids:
    """Answer what `count` candidates for each pending query suffice for; return the queries still pending."""
    asked, wanted = queries[pending], counts[pending]
    fetched = source.fetch(asked, count, excluded)
    slacks = _slacks(source, asked, fetched.longest)
    candidates = _worth_scoring(fetched, wanted, slacks) if source.is_exact else fetched.ids
    size = max(1, _SCORED_FLOATS // (candidates.shape[1] * source.width))
    is_settled = np.zeros(len(pending), bool)
    for start in range(0, len(pending), size):
        part = slice(start, start + size)
        ids, values = _best(source, asked[part], candidates[part], found.ids.shape[1])
        last = np.take_along_axis(values, wanted[part, None] - 1, axis=1)[:, 0]
        with np.errstate(invalid="ignore"):  # Infinite slack is settled below.
            sure = fetched.worst[part] + slacks[part] < last
        is_settled[part] = sure if source.is_exact else np.isfinite(slacks[part]) & np.isfinite(last)
        into = pending[part][is_settled[part]]
        beyond = np.arange(ids.shape[1]) >= wanted[part, None]
        found.ids[into, : ids.shape[1]] = np.where(beyond, -1, ids)[is_settled[part]]
        found.scores[into, : ids.shape[1]] = values[is_settled[part]]
        found.exact[into] = sure[is_settled[part]]
    for query in pending[~np.isfinite(slacks)].tolist():
        own = excluded.of(int(np.searchsorted(pending, query)))
        found.ids[query, : counts[query]], found.scores[query, : counts[query]] = _best_of_all(
            source, queries[query], int(counts[query]), own
        )
    return pending[~is_settled & np.isfinite(slacks)]


def _slacks(source: CandidateSource, queries: Scores, longest: float) -> Scores:
    """Return how far float32 comparison values may be off, float64[B]; infinity where that cannot be told."""
    lengths = source.metric.lengths(queries)
    if not np.isfinite(longest):
        return np.full(len(queries), np.inf)
    beyond = is_beyond_float32(source.width, lengths, longest)
    slacks: Scores = np.where(beyond, np.inf, source.metric.slack(source.width, lengths, longest))
    return slacks


def _worth_scoring(fetched: Fetched, wanted: Ids, slacks: Scores) -> Ids:
    """Return the candidates int64[B, <= F] that may be among the best; the others are surely worse."""
    order = np.argsort(-fetched.values, axis=1, kind="stable")
    values = np.take_along_axis(fetched.values, order, axis=1).astype(np.float64)
    last = np.take_along_axis(values, np.minimum(wanted, values.shape[1])[:, None] - 1, axis=1)
    with np.errstate(invalid="ignore"):  # what is infinite is settled elsewhere
        close = ~(values < last - 2 * slacks[:, None])
    most = max(int(wanted.max()), int(close[np.isfinite(slacks)].sum(axis=1).max(initial=0)))
    return np.take_along_axis(fetched.ids, order[:, :most], axis=1)


def _best(source: CandidateSource, queries: Scores, ids: Ids, k: int) -> tuple[Ids, Scores]:
    """Return the k best of some rows int64[B, F] and their float64 comparison values, ties by lower row."""
    rows = source.candidates(np.maximum(ids, 0).ravel()).reshape(*ids.shape, source.width)
    with np.errstate(over="ignore", invalid="ignore"):
        values = source.metric.compare_pairs(queries[:, None], rows)
    if not np.isfinite(values).all():
        source.check_finite(ids[ids >= 0])
    values = np.where(ids >= 0, values, -np.inf)
    order = np.lexsort((ids, -values), axis=1)[:, :k]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def _best_of_all(source: CandidateSource, query: Scores, k: int, excluded: Ids) -> tuple[Ids, Scores]:
    """Return the k best of all rows but `excluded`, in float64, block by block."""
    best, values = np.empty(0, np.int64), np.empty(0)
    for start in range(0, len(source), _BLOCK_ROWS):
        block = source.ids(range(start, min(start + _BLOCK_ROWS, len(source))))
        block = np.setdiff1d(block, excluded, assume_unique=True)
        block_ids, block_values = _best(source, query[None], block[None], k)
        best = np.concatenate([best, block_ids[0]])
        values = np.concatenate([values, block_values[0]])
        order = np.lexsort((best, -values))[:k]
        best, values = best[order], values[order]
    return best, values
