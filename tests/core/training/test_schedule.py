"""Learning-rate schedules against torch's own schedulers, and at their edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torchs

from kgshard.errors import ConfigError
from kgshard.training.schedule import DECAYS, learning_rate_factor

Decayed = Callable[[torch.optim.Optimizer, int, float], torchs.LRScheduler]
TORCHS: dict[str, Decayed] = {
    "constant": lambda optimizer, steps, final: torchs.ConstantLR(optimizer, factor=1.0),
    "linear": lambda optimizer, steps, final: torchs.LinearLR(
        optimizer, start_factor=1.0, end_factor=final, total_iters=steps
    ),
    "cosine": lambda optimizer, steps, final: torchs.CosineAnnealingLR(optimizer, steps, eta_min=final),
    "exponential": lambda optimizer, steps, final: torchs.ExponentialLR(optimizer, final ** (1 / steps)),
}
FINAL = {"constant": 0.3, "linear": 0.0, "cosine": 0.2, "exponential": 0.01}


def torchs_factors(decay: str, num_steps: int, warmup_steps: int, final: float) -> list[float]:
    """Return the rates of torch's schedulers, warm-up first, for a base rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    warm = torchs.LambdaLR(optimizer, lambda step: (step + 1) / warmup_steps)
    rates = []
    for _ in range(warmup_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        warm.step()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = TORCHS[decay](optimizer, num_steps - warmup_steps, final)
    for _ in range(num_steps - warmup_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("decay", sorted(DECAYS))
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(40, 7), (40, 1), (5, 4), (1, 0)])
def test_every_step_is_that_of_torchs_schedulers(decay: str, num_steps: int, warmup_steps: int) -> None:
    final = FINAL[decay]
    factors = [
        learning_rate_factor(step, num_steps=num_steps, warmup_steps=warmup_steps, decay=decay, final=final)
        for step in range(num_steps)
    ]
    if warmup_steps:
        wanted = torchs_factors(decay, num_steps, warmup_steps, final)
    else:  # nothing to divide by
        wanted = torchs_factors(decay, num_steps + 1, 1, final)[1:]
    assert factors == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("decay", sorted(DECAYS))
def test_without_warm_up_the_first_step_has_the_whole_rate(decay: str) -> None:
    assert learning_rate_factor(0, num_steps=10, warmup_steps=0, decay=decay, final=0.5) == 1.0


@pytest.mark.parametrize("decay", sorted(DECAYS))
def test_warm_up_ends_with_the_whole_rate_and_decay_starts_from_it(decay: str) -> None:
    around = [
        learning_rate_factor(step, num_steps=10, warmup_steps=4, decay=decay, final=0.5) for step in (0, 3, 4)
    ]
    assert around == [0.25, 1.0, 1.0]
    assert learning_rate_factor(9, num_steps=10, warmup_steps=10, decay=decay, final=0.5) == 1.0


LAST = {
    "constant": 1.0,
    "linear": 1 - 0.9 * 7 / 8,
    "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2,
    "exponential": 0.1 ** (7 / 8),
}


@pytest.mark.parametrize("decay", sorted(DECAYS))
def test_the_last_step_is_one_part_short_of_the_final_factor(decay: str) -> None:
    factor = learning_rate_factor(9, num_steps=10, warmup_steps=2, decay=decay, final=0.1)
    assert factor == pytest.approx(LAST[decay], rel=1e-12)


@pytest.mark.parametrize("decay", sorted(DECAYS))
@pytest.mark.parametrize("warmup_steps", [0, 3, 10])
@pytest.mark.parametrize("step", [10, 11, 1000])
def test_steps_beyond_the_run_keep_the_final_factor(decay: str, warmup_steps: int, step: int) -> None:
    factor = learning_rate_factor(step, num_steps=10, warmup_steps=warmup_steps, decay=decay, final=0.1)
    assert factor == pytest.approx(1.0 if decay == "constant" else 0.1, rel=1e-12)


@given(
    st.sampled_from(sorted(DECAYS)),
    st.integers(1, 50),
    st.floats(0, 1),
    st.floats(1e-6, 1),
)
def test_factors_rise_to_one_then_never_rise_and_every_step_learns(
    decay: str, num_steps: int, warm_part: float, final: float
) -> None:
    warmup_steps = round(warm_part * num_steps)
    factors = [
        learning_rate_factor(step, num_steps=num_steps, warmup_steps=warmup_steps, decay=decay, final=final)
        for step in range(num_steps + 1)
    ]
    rising, falling = factors[:warmup_steps], factors[warmup_steps:]
    assert rising == sorted(rising)
    assert all(later <= earlier + 1e-15 for earlier, later in pairwise(falling))
    assert all(0 < factor <= 1 for factor in factors[:num_steps])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_to_zero_makes_no_step_of_rate_zero(decay: str) -> None:
    assert learning_rate_factor(99, num_steps=100, warmup_steps=0, decay=decay) > 0
    assert learning_rate_factor(100, num_steps=100, warmup_steps=0, decay=decay) == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"decay": "quadratic"},
            r"unknown decay 'quadratic' \(known: constant, linear, cosine, exponential\)",
        ),
        ({"num_steps": 0}, "num_steps must be >= 1, got 0"),
        ({"warmup_steps": -1}, "warm-up must be 0 to 10 steps, all that the run has; got -1"),
        ({"warmup_steps": 11}, "warm-up must be 0 to 10 steps, all that the run has; got 11"),
        ({"final": 1.5}, r"the final factor must be in \[0, 1\], got 1.5"),
        ({"final": float("nan")}, r"the final factor must be in \[0, 1\], got nan"),
        ({"decay": "exponential", "final": 0.0}, "exponential decay never arrives at 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(wrong: dict[str, object], words: str) -> None:
    settings = {"num_steps": 10, "warmup_steps": 2, "decay": "linear", "final": 0.1, **wrong}
    with pytest.raises(ConfigError, match=words):
        learning_rate_factor(0, **settings)  # type: ignore[arg-type]


def test_a_step_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        learning_rate_factor(-1, num_steps=10, warmup_steps=2, decay="linear")
