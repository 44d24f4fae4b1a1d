"""Worlds of ranks for tests: threads around a barrier for the many cases, warm gloo processes for a few.

Both run the same functions, which take an Exchange first and live in tests/support.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kgshard.exchange import Announcement, Exchange


class ThreadExchange(Exchange):
    """One rank of a ThreadWorld."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__()
        self._world = world
        self.rank = rank
        self.world_size = world.world_size
        self.device = torch.device("cpu")

    def _offer(self, payload: Tensor, sends: Sequence[int]) -> None:
        """Nothing travels before sizes were checked."""

    def _sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._world.swap(self.rank, tensor.clone())).sum(0)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        return self._world.swap(self.rank, numbers)

    def _move(self, rows: Tensor, announced: Sequence[Announcement]) -> Tensor:
        everyone = self._world.swap(self.rank, rows.clone().split(announced[self.rank].sends))
        received = [sent[self.rank] for sent in everyone]
        assert [len(part) for part in received] == [other.sends[self.rank] for other in announced]
        return torch.cat(received)


class ThreadWorld:
    """Ranks as threads. The first rank that fails aborts the others at once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._slots: list[Any] = [None] * world_size

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, once all have given theirs."""
        self._slots[rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._slots)
        self._barrier.wait(timeout=60)
        return values

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return function(exchange, *arguments) of every rank; raise the first rank's error."""
        outcomes, errors = self.run_all(function, *arguments)
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return outcomes

    def run_all(
        self, function: Callable[..., Any], *arguments: Any
    ) -> tuple[list[Any], list[BaseException | None]]:
        """Return what each rank returned and what each rank raised."""
        outcomes: list[Any] = [None] * self.world_size
        errors: list[BaseException | None] = [None] * self.world_size

        def work(rank: int) -> None:
            try:
                outcomes[rank] = function(ThreadExchange(self, rank), *arguments)
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes, errors


class GlooPool:
    """Processes that have torch already and become gloo ranks of one world after another.

    Importing torch costs seconds; a world on warm processes costs a fraction of one.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._num_worlds = 0
        self.transport = "torch"

    def run(self, world_size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return function(exchange, *arguments) of every rank of a new gloo world.

        Args:
            world_size: At most the pool's size.
            folder: Where ranks meet.
            function: A module-level function of tests/support.
            *arguments: Picklable.

        Raises:
            AssertionError: A rank failed; with its traceback.
        """
        self._num_worlds += 1
        meeting = f"{folder}/rendezvous-{self._num_worlds}"
        for rank in range(world_size):
            self._pipes[rank].send((rank, world_size, meeting, self.transport, function, arguments))
        replies = [self._pipes[rank].recv() for rank in range(world_size)]
        for rank, (_, trouble) in enumerate(replies):
            assert trouble is None, f"rank {rank}:\n{trouble}"
        return [outcome for outcome, _ in replies]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    from kgshard.distributed import joined_exchange

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    while True:
        rank, world_size, meeting, transport, function, arguments = pipe.recv()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "KGSHARD_RENDEZVOUS": meeting}
        try:
            with joined_exchange(torch.device("cpu"), transport) as exchange:
                outcome = function(exchange, *arguments)
            pipe.send((outcome, None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
