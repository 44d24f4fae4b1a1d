"""Optimizers of touched rows, against torch and against their papers in numpy float64.

Stochastic rounding itself is tested in test_rounding.py; here is what it does to training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from rank_functions import Floats, Ints
from torch import Tensor

from kgshard.config import OPTIMIZER_NAMES
from kgshard.errors import ConfigError
from kgshard.optim import OPTIMIZERS, SGD, Adagrad, RowOptimizer, RowStepAdam, RowWiseAdagrad, SparseAdam
from kgshard.optim.base import Rounding
from kgshard.partition import RowPartition
from kgshard.routing import RowGradient

NUM_ROWS, DIM, LR, NUM_STEPS = 12, 5, 0.05, 50
NAMES = sorted(OPTIMIZERS)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
DTYPES = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16)]
"""Of the table and of the state."""


def random_gradients(seed: int) -> Iterator[tuple[Ints, Floats]]:
    """Yield 50 steps of ascending touched rows, at times none, at times all, and gradients of many sizes."""
    source = np.random.default_rng(seed)
    for _ in range(NUM_STEPS):
        rows = np.flatnonzero(source.random(NUM_ROWS) < source.choice([0, 0.2, 0.7, 1]))
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


def torchs(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[int], Floats]:
    """Return how torch trains the rows with sparse gradients."""

    def train(seed: int) -> Floats:
        weight = torch.nn.Parameter(torch.from_numpy(first_weight(seed)).float())
        optimizer = optimizer_class([weight], lr=LR)  # type: ignore[call-arg]
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            for rows, values in random_gradients(seed):
                weight.grad = torch.sparse_coo_tensor(
                    torch.from_numpy(rows)[None], torch.from_numpy(values).float(), (NUM_ROWS, DIM)
                )
                optimizer.step()
        result: Floats = weight.detach().double().numpy()
        return result

    return train


def torchs_adam_for_each_row(seed: int) -> Floats:
    """Every row has a torch.optim.Adam of its own, in float64, that knows of no other row's steps."""
    weights = [torch.nn.Parameter(torch.from_numpy(row)) for row in first_weight(seed)]
    optimizers = [torch.optim.Adam([weight], lr=LR) for weight in weights]
    for rows, values in random_gradients(seed):
        for row, gradient in zip(rows, values, strict=True):
            weights[row].grad = torch.from_numpy(gradient.astype(np.float32).astype(np.float64))
            optimizers[row].step()
    return np.stack([weight.detach().numpy() for weight in weights])


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
    "adam": torchs(torch.optim.SparseAdam),
    "adam-rowstep": torchs_adam_for_each_row,
    "adagrad": paper_adagrad,
    "adagrad-rowwise": paper_rowwise_adagrad,
    "sgd": torchs(torch.optim.SGD),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_50_steps_on_random_rows_equal_the_truth(name: str, seed: int) -> None:
    truth = TRUTHS[name](seed)
    assert np.abs(truth - first_weight(seed)).max() > 2 * LR
    np.testing.assert_allclose(trained(name, seed), truth, rtol=1e-6, atol=2e-6)


