"""Every argument of setup_fsdp_training about optimizers takes effect or is refused."""

from __future__ import annotations

import copy
import io
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from sharded_models import NUM_RELATIONS, Course, Stranger, resumed, sharded
from torch import Tensor
from worlds import ThreadWorld

from kgshard import optim
from kgshard.errors import ConfigError
from kgshard.exchange import SingleExchange
from kgshard.optim.base import RowOptimizer, Rows
from kgshard.sharded_model.lifecycle import create_fsdp_sharded_model_class


def step(gradient: float = 2.0, **settings: Any) -> tuple[Any, Tensor]:
    """Make one step with a gradient on row 1 alone; return the model and how far each row moved."""
    model = sharded(SingleExchange(), Stranger(), **settings)
    before = model.entity_embeddings.weight.detach().clone()
    (model.entity_embeddings(torch.tensor([1])) * gradient).sum().backward()
    model.entity_optimizer.step()
    return model, (model.entity_embeddings.weight.detach() - before)[:, 0]


class Leap(RowOptimizer):
    """Moves touched rows by a number."""

    def __init__(self, weight: Tensor, *, lr: float, far: float = 1.0, **storage: Any) -> None:
        super().__init__(weight, lr=lr, **storage)
        self.far = far

    def _update(self, rows: Rows, gradients: Tensor) -> Tensor:
        return torch.full_like(gradients, self.far)


# One step from zero state moves a value with gradient g by this much.
MOVES: dict[str, tuple[type | None, dict[str, Any], float]] = {
    "default": (None, {}, -0.1),
    "default with eps": (None, {"eps": 2.0, "betas": (0.5, 0.75)}, -0.1 * 2 / (2 + 2 / 0.25**0.5)),
    "ours": (optim.SparseAdam, {}, -0.1),
    "torch's sparse adam": (torch.optim.SparseAdam, {}, -0.1),
    "adagrad": (torch.optim.Adagrad, {}, -0.1),
    "adagrad with eps": (torch.optim.Adagrad, {"eps": 2.0}, -0.1 * 2 / (2 + 2)),
    "our adagrad": (optim.Adagrad, {"eps": 6.0}, -0.1 * 2 / (2 + 6)),
    "row-wise adagrad": (optim.RowWiseAdagrad, {}, -0.1),
    "sgd": (torch.optim.SGD, {}, -0.2),
    "our sgd": (optim.SGD, {}, -0.2),
    "the user's": (Leap, {"far": 3.0}, 3.0),
    "lr said twice, alike": (torch.optim.SGD, {"lr": 0.1}, -0.2),
}


@pytest.mark.parametrize("name", MOVES)
def test_class_and_settings_decide_how_far_a_row_moves(name: str) -> None:
    optimizer_cls, settings, move = MOVES[name]
    _, moved = step(optimizer_cls=optimizer_cls, optimizer_kwargs=settings)
    assert float(moved[1]) == pytest.approx(move, rel=1e-5)
    assert float(moved[[0, 2, 3, 4, 5, 6]].abs().max()) == 0


def test_the_learning_rate_decides_too() -> None:
    _, moved = step(lr=0.25, optimizer_cls=torch.optim.SGD)
    assert float(moved[1]) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("optimizer_cls", "ours"),
    [
        (None, optim.SparseAdam),
        (torch.optim.SparseAdam, optim.SparseAdam),
        (torch.optim.Adagrad, optim.Adagrad),
        (torch.optim.SGD, optim.SGD),
        (optim.RowStepAdam, optim.RowStepAdam),
    ],
)
def test_torchs_classes_mean_ours(optimizer_cls: type | None, ours: type) -> None:
    model = sharded(SingleExchange(), Stranger(), optimizer_cls=optimizer_cls)
    assert type(model.entity_optimizer.rows) is ours


def test_storage_settings_reach_the_optimizer() -> None:
    model, _ = step(optimizer_kwargs={"state_dtype": torch.bfloat16, "rounding": "nearest"}, seed=9)
    rows = model.entity_optimizer.rows
    assert (rows.state_dtype, rows.rounding, rows.seed) == (torch.bfloat16, "nearest", 9)
    assert rows.state()["exp_avg"].dtype == torch.bfloat16


def first_rows(exchange: Any) -> tuple[int, int]:
    model = sharded(exchange, Stranger())
    return model.entity_optimizer.rows.first_row, model.entity_embeddings.start_row


