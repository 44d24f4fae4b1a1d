"""The seam between arithmetic and communication: what training needs from the other ranks.

Before any payload moves, every rank announces to all what it is about to send and what it expects to
receive. All ranks check the same announcements, so they all stop, with the same words, or none does:
gloo would hand out uninitialised memory when sizes disagree, and say nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kgshard.errors import ExchangeMismatchError, RankFailureError

Kind = Literal["bytes", "ids", "rows", "gradients", "sum"]
"""What a payload is."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
KINDS: tuple[Kind, ...] = ("bytes", "ids", "rows", "gradients", "sum")
_UNKNOWN = -1
"""Stands for "no expectation" in an announcement."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one rank says before a call."""

    call: int
    """How many calls this rank made before."""
    table: int
    """Which of the exchange's tables it is about, in order of construction; 0 for none."""
    kind: int
    """Position in KINDS."""
    dtype: int
    """Position in _DTYPES."""
    width: int
    """Elements for each row."""
    sends: list[int]
    """Rows it sends to each rank."""
    expects: list[int]
    """Rows it expects from each rank, or -1 where any number will do."""

    def to_list(self) -> list[int]:
        return [self.call, self.table, self.kind, self.dtype, self.width, *self.sends, *self.expects]

    @staticmethod
    def from_list(numbers: list[int], world_size: int) -> Announcement:
        call, table, kind, dtype, width, *counts = numbers
        return Announcement(call, table, kind, dtype, width, counts[:world_size], counts[world_size:])


def check_announcements(announced: Sequence[Announcement]) -> None:
    """Compare what ranks send with what their peers expect; `announced[r]` is rank r's.

    Raises:
        ExchangeMismatchError: Naming the first pair of ranks that disagree.
    """
    first = announced[0]
    for rank, other in enumerate(announced):
        for what in ("call", "table", "kind", "dtype", "width"):
            said, wanted = getattr(other, what), getattr(first, what)
            if said != wanted:
                raise ExchangeMismatchError(
                    f"exchange mismatch rank {rank}→0: announced {what} {_show(what, said)},"
                    f" expected {_show(what, wanted)}"
                )
    for receiver, receiving in enumerate(announced):
        for sender, expected in enumerate(receiving.expects):
            count = announced[sender].sends[receiver]
            if expected not in (_UNKNOWN, count):
                raise ExchangeMismatchError(
                    f"exchange mismatch rank {sender}→{receiver}: announced {count}, expected {expected}"
                )


def _show(what: str, value: int) -> str:
    names = {"dtype": _DTYPES, "kind": KINDS}
    return str(names[what][value]) if what in names else str(value)


