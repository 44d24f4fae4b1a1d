"""Candidates from an approximate FAISS index, scored again on the rows of the table it was built from.

Every query gets as many answers as there are: known answers are left out exactly, however many there are, and
where an index comes back with too few, more of it is searched, at last every row.
"""

from __future__ import annotations

import numpy as np

from kgshard.errors import ShardError
from kgshard.shards import Floats
from kgshard_tools.index import faiss_files
from kgshard_tools.index.tuned import TunedIndex
from kgshard_tools.search import Exclusions, Fetched, Ids, Scan, Scores

_FEW_EXCLUDED = (0, 8, 64, 512)
"""Queries with up to so many exclusions are searched together, for so many more answers; others by a scan."""


class ApproximateIndex(TunedIndex):
    """Candidates from all parts of an index that FAISS searches."""

    def open_files(self) -> None:
        table, files, kind = self.table, self.files, self.kind
        self._scan = Scan(table, self.metric, self.lift, labels=self.labels)
        self._padding = faiss_files.padded_width(kind, self.width) - self.width
        self._padding += kind.lengthens(self.metric)
        self._parts = [(file.rows.start, faiss_files.open_index(file.path, kind)) for file in files]
        self.num_lists = max(faiss_files.lists_of(index) for _, index in self._parts)
        for file, (_, index) in zip(files, self._parts, strict=True):
            found, expected = faiss_files.size_of(index), (len(file.rows), self.width + self._padding)
            if found != expected:
                raise ShardError(
                    f"{file.path}: {found} vectors and floats, expected {expected}", file=str(file.path)
                )
        if sum(len(file.rows) for file in files) != table.num_rows:
            raise ShardError(
                f"{files[0].path}: the index does not hold {table.num_rows} rows", file=str(files[0].path)
            )

    def fetch(self, queries: Scores, count: int, excluded: Exclusions) -> Fetched:
        narrow, setting = self._narrow(queries), self.search.setting
        ids, values = _nothing(len(queries), count)
        few = np.flatnonzero(excluded.counts <= _FEW_EXCLUDED[-1])
        ids[few], values[few] = self._find(narrow[few], count, excluded.take(few), setting)
        most = max(self.kind.settings(self.num_lists, len(self)))
        short = few[(ids[few] < 0).any(axis=1)]
        while len(short) and setting < most:
            setting = min(4 * setting, most)
            ids[short], values[short] = self._find(narrow[short], count, excluded.take(short), setting)
            short = short[(ids[short] < 0).any(axis=1)]
        left = np.flatnonzero((ids < 0).any(axis=1))
        if len(left):  # Many exclusions, or nodes of a graph that no other links to.
            found = self._scan.fetch(queries[left], count, excluded.take(left))
            ids[left], values[left] = found.ids, found.values
        return Fetched(ids, values, np.full(len(queries), np.inf), self._longest)

    def _narrow(self, queries: Scores) -> Floats:
        """Return queries as FAISS takes them; the columns that candidates have more are 0."""
        with np.errstate(over="ignore"):  # `search` sees to that.
            narrow = queries[:, : self.width].astype(np.float32)
        return np.ascontiguousarray(np.pad(narrow, ((0, 0), (0, self._padding)))) if self._padding else narrow

    def _find(self, narrow: Floats, count: int, excluded: Exclusions, setting: int) -> tuple[Ids, Floats]:
        """Return rows int64[B, count] that are not excluded, and their values; -1 where there are fewer.

        What is excluded is mostly what lies nearest, so the more of it there is, the more is looked through.
        """
        if not excluded:
            return self._find_any(narrow, count, setting)
        ids, values = _nothing(len(narrow), count)
        counts, before = excluded.counts, -1
        for limit in _FEW_EXCLUDED:
            some = np.flatnonzero((counts > before) & (counts <= limit))
            before = limit
            if len(some):
                most = int(counts[some].max())
                found = self._find_any(narrow[some], count + most, self._effort(setting, most))
                ids[some], values[some] = excluded.take(some).first_left(*found, count)
        return ids, values

    def _effort(self, setting: int, num_excluded: int) -> int:
        """Return how much to look through where so many rows are no answers."""
        if self.kind.parameter == "ef":
            return setting + 2 * num_excluded
        in_lists = -(-num_excluded * self.num_lists // len(self))
        return min(setting + setting * in_lists + 2 * in_lists, self.num_lists) if num_excluded else setting

    def _find_any(self, narrow: Floats, count: int, setting: int) -> tuple[Ids, Floats]:
        """Search every part; return rows int64[B, count] and values, best first."""
        found = []
        for start, index in self._parts:
            values, ids = faiss_files.find(index, self.kind, narrow, count, setting)
            found.append((np.where(ids < 0, -1, ids + start), np.where(ids < 0, np.float32(-np.inf), values)))
        if len(found) == 1:
            return found[0]
        ids, values = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        order = np.argsort(-values, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def _nothing(num_queries: int, count: int) -> tuple[Ids, Floats]:
    """Return rows and values of queries that found nothing yet."""
    return np.full((num_queries, count), -1, np.int64), np.full((num_queries, count), -np.inf, np.float32)
