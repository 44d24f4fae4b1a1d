"""The best rows so far for each of many queries, kept while blocks of comparison values come by.

Shape letters: B queries, n rows of a block, F rows kept for each query.
"""

from __future__ import annotations

import numpy as np

from kgshard.shards import Floats
from kgshard_tools.search.exclusions import Ids

_FEW = 128
"""So many rows for each that is kept are looked at before others."""
_MANY = 8
"""Beyond so many new rows for each that is kept, a partial sort of the block is cheaper than picking them."""


class BestRows:
    """F rows for each query: the best that were offered, in no order; ties at the end fall anyhow."""

    def __init__(self, num_queries: int, count: int) -> None:
        self.ids: Ids = np.full((num_queries, count), -1, np.int64)
        """int64[B, F]; -1 where fewer were offered."""
        self.values: Floats = np.full((num_queries, count), -np.inf, np.float32)
        """float32[B, F]; -inf where fewer were offered."""
        self._worst: Floats = np.full(num_queries, -np.inf, np.float32)

    @property
    def worst(self) -> Floats:
        """float32[B]: nothing better than this was let go."""
        return self._worst

    def offer(self, queries: Ids, first_row: int, values: Floats) -> None:
        """Take what is better than the worst kept from comparison values float32[b, n] of queries int64[b].

        Values that are no numbers, or -inf, are never taken.
        """
        num_rows = values.shape[1]
        few = _FEW * self.ids.shape[1]
        if num_rows > 2 * few and np.isneginf(self._worst[queries]).any():
            # The best of a few show how little of the others is worth keeping.
            self._merge_block(queries, first_row, values[:, :few])
            first_row, values, num_rows = first_row + few, values[:, few:], num_rows - few
        hits = np.flatnonzero(values > self._worst[queries][:, None])
        if len(hits) > _MANY * len(queries) * self.ids.shape[1]:
            self._merge_block(queries, first_row, values)
        elif len(hits):
            asked, places = np.divmod(hits, num_rows)
            self._merge(queries, asked, first_row + places, values[asked, places])

    def _merge_block(self, queries: Ids, first_row: int, values: Floats) -> None:
        count = min(self.ids.shape[1], values.shape[1])
        ranked = np.where(np.isnan(values), np.float32(-np.inf), values)
        places = np.argpartition(ranked, values.shape[1] - count, axis=1)[:, -count:]
        new = np.take_along_axis(ranked, places, axis=1)
        ids = np.where(new > -np.inf, places + first_row, -1)
        self._keep(queries, ids, new)

    def _merge(self, queries: Ids, asked: Ids, ids: Ids, values: Floats) -> None:
        """Merge new rows, given as triples of a place in `queries` (ascending), row and value."""
        order = np.lexsort((-values, asked))
        counts = np.bincount(asked)
        places = np.arange(len(asked)) - np.repeat(np.cumsum(counts) - counts, counts)
        order, places = (array[places < self.ids.shape[1]] for array in (order, places))
        asked, ids, values = asked[order], ids[order], values[order]
        changed, lines = np.flatnonzero(counts), np.cumsum(counts > 0)[asked] - 1
        new_ids = np.full((len(changed), int(places.max()) + 1), -1, np.int64)
        new_values = np.full(new_ids.shape, -np.inf, np.float32)
        new_ids[lines, places], new_values[lines, places] = ids, values
        self._keep(queries[changed], new_ids, new_values)

    def _keep(self, queries: Ids, ids: Ids, values: Floats) -> None:
        """Keep the best of what some queries have and of what is new to them."""
        count = self.ids.shape[1]
        all_values = np.concatenate([self.values[queries], values], axis=1)
        places = np.argpartition(all_values, all_values.shape[1] - count, axis=1)[:, -count:]
        all_ids = np.concatenate([self.ids[queries], ids], axis=1)
        self.ids[queries] = np.take_along_axis(all_ids, places, axis=1)
        self.values[queries] = kept = np.take_along_axis(all_values, places, axis=1)
        self._worst[queries] = kept[:, 0]  # where the partition puts the smallest of the kept
