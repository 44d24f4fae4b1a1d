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
from kgshard.exchange import Exchange, SingleExchange
from kgshard.launch import is_rank

_TIMEOUT = timedelta(seconds=120)
_SMALL_BYTES = 1 << 23
"""What a rank may send in place of an all_reduce, over all ranks."""


class TorchExchange(Exchange):
    """An exchange over the default process group of torch.distributed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu" and self.world_size * tensor.nbytes <= _SMALL_BYTES:
            # gloo's all_to_all takes half the time of its all_reduce at such sizes; the sum is in rank
            # order on every rank, so replicas stay equal to the bit.
            return self._from_everyone(tensor).sum(dim=0)
        dist.all_reduce(tensor)
        return tensor

    def _all_gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        gathered: list[list[int]] = self._from_everyone(mine).tolist()
        return gathered

    def _from_everyone(self, tensor: Tensor) -> Tensor:
        """Return [world_size, *shape]: every rank's tensor, in rank order. All have one shape."""
        sent = tensor.contiguous().expand(self.world_size, *tensor.shape).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received

    def _move(self, chunks: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
        sent = torch.cat(list(chunks))
        received = sent.new_empty(sum(counts), *sent.shape[1:])
        dist.all_to_all_single(received, sent, counts, [len(chunk) for chunk in chunks])
        return list(received.split(counts))


def current_exchange(device: torch.device) -> Exchange:
    """Return an exchange over torch.distributed's process group, or a world of one where there is none."""
    if dist.is_available() and dist.is_initialized():
        return TorchExchange(device)
    return SingleExchange(device)


def choose_device(name: str) -> torch.device:
    """Return the device that `--device` names; "auto" is CUDA where there is one.

    Raises:
        ConfigError: No such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: no CUDA device here")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: choose cpu or cuda")
    if device.type == "cuda" and device.index is None:
        device = torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        )  # CUDA
    return device


@contextmanager
def joined_exchange(device: torch.device, *, init_method: str | None = None) -> Iterator[Exchange]:
    """Join the other ranks for the length of a `with` block; alone, a world of one.

    Args:
        device: Where this rank's tensors live.
        init_method: Where ranks meet, for torch.distributed; by default what the launcher's
            environment says.

    Raises:
        RankFailureError: A peer went away in the middle of a call.
    """
    if not is_rank():
        yield SingleExchange(device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # CUDA
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method or os.environ.get("KGSHARD_RENDEZVOUS") or "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=_TIMEOUT,
    )
    try:
        yield TorchExchange(device)
    except (dist.DistBackendError, RuntimeError) as error:
        if _lost_peer(error):
            first_line = str(error).splitlines()[0]
            raise RankFailureError(f"rank {os.environ['RANK']}: lost a peer: {first_line}") from error
        raise
    # Not after an error: peers would see the connection close before this rank has said why.
    dist.destroy_process_group()


def _lost_peer(error: Exception) -> bool:
    return isinstance(error, dist.DistBackendError) or any(
        sign in str(error) for sign in ("Connection closed by peer", "Connection reset", "Timed out", "gloo")
    )
