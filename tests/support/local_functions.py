"""What runs on ranks that share memory, in tests of that exchange. Every function takes an Exchange first."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from rank_functions import Ints, exchange_matrices

from kgshard.errors import RankFailureError
from kgshard.exchange import Exchange
from kgshard.shared_memory import SharedMemoryExchange


def shares_memory(exchange: Exchange, function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Return whether ranks share memory after a function ran on them, and what it returned."""
    outcome = function(exchange, *arguments)
    assert isinstance(exchange, SharedMemoryExchange)
    return exchange.shares_memory, outcome


def with_small_outboxes(
    exchange: Exchange, half_bytes: int, matrices: list[Ints]
) -> tuple[list[bool], int, float]:
    """Exchange rows, some too large for an outbox; then sum two tensors, one of them too large.

    Returns:
        What `exchange_matrices` returns, how many payloads went another way, and the sum of both sums.
    """
    assert isinstance(exchange, SharedMemoryExchange)
    outer = exchange._outer
    move, add, elsewhere = outer._move, outer._sum, 0

    def counted(way: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal elsewhere
            elsewhere += 1
            return way(*arguments)

        return call

    exchange.gather_bytes(b"meet")
    with (
        patch("kgshard.shared_memory.HALF_BYTES", half_bytes),
        patch.object(outer, "_move", counted(move)),
        patch.object(outer, "_sum", counted(add)),
    ):
        arrived = exchange_matrices(exchange, matrices, 3, torch.float32)
        few, many = (
            exchange.all_reduce(torch.full((size,), exchange.rank + 1.0)) for size in (1, half_bytes)
        )
    return arrived, elsewhere, float(few.sum() + many.sum())


def on_other_machines(exchange: Exchange, matrices: list[Ints], what: str) -> tuple[bool, list[bool]]:
    """Exchange rows where ranks find that they cannot share memory; see `shares_memory`."""
    if what == "another machine":
        trouble = patch("kgshard.shared_memory._machine", lambda: f"machine {exchange.rank}")
    elif what == "no sockets on one rank" and exchange.rank == 1:
        trouble = patch("kgshard.shared_memory._listening", side_effect=OSError("no sockets"))
    elif what == "one rank cannot call" and exchange.rank == 0:
        trouble = patch("kgshard.shared_memory._call", side_effect=OSError("no route"))
    else:
        trouble = patch("kgshard.shared_memory._MEETING_SECONDS", 0.3)
    with trouble:
        return shares_memory(exchange, exchange_matrices, matrices, 3, torch.float32)


def lose_a_peer(exchange: Exchange, how: str) -> str:
    """Make a call that rank 1 does not take part in; return the words of the other ranks' error."""
    assert isinstance(exchange, SharedMemoryExchange)
    exchange.gather_bytes(b"meet")
    try:
        if exchange.rank == 1 and how == "ends":
            for peer in exchange._peers.values():
                peer.close()
            return ""
        if exchange.rank == 1:
            time.sleep(1)
            return ""
        exchange._timeout = timedelta(seconds=0.2)
        exchange.gather_bytes(b"still there?")
    except RankFailureError as error:
        return str(error)
    return "no error"


def wait_patiently(exchange: Exchange) -> list[bytes]:
    """Wait longer for rank 1 than calls otherwise do."""
    assert isinstance(exchange, SharedMemoryExchange)
    exchange.gather_bytes(b"meet")
    exchange._timeout = timedelta(seconds=0.2)
    with exchange.patiently():
        if exchange.rank == 1:
            time.sleep(0.5)
        return exchange.gather_bytes(str(exchange.rank).encode())


def sum_in_rank_order(exchange: Exchange, values: list[list[float]]) -> list[float]:
    """Sum values[rank] over ranks."""
    total: list[float] = exchange.all_reduce(torch.tensor(values[exchange.rank])).tolist()
    return total
