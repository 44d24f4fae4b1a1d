"""Bringing a sharded table to rank 0, a block at a time; no other rank receives a row."""

from __future__ import annotations

import torch
from torch import Tensor

from kgshard.embedding import RowWiseShardedEmbedding
from kgshard.exchange import Exchange

_BLOCK_BYTES = 1 << 25
"""What travels at a time."""


def gather_on_rank_zero(sharded: RowWiseShardedEmbedding) -> Tensor | None:
    """Return every row on rank 0, in host memory, and None on other ranks. A collective call.

    Beyond the result, rank 0 holds one block.

    Returns:
        [num_embeddings, embedding_dim], float32, or float64 where rows are.
    """
    weight, table = sharded.weight.detach(), sharded.table
    shape = (sharded.num_embeddings, sharded.embedding_dim)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    whole = torch.empty(shape, dtype=dtype) if sharded.rank == 0 else None
    size = max(1, _BLOCK_BYTES // (sharded.embedding_dim * weight.element_size()))
    for owner in range(sharded.world_size):
        rows = table.partition.rows_of(owner)
        for start in range(rows.start, rows.stop, size):
            stop = min(start + size, rows.stop)
            here = weight[start - rows.start : stop - rows.start] if owner == sharded.rank else weight[:0]
            block = _send_to_rank_zero(here, owner, stop - start, table.exchange)
            if whole is not None:
                whole[start:stop] = block
    return whole


def _send_to_rank_zero(rows: Tensor, owner: int, count: int, exchange: Exchange) -> Tensor:
    """Return `owner`'s rows on rank 0, and no rows elsewhere.

    Args:
        rows: On the owner, what it sends; elsewhere, no rows.
        owner: Who sends.
        count: How many rows it sends.
        exchange: All ranks.
    """
    if owner == 0:
        return rows
    expected = [0] * exchange.world_size
    if exchange.rank == 0:
        expected[owner] = count
    return exchange.all_to_all([rows, *[rows[:0]] * (exchange.world_size - 1)], expected, kind="rows")[owner]
