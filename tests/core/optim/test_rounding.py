"""Stochastic rounding against the definition in float64: the two neighbours, and the odds between them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_functions import Floats, Ints

from kgshard.optim.rounding import random_bits, round_stochastically, stream_key

ALL_PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
FINITE = np.unique(ALL_PATTERNS[ALL_PATTERNS.isfinite()].double().numpy())
"""Every number that bfloat16 holds, ascending."""
LARGEST = float(FINITE[-1])
AWKWARD = (
    *(0.0, 1.0, 1.0 + 2**-23, 1.0 - 2**-24, 255.0, 257.0, math.pi, -math.e, -1.0 - 2**-9),
    *(1e-45, -3e-45, 1e-40, -9.2e-41, 2.0**-126 - 2**-149, -(2.0**-126) - 2**-149),  # subnormal, and just not
    *(1e38, -2.5e38, LARGEST, -LARGEST, LARGEST * (1 - 2**-20)),
)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def single(value: float) -> float:
    return float(np.float32(value))


def neighbours(value: float) -> tuple[float, float, float]:
    """Return the bfloat16 numbers below and above a float32, and the odds of the upper one."""
    place = int(np.searchsorted(FINITE, value, side="right")) - 1
    low = float(FINITE[place])
    if low == value:
        return low, low, 0.0
    high = float(FINITE[place + 1])
    return low, high, (value - low) / (high - low)


def rounded_with(value: float, bits: Ints, device: str = "cpu") -> Floats:
    """Round one value with each of some bits."""
    values = torch.full((1, len(bits)), value, dtype=torch.float32, device=device)
    noise = torch.from_numpy(bits.astype(np.int32))[None].to(device)
    result: Floats = round_stochastically(values, noise)[0].double().cpu().numpy()
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", AWKWARD)
def test_over_all_bits_the_odds_and_the_mean_are_exact(value: float, device: str) -> None:
    value = single(value)
    low, high, odds = neighbours(value)
    rounded = rounded_with(value, np.arange(65536), device)
    assert set(rounded) <= {low, high}
    assert (rounded == high).mean() == (odds or 1.0)
    assert rounded.mean() == value


@given(st.floats(-LARGEST, LARGEST, width=32), st.integers(0, 65535))
def test_every_number_goes_to_a_neighbour_by_its_odds(value: float, bits: int) -> None:
    low, high, odds = neighbours(value)
    away = odds if value > 0 else 1 - odds  # of zero
    goes_away = bits >= 65536 * (1 - away) if low < high else False
    wanted = (high if value > 0 else low) if goes_away else (low if value > 0 else high)
    assert rounded_with(value, np.array([bits])) == [wanted]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [0, 1, 32768, 65535])
def test_what_bfloat16_holds_stays_as_it_is(bits: int, device: str) -> None:
    """Both zeros, subnormals, infinities and NaN among them; alone too, where no other value is large."""
    kinds = [ALL_PATTERNS, ALL_PATTERNS[ALL_PATTERNS.abs() < 1e30]]
    for patterns in kinds:
        values = patterns.to(device).float()[None]
        rounded = round_stochastically(values, torch.full_like(values, bits, dtype=torch.int32))[0].cpu()
        nan = patterns.isnan()
        assert torch.equal(rounded[~nan].view(torch.int16), patterns[~nan].view(torch.int16))
        assert rounded[nan].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sign", [1, -1])
def test_no_finite_number_becomes_infinite(sign: int, device: str) -> None:
    """Beyond bfloat16's largest number there is none to round to; nearest would say infinity."""
    largest_single = float(np.finfo(np.float32).max)
    for value in (largest_single, single(LARGEST * (1 + 2**-10)), LARGEST):
        rounded = rounded_with(sign * value, np.array([0, 1, 65535]), device)
        assert rounded.tolist() == [sign * LARGEST] * 3
    assert torch.tensor(largest_single).bfloat16().isinf()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF])
def test_every_nan_stays_nan(pattern: int, device: str) -> None:
    """A carry out of 0x7fffffff would make a zero of it."""
    values = torch.tensor([[pattern, 0]], dtype=torch.int32, device=device).view(torch.float32)
    for bits in (0, 1, 65535):
        rounded = round_stochastically(values, torch.full_like(values, bits, dtype=torch.int32))
        assert rounded.isnan().tolist() == [[True, False]]


def test_infinity_does_not_change_its_neighbours() -> None:
    values = torch.tensor([[math.inf, 1.0 + 2**-8, -math.inf, -1.0 - 2**-8]])
    assert rounded_pair(values, 0) == [math.inf, 1.0, -math.inf, -1.0]
    assert rounded_pair(values, 65535) == [math.inf, 1.0 + 2**-7, -math.inf, -1.0 - 2**-7]


