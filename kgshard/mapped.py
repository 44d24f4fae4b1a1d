"""Tables that lie in files, not in memory: the kernel keeps the rows in use, and writes the others back.

A file has no name, so nothing is left behind however a process ends. Its room on the disk is taken when it is
made: a process that writes to mapped memory that finds none is ended by SIGBUS.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kgshard.errors import ConfigError
from kgshard.machine import free_disk


def mapped_zeros(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros that lie in a file without a name on the disk of `folder`.

    Raises:
        ConfigError: The disk has no room.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype)
    check_room(folder, num_bytes)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:  # Another rank was faster.
            raise ConfigError(
                f"--table-storage mmap: {num_bytes / 1e9:.1f} GB on the disk of {folder}: {error.strerror}"
            ) from error
        memory = mmap.mmap(file.fileno(), num_bytes)
    # Rows that a step wants lie anywhere: what the kernel would read around each of them is not wanted.
    memory.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError where the disk of `folder` has no room: rows that find none end their process."""
    free = free_disk(folder)
    if num_bytes > free:
        raise ConfigError(
            f"--table-storage mmap: rows and optimizer state take {num_bytes / 1e9:.1f} GB, but the disk"
            f" of {folder} has {free / 1e9:.1f} GB free; take another disk, --optimizer or --dim"
        )
