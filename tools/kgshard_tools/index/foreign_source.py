"""Candidates from a FAISS file that no record knows: searched apart, under limits, and scored again here.

Whoever made the file put this run's vectors into it, row i as vector i, as `kgshard export` writes them. If
other vectors are in it the answers are poor, but they are rows that exist, with the model's own scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kgshard.errors import ConfigError
from kgshard.shards import StoredTable
from kgshard_tools.index.contents import Contents
from kgshard_tools.index.foreign import ForeignReader
from kgshard_tools.search import CandidateSource, Exclusions, Fetched, Scan, Scores

_QUERIES_AT_ONCE = 1024
_SCORED_AGAIN = 4
"""Candidates for each answer."""


class ForeignSource(CandidateSource):
    """Candidates from a file that is read by another process."""

    is_exact = False

    def __init__(
        self, path: Path, contents: Contents, table: StoredTable, *, labels: Sequence[str] = ()
    ) -> None:
        """Look at a file.

        Raises:
            ShardError: It cannot be read, or not within the limits.
            ConfigError: Its vectors are not as many or as wide as what queries are compared with.
        """
        super().__init__(table, contents.metric, contents.lift, labels=labels)
        self._path, self._reader = path, ForeignReader()
        self._scan = Scan(table, contents.metric, contents.lift, labels=labels)
        index = self._reader.describe(path)
        if (index.rows, index.dim) != (table.num_rows, self.width):
            raise ConfigError(
                f"--allow-foreign-index {path}: {index.rows} vectors of {index.dim} floats, "
                f"expected {table.num_rows} of {self.width}"
            )

    def described(self) -> dict[str, object]:
        return {"index": "foreign", "file": str(self._path)}

    def first_count(self, k: int) -> int:
        return k * _SCORED_AGAIN

    def fetch(self, queries: Scores, count: int, excluded: Exclusions) -> Fetched:
        shape = len(queries), count
        ids, values = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
        more = count + int(excluded.counts.max(initial=0))
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            part = np.arange(start, min(start + _QUERIES_AT_ONCE, len(queries)))
            narrow = queries[part, : self.width].astype(np.float32)
            found = self._reader.search(self._path, narrow, more, num_rows=len(self))
            ids[part], values[part] = excluded.take(part).first_left(found.ids, found.values, count)
        longest = 1.0  # Nothing is bounded by it: what was not found is not known.
        short = np.flatnonzero((ids < 0).any(axis=1))
        if len(short):
            all_rows = self._scan.fetch(queries[short], count, excluded.take(short))
            ids[short], values[short], longest = all_rows.ids, all_rows.values, all_rows.longest
        return Fetched(ids, values, np.full(len(queries), np.inf), longest)
