"""Initial values, the same at any world size: each block of rows is drawn from (seed, table, block)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.models.scoring import Columns, Init, SharedInit
from kgshard.seeds import generator

BLOCK_ROWS = 4096
"""Rows drawn together. Part of the definition of a table's initial values."""


@torch.no_grad()
def fill_initial_rows(weight: Tensor, init: Init | Columns, *, seed: int, table: str, rows: range) -> None:
    """Overwrite `weight` [len(rows), dim] with the initial values of the global `rows`.

    Raises:
        ValueError: The columns of `init` do not add up to dim.
    """
    columns = ((weight.shape[1], init),) if isinstance(init, Init) else init
    if sum(width for width, _ in columns) != weight.shape[1]:
        raise ValueError(f"initial columns {columns} do not add up to {weight.shape[1]} floats")

    def fill(block: int) -> None:
        start = max(rows.start, block * BLOCK_ROWS)
        stop = min(rows.stop, (block + 1) * BLOCK_ROWS)
        # Rows are drawn one after the other, so those behind the last wanted one can be left out.
        num_rows = stop - block * BLOCK_ROWS
        values = np.concatenate(
            [
                _draw(generator(seed, f"init/{table}", block, *parts), how, (num_rows, width))
                for (width, how), parts in zip(columns, _keys(len(columns)), strict=True)
            ],
            axis=1,
        )
        piece = values[start - block * BLOCK_ROWS : stop - block * BLOCK_ROWS]
        weight[start - rows.start : stop - rows.start].copy_(torch.from_numpy(piece))

    blocks = range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)) if len(rows) else range(0)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # numpy lets go of the lock while it draws.
        for _ in threads.map(fill, blocks):
            pass


def _keys(num_columns: int) -> list[tuple[int, ...]]:
    """Return what tells the draws of column groups apart; the first goes without."""
    return [() if index == 0 else (index,) for index in range(num_columns)]


def initial_shared(inits: Mapping[str, SharedInit], *, seed: int) -> dict[str, Tensor]:
    """Return the initial values, float32, of parameters that all rows share."""
    return {
        name: torch.from_numpy(_draw(generator(seed, f"init/shared/{name}"), how.init, how.shape))
        for name, how in inits.items()
    }


def _draw(source: np.random.Generator, init: Init, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if init.kind == "normal":
        unit = source.standard_normal(shape, np.float32)
    else:
        unit = source.random(shape, np.float32) * np.float32(2) - np.float32(1)
    scaled = unit * np.float32(init.scale)
    return scaled + np.float32(init.center) if init.center else scaled