class Exchange(ABC):
    """Collective calls among ranks. Every rank must make the same calls in the same order."""

    rank: int
    world_size: int
    device: torch.device
    """Where tensors handed to this exchange must live."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_tables = 0

    def number_table(self) -> int:
        """Return a number for a new table, from 1. Ranks must construct their tables in the same order."""
        self._num_tables += 1
        return self._num_tables

    def all_to_all(
        self,
        chunks: Sequence[Tensor],
        expected: Sequence[int] | None = None,
        *,
        kind: Kind = "bytes",
        table: int = 0,
    ) -> list[Tensor]:
        """Send chunks[r] to rank r; return what each rank sent here, in rank order.

        Args:
            chunks: One tensor for each rank, [n_r] or [n_r, width]. Lengths may differ, zero included;
                dtype and width must agree on all ranks.
            expected: How many rows each rank will send here, where that is known.
            kind: What the rows are; ranks must agree.
            table: Number of the table they are about; ranks must agree.

        Raises:
            ValueError: Not one chunk a rank, or of a dtype that does not travel.
            ExchangeMismatchError: Ranks disagree. Raised on every rank, before any payload is used.
        """
        if len(chunks) != self.world_size:
            raise ValueError(f"{len(chunks)} chunks for {self.world_size} ranks")
        rows = chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))
        sends = [len(chunk) for chunk in chunks]
        received, counts = self.swap(rows, sends, expected, kind=kind, table=table)
        return list(received.split_with_sizes(counts)) if len(counts) > 1 else [received]

    def swap(
        self,
        rows: Tensor,
        sends: Sequence[int],
        expected: Sequence[int] | None = None,
        *,
        kind: Kind = "bytes",
        table: int = 0,
    ) -> tuple[Tensor, list[int]]:
        """Send the first sends[0] rows to rank 0, the next sends[1] to rank 1, ...

        Args:
            rows: [n] or [n, width], contiguous.
            sends: A number for each rank; they sum to n.
            expected: See `all_to_all`, which also says what is raised.
            kind: What the rows are; ranks must agree.
            table: Number of the table they are about; ranks must agree.

        Returns:
            [m] or [m, width] what all ranks sent here, in rank order, and how many of these rows each sent.
        """
        self._offer(rows, sends)
        announced = self._announce(
            kind,
            rows.dtype,
            table=table,
            width=rows.shape[1] if rows.dim() == 2 else 1,
            sends=list(sends),
            expects=list(expected) if expected is not None else [_UNKNOWN] * self.world_size,
        )
        return self._move(rows, announced), [other.sends[self.rank] for other in announced]

    def all_gather(
        self, tensor: Tensor, expected: Sequence[int] | None = None, *, kind: Kind = "bytes"
    ) -> list[Tensor]:
        """Send one tensor to every rank; return every rank's, in rank order. See `all_to_all`."""
        return self.all_to_all([tensor] * self.world_size, expected, kind=kind)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over ranks; the argument may be overwritten.

        Raises:
            ExchangeMismatchError: Ranks bring tensors of another size or dtype, or make another call.
        """
        nothing = [0] * self.world_size
        self._offer(tensor, nothing)
        self._announce("sum", tensor.dtype, width=tensor.numel(), sends=nothing, expects=nothing)
        return self._sum(tensor)

    def _announce(
        self,
        kind: Kind,
        dtype: torch.dtype,
        *,
        width: int,
        sends: list[int],
        expects: list[int],
        table: int = 0,
    ) -> list[Announcement]:
        """Tell all ranks what is about to move; return what all announced, once it was found to fit."""
        if dtype not in _DTYPES:
            raise ValueError(f"{dtype} does not travel (known: {', '.join(map(str, _DTYPES))})")
        mine = Announcement(
            self._num_calls, table, KINDS.index(kind), _DTYPES.index(dtype), width, sends, expects
        )
        self._num_calls += 1
        announced = [
            Announcement.from_list(numbers, self.world_size) for numbers in self._gather(mine.to_list())
        ]
        check_announcements(announced)
        return announced

    def patiently(self) -> AbstractContextManager[None]:
        """Allow calls in a `with` block to wait for days: rank 0 may be preparing data alone."""
        return nullcontext()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order, on every rank."""
        chunk = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            if payload
            else torch.empty(0, dtype=torch.uint8)
        )
        received = self.all_gather(chunk.to(self.device))
        return [bytes(part.cpu().numpy().tobytes()) for part in received]

    def share_failure(self, error: BaseException | None) -> None:
        """Raise on every rank if any rank failed. Ranks call this where one of them may have stumbled.

        Raises:
            KgshardError: The rank's own error, on the rank that failed.
            RankFailureError: Elsewhere, naming that rank and its error.
        """
        message = f"{type(error).__name__}: {error}" if error is not None else ""
        failures = self.gather_bytes(message.encode())
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure:
                others = RankFailureError(f"rank {rank}: {failure.decode()}")
                others.told = True
                raise others

    @contextmanager
    def sharing_failure(self, *kinds: type[Exception]) -> Iterator[None]:
        """Run a `with` block on which ranks may stumble; then raise on every rank if one of them did.

        Args:
            *kinds: Errors that are shared; others leave at once, on this rank alone.

        Raises:
            KgshardError, RankFailureError: See `share_failure`.
        """
        error = None
        try:
            yield
        except kinds as failure:
            error = failure
        self.share_failure(error)

    @abstractmethod
    def _offer(self, payload: Tensor, sends: Sequence[int]) -> None:
        """Hear what the next announcement is about: rows for each rank, or a tensor to be summed."""

    @abstractmethod
    def _sum(self, tensor: Tensor) -> Tensor:
        """Carry out an all_reduce whose sizes were checked."""

    @abstractmethod
    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """Return every rank's numbers, in rank order. All lists have one length."""

    @abstractmethod
    def _move(self, rows: Tensor, announced: Sequence[Announcement]) -> Tensor:
        """Carry out a swap whose counts were checked; `announced[r]` is rank r's."""


class SingleExchange(Exchange):
    """A world of one rank: everything sent comes back."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device)

    def _offer(self, payload: Tensor, sends: Sequence[int]) -> None:
        """Nobody is there to be told."""

    def _sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        return [numbers]

    def _move(self, rows: Tensor, announced: Sequence[Announcement]) -> Tensor:
        return rows