def rounded_pair(values: torch.Tensor, bits: int) -> list[float]:
    numbers: list[float] = round_stochastically(values, torch.full_like(values, bits, dtype=torch.int32))[
        0
    ].tolist()
    return numbers


def test_values_are_left_alone_and_none_are_fine() -> None:
    values = torch.full((1, 3), 1.1)
    round_stochastically(values, torch.full((1, 3), 65535, dtype=torch.int32))
    assert torch.equal(values, torch.full((1, 3), 1.1))
    nothing = round_stochastically(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.int32))
    assert nothing.shape == (0, 3)
    assert nothing.dtype == torch.bfloat16


def drawn(seed: int, purpose: str, step: int, num_rows: int = 500, num_columns: int = 256) -> Ints:
    bits = random_bits(stream_key(seed, purpose, step), torch.arange(num_rows), num_columns)
    assert bits.dtype == torch.int32
    result: Ints = bits.numpy().astype(np.int64)
    return result


def excess(counts: npt.NDArray[np.int64]) -> float:
    """Return by how many standard deviations a chi-square of equal odds exceeds its mean."""
    mean = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - mean) ** 2 / mean).sum() - freedom) / math.sqrt(2 * freedom))


def test_bits_are_sixteen_and_uniform() -> None:
    bits = np.concatenate([drawn(3, "weight", step).ravel() for step in range(16)])
    assert bits.min() == 0
    assert bits.max() == 65535
    for part, size in ((bits, 65536), (bits >> 8, 256), (bits & 255, 256)):
        assert abs(excess(np.bincount(part, minlength=size))) < 6


def centred(bits: Ints) -> Floats:
    """Return draws of mean 0 and variance 1."""
    return (bits.astype(np.float64) - 32767.5) / (65536 / math.sqrt(12))


def test_bits_of_near_values_have_nothing_to_do_with_each_other() -> None:
    """Neighbours along rows, columns and steps, and the four corners of a rectangle together."""
    now, later = (centred(drawn(0, "weight", step)) for step in (1, 2))
    products = {
        "rows": now[1:] * now[:-1],
        "columns": now[:, 1:] * now[:, :-1],
        "steps": now * later,
        "corners": now[1:, 1:] * now[1:, :-1] * now[:-1, 1:] * now[:-1, :-1],
    }
    for name, product in products.items():
        assert abs(product.mean()) * math.sqrt(product.size) < 5, name


def test_a_value_over_many_steps_sees_uniform_independent_bits() -> None:
    history = centred(np.stack([drawn(0, "weight", step, 2, 2) for step in range(4000)]))
    assert (np.abs(history.mean(axis=0)) * math.sqrt(4000) < 5).all()
    assert (np.abs((history**2).mean(axis=0) - 1) < 0.1).all()
    assert (np.abs((history[1:] * history[:-1]).mean(axis=0)) * math.sqrt(4000) < 5).all()


OTHER_STREAMS = [(1, "weight", 1), (0, "exp_avg", 1), (0, "weight", 2), (0, "weight", 11), (11, "weight", 1)]


@pytest.mark.parametrize("other", OTHER_STREAMS)
def test_another_seed_purpose_or_step_draws_other_bits(other: tuple[int, str, int]) -> None:
    ours, theirs = drawn(0, "weight", 1), drawn(*other)
    assert (ours == theirs).mean() < 0.001
    assert abs((centred(ours) * centred(theirs)).mean()) * math.sqrt(ours.size) < 5
    assert np.array_equal(ours, drawn(0, "weight", 1))


@given(st.lists(st.integers(0, 10**9), unique=True, max_size=30), st.integers(0, 9), st.integers(0, 9))
def test_bits_depend_on_the_row_and_the_column_only(rows: list[int], more: int, columns: int) -> None:
    """Not on which other rows are drawn, so not on who owns them, nor on how wide the table is."""
    key = stream_key(5, "weight", 7)
    ids = torch.tensor(sorted(rows), dtype=torch.int64)
    together = random_bits(key, torch.cat([ids, torch.arange(more)]), columns + 2)
    alone = [random_bits(key, ids[place : place + 1], columns) for place in range(len(ids))]
    assert torch.equal(together[: len(ids), :columns], torch.cat([torch.empty(0, columns).int(), *alone]))


def test_keys_are_64_bits_of_either_sign() -> None:
    keys = [stream_key(seed, "weight", step) for seed in range(20) for step in range(20)]
    assert len(set(keys)) == 400
    assert min(keys) < -(2**61)
    assert max(keys) > 2**61
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert stream_key(0, "a1", 1) != stream_key(0, "a", 11)
