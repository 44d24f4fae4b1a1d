"""Updates in one pass: what the papers say, and what torch's operations do where there is no kernel."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kgshard.optim import OPTIMIZERS, kernels
from kgshard.routing import RowGradient

NAMES = ("adam", "adam-rowstep", "adagrad", "adagrad-rowwise")
RATE = 0.1

needs_kernels = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build kernels with")


def gradients(num_rows: int, width: int, seed: int) -> list[RowGradient]:
    """Return those of four steps, each of a random half of the rows."""
    source = np.random.default_rng(seed)
    chosen = [np.flatnonzero(source.random(num_rows) < 0.5) for _ in range(4)]
    return [
        RowGradient(torch.from_numpy(rows), torch.from_numpy(source.normal(size=(len(rows), width))).float())
        for rows in chosen
    ]


def trained(name: str, weight: torch.Tensor, steps: list[RowGradient]) -> list[torch.Tensor]:
    """Return the rows and the state after some steps."""
    optimizer = OPTIMIZERS[name](weight.clone(), lr=RATE)
    for gradient in steps:
        optimizer.step(gradient)
    return [optimizer.weight, *optimizer.state().values()]


def truth(
    name: str, weight: torch.Tensor, steps: list[RowGradient]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the rows after some steps, row by row, in float64."""
    w = weight.double().numpy().copy()
    m, v, own = np.zeros_like(w), np.zeros_like(w), np.zeros(len(w))
    for step, gradient in enumerate(steps, start=1):
        for row, g in zip(gradient.rows.tolist(), gradient.values.double().numpy(), strict=True):
            own[row] += 1
            t = own[row] if name == "adam-rowstep" else step
            if name.startswith("adam"):
                m[row] = 0.9 * m[row] + 0.1 * g
                v[row] = 0.999 * v[row] + 0.001 * g * g
                root = np.sqrt(v[row] / (1 - 0.999**t)) + 1e-8 / np.sqrt(1 - 0.999**t) ** (name == "adam")
                w[row] -= RATE * m[row] / (1 - 0.9**t) / root
            else:
                v[row] += (g * g).mean() if name == "adagrad-rowwise" else g * g
                w[row] -= RATE * g / (np.sqrt(v[row]) + 1e-10)
    return w


@needs_kernels
def test_kernels_were_compiled() -> None:
    """Else everything below would test torch's operations."""
    assert kernels._library() is not None


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
@given(num_rows=st.integers(1, 9), width=st.integers(1, 40), seed=st.integers(0, 1000))
def test_a_kernel_does_what_the_paper_says_on_rows_of_any_width(
    name: str, num_rows: int, width: int, seed: int
) -> None:
    steps, weight = gradients(num_rows, width, seed), torch.randn(num_rows, width)
    rows = trained(name, weight, steps)[0].double().numpy()
    np.testing.assert_allclose(rows, truth(name, weight, steps), rtol=1e-5, atol=1e-5)
    touched = {row for gradient in steps for row in gradient.rows.tolist()}
    untouched = [row for row in range(num_rows) if row not in touched]
    assert np.array_equal(rows[untouched], weight[untouched].numpy())


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_torchs_operations_do_the_same_where_there_is_no_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, weight = gradients(50, 24, seed=1), torch.randn(50, 24)
    ours = trained(name, weight, steps)
    monkeypatch.setattr(kernels, "_library", lambda: None)
    for one, other in zip(ours, trained(name, weight, steps), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_threads_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, weight = gradients(5000, 64, seed=2), torch.randn(5000, 64)
    results = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        results.append(trained(name, weight, steps))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("rows", [[0, 4], [-1, 2]])
def test_rows_that_the_table_has_not_reach_no_kernel(rows: list[int]) -> None:
    gradient = RowGradient(torch.tensor(rows), torch.ones(2, 3))
    assert not kernels.can_update(gradient, torch.zeros(4, 3))


def test_the_environment_can_turn_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGSHARD_KERNELS", "0")
    assert kernels._library.__wrapped__() is None
