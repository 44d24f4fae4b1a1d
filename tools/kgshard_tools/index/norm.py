"""Inner products from the longest row to the shortest: a search ends where no row left can be better.

<q, e> <= |q| |e|, so a row is no answer once |q| times its length is below the k-th best so far; that is
exact (Teflioudi, Gemulla and Mykytiuk, LEMP, 2015). Trained tables have few long rows, which are most of the
answers. Where the bound is loose, looking only at the longest rows finds nearly all answers too: how many are
enough is measured.

The file is a FAISS flat index with ids, which others may read; here it is mapped, and faiss is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from kgshard.errors import ShardError
from kgshard.shards import Floats, Piece, StoredTable, TensorInfo
from kgshard_tools.headers import read_index_header
from kgshard_tools.index.tuned import TunedIndex
from kgshard_tools.search import Exclusions, Fetched, Ids, Scores
from kgshard_tools.search.best import BestRows

_PART_QUERIES = 1024
_FIRST_ROWS, _MOST_ROWS = 256, 16384
"""Rows of the first block and of the largest; each is three times as long as all before, while they grow."""
_SPARE = 4


class NormIndex(TunedIndex):
    """Candidates from rows in order of length."""

    def open_files(self) -> None:
        [file] = self.files
        header = read_index_header(file.path)
        if (
            header.offset is None
            or header.ids is None
            or (header.rows, header.dim) != (len(self), self.width)
        ):
            raise ShardError(
                f"{file.path}: {header.type}, {header.rows} x {header.dim}, "
                f"expected flat with ids, {len(self)} x {self.width}",
                file=str(file.path),
            )
        info = TensorInfo("F32", (header.rows, header.dim), header.offset)
        self._vectors = StoredTable("vectors", [Piece(file.path, range(header.rows), info)])
        self._ids: Ids = np.memmap(file.path, "<i8", "r", header.ids, (header.rows,))

    def first_count(self, k: int) -> int:
        return k + _SPARE

    def fetch(self, queries: Scores, count: int, excluded: Exclusions) -> Fetched:
        places = excluded.moved(self._places) if excluded else excluded
        best = BestRows(len(queries), count)
        lengths = self.metric.lengths(queries)
        bounds = np.full(len(queries), -np.inf)
        slacks = self.metric.slack(self.width, lengths, self._longest)
        with np.errstate(over="ignore"):  # `search` sees to that.
            narrow = queries.astype(np.float32)
        for start in range(0, len(queries), _PART_QUERIES):
            part = slice(start, min(start + _PART_QUERIES, len(queries)))
            bounds[part] = self._scan(narrow, lengths, slacks, part, places, best)
        worst = np.maximum(best.worst, bounds)
        ids = np.where(best.ids < 0, -1, self._ids[np.maximum(best.ids, 0)])
        return Fetched(ids, best.values, worst, self._longest)

    def _scan(
        self, narrow: Floats, lengths: Scores, slacks: Scores, part: slice, places: Exclusions, best: BestRows
    ) -> Scores:
        """Offer rows to some queries until none left can be better; return the bounds of those, or -inf."""
        active, most_rows = np.arange(part.start, part.stop), self.search.setting
        bounds = np.full(len(active), -np.inf)
        for block in self._blocks():
            vectors = self._vectors.read(block)
            ahead = lengths[active] * float(np.linalg.norm(vectors[0].astype(np.float64)))
            goes_on = best.worst[active] <= ahead + slacks[active]
            if block.start >= most_rows:  # But whoever has too few candidates yet goes on.
                goes_on &= np.isneginf(best.worst[active])
            bounds[active[~goes_on] - part.start] = ahead[~goes_on]
            active = active[goes_on]
            if not len(active):
                break
            values = narrow[active] @ vectors.T
            if places:
                values[places.within(block, active)] = -np.inf
            best.offer(active, block.start, values)
        return bounds

    def _blocks(self) -> Iterator[range]:
        start, size = 0, _FIRST_ROWS
        while start < len(self):
            stop = min(start + size, len(self))
            if start < self.search.setting < stop:
                stop = self.search.setting
            yield range(start, stop)
            start, size = stop, min(3 * stop, _MOST_ROWS)

    @cached_property
    def _places(self) -> Ids:
        """int64[N]: where each row of the table stands in the index."""
        places = np.empty(len(self), np.int64)
        places[self._ids] = np.arange(len(self))
        return places
