"""Initial rows, the same at any world size: each block of rows is drawn from (seed, table, block)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kgshard.models.scoring import Init
from kgshard.seeds import generator

BLOCK_ROWS = 4096
"""Rows drawn together. Part of the definition of a table's initial values."""


@torch.no_grad()
def fill_initial_rows(weight: Tensor, init: Init, *, seed: int, table: str, rows: range) -> None:
    """Overwrite `weight` [len(rows), dim] with the initial values of the global `rows`."""
    dim = weight.shape[1]
    first_block = rows.start // BLOCK_ROWS
    for block in range(first_block, -(-rows.stop // BLOCK_ROWS) if len(rows) else first_block):
        values = _draw(init, seed, table, block, dim)
        start = max(rows.start, block * BLOCK_ROWS)
        stop = min(rows.stop, (block + 1) * BLOCK_ROWS)
        piece = values[start - block * BLOCK_ROWS : stop - block * BLOCK_ROWS]
        weight[start - rows.start : stop - rows.start].copy_(torch.from_numpy(piece))


def _draw(
    init: Init, seed: int, table: str, block: int, dim: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    source = generator(seed, f"init/{table}", block)
    if init.kind == "normal":
        return source.standard_normal((BLOCK_ROWS, dim), np.float32) * np.float32(init.scale)
    unit = source.random((BLOCK_ROWS, dim), np.float32)
    return (unit * np.float32(2) - np.float32(1)) * np.float32(init.scale)