def test_adagrad_is_torchs_too() -> None:
    np.testing.assert_allclose(trained("adagrad", 0), torchs(torch.optim.Adagrad)(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_another_optimizer_or_learning_rate_is_noticed(name: str) -> None:
    """Negative control: the truths tell optimizers apart, and a learning rate a hundredth off."""
    for other in OPTIMIZERS:
        difference = np.abs(trained(other, 0) - TRUTHS[name](0)).max()
        assert (difference < 1e-5) == (other == name)
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
    assert optimizer.num_steps == 3


@pytest.mark.parametrize(("late", "lengths"), [(1, 1.0), (1000, 2.514), (10000, 3.162)])
def test_a_row_touched_late_moves_by_lr_only_if_it_has_its_own_step_count(late: int, lengths: float) -> None:
    weights = {cls: torch.zeros(1, 1) for cls in (SparseAdam, RowStepAdam)}
    for cls, weight in weights.items():
        optimizer = cls(weight, lr=0.01)
        optimizer.num_steps = late - 1
        optimizer.step(RowGradient(torch.tensor([0]), torch.full((1, 1), 0.3)))
    assert float(weights[SparseAdam]) == pytest.approx(-0.01 * lengths, rel=1e-3)
    assert float(weights[RowStepAdam]) == pytest.approx(-0.01, rel=1e-6)


def test_row_steps_count_the_touches_of_each_row() -> None:
    optimizer = RowStepAdam(torch.zeros(4, 2), lr=0.1)
    for rows in ([0, 2], [2], [], [0, 1, 2, 3]):
        optimizer.step(RowGradient(torch.tensor(rows, dtype=torch.int64), torch.ones(len(rows), 2)))
    assert optimizer.row_steps.tolist() == [2, 1, 3, 1]
    assert optimizer.row_steps.dtype == torch.int32


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_not_listed_stay_as_they_are(name: str) -> None:
    weight = torch.from_numpy(first_weight(0)).float()
    before = weight.clone()
    optimizer = OPTIMIZERS[name](weight, lr=0.5)
    optimizer.step(row_gradient(np.array([1, 4]), np.ones((2, DIM))))
    for moved in (weight - before, *optimizer.state().values()):
        changed = moved.reshape(NUM_ROWS, -1).any(dim=1)
        assert changed.nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_a_zero_gradient_moves_nothing_and_makes_no_nan(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    for rows in ([0], [0, 1]):
        weight = torch.ones(2, 3, dtype=dtype)
        optimizer = OPTIMIZERS[name](weight, lr=0.5, state_dtype=state_dtype)
        optimizer.step(RowGradient(torch.tensor(rows), torch.zeros(len(rows), 3)))
        assert torch.equal(weight, torch.ones(2, 3, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_a_table_of_no_values_can_be_stepped(name: str, shape: tuple[int, int]) -> None:
    weight = torch.empty(shape, dtype=BFLOAT16)
    optimizer = OPTIMIZERS[name](weight, lr=0.5)
    optimizer.step(RowGradient(torch.empty(0, dtype=torch.int64), torch.empty(0, shape[1])))
    optimizer.step_dense(torch.empty(shape))
    assert weight.shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_state_is_made_on_the_device_it_is_given(name: str) -> None:
    optimizer = OPTIMIZERS[name](torch.zeros(3, 2), lr=0.1, device=torch.device("meta"))
    assert {str(state.device) for state in optimizer.state().values()} <= {"meta"}
    assert np.array_equal(trained(name, 2, device=torch.device("cpu")), trained(name, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", NAMES)
def test_a_table_on_a_gpu_is_trained_as_on_a_cpu(name: str) -> None:
    """With the state beside it or in host memory; rounding's bits are those of the CPU."""
    for (dtype, state_dtype), device in product(DTYPES, ("cpu", "cuda")):
        here = made(name, dtype, state_dtype, torch.from_numpy(first_weight(0)).float())
        there = made(name, dtype, state_dtype, here.weight.cuda(), device=torch.device(device))
        for rows, values in random_gradients(0):
            gradient = row_gradient(rows, values)
            here.step(gradient)
            there.step(RowGradient(gradient.rows.cuda(), gradient.values.cuda()))
        # An ulp of float32 before rounding is now and then an ulp of bfloat16 after it.
        near = torch.isclose(here.weight.double(), there.weight.cpu().double(), rtol=1e-5, atol=1e-5)
        assert near.double().mean() > (0.9 if BFLOAT16 in (dtype, state_dtype) else 0.999)


def test_rowwise_state_is_one_number_for_each_row() -> None:
    assert RowWiseAdagrad(torch.zeros(7, 3), lr=0.1).sum.shape == (7,)
    assert Adagrad(torch.zeros(7, 3), lr=0.1).sum.shape == (7, 3)
    assert SGD(torch.zeros(7, 3), lr=0.1).state() == {}


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_left_alone(name: str) -> None:
    for num_rows in (1, 2):  # all rows, and one of two
        gradient = RowGradient(torch.tensor([0]), torch.full((1, 2), 2.0))
        OPTIMIZERS[name](torch.zeros(num_rows, 2), lr=0.1).step(gradient)
        assert gradient.values.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("name", NAMES)
def test_the_learning_rate_may_change_between_steps(name: str) -> None:
    weight = torch.zeros(2, 1)
    optimizer = OPTIMIZERS[name](weight, lr=0.5)
    touched = RowGradient(torch.tensor([0]), torch.ones(1, 1))
    optimizer.lr = 0.0
    optimizer.step(touched)
    assert float(weight[0]) == 0
    same = torch.zeros(2, 1)
    other = OPTIMIZERS[name](same, lr=0.25)
    other.lr = 0.0
    other.step(touched)
    optimizer.lr, other.lr = 0.25, 0.25
    for one in (optimizer, other):
        one.step(touched)
    assert float(weight[0]) == float(same[0]) < 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": 0.0}, "lr must be > 0, got 0.0"),
        ({"lr": -1.0}, "lr must be > 0, got -1.0"),
        ({"lr": math.nan}, "lr must be > 0, got nan"),
        ({"lr": math.inf}, "lr must be > 0, got inf"),
        ({"state_dtype": torch.float16}, "state_dtype must be float32 or bfloat16, got torch.float16"),
        ({"rounding": "up"}, "rounding must be stochastic or nearest, got 'up'"),
        ({"eps": 0.0}, "eps must be > 0, got 0.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SparseAdam(torch.zeros(1, 1), **{"lr": 0.1, **wrong})
    if "betas" not in wrong:
        with pytest.raises(ConfigError, match=words):
            Adagrad(torch.zeros(1, 1), **{"lr": 0.1, **wrong})


def test_every_optimizer_can_be_named_in_settings() -> None:
    assert sorted(OPTIMIZERS) == sorted(OPTIMIZER_NAMES) == sorted(TRUTHS)


# All rows at once, many rows, and rows that lie strangely in memory.


def made(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype, weight: Tensor, **more: Any
) -> RowOptimizer:
    return OPTIMIZERS[name](weight.to(dtype), lr=LR, state_dtype=state_dtype, seed=3, table="entity", **more)


def assert_same(one: RowOptimizer, other: RowOptimizer, rows: slice = slice(None)) -> None:
    """Bit by bit, the weight and the state of some rows of `other` and all of `one`."""
    assert torch.equal(one.weight, other.weight[rows])
    assert one.state().keys() == other.state().keys()
    for name, state in one.state().items():
        assert torch.equal(state, other.state()[name][rows])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
@pytest.mark.parametrize("dim", [5, 8])  # 8 is moved in words of 16 bytes
def test_a_gradient_of_all_rows_does_what_a_list_of_rows_does(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype, dim: int
) -> None:
    """A row more, never touched, and the same rows are no longer all of them."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(NUM_ROWS + 1, dim, generator=source)
    whole = made(name, dtype, state_dtype, weight[:-1].clone())
    listed = made(name, dtype, state_dtype, weight)
    for _ in range(20):
        gradient = RowGradient(torch.arange(NUM_ROWS), torch.randn(NUM_ROWS, dim, generator=source))
        whole.step(gradient)
        listed.step(gradient)
    assert_same(whole, listed, slice(NUM_ROWS))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_shards_are_trained_bit_for_bit_as_one_table(
    world_size: int, name: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Rounding's bits are those of the global row, and an idle shard counts steps like the others."""
    weight = torch.from_numpy(first_weight(1)).float()
    partition = RowPartition(NUM_ROWS, world_size)
    ranges = [partition.rows_of(rank) for rank in range(world_size)]
    table = made(name, dtype, state_dtype, weight)
    shards = [
        made(name, dtype, state_dtype, weight[rows.start : rows.stop].clone(), first_row=rows.start)
        for rows in ranges
    ]
    for rows, values in random_gradients(1):
        table.step(row_gradient(rows, values))
        for shard, owned in zip(shards, ranges, strict=True):
            ours = (rows >= owned.start) & (rows < owned.stop)
            shard.step(row_gradient(rows[ours] - owned.start, values[ours]))
    for shard, owned in zip(shards, ranges, strict=True):
        assert_same(shard, table, slice(owned.start, owned.stop))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["all", "most"])
def test_a_step_in_blocks_is_one_step(name: str, part: str) -> None:
    """1,500 rows of 1,024 values are two blocks on a CPU; each shard is one."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(1500, 1024, generator=source)
    rows = torch.arange(1500)[torch.rand(1500, generator=source) < {"all": 2.0, "most": 0.9}[part]]
    values = torch.randn(len(rows), 1024, generator=source)
    table = made(name, BFLOAT16, BFLOAT16, weight)
    halves = [made(name, BFLOAT16, BFLOAT16, weight[i : i + 750].clone(), first_row=i) for i in (0, 750)]
    assert len(list(table._blocks(len(rows)))) == 2
    for _ in range(2):
        table.step(RowGradient(rows, values))
        for start, half in zip((0, 750), halves, strict=True):
            ours = (rows >= start) & (rows < start + 750)
            half.step(RowGradient(rows[ours] - start, values[ours]))
    assert table.num_steps == 2
    for start, half in zip((0, 750), halves, strict=True):
        assert_same(half, table, slice(start, start + 750))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "after one value": lambda rows: torch.cat([rows[0, :1], rows.flatten()])[1:].view(rows.shape),
    "left columns": lambda rows: torch.cat([rows, rows], dim=1)[:, : rows.shape[1]],
    "transposed": lambda rows: rows.T.contiguous().T,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_rows_may_lie_in_memory_as_they_like(name: str, layout: str, dtype: torch.dtype) -> None:
    for rows in ([0, 3], [0, 1, 2, 3]):
        plain = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        other = LAYOUTS[layout](plain)
        for weight in (plain, other):
            optimizer = OPTIMIZERS[name](weight, lr=LR)
            for _ in range(2):
                optimizer.step(RowGradient(torch.tensor(rows), torch.full((len(rows), 8), 0.3)))
        assert torch.equal(plain, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_tables_of_other_dtypes_are_trained_in_theirs(name: str, dtype: torch.dtype) -> None:
    for rows in ([0], [0, 1]):
        weight = torch.zeros(2, 8, dtype=dtype)
        OPTIMIZERS[name](weight, lr=0.25).step(RowGradient(torch.tensor(rows), torch.ones(len(rows), 8)))
        assert weight.dtype == dtype
        assert weight[0].tolist() == pytest.approx([-0.25] * 8, rel=1e-3)


# Dense gradients.

TORCHS_DENSE: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adam-rowstep": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


@pytest.mark.parametrize("name", sorted(TORCHS_DENSE))
@pytest.mark.parametrize("shape", [(), (1,), (6,), (4, 3), (2, 3, 4), (3, 1, 2, 2)])
def test_a_dense_gradient_of_any_shape_does_what_torchs_optimizer_does(
    name: str, shape: tuple[int, ...]
) -> None:
    source = torch.Generator().manual_seed(0)
    ours = torch.randn(shape, generator=source)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = OPTIMIZERS[name](ours, lr=LR)
    torchs_own = TORCHS_DENSE[name]([theirs], lr=LR)  # type: ignore[call-arg]
    for step in range(30):
        if name == "adam":  # torch.optim.SparseAdam's eps in torch.optim.Adam's formula
            torchs_own.param_groups[0]["eps"] = 1e-8 / math.sqrt(1 - 0.999 ** (step + 1))
        gradient = torch.randn(shape, generator=source) * 10.0 ** (step % 4 - 2)
        optimizer.step_dense(gradient)
        theirs.grad = gradient.clone()
        torchs_own.step()
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert float((ours - start).abs().max()) > LR
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=2e-6)


def test_a_dense_parameter_has_one_rowwise_sum_for_each_first_index() -> None:
    gradient = torch.arange(24.0).view(2, 3, 4)
    weight = torch.zeros(2, 3, 4)
    optimizer = RowWiseAdagrad(weight, lr=0.5)
    optimizer.step_dense(gradient)
    means = gradient.numpy().astype(np.float64).reshape(2, 12)
    means = (means**2).mean(axis=1)
    np.testing.assert_allclose(optimizer.sum.numpy(), means, rtol=1e-6)
    wanted = -0.5 * gradient.numpy() / np.sqrt(means)[:, None, None]
    np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "size", "same"), [("adam-rowstep", 1e-8, True), ("adam", 1e-8, False), ("adam", 0.1, True)]
)
def test_where_eps_enters_shows_for_tiny_gradients_only(name: str, size: float, same: bool) -> None:
    """Row steps have torch.optim.Adam's eps, one step count has torch.optim.SparseAdam's."""
    ours, theirs = torch.zeros(2, 2), torch.nn.Parameter(torch.zeros(2, 2))
    optimizer, torchs_own = OPTIMIZERS[name](ours, lr=LR), torch.optim.Adam([theirs], lr=LR)
    for _ in range(3):
        theirs.grad = torch.full((2, 2), size)
        optimizer.step_dense(theirs.grad)
        torchs_own.step()
    assert torch.allclose(ours, theirs, rtol=1e-5) == same


def test_a_gradient_that_lies_permuted_is_taken_by_its_indices() -> None:
    weight, gradient = torch.zeros(2, 3, 4), torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0)
    SGD(weight, lr=1.0).step_dense(gradient)
    assert weight.tolist() == (-gradient).tolist()


def test_a_dense_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gradient: expected shape \(2, 3\), got \(3, 2\)"):
        SGD(torch.zeros(2, 3), lr=1.0).step_dense(torch.zeros(3, 2))


# What bfloat16 does to training.


@pytest.mark.parametrize("name", NAMES)
def test_state_is_float32_unless_asked_otherwise(name: str) -> None:
    weight = torch.ones(3, 2, dtype=BFLOAT16)
    optimizer = OPTIMIZERS[name](weight, lr=0.5)
    optimizer.step(RowGradient(torch.tensor([2]), torch.ones(1, 2, dtype=BFLOAT16)))
    moments = {key: state.dtype for key, state in optimizer.state().items() if key != "row_steps"}
    assert set(moments.values()) <= {FLOAT32}
    assert weight.dtype == BFLOAT16
    assert weight[2].tolist() == pytest.approx([0.5, 0.5], rel=2**-7)  # every first step is lr long here
    halved = OPTIMIZERS[name](weight, lr=0.5, state_dtype=BFLOAT16).state()
    assert {state.dtype for key, state in halved.items() if key != "row_steps"} <= {BFLOAT16}


def decayed_moment(rounding: Rounding, num_steps: int) -> Floats:
    """Return Adam's v of 64 x 64 values, 1 at first, after steps of zero gradients at beta2 = 0.999."""
    optimizer = SparseAdam(torch.zeros(64, 64), lr=0.1, state_dtype=BFLOAT16, rounding=rounding)
    optimizer.exp_avg_sq.fill_(1)
    for _ in range(num_steps):
        optimizer.step_dense(torch.zeros(64, 64))
    result: Floats = optimizer.exp_avg_sq.double().numpy()
    return result


def assert_mean(values: Floats, wanted: float) -> None:
    """Their mean is `wanted` within five standard errors, and they are not all the same."""
    error = values.std() / math.sqrt(values.size)
    assert error > 0
    assert abs(values.mean() - wanted) < 5 * error
    assert 5 * error < abs(wanted) / 20


def test_a_second_moment_decays_with_stochastic_rounding_and_never_with_nearest() -> None:
    """The negative control is what rounds to nearest: 0.999 of v is nearer to v than to the next number."""
    assert (decayed_moment("nearest", 500) == 1).all()
    assert_mean(decayed_moment("stochastic", 500), 0.999**500)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_small_updates_of_a_bfloat16_table_add_up_with_stochastic_rounding_only(rounding: Rounding) -> None:
    """Each is a quarter of the distance of neighbours, which nearest rounds away."""
    weight = torch.full((64, 64), -1.0, dtype=BFLOAT16)
    optimizer = SGD(weight, lr=2**-9, rounding=rounding)
    for _ in range(100):
        optimizer.step_dense(torch.ones(64, 64))
    if rounding == "nearest":
        assert (weight == -1).all()
    else:
        assert_mean(weight.double().numpy(), -1 - 100 * 2**-9)


def accumulated(rounding: Rounding) -> Floats:
    """Return Adagrad's sums, 8 at first, after 200 gradients of 0.1."""
    optimizer = Adagrad(torch.zeros(64, 64), lr=0.1, state_dtype=BFLOAT16, rounding=rounding)
    optimizer.sum.fill_(8)
    for _ in range(200):
        optimizer.step_dense(torch.full((64, 64), 0.1))
    result: Floats = optimizer.sum.double().numpy()
    return result


def test_adagrads_sum_grows_with_stochastic_rounding_and_stops_with_nearest() -> None:
    assert (accumulated("nearest") == 8).all()
    assert_mean(accumulated("stochastic"), 8 + 200 * 0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtypes", DTYPES[1:], ids=str)
def test_bfloat16_training_follows_float32(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The mean over 4,096 values that all see the same gradients is that of float32, within its error."""
    wanted, weight = torch.full((1, 1), 0.75), torch.full((64, 64), 0.75, dtype=dtypes[0])
    exact = OPTIMIZERS[name](wanted, lr=0.002)
    optimizer = OPTIMIZERS[name](weight, lr=0.002, state_dtype=dtypes[1])
    for gradient in np.random.default_rng(0).normal(0.3, 1, size=60):
        exact.step_dense(torch.full((1, 1), gradient))
        optimizer.step_dense(torch.full((64, 64), gradient))
    values, truth = weight.double().numpy() - 0.75, float(wanted) - 0.75
    assert abs(truth) > 0.01
    # The root of a rounded moment is not the root of its mean: hence a percent besides the error.
    assert abs(values.mean() - truth) < 5 * values.std() / 64 + abs(truth) / 100


def test_the_table_and_each_moment_are_rounded_with_bits_of_their_own() -> None:
    """One step that leaves m, v and w half way between two numbers, so that each goes up at even odds."""
    half = 1 + 2**-8
    weight = torch.zeros(64, 64, dtype=BFLOAT16)
    optimizer = SparseAdam(weight, lr=half, betas=(0.0, 1 - 1 / half), state_dtype=BFLOAT16)
    optimizer.step_dense(torch.full((64, 64), half))
    away = [table.abs().double() > half for table in (weight, optimizer.exp_avg, optimizer.exp_avg_sq)]
    for place, one in enumerate(away):
        assert 0.4 < one.double().mean() < 0.6
        for other in away[:place]:
            assert 0.4 < (one == other).double().mean() < 0.6


def rounded_once(**settings: Any) -> Tensor:
    weight = torch.ones(64, 64, dtype=BFLOAT16)
    SGD(weight, lr=2**-9, **settings).step_dense(torch.ones(64, 64))
    return weight


def test_runs_repeat_and_another_seed_or_table_is_another_run() -> None:
    assert torch.equal(rounded_once(seed=1, table="entity"), rounded_once(seed=1, table="entity"))
    ours = rounded_once(seed=1, table="entity")
    for other in ({"seed": 2, "table": "entity"}, {"seed": 1, "table": "relation"}):
        assert not torch.equal(ours, rounded_once(**other))
    shifted = rounded_once(seed=1, table="entity", first_row=1)
    assert torch.equal(ours[1:], shifted[:-1])


def test_float32_tables_know_nothing_of_rounding() -> None:
    weights = [torch.zeros(3, 2) for _ in range(2)]
    one = SparseAdam(weights[0], lr=0.1, seed=1)
    other = SparseAdam(weights[1], lr=0.1, seed=2, rounding="nearest")
    for optimizer in (one, other):
        optimizer.step_dense(torch.full((3, 2), 0.1))
    assert_same(one, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_weight_state_and_step_count_are_all_there_is_to_resume_from(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    steps = list(random_gradients(4))
    straight = made(name, dtype, state_dtype, torch.from_numpy(first_weight(4)).float())
    for rows, values in steps[:25]:
        straight.step(row_gradient(rows, values))
    resumed = made(name, dtype, state_dtype, straight.weight.clone())
    resumed.num_steps = straight.num_steps
    for key, state in resumed.state().items():
        state.copy_(straight.state()[key])
    for optimizer in (straight, resumed):
        for rows, values in steps[25:]:
            optimizer.step(row_gradient(rows, values))
    assert_same(straight, resumed)
    assert straight.num_steps == resumed.num_steps == NUM_STEPS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_no_gradient_is_too_small_or_too_large_for_bfloat16_to_stay_finite(name: str, size: float) -> None:
    """In the state, squares beyond float32 are infinite, as they are without bfloat16."""
    weight = torch.full((2, 8), 1e-40, dtype=BFLOAT16)
    optimizer = OPTIMIZERS[name](weight, lr=0.1, state_dtype=BFLOAT16)
    for sign in (1, -1, 1):
        optimizer.step_dense(torch.full((2, 8), sign * size))
        assert weight.isfinite().all()
