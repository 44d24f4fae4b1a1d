"""`RowWiseShardedEmbedding`: a sharded table used like `nn.Embedding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kgshard.distributed import current_exchange
from kgshard.exchange import Exchange
from kgshard.initialise import fill_initial_rows
from kgshard.models.scoring import Init
from kgshard.partition import RowPartition
from kgshard.table import Lookup, ShardedTable


class RowWiseShardedEmbedding(nn.Module):
    """An embedding table whose rows are spread over ranks; each rank holds [start_row, end_row).

    `forward` takes any ids and returns their rows, as `nn.Embedding` does. The backward pass sends
    gradients to the owners, so both are collective calls: every rank makes them, with as many or as few
    ids as it has. `weight.grad` is sparse and coalesced: one row, summed over all ranks, for each row
    that any rank asked for; `torch.optim.SparseAdam([table.weight])` takes it as it is.

    Gradients are summed, not averaged, over ranks: divide the loss by the size of the global batch. They
    have no gradient themselves: a second derivative through the table is a RuntimeError.

    Attributes:
        num_embeddings: Rows of the whole table.
        embedding_dim: Floats for each row.
        rank, world_size, device: Where this shard lives.
        start_row, end_row: The global rows held here, half-open.
        local_rows: end_row - start_row; may be 0.
        shard_size: The same number. Shards differ by at most one row.
        weight: float[local_rows, embedding_dim].
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int,
        world_size: int,
        device: torch.device | str,
        weight_dtype: torch.dtype = torch.bfloat16,
        *,
        init: Init | None = None,
        seed: int = 0,
        fill: Callable[[Tensor, range], None] | None = None,
        exchange: Exchange | None = None,
        exchange_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate and fill this rank's rows.

        Args:
            num_embeddings: Rows of the whole table.
            embedding_dim: Floats for each row.
            rank: This rank; must be that of `exchange`.
            world_size: Number of ranks; must be that of `exchange`.
            device: Where the rows live.
            weight_dtype: dtype of the rows.
            init: Initial distribution; by default normal with standard deviation 1 / sqrt(embedding_dim).
            seed: Row r starts the same for one seed, whatever the world size.
            fill: Writes the first values of some global rows to float[rows, embedding_dim]; replaces init
                and seed.
            exchange: The other ranks; by default the process group of torch.distributed, or a world of one.
            exchange_dtype: Of rows and gradients on their way; see `ShardedTable`.

        Raises:
            ValueError: rank or world_size are not those of the exchange.
        """
        super().__init__()
        if embedding_dim < 1:
            raise ValueError(f"embedding_dim must be >= 1, got {embedding_dim}")
        self.device = torch.device(device)
        exchange = exchange or current_exchange(self.device)
        if (rank, world_size) != (exchange.rank, exchange.world_size):
            raise ValueError(
                f"rank {rank} of {world_size} does not fit the process group: "
                f"this is rank {exchange.rank} of {exchange.world_size}"
            )
        partition = RowPartition(num_embeddings, world_size)
        rows = partition.rows_of(rank)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.rank = rank
        self.world_size = world_size
        self.start_row, self.end_row = rows.start, rows.stop
        self.local_rows = self.shard_size = len(rows)
        self.weight = nn.Parameter(
            torch.empty(self.local_rows, embedding_dim, device=self.device, dtype=weight_dtype)
        )
        if fill is None:
            init = init or Init("normal", embedding_dim**-0.5)
            fill_initial_rows(self.weight.data, init, seed=seed, table="entity", rows=rows)
        else:
            fill(self.weight.data, rows)
        # torch forgets on the way to weight.grad that a gradient is coalesced.
        self.weight.register_post_accumulate_grad_hook(_coalesce_gradient)
        self._table = ShardedTable(self.weight.data, partition, exchange, exchange_dtype=exchange_dtype)

    @property
    def table(self) -> ShardedTable:
        """The same rows without autograd: fetch, push, replicate."""
        self._table.weight = self.weight.data  # Module.to() may have replaced them.
        return self._table

    def lookup(self, entity_ids: Tensor) -> Lookup:
        """Fetch rows without autograd; see `ShardedTable.fetch`."""
        return self.table.fetch(entity_ids)

    def forward(self, entity_ids: Tensor) -> Tensor:
        """Return float[..., embedding_dim]: the rows of int64[...] ids, which any rank may own.

        Raises:
            IndexError: An id is outside the table.
        """
        rows: Tensor = _ShardedRows.apply(self.weight, entity_ids.reshape(-1), self.table)
        return rows.view(*entity_ids.shape, self.embedding_dim)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuse to be copied or pickled, which `copy` and `pickle` do through here.

        Raises:
            TypeError: Always.
        """
        raise cannot_copy(self)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, "
            f"rows {self.start_row}..{self.end_row} on rank {self.rank} of {self.world_size}"
        )


def cannot_copy(holder: object) -> TypeError:
    """Return the error of something that is bound to one rank, which `copy` and `pickle` would not know."""
    return TypeError(
        f"cannot copy {type(holder).__name__}: it holds one rank's rows and a process group;"
        " copy state_dict()"
    )


def _coalesce_gradient(weight: Tensor) -> None:
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.coalesce()


class _ShardedRows(torch.autograd.Function):
    """Rows there, gradients back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: ShardedTable) -> Tensor:
        lookup = table.fetch(ids)
        ctx.lookup, ctx.table, ctx.shape = lookup, table, weight.shape
        return lookup.rows.index_select(0, lookup.inverse)

    @staticmethod
    @once_differentiable  # Second derivatives would need exchanges of their own: refused, not left out.
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        lookup: Lookup = ctx.lookup
        per_row = torch.zeros_like(lookup.rows).index_add_(0, lookup.inverse, gradients[0])
        owned = ctx.table.push(lookup, per_row)
        sparse = torch.sparse_coo_tensor(
            owned.rows[None], owned.values, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return sparse, None, None