def test_the_optimizer_knows_which_global_rows_it_has() -> None:
    assert ThreadWorld(3).run(first_rows) == [(0, 0), (3, 3), (5, 5)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adam": (
        {"optimizer_cls": torch.optim.Adam},
        r"optimizer_cls: Adam cannot be made to touch only rows with a gradient \(known: torch.optim.Ada",
    ),
    "adamw": ({"optimizer_cls": torch.optim.AdamW}, "optimizer_cls: AdamW cannot be made to touch"),
    "abstract": ({"optimizer_cls": RowOptimizer}, "optimizer_cls: RowOptimizer cannot be made"),
    "no class": ({"optimizer_cls": "adam"}, "optimizer_cls: 'adam' cannot be made"),
    "a function": ({"optimizer_cls": lambda weight: None}, "optimizer_cls: <lambda> cannot be made"),
    "unknown setting": (
        {"optimizer_kwargs": {"beta": 0.9}},
        r"optimizer_kwargs: SparseAdam has no setting beta, did you mean betas\?"
        r" \(known: betas, eps, rounding, state_dtype\)",
    ),
    "torch's setting": (
        {"optimizer_cls": torch.optim.Adagrad, "optimizer_kwargs": {"lr_decay": 0.1}},
        "optimizer_kwargs: Adagrad has no setting lr_decay",
    ),
    "momentum": (
        {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}},
        "optimizer_kwargs: SGD has no setting momentum",
    ),
    "weight": ({"optimizer_kwargs": {"weight": 0}}, "SparseAdam has no setting weight"),
    "device": (
        {"optimizer_kwargs": {"device": "cpu"}},
        "optimizer_kwargs: device is not to be set here; use the argument adam_device",
    ),
    "seed": ({"optimizer_kwargs": {"seed": 1}}, "seed is not to be set here; use the argument seed"),
    "table": ({"optimizer_kwargs": {"table": "x"}}, "optimizer_kwargs: table is not to be set here$"),
    "two rates": ({"optimizer_kwargs": {"lr": 0.2}}, "lr is 0.1, but optimizer_kwargs says 0.2"),
    "no rate": ({"lr": 0.0}, "lr must be > 0, got 0.0"),
    "rate nan": ({"lr": math.nan}, "lr must be > 0, got nan"),
    "rate infinite": ({"lr": math.inf}, "lr must be > 0, got inf"),
    "rate in words": ({"lr": "0.1"}, "lr must be a number > 0, got '0.1'"),
    "rate none": ({"lr": None}, "lr must be a number > 0, got None"),
    "rate true": ({"lr": True}, "lr must be a number > 0, got True"),
    "rate of a tensor": ({"lr": torch.tensor(0.1)}, r"lr must be a number > 0, got tensor\(0.1000\)"),
    "betas": ({"optimizer_kwargs": {"betas": (0.9, 1.0)}}, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
    "one beta": ({"optimizer_kwargs": {"betas": 0.9}}, "optimizer_kwargs: SparseAdam refuses .*betas"),
    "eps": ({"optimizer_kwargs": {"eps": -1.0}}, "eps must be > 0, got -1.0"),
    "rounding": (
        {"optimizer_kwargs": {"rounding": "up"}},
        "rounding must be stochastic or nearest, got 'up'",
    ),
    "no device": ({"adam_device": "nowhere"}, "adam_device: .*nowhere"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_effect_is_refused(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        sharded(SingleExchange(), Stranger(), **settings)


# --- an ordinary optimizer


def test_a_scheduler_sets_the_learning_rate() -> None:
    model = sharded(SingleExchange(), Stranger(), optimizer_cls=torch.optim.SGD)
    optimizer = model.entity_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    moves = []
    for _ in range(3):
        before = model.entity_embeddings.weight.detach().clone()
        optimizer.zero_grad()
        model.entity_embeddings(torch.tensor([4])).sum().backward()
        optimizer.step()
        scheduler.step()
        moves.append(float((before - model.entity_embeddings.weight.detach())[4, 0]))
    assert moves == pytest.approx([0.1, 0.05, 0.025], rel=1e-4)


def test_a_closure_is_evaluated_with_gradients() -> None:
    model = sharded(SingleExchange(), Stranger(), optimizer_cls=torch.optim.SGD)

    def closure() -> float:
        loss = model.entity_embeddings(torch.tensor([4])).sum()
        loss.backward()
        return float(loss.detach())

    before = model.entity_embeddings.weight.detach()[4].clone()
    assert model.entity_optimizer.step(closure) == pytest.approx(float(before.sum()))
    assert torch.allclose(model.entity_embeddings.weight.detach()[4], before - 0.1)


def test_nothing_moves_without_a_gradient() -> None:
    model, _ = step()
    model.entity_optimizer.zero_grad()
    before = model.entity_embeddings.weight.detach().clone()
    assert model.entity_optimizer.step() is None
    assert torch.equal(model.entity_embeddings.weight.detach(), before)
    assert model.entity_optimizer.rows.num_steps == 1


def test_rows_that_were_moved_are_the_rows_that_are_stepped() -> None:
    model, _ = step()
    model.double()
    before = model.entity_embeddings.weight.detach().clone()
    model.entity_optimizer.zero_grad()
    model.entity_embeddings(torch.tensor([1])).sum().backward()
    model.entity_optimizer.step()
    assert before.dtype == torch.float64
    assert float((model.entity_embeddings.weight.detach() - before)[1].abs().min()) > 0.01


def plan(optimizer: type) -> Course:
    source = np.random.default_rng(5)
    columns = [source.integers(0, size, size=(6, 8)) for size in (7, NUM_RELATIONS, 7)]
    return Course(list(np.stack(columns, axis=2)), source.normal(size=8), optimizer)


@pytest.mark.parametrize("optimizer", [optim.SparseAdam, optim.RowStepAdam, optim.RowWiseAdagrad, optim.SGD])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_dict_carries_all_that_the_next_step_needs(optimizer: type, world_size: int) -> None:
    for straight, in_two in ThreadWorld(world_size).run(resumed, Stranger(), plan(optimizer), 3):
        assert torch.equal(straight, in_two)


def test_state_of_other_rows_is_refused() -> None:
    other = sharded(SingleExchange(), Stranger(5)).entity_optimizer.state_dict()
    with pytest.raises(ValueError, match="optimizer state of entity rows: expected"):
        sharded(SingleExchange(), Stranger(7)).entity_optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="optimizer state of entity rows: expected"):
        sharded(SingleExchange(), Stranger(5), optimizer_cls=optim.Adagrad).entity_optimizer.load_state_dict(
            other
        )


STATES_OF_NOTHING: dict[str, dict[str, Any]] = {
    "empty": {},
    "without state": {"param_groups": [{"params": [0], "lr": 1.0}]},
    "no step yet": {"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]},
    "another parameter": {"state": {1: {"num_steps": 3}}, "param_groups": [{"params": [1]}]},
    "no count": {"state": {0: {}}, "param_groups": [{"params": [0]}]},
    "torch's": {"state": {0: {"step": 1, "exp_avg": torch.zeros(7, 4)}}, "param_groups": [{"params": [0]}]},
}


@pytest.mark.parametrize("name", STATES_OF_NOTHING)
@pytest.mark.parametrize("optimizer_cls", [optim.SparseAdam, optim.SGD])
def test_a_state_without_ours_is_refused(name: str, optimizer_cls: type) -> None:
    optimizer = sharded(SingleExchange(), Stranger(), optimizer_cls=optimizer_cls).entity_optimizer
    with pytest.raises(ValueError, match=r"optimizer state of entity rows: expected \{'num_steps': \(\)"):
        optimizer.load_state_dict(STATES_OF_NOTHING[name])
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("part", ["model", "entity_optimizer", "entity_embeddings"])
def test_what_holds_one_ranks_rows_is_not_copied(part: str) -> None:
    """A copy would step the rows of the original."""
    model = sharded(SingleExchange(), Stranger())
    held = model if part == "model" else getattr(model, part)
    words = (
        f"cannot copy {type(held).__name__}: it holds one rank's rows and a process group; copy state_dict()"
    )
    for copied in (copy.deepcopy, lambda whole: torch.save(whole, io.BytesIO())):
        with pytest.raises(TypeError, match=re.escape(words)):
            copied(held)


def test_a_model_is_copied_before_setup_and_after_its_table_is_gathered() -> None:
    model: Any = create_fsdp_sharded_model_class(Stranger)()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.setup_fsdp_training("cpu", 0.1, seed=3)
    assert torch.equal(model.entity_embeddings.weight, twin.entity_embeddings.weight)
    model.entity_embeddings = model.gather_entity_embeddings_on_rank_zero()
    whole = copy.deepcopy(model).entity_embeddings.weight
    assert torch.equal(whole, model.entity_embeddings.weight)
    assert whole.data_ptr() != model.entity_embeddings.weight.data_ptr()
