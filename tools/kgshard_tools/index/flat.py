"""Flat FAISS indexes: the one module that imports faiss, and where its conventions end.

FAISS reports squared L2 distances and plain L1 distances, smaller first, pads short results with id -1,
and says nothing useful about a query of the wrong width. Callers see comparison values
(kgshard.models.metric), higher first, and only rows that exist.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from kgshard.errors import ShardError
from kgshard.models.metric import Metric
from kgshard.shards import StoredTable
from kgshard_tools.index import FoundIndex
from kgshard_tools.search import CandidateSource, Fetched, Ids, Scores

_FAISS_METRICS = {"dot": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2, "l1": faiss.METRIC_L1}


def is_searchable(metric: Metric) -> bool:
    """Whether FAISS can compare by a metric, exactly."""
    return metric.name in _FAISS_METRICS


def new_index(metric: Metric, width: int) -> Any:
    """Return an empty flat index of vectors float32[width], for a metric that is searchable."""
    return faiss.IndexFlat(width, _FAISS_METRICS[metric.name])


def write_index(index: Any, path: Path) -> None:
    """Write an index to `path`.

    Raises:
        OSError: It cannot be written.
    """
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(errno.EIO, "FAISS could not write the index (disk full?)", str(path)) from error


class FlatIndex(CandidateSource):
    """Candidates from a flat index, scored again on the rows of the table it was built from."""

    def __init__(self, found: FoundIndex, table: StoredTable, *, labels: Sequence[str] = ()) -> None:
        """Open an index of `table`.

        Raises:
            ShardError: FAISS cannot read it, or it is of another size than the table.
        """
        super().__init__(table, found.contents.metric, found.contents.lift, labels=labels)
        try:
            # Mapped, not loaded: a flat index is as large as the table.
            self._index = faiss.read_index(str(found.path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise ShardError(f"{found.path}: {error}", file=str(found.path)) from error
        if (self._index.ntotal, self._index.d) != (table.num_rows, self.width):
            raise ShardError(
                f"{found.path}: {self._index.ntotal} x {self._index.d}, "
                f"expected {table.num_rows} x {self.width}",
                file=str(found.path),
            )
        self._longest = found.longest

    def fetch(self, query: Scores, count: int, excluded: Ids) -> Fetched:
        parameters = None
        if len(excluded):
            excluded = np.ascontiguousarray(excluded, np.int64)
            selector = faiss.IDSelectorNot(faiss.IDSelectorBatch(excluded))
            parameters = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
        with np.errstate(over="ignore"):  # `search` sees to that.
            narrow = np.ascontiguousarray(query[None], np.float32)
        raw, ids = self._index.search(narrow, count, params=parameters)
        found = ids[0] >= 0
        values = (raw[0] if self.metric.name == "dot" else -raw[0])[found]
        # Fewer than asked for: some comparison values were no numbers. Nothing is known of the rest.
        worst = float(values.min()) if len(values) == count else np.inf
        return Fetched(ids[0][found].astype(np.int64), worst, self._longest)
