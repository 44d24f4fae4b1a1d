"""Ranks of one machine that reach each other through memory they share, rather than through a network.

gloo takes a payload through the kernel's loopback device, in two calls for each exchange: one for the
announcement, one for the rows. Here every rank has an outbox, memory that the others map too. It puts a
payload there, then sends its announcement to each of the others over a socket; who has received everybody's
finds all payloads in their outboxes. That is one message to each rank for each call.

An outbox has two halves, used in turn. Who announces call n has read what was sent by call n - 1, and
nobody ends call n before all have announced it: so when call n + 1 fills a half anew, nobody reads there.

    rank 0                 rank 1
    fill half 0            fill half 0
    announce call 0  <-->  announce call 0
    read 1's half 0        read 0's half 0
    fill half 1            ...
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from kgshard.errors import RankFailureError
from kgshard.exchange import Announcement, Exchange
from kgshard.memory import HALF_BYTES

_MEETING_SECONDS = 30.0
_LEAST_SECONDS = 0.01
"""A wait that is over its time still hears what has arrived."""


class SharedMemoryExchange(Exchange):
    """An exchange among ranks of one machine, on a CPU.

    Ranks meet in the first call, through another exchange, which goes on to carry payloads that are too
    large for an outbox. Where they cannot share memory (other machines, containers, or users) it carries
    everything.
    """

    def __init__(self, outer: Exchange, timeout: timedelta, patience: timedelta) -> None:
        """Take the place of another exchange of the same ranks, in which no call is under way.

        Args:
            outer: How ranks meet.
            timeout: How long a call waits for the slowest rank.
            patience: The same, in `patiently`.
        """
        super().__init__()
        self.rank, self.world_size, self.device = outer.rank, outer.world_size, outer.device
        self._outer = outer
        self._timeout = timeout
        self._patience = patience
        self._met = False
        self._outbox: _Outbox | None = None
        """None until ranks have met, and where they cannot share memory."""
        self._peers: dict[int, _Peer] = {}

    @property
    def shares_memory(self) -> bool:
        """Whether ranks found that they share memory, once a call was made."""
        return self._outbox is not None

    @contextmanager
    def patiently(self) -> Iterator[None]:
        hasty, self._timeout = self._timeout, self._patience
        try:
            with self._outer.patiently():
                yield
        finally:
            self._timeout = hasty

    def _offer(self, payload: Tensor, sends: Sequence[int]) -> None:
        if not self._met:
            self._met = True
            self._meet()
        if self._outbox is not None and payload.nbytes <= HALF_BYTES:
            # Rows for this rank itself need not go round.
            start = sum(sends[: self.rank])
            self._outbox.fill(self._num_calls, payload[:start], payload[start + sends[self.rank] :])

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        if self._outbox is None:
            return self._outer._gather(numbers)
        form = struct.Struct(f"={len(numbers)}q")
        message = form.pack(*numbers)
        for peer in self._peers.values():
            peer.send(message)
        deadline = time.monotonic() + self._timeout.total_seconds()
        gathered = {rank: peer.receive(form.size, deadline) for rank, peer in self._peers.items()}
        return [
            list(form.unpack(gathered[rank])) if rank in gathered else numbers
            for rank in range(self.world_size)
        ]

    def _move(self, rows: Tensor, announced: Sequence[Announcement]) -> Tensor:
        if self._outbox is None or _largest_bytes(rows, announced) > HALF_BYTES:
            return self._outer._move(rows, announced)
        counts = [other.sends[self.rank] for other in announced]
        received = rows.new_empty(sum(counts), *rows.shape[1:])
        for rank, part in enumerate(received.split_with_sizes(counts)):
            sends = announced[rank].sends
            before = sum(sends[: self.rank])
            if rank == self.rank:
                part.copy_(rows[before : before + len(part)])
            elif len(part):
                skipped = sends[rank] if rank < self.rank else 0
                offset = (before - skipped) * part[0].nbytes
                self._peers[rank].outbox.read(announced[rank].call, offset, part)
        return received

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._outbox is None or tensor.nbytes > HALF_BYTES:
            return self._outer._sum(tensor)
        # In rank order on every rank, so that replicas stay equal to the bit.
        call, total, part = self._num_calls - 1, torch.zeros_like(tensor), torch.empty_like(tensor)
        for rank in range(self.world_size):
            if rank != self.rank:
                self._peers[rank].outbox.read(call, 0, part)
            total.add_(tensor if rank == self.rank else part)
        return total

    def _meet(self) -> None:
        """Map each other's outboxes, or find on all ranks that they cannot."""
        with ExitStack() as stack:
            outbox: _Outbox | None = None
            peers: dict[int, _Peer] = {}
            try:
                listener = stack.enter_context(_listening(self.world_size))
                card = _Card(_machine(), secrets.token_hex(16), listener.getsockname()[1:].decode())
            except (OSError, AttributeError):
                card = _Card("", "", "")
            cards = [_Card.parse(card) for card in self._outer.gather_bytes(card.to_bytes())]
            if all(each.machine == cards[0].machine and each.machine for each in cards):
                with suppress(OSError, ValueError):
                    outbox, peers = self._connect(listener, cards)
            everyone = self._outer.gather_bytes(b"met" if outbox else b"")
        if all(everyone):
            self._outbox, self._peers = outbox, peers
        else:
            for peer in peers.values():
                peer.close()

    def _connect(self, listener: socket.socket, cards: Sequence[_Card]) -> tuple[_Outbox, dict[int, _Peer]]:
        """Connect to all other ranks: lower ranks call higher ones, and each sends its outbox.

        Raises:
            OSError: One cannot be reached.
            ValueError: One did not send its outbox.
        """
        memory = os.memfd_create("kgshard-outbox")
        try:
            os.ftruncate(memory, 2 * HALF_BYTES)
            connections = {}
            for rank in range(self.rank + 1, self.world_size):
                connections[rank] = _call(cards[rank], self.rank)
            for rank, connection in _answered(listener, cards[self.rank], self.rank):
                connections[rank] = connection
            for connection in connections.values():
                socket.send_fds(connection, [b"outbox"], [memory])
            peers = {rank: _Peer(self.rank, rank, connections[rank]) for rank in sorted(connections)}
            return _Outbox(memory), peers
        finally:
            os.close(memory)


