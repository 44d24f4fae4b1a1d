"""What a training tells the C library about memory."""

from __future__ import annotations

import ctypes
import os

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
