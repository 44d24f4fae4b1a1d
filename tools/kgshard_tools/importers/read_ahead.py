"""Rows of a mapped file in an order that is not the file's, with no byte read from the disk twice.

Left alone, the kernel takes every row out of order for the begin of a scan, and reads megabytes behind it.
A file that memory holds is read whole, in its order, before the first row is asked for; of a larger one
only the pages of the rows that come next.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard_tools.importers.foreign import ForeignFloats

_AT_ONCE = 1 << 20
"""Bytes that the kernel is asked for in a call: it cuts off what is beyond a few MiB."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Tells the kernel which rows of a table come next."""

    mapped: mmap.mmap | None = None
    """The file, where it is too large to be read whole."""
    offset: int = 0
    """Where the table begins in it, in bytes."""
    row_bytes: int = 0

    @staticmethod
    def of(table: ForeignFloats) -> ReadAhead:
        """Prepare for all rows of a table [n, D]; one that is not mapped needs nothing."""
        mapped = _mapping(table)
        if mapped is None:
            return ReadAhead()
        if len(mapped) <= _held_in_memory():
            for start in range(0, len(mapped), _AT_ONCE):
                mapped.madvise(mmap.MADV_WILLNEED, start, min(_AT_ONCE, len(mapped) - start))
            return ReadAhead()
        mapped.madvise(mmap.MADV_RANDOM)
        if not table.flags.c_contiguous:
            return ReadAhead()
        offset = table.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
        return ReadAhead(mapped, offset, table.strides[0])

    def ask_for(self, rows: npt.NDArray[np.int64]) -> None:
        """Let the disk begin with the pages of some rows."""
        if self.mapped is None:
            return
        starts = self.offset + np.sort(rows) * self.row_bytes
        for page, end in zip(
            (starts // mmap.PAGESIZE * mmap.PAGESIZE).tolist(),
            (starts + self.row_bytes).tolist(),
            strict=True,
        ):
            self.mapped.madvise(mmap.MADV_WILLNEED, page, end - page)


def _mapping(table: ForeignFloats) -> mmap.mmap | None:
    """Return the mapped file that an array looks into, if it does."""
    base: object = table
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def _held_in_memory() -> int:
    """Return how many bytes of a file memory surely holds while other things go on."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
