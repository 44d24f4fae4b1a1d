"""How much memory parts of a step may take, and what the C library is told about memory. No torch."""

from __future__ import annotations

import ctypes
import os

BLOCK_NUMBERS = 1 << 24
"""Numbers that a block of a loss over all rows makes, at most: 64 MiB."""
KEPT_NUMBERS = 1 << 26
"""Numbers that such a loss keeps from the forward to the backward pass, at most: 256 MiB."""
SLICE_NUMBERS = 1 << 20
"""Complex differences of queries and candidates held at once: 8 MiB of float32."""
HALF_BYTES = 1 << 26
"""What one rank can send in one call through shared memory; memory is taken for what is used."""

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one: the kernel would zero the same pages each time.

    For the whole process. What the user says in MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ holds.
    Other C libraries, and glibc before 2.35, which refuses such thresholds, go on as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, option, value in (
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 1 << 30),
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _LARGEST),
    ):
        if name not in os.environ:
            mallopt(option, value)
