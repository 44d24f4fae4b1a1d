"""Who is no answer to a query: known answers, an entity itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.shards import Floats

Ids = npt.NDArray[np.int64]


class Exclusions:
    """Rows that are no answers, for each of B queries."""

    def __init__(
        self, queries: npt.ArrayLike, ids: npt.ArrayLike, *, num_queries: int, num_rows: int
    ) -> None:
        """Take pairs in any order; the same pair may come twice.

        Args:
            queries: int64[M], from 0 to num_queries - 1.
            ids: int64[M], from 0 to num_rows - 1.
            num_queries: B.
            num_rows: Rows that are searched.
        """
        self._span = max(num_rows, 1)
        keys = np.asarray(queries, np.int64) * self._span + np.asarray(ids, np.int64)
        self._keys = _distinct(keys)
        self._set_starts(num_queries)

    @classmethod
    def none(cls, num_queries: int) -> Exclusions:
        """Return that every row may answer each of B queries."""
        return cls([], [], num_queries=num_queries, num_rows=1)

    @classmethod
    def of_one(cls, ids: npt.ArrayLike, *, num_rows: int) -> Exclusions:
        """Return what is no answer to a single query."""
        ids = np.asarray(ids, np.int64)
        return cls(np.zeros_like(ids), ids, num_queries=1, num_rows=num_rows)

    def _set_starts(self, num_queries: int) -> None:
        self._starts = np.searchsorted(self._keys, np.arange(num_queries + 1) * self._span)

    def __len__(self) -> int:
        """Return B."""
        return len(self._starts) - 1

    def __bool__(self) -> bool:
        """Whether anything is excluded at all."""
        return len(self._keys) > 0

    @property
    def counts(self) -> Ids:
        """int64[B]: how many rows are no answers to each query."""
        return np.diff(self._starts)

    def of(self, query: int) -> Ids:
        """Return what is no answer to one query, ascending."""
        return self._keys[self._starts[query] : self._starts[query + 1]] - query * self._span

    def take(self, queries: npt.NDArray[np.integer[Any]]) -> Exclusions:
        """Return the exclusions of some of the queries, numbered anew in their order."""
        if not self or (len(queries) == len(self) and (queries == np.arange(len(self))).all()):
            return self if self else Exclusions.none(len(queries))
        counts = self.counts[queries]
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        old = self._keys[np.repeat(self._starts[queries], counts) + within]
        shifts = (np.arange(len(queries)) - queries) * self._span
        taken = Exclusions.none(0)
        taken._span, taken._keys = self._span, old + np.repeat(shifts, counts)
        taken._set_starts(len(queries))
        return taken

    def within(self, rows: range, queries: Ids) -> tuple[Ids, Ids]:
        """Return the pairs that lie in some rows, for some queries: a place in `queries`, and a row counted
        from the first of `rows`.
        """
        if not self:
            empty = np.empty(0, np.int64)
            return empty, empty
        firsts = queries * self._span
        starts = np.searchsorted(self._keys, firsts + rows.start)
        counts = np.searchsorted(self._keys, firsts + min(rows.stop, self._span)) - starts
        ends = np.cumsum(counts)
        asked = np.repeat(np.arange(len(queries)), counts)
        within = np.arange(len(asked)) - np.repeat(ends - counts, counts)
        keys = self._keys[np.repeat(starts, counts) + within]
        return asked, keys - firsts[asked] - rows.start

    def moved(self, places: Ids) -> Exclusions:
        """Return the same where row i of the table stands at places[i]."""
        asked, ids = np.divmod(self._keys, self._span)
        return Exclusions(asked, places[ids], num_queries=len(self), num_rows=len(places))

    def joined(self, others: Sequence[Exclusions]) -> Exclusions:
        """Return what is excluded here or in any of the others, which are of the same queries and rows."""
        joined = Exclusions.none(0)
        joined._span = self._span
        joined._keys = _distinct(np.concatenate([self._keys, *(other._keys for other in others)]))
        joined._set_starts(len(self))
        return joined

    def among(self, rows: Ids) -> Exclusions:
        """Return only the exclusions of some rows, int64[N] ascending."""
        asked, ids = np.divmod(self._keys, self._span)
        kept = np.isin(ids, rows)
        return Exclusions(asked[kept], ids[kept], num_queries=len(self), num_rows=self._span)

    def renumbered(self, rows: Ids) -> Exclusions:
        """Return the same for a table of only these rows, int64[N] ascending, which hold all exclusions."""
        asked, ids = np.divmod(self._keys, self._span)
        places = np.searchsorted(rows, ids)
        return Exclusions(asked, places, num_queries=len(self), num_rows=len(rows))

    def hold(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return bool[B, F]: which of the rows int64[B, F] are no answers to their query; -1 is no row."""
        if not self:
            return np.zeros(ids.shape, bool)
        keys = np.arange(len(ids))[:, None] * self._span + ids
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        held: npt.NDArray[np.bool_] = (self._keys[places] == keys) & (ids >= 0)
        return held

    def first_left(self, ids: Ids, values: Floats, count: int) -> tuple[Ids, Floats]:
        """Return the first `count` of rows int64[B, F] and their values that are left; else -1 and -inf."""
        is_out = self.hold(ids) | (ids < 0)
        order = np.argsort(is_out, axis=1, kind="stable")[:, :count]
        out = np.take_along_axis(is_out, order, axis=1)
        kept = np.where(out, np.float32(-np.inf), np.take_along_axis(values, order, axis=1))
        return np.where(out, -1, np.take_along_axis(ids, order, axis=1)), kept


def _distinct(keys: Ids) -> Ids:
    """Return distinct keys, ascending. (np.unique hashes first, which takes several times as long.)"""
    ascending = np.sort(keys)
    distinct: Ids = ascending[np.diff(ascending, prepend=-1) != 0]
    return distinct
