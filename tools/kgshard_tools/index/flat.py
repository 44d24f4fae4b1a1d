"""Flat FAISS indexes, searched as any other rows: a scan multiplies matrices ten times as fast as FAISS does.

The vectors of a flat index file lie in it as they are, so they are mapped; faiss is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kgshard.errors import ShardError
from kgshard.shards import Floats, Piece, StoredTable, TensorInfo
from kgshard_tools.headers import read_index_header
from kgshard_tools.index.sidecar import FoundIndex
from kgshard_tools.lifts import AS_STORED, squares
from kgshard_tools.search import Scan


class FlatIndex(Scan):
    """Candidates from a flat index, scored again on the rows of the table it was built from."""

    def __init__(self, found: FoundIndex, table: StoredTable, *, labels: Sequence[str] = ()) -> None:
        """Open an index of `table`.

        Raises:
            ShardError: It is no flat index, or of another size than the table.
        """
        super().__init__(table, found.contents.metric, found.contents.lift, labels=labels)
        pieces = []
        for part in found.info.parts:
            path, rows = found.folder / part.file, range(*part.rows)
            header = read_index_header(path)
            if header.offset is None or (header.rows, header.dim) != (len(rows), self.width):
                raise ShardError(
                    f"{path}: {header.type}, {header.rows} x {header.dim}, "
                    f"expected flat, {len(rows)} x {self.width}",
                    file=str(path),
                )
            pieces.append(Piece(path, rows, TensorInfo("F32", (header.rows, header.dim), header.offset)))
        self._vectors = StoredTable("vectors", pieces)
        if self._vectors.num_rows != table.num_rows:
            raise ShardError(
                f"{found.folder}: {self._vectors.num_rows} vectors for {table.num_rows} entities",
                file=str(found.folder),
            )
        self._longest = found.info.longest

    def _candidates(self, block: range) -> tuple[Floats, Floats]:
        if self.lift is AS_STORED and self.table.dtype == "F32":
            # The same floats; the shards keep them where the processor likes them.
            return super()._candidates(block)
        vectors = self._vectors.read(block)
        return vectors, squares(vectors) if self.metric.uses_squares else np.empty(0, np.float32)
