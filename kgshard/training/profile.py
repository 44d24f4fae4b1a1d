"""How far a training's steps are from what the machine allows, stage by stage.

A stage cannot be faster than its floor: the time to move its bytes at the machine's copy rate, or to
multiply its matrices at the rate of a large product, whichever is longer. Both rates are measured on the
spot, on all ranks at once, since they share the memory and the cores, before and after training, for other
programs may be in the way: the faster one counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kgshard.exchange import Exchange
from kgshard.stages import Stage

_COPIED_BYTES = 1 << 27
_PRODUCT_SIZE = 1024
_TRIES = 7
_FORWARD = ("gather", "queries", "scores", "loss", "regulariser")
"""What the backward pass goes through again: as many bytes, and two products for each one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank can do while all others do the same."""

    bytes_per_second: float
    """Read and written by a copy of memory beyond the caches."""
    flops_per_second: float
    """Of a float32 product of two large square matrices."""

    def best(self, other: Limits) -> Limits:
        return Limits(
            max(self.bytes_per_second, other.bytes_per_second),
            max(self.flops_per_second, other.flops_per_second),
        )

    def floor(self, stage: Stage) -> float:
        """Return the seconds that a stage takes at least."""
        return max(stage.num_bytes / self.bytes_per_second, stage.num_flops / self.flops_per_second)


def measure_limits(exchange: Exchange) -> Limits:
    """Measure them. A collective call."""
    device = exchange.device
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    square = torch.rand(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device)
    product = torch.empty_like(square)
    exchange.gather_bytes(b"")  # All begin together.
    copying = _fastest(lambda: target.copy_(source), device)
    multiplying = _fastest(lambda: torch.mm(square, square, out=product), device)
    return Limits(2 * _COPIED_BYTES / copying, 2 * _PRODUCT_SIZE**3 / multiplying)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        settle(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def settle(device: torch.device) -> None:
    """Wait for what was only begun."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # CUDA


def profile_of(
    stages: Mapping[str, Stage], limits: Limits, *, seconds: float, num_steps: int
) -> dict[str, Any]:
    """Return what `kgshard train --profile` tells of this rank, all for one step.

    Args:
        stages: Measured over all steps.
        limits: Of the machine.
        seconds: The wall time of all steps.
        num_steps: How many there were.

    Returns:
        {"steps", "milliseconds", "floor_milliseconds", "ratio", "gigabytes_per_second",
        "gigaflops_per_second", "stages": {name: {"milliseconds", "floor_milliseconds", "bytes", "flops"}}}.
    """
    known = {name: Stage(each.seconds, each.num_bytes, each.num_flops) for name, each in stages.items()}
    if "backward" in known:
        for name in _FORWARD:
            if name in known:
                known["backward"].moves(known[name].num_bytes)
                known["backward"].multiplies(2 * known[name].num_flops)
    known["other"] = Stage(seconds=seconds - sum(each.seconds for each in known.values()))
    steps = max(1, num_steps)
    floor = sum(limits.floor(each) for each in known.values())
    return {
        "steps": num_steps,
        "milliseconds": 1000 * seconds / steps,
        "floor_milliseconds": 1000 * floor / steps,
        "ratio": seconds / floor if floor else None,
        "gigabytes_per_second": limits.bytes_per_second / 1e9,
        "gigaflops_per_second": limits.flops_per_second / 1e9,
        "stages": {
            name: {
                "milliseconds": 1000 * each.seconds / steps,
                "floor_milliseconds": 1000 * limits.floor(each) / steps,
                "bytes": round(each.num_bytes / steps),
                "flops": round(each.num_flops / steps),
            }
            for name, each in known.items()
        },
    }
