"""Optimizers of touched rows, against torch and against their papers in numpy float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from rank_functions import Floats, Ints

from kgshard.config import OPTIMIZER_NAMES
from kgshard.errors import ConfigError
from kgshard.optim import OPTIMIZERS, Adagrad, RowWiseAdagrad, SparseAdam
from kgshard.routing import RowGradient

NUM_ROWS, DIM, LR, NUM_STEPS = 12, 5, 0.05, 50


def random_gradients(seed: int) -> Iterator[tuple[Ints, Floats]]:
    """Yield 50 steps of ascending touched rows, at times none, and their gradients of many sizes."""
    source = np.random.default_rng(seed)
    for _ in range(NUM_STEPS):
        rows = np.flatnonzero(source.random(NUM_ROWS) < source.choice([0, 0.2, 0.7]))
        yield rows, source.normal(size=(len(rows), DIM)) * 10.0 ** source.integers(-3, 2)


def first_weight(seed: int) -> Floats:
    return np.random.default_rng([seed, 1]).normal(size=(NUM_ROWS, DIM)).astype(np.float32).astype(np.float64)


def row_gradient(rows: Ints, values: Floats) -> RowGradient:
    return RowGradient(torch.from_numpy(rows), torch.from_numpy(values).float())


def trained(name: str, seed: int, lr: float = LR, device: torch.device | None = None) -> Floats:
    """Return float64 rows after 50 steps of one of OPTIMIZERS."""
    weight = torch.from_numpy(first_weight(seed)).float()
    optimizer = OPTIMIZERS[name](weight, lr=lr, device=device)
    for rows, values in random_gradients(seed):
        optimizer.step(row_gradient(rows, values))
    result: Floats = weight.double().numpy()
    return result


def torchs_sparse_adam(seed: int) -> Floats:
    weight = torch.nn.Parameter(torch.from_numpy(first_weight(seed)).float())
    optimizer = torch.optim.SparseAdam([weight], lr=LR)
    for rows, values in random_gradients(seed):
        weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(rows)[None],
            torch.from_numpy(values).float(),
            (NUM_ROWS, DIM),
            check_invariants=True,
        )
        optimizer.step()  # type: ignore[no-untyped-call]
    result: Floats = weight.detach().double().numpy()
    return result


def paper_adagrad(seed: int) -> Floats:
    """Duchi et al. (2011): each value divides by the root of its own sum of squares."""
    weight, total = first_weight(seed), np.zeros((NUM_ROWS, DIM))
    for rows, values in random_gradients(seed):
        for row, gradient in zip(rows, values, strict=True):
            total[row] += gradient**2
            weight[row] -= LR * gradient / (np.sqrt(total[row]) + 1e-10)
    return weight


def paper_rowwise_adagrad(seed: int) -> Floats:
    """One sum for a row: of the mean square of its gradient."""
    weight, total = first_weight(seed), [0.0] * NUM_ROWS
    for rows, values in random_gradients(seed):
        for row, gradient in zip(rows, values, strict=True):
            total[row] += sum(float(g) ** 2 for g in gradient) / DIM
            weight[row] -= LR * gradient / (total[row] ** 0.5 + 1e-10)
    return weight


TRUTHS: dict[str, Callable[[int], Floats]] = {
    "adam": torchs_sparse_adam,
    "adagrad": paper_adagrad,
    "adagrad-rowwise": paper_rowwise_adagrad,
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("seed", range(5))
def test_50_steps_on_random_rows_equal_the_truth(name: str, seed: int) -> None:
    truth = TRUTHS[name](seed)
    assert np.abs(truth - first_weight(seed)).max() > 2 * LR
    np.testing.assert_allclose(trained(name, seed), truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_another_optimizer_or_learning_rate_is_noticed(name: str) -> None:
    """Negative control: the truths tell optimizers apart, and a learning rate a hundredth off."""
    for other in OPTIMIZERS:
        difference = np.abs(trained(other, 0) - TRUTHS[name](0)).max()
        assert (difference < 1e-6) == (other == name)
    assert np.abs(trained(name, 0, lr=LR * 1.01) - TRUTHS[name](0)).max() > 1e-4


def test_adam_counts_a_step_in_which_nothing_was_touched() -> None:
    """As torch's does: one step count for the table."""
    empty = RowGradient(torch.empty(0, dtype=torch.int64), torch.empty(0, 1))
    full = RowGradient(torch.tensor([0]), torch.ones(1, 1))
    weight = torch.zeros(1, 1)
    optimizer = SparseAdam(weight, lr=1.0)
    for gradient in (empty, empty, full):
        optimizer.step(gradient)
    correction = (1 - 0.999**3) ** 0.5 / (1 - 0.9**3)
    assert float(weight) == pytest.approx(-0.1 / 0.001**0.5 * correction, rel=1e-5)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_rows_that_are_not_listed_stay_as_they_are(name: str) -> None:
    weight = torch.from_numpy(first_weight(0)).float()
    before = weight.clone()
    OPTIMIZERS[name](weight, lr=0.5).step(row_gradient(np.array([1, 4]), np.ones((2, DIM))))
    changed = (weight != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_zero_gradient_moves_nothing_and_makes_no_nan(name: str) -> None:
    weight = torch.ones(2, 3)
    optimizer = OPTIMIZERS[name](weight, lr=0.5)
    optimizer.step(RowGradient(torch.tensor([0]), torch.zeros(1, 3)))
    assert torch.equal(weight, torch.ones(2, 3))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_table_of_no_rows_can_be_stepped(name: str) -> None:
    weight = torch.empty(0, 3)
    OPTIMIZERS[name](weight, lr=0.5).step(RowGradient(torch.empty(0, dtype=torch.int64), torch.empty(0, 3)))
    assert weight.shape == (0, 3)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_state_is_made_on_the_device_it_is_given(name: str) -> None:
    meta = OPTIMIZERS[name](torch.zeros(3, 2), lr=0.1, device=torch.device("meta"))
    states = [value for value in vars(meta).values() if isinstance(value, torch.Tensor)]
    assert {str(state.device) for state in states} == {"cpu", "meta"}  # weight and state
    assert np.array_equal(trained(name, 2, device=torch.device("cpu")), trained(name, 2))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_state_is_float32_where_rows_are_bfloat16(name: str) -> None:
    weight = torch.ones(3, 2, dtype=torch.bfloat16)
    optimizer = OPTIMIZERS[name](weight, lr=0.5)
    optimizer.step(RowGradient(torch.tensor([2]), torch.full((1, 2), 3.0, dtype=torch.bfloat16)))
    states = [v for key, v in vars(optimizer).items() if isinstance(v, torch.Tensor) and key != "weight"]
    assert {state.dtype for state in states} == {torch.float32}
    assert weight.dtype == torch.bfloat16
    assert weight[2].tolist() == [0.5, 0.5]  # every first step is lr long here


def test_rowwise_state_is_one_number_for_each_row() -> None:
    assert RowWiseAdagrad(torch.zeros(7, 3), lr=0.1).sum.shape == (7,)
    assert Adagrad(torch.zeros(7, 3), lr=0.1).sum.shape == (7, 3)


def test_the_gradient_is_left_alone() -> None:
    for name in OPTIMIZERS:
        gradient = RowGradient(torch.tensor([0]), torch.full((1, 2), 2.0))
        OPTIMIZERS[name](torch.zeros(1, 2), lr=0.1).step(gradient)
        assert gradient.values.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan")])
def test_a_learning_rate_that_cannot_be_is_refused(lr: float) -> None:
    with pytest.raises(ConfigError, match="lr must be > 0"):
        SparseAdam(torch.zeros(1, 1), lr=lr)


def test_every_optimizer_can_be_named_in_settings() -> None:
    assert sorted(OPTIMIZERS) == sorted(OPTIMIZER_NAMES) == sorted(TRUTHS)
