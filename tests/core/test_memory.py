"""A training keeps what it frees."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_COUNT_FAULTS = """
import resource
from kgshard.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""
_PAGES = 10 * (64 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="an older glibc, or another C library")
@pytest.mark.parametrize(
    ("said", "is_kept"),
    [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}, False)],
)
def test_freed_memory_is_kept_unless_the_user_says_otherwise(said: dict[str, str], is_kept: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_FAULTS],
        env=environment | said,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (int(done.stdout) < _PAGES / 100) is is_kept
