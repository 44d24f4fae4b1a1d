"""Counting and finding the true ones among millions of flags, eight at a time.

torch counts and finds booleans one by one; a matrix product of the same shape takes as long. Here eight
flags, a byte each, are one 64-bit word: words are added, and words of zeros are passed over.

Shape letters: R rows, C columns, P columns padded with False.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 8
_WORDS = 128
"""Words added together: their bytes stay below 256."""


def no_flags(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Return bool[R, P], all False; P >= C is what `count_true` and `find_true` need."""
    step = _BYTES * _WORDS
    return torch.zeros(num_rows, -(-num_columns // step) * step, dtype=torch.bool, device=device)


def count_true(flags: Tensor) -> Tensor:
    """Return int64[R]: how many flags [R, P] of each row are True."""
    words = flags.view(torch.int64).view(len(flags), -1, _WORDS)
    return words.sum(dim=-1).view(torch.uint8).sum(dim=-1)


def find_true(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Return int64[M] rows and int64[M] columns of the True ones among flags [R, P], in reading order."""
    words = flags.view(-1).view(torch.int64).nonzero()[:, 0]
    which, byte = flags.view(-1, _BYTES)[words].nonzero(as_tuple=True)
    positions = words[which] * _BYTES + byte
    return positions // flags.shape[1], positions % flags.shape[1]
