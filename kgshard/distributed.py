"""Ranks as processes: the one module that imports torch.distributed.

gloo on CPU, nccl on CUDA, by the same code. CUDA-only lines carry the comment `# CUDA`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kgshard.errors import ConfigError, RankFailureError
from kgshard.exchange import Announcement, Exchange, SingleExchange
from kgshard.launch import is_rank
from kgshard.shared_memory import SharedMemoryExchange

_TIMEOUT = timedelta(seconds=120)
"""How long a call may wait for the slowest rank."""
_MEETING = timedelta(minutes=10)
"""How long ranks wait for each other at the start."""
_PATIENCE = timedelta(days=7)
"""The same, while rank 0 prepares data alone."""
_LIBRARY_TIMEOUT = timedelta(minutes=30)
"""The same in a program that is not ours: torch's own default."""
_SMALL_BYTES = 1 << 23
"""What a rank may send in place of an all_reduce, over all ranks."""


class TorchExchange(Exchange):
    """An exchange over process groups of torch.distributed."""

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        patient_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Wrap a group, by default the default one; another, with a longer deadline, serves `patiently`."""
        super().__init__()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self._group = group
        self._patient_group = patient_group

    @contextmanager
    def patiently(self) -> Iterator[None]:
        hasty, self._group = self._group, self._patient_group
        try:
            yield
        finally:
            self._group = hasty

    def _offer(self, payload: Tensor, sends: Sequence[int]) -> None:
        """Nothing travels before sizes were checked."""

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu" and self.world_size * tensor.nbytes <= _SMALL_BYTES:
            # gloo's all_to_all takes half the time of its all_reduce at such sizes; the sum is in rank
            # order on every rank, so replicas stay equal to the bit.
            return self._from_everyone(tensor).sum(dim=0)
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        gathered: list[list[int]] = self._from_everyone(mine).tolist()
        return gathered

    def _from_everyone(self, tensor: Tensor) -> Tensor:
        """Return [world_size, *shape]: every rank's tensor, in rank order. All have one shape."""
        sent = tensor.expand(self.world_size, *tensor.shape).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def _move(self, rows: Tensor, announced: Sequence[Announcement]) -> Tensor:
        counts = [other.sends[self.rank] for other in announced]
        received = rows.new_empty(sum(counts), *rows.shape[1:])
        sends = announced[self.rank].sends
        dist.all_to_all_single(received, rows.contiguous(), counts, sends, group=self._group)
        return received


def current_exchange(device: torch.device) -> Exchange:
    """Return an exchange over torch.distributed's process group, or a world of one where there is none."""
    if dist.is_available() and dist.is_initialized():
        return _nearest(TorchExchange(device), _LIBRARY_TIMEOUT)
    return SingleExchange(device)


def _nearest(exchange: TorchExchange, timeout: timedelta) -> Exchange:
    """Return the same ranks reached through shared memory, where their rows are in it."""
    if exchange.device.type != "cpu":
        return exchange
    return SharedMemoryExchange(exchange, timeout, _PATIENCE)


def choose_device(name: str) -> torch.device:
    """Return the device that a checked name means; "auto" is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        name = f"cuda:{local_rank % torch.cuda.device_count()}"  # CUDA
    return torch.device(name)


def free_on_gpus(name: str) -> tuple[int, ...]:
    """Return the free bytes of each CUDA device that ranks would use; none where torch sees none."""
    if not torch.cuda.is_available():
        return ()
    device = torch.device(name if name != "auto" else "cuda")  # CUDA
    numbers = range(torch.cuda.device_count()) if device.index is None else [device.index]  # CUDA
    return tuple(torch.cuda.mem_get_info(number)[0] for number in numbers)  # CUDA


@contextmanager
def joined_exchange(device: torch.device, transport: str = "auto") -> Iterator[Exchange]:
    """Join the other ranks for the length of a `with` block; alone, a world of one.

    Ranks meet where our launcher says (a file), or torchrun (environment).

    Args:
        device: Where rows live.
        transport: What carries rows, "torch" or "auto", which is shared memory where ranks have some; the
            same on all ranks.

    Raises:
        RankFailureError: A peer went away in the middle of a call.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # CUDA
    if not is_rank() or os.environ["WORLD_SIZE"] == "1":
        yield SingleExchange(device)
        return
    _join(device)
    try:
        exchange = TorchExchange(device, dist.new_group(timeout=_TIMEOUT), dist.new_group(timeout=_PATIENCE))
        yield _nearest(exchange, _TIMEOUT) if transport == "auto" else exchange
    except RuntimeError as error:
        if _lost_peer(error):
            raise RankFailureError(f"rank {os.environ['RANK']}: lost a peer") from error
        raise
    # Not after an error: peers would see the connection close before this rank has said why.
    dist.destroy_process_group()


def _join(device: torch.device) -> None:
    meeting = os.environ.get("KGSHARD_RENDEZVOUS")
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(meeting, world_size) if meeting else None,  # type: ignore[attr-defined]
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            timeout=_MEETING,
        )
    except ValueError as error:
        raise ConfigError(f"cannot join the other ranks: {str(error).splitlines()[0]}") from error


def _lost_peer(error: RuntimeError) -> bool:
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "Read error")
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in signs)