def _largest_bytes(rows: Tensor, announced: Sequence[Announcement]) -> int:
    """Return the most bytes that one of the ranks sends in a call."""
    row_bytes = rows.element_size() * announced[0].width
    return max(sum(each.sends) for each in announced) * row_bytes


def _machine() -> str:
    """Return what ranks that can share memory have in common: one run of one kernel, and one user."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.getuid()}"


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank tells the others to be found by."""

    machine: str
    """Empty where it cannot share memory."""
    token: str
    """What callers must say."""
    address: str
    """Of its socket, an abstract name, which is no file."""

    def to_bytes(self) -> bytes:
        return "\n".join([self.machine, self.token, self.address]).encode()

    @staticmethod
    def parse(card: bytes) -> _Card:
        return _Card(*card.decode().split("\n"))


@contextmanager
def _listening(world_size: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0kgshard-{secrets.token_hex(16)}")
        listener.listen(world_size)
        listener.settimeout(_MEETING_SECONDS)
        yield listener


def _call(card: _Card, rank: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_MEETING_SECONDS)
    connection.connect(f"\0{card.address}")
    connection.send(f"{card.token} {rank}".encode())
    return connection


def _answered(listener: socket.socket, card: _Card, num_callers: int) -> Iterator[tuple[int, socket.socket]]:
    """Yield the calls of all lower ranks, and who called; who does not know the token is sent away."""
    while num_callers:
        connection, _ = listener.accept()
        connection.settimeout(_MEETING_SECONDS)
        token, _, rank = connection.recv(100).decode("ascii", "replace").partition(" ")
        if secrets.compare_digest(token.encode(), card.token.encode()):
            num_callers -= 1
            yield int(rank), connection
        else:
            connection.close()


class _Outbox:
    """Memory of one rank, for all to read."""

    def __init__(self, memory: int) -> None:
        """Map a file of memory, which may be closed afterwards."""
        self._bytes = torch.frombuffer(mmap.mmap(memory, 2 * HALF_BYTES), dtype=torch.uint8)

    def fill(self, call: int, *parts: Tensor) -> None:
        """Put tensors one after the other into the half of a call."""
        start = call % 2 * HALF_BYTES
        for part in parts:
            if part.nbytes:
                self._bytes[start : start + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
                start += part.nbytes

    def read(self, call: int, offset: int, into: Tensor) -> None:
        """Copy a part of the half of a call, which begins at a byte of it."""
        start = call % 2 * HALF_BYTES + offset
        into.copy_(self._bytes[start : start + into.nbytes].view(into.dtype).view(into.shape))


class _Peer:
    """Another rank: its outbox, and the socket that announcements take."""

    def __init__(self, rank: int, peer: int, connection: socket.socket) -> None:
        """Wait for the outbox of rank `peer` on its connection; this is rank `rank`."""
        _, [memory], _, _ = socket.recv_fds(connection, 100, 1)
        try:
            self.outbox = _Outbox(memory)
        finally:
            os.close(memory)
        self._connection = connection
        self._words = f"rank {rank}: lost a peer, rank {peer}"

    def send(self, message: bytes) -> None:
        with self._naming_peer():
            self._connection.send(message)

    def receive(self, size: int, deadline: float) -> bytes:
        """Return its next message, which is waited for until then (of time.monotonic)."""
        self._connection.settimeout(max(_LEAST_SECONDS, deadline - time.monotonic()))
        with self._naming_peer():
            message = self._connection.recv(size)
        if len(message) != size:
            raise RankFailureError(self._words)
        return message

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _naming_peer(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise RankFailureError(f"{self._words}, which did not answer in time") from error
        except OSError as error:
            raise RankFailureError(self._words) from error
