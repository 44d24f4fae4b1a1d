"""A table cut row-wise over ranks, reached by moving rows: fetch them, push their gradients back.

Shape letters: I requested ids, U distinct ids, D floats for each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kgshard.exchange import Exchange, Kind
from kgshard.packing import pack, unpack
from kgshard.partition import RowPartition
from kgshard.routing import Route, RowGradient, check_ids, plan_route, sum_by_row
from kgshard.stages import stage

_INT32_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows fetched by one rank, and what is needed to send gradients back."""

    route: Route
    """What this rank asked for."""
    rows: Tensor
    """float[U, D]: row i is that of route.unique_ids[i]."""
    asked_here: Tensor
    """int64: local rows that the ranks asked this one for, in rank order."""
    asked_counts: list[int]
    """How many of them each rank asked for."""

    @property
    def inverse(self) -> Tensor:
        """int64[I]: the rows of the requested ids are rows[inverse]."""
        return self.route.inverse


class ShardedTable:
    """Rows partition.rows_of(rank) of a table; the other ranks hold the rest."""

    def __init__(
        self,
        weight: Tensor,
        partition: RowPartition,
        exchange: Exchange,
        *,
        exchange_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Wrap this rank's rows.

        Args:
            weight: float[local rows, D], on exchange.device.
            partition: Which rank owns which rows.
            exchange: The other ranks.
            exchange_dtype: What `fetch` and `push` round rows and gradients to on their way, those that stay
                on a rank too, so that results are the same at any world size; see `kgshard.packing.pack`.
        """
        self.rows = partition.rows_of(exchange.rank)
        if len(weight) != len(self.rows):
            raise ValueError(f"weight has {len(weight)} rows, but rank {exchange.rank} owns {len(self.rows)}")
        self.weight = weight
        self.partition = partition
        self.exchange = exchange
        self._exchange_dtype = exchange_dtype
        self.sent_row_bytes = pack(weight.new_zeros(1, weight.shape[1]), exchange_dtype).nbytes
        """What one row takes on its way."""
        self._number = exchange.number_table()
        # Half the bytes, where they fit.
        self._id_dtype = torch.int32 if partition.num_rows <= _INT32_ROWS else torch.int64

    @torch.no_grad()
    def fetch(self, ids: Tensor) -> Lookup:
        """Bring the rows of `ids` here. Every rank must call this, with ids of its own (maybe none).

        Two exchanges: distinct ids to their owners, rows back.

        Args:
            ids: int64[I] global ids.

        Raises:
            IndexError: An id is outside the table.
        """
        with stage("routing") as work:
            route = plan_route(ids, self.partition)
            work.moves(2 * ids.nbytes + route.unique_ids.nbytes)
        wanted = route.unique_ids.to(self._id_dtype)
        asked, asked_counts = self._swap(wanted, route.counts, "ids")
        with stage("lookup") as work:
            asked_here = asked.long() - self.rows.start
            answers = pack(self.weight.index_select(0, asked_here), self._exchange_dtype)
            work.moves(2 * answers.nbytes)
        packed, _ = self._swap(answers, asked_counts, "rows", expected=route.counts)
        return Lookup(
            route, unpack(packed, self._exchange_dtype, self.weight.dtype), asked_here, asked_counts
        )

    @torch.no_grad()
    def push(self, lookup: Lookup, gradients: Tensor) -> RowGradient:
        """Send gradients of fetched rows to their owners; return the sums for the rows owned here.

        Args:
            lookup: What `fetch` returned, on every rank the same call.
            gradients: float[U, D], one for each of lookup.rows.
        """
        packed, _ = self._swap(
            pack(gradients, self._exchange_dtype),
            lookup.route.counts,
            "gradients",
            expected=lookup.asked_counts,
        )
        values = unpack(packed, self._exchange_dtype, gradients.dtype)
        if self.exchange.world_size == 1:
            return RowGradient(lookup.asked_here, values)
        with stage("gradient sums") as work:
            summed = sum_by_row(lookup.asked_here, values)
            work.moves(values.nbytes + summed.values.nbytes)
        return summed

    def _swap(
        self, rows: Tensor, counts: list[int], kind: Kind, *, expected: list[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        with stage(f"{kind} exchanged") as work:
            received, counts = self.exchange.swap(rows, counts, expected, kind=kind, table=self._number)
            if received is not rows:
                work.moves(rows.nbytes + received.nbytes)
        return received, counts

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return self.partition.num_rows

    @torch.no_grad()
    def replicate(self, ids: Tensor) -> Tensor:
        """Return the rows [I, D] of `ids`, which must be equal on all ranks, on every rank.

        Raises:
            IndexError: An id is outside the table.
        """
        check_ids(ids, self.partition.num_rows)
        local = ids - self.rows.start
        owned = (local >= 0) & (local < len(self.rows))
        rows = self.weight.new_zeros(len(ids), self.weight.shape[1])
        rows[owned] = self.weight[local[owned]]
        return self.exchange.all_reduce(rows)


def rows_everywhere(table: ShardedTable | Tensor, ids: Tensor) -> Tensor:
    """Return rows [I, D] of ids, equal on all ranks, of a table that is sharded or held by every rank."""
    return table.replicate(ids) if isinstance(table, ShardedTable) else table[ids]


def held_rows(table: ShardedTable | Tensor) -> Tensor:
    """Return the rows that this rank holds of a table that is sharded or held by every rank."""
    return table.weight if isinstance(table, ShardedTable) else table
