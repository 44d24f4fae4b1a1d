"""Learning rates over a run: the factor of the base rate for each step, a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable

from kgshard.errors import ConfigError

DECAYS: dict[str, Callable[[float, float], float]] = {
    "constant": lambda progress, final: 1.0,
    "linear": lambda progress, final: 1 + (final - 1) * progress,
    "cosine": lambda progress, final: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2,
    "exponential": lambda progress, final: final**progress,
}
"""Factors by progress in [0, 1] and the final factor: 1 at progress 0, final at progress 1."""


def learning_rate_factor(
    step: int, *, num_steps: int, warmup_steps: int, decay: str, final: float = 0.0
) -> float:
    """Return the factor of step 0, 1, ..., num_steps - 1.

    Warm-up rises by equal parts from 1 / warmup_steps in step 0 to 1 in step warmup_steps - 1. The first
    step after it, which is step 0 where warmup_steps is 0, has factor 1 too, and decay starts from
    there. It arrives at `final` in step num_steps, the first that is not made: so no step is made with a
    rate of 0, and step num_steps - 1 is 1 / (num_steps - warmup_steps) of the way short of the end.
    Steps from num_steps on keep `final`.

    Args:
        step: Steps made before this one.
        num_steps: Steps of the whole run.
        warmup_steps: Steps of warm-up among them; may be 0, or all.
        decay: A name in DECAYS.
        final: Where decay ends, in [0, 1]; "constant" ignores it.

    Raises:
        ConfigError: A setting is unknown or out of range.
        ValueError: step < 0.

    Example:
        >>> linear = {"num_steps": 6, "warmup_steps": 2, "decay": "linear"}
        >>> [learning_rate_factor(step, **linear) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    _check(num_steps, warmup_steps, decay, final)
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (num_steps - warmup_steps) if step < num_steps else 1.0
    return DECAYS[decay](progress, final)


def _check(num_steps: int, warmup_steps: int, decay: str, final: float) -> None:
    if decay not in DECAYS:
        raise ConfigError(f"unknown decay {decay!r} (known: {', '.join(DECAYS)})")
    if num_steps < 1:
        raise ConfigError(f"num_steps must be >= 1, got {num_steps}")
    if not 0 <= warmup_steps <= num_steps:
        raise ConfigError(f"warm-up must be 0 to {num_steps} steps, all that the run has; got {warmup_steps}")
    if not 0 <= final <= 1:
        raise ConfigError(f"the final factor must be in [0, 1], got {final}")
    if decay == "exponential" and final == 0:
        raise ConfigError("exponential decay never arrives at 0; give a final factor > 0")
