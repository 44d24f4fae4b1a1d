"""Checkpoints hold what the next step needs to know, unless told not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from graphs import ENTITIES, RELATIONS, ring, write_graph

import kgshard
from kgshard.checkpoint import OptimizerState, save_checkpoint
from kgshard.config import OPTIMIZER_NAMES
from kgshard.errors import NonFiniteError
from kgshard.runs import Run, open_run
from kgshard.training import tasks

PARTS = {
    "adagrad": {"sum"},
    "adagrad-rowwise": {"sum"},
    "adam": {"exp_avg", "exp_avg_sq"},
    "adam-rowstep": {"exp_avg", "exp_avg_sq", "row_steps"},
    "sgd": set(),
}


def trained(folder: Path, **settings: Any) -> Run:
    source = write_graph(folder / "source", ring(20, 3), [], [])
    kgshard.train(
        source, out=folder / "run", model="tucker", dim=4, batch_size=8, epochs=2, quiet=True, **settings
    )
    return open_run(folder / "run")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_what_is_saved_is_what_the_optimizer_held(
    here: None, tmp_path: Path, optimizer: str, dtype: str
) -> None:
    held: list[OptimizerState] = []

    def save(*arguments: Any, optimizer: OptimizerState, **settings: Any) -> Path:
        held.append(optimizer)
        return save_checkpoint(*arguments, optimizer=optimizer, **settings)

    with patch.object(tasks, "save_checkpoint", save):
        run = trained(tmp_path, optimizer=optimizer, dtype=dtype)
    checkpoint, [state] = run.checkpoint, held
    saved = checkpoint.manifest.optimizer
    assert saved is not None
    assert (saved.name, saved.num_steps) == (optimizer, checkpoint.step)
    assert checkpoint.step > 0
    expected = {
        f"{table}.{part}": values
        for table, parts in ((ENTITIES, state.entities), (RELATIONS, state.relations))
        for part, values in parts.items()
    }
    assert set(expected) == {
        f"{table}.{part}" for table in (ENTITIES, RELATIONS) for part in PARTS[optimizer]
    }
    assert set(checkpoint.optimizer_tables) == set(expected)
    for name, table in checkpoint.optimizer_tables.items():
        rows = 20 if name.startswith(ENTITIES) else 6
        values = expected[name].float().numpy().reshape(rows, -1)
        np.testing.assert_array_equal(table.read(range(rows)), values)
        assert values.any()
    assert set(checkpoint.optimizer_shared) == {f"core.{part}" for part in PARTS[optimizer]}
    assert len(list(checkpoint.verify())) == len(list(checkpoint.folder.glob("*.safetensors")))


def test_it_is_left_out_when_told_to(here: None, tmp_path: Path) -> None:
    run = trained(tmp_path, save_optimizer=False)
    assert run.checkpoint.manifest.optimizer is None
    assert run.checkpoint.optimizer_tables == {}
    assert not list(run.checkpoint.folder.glob("optim-*"))
    assert "save_optimizer = false" in (run.folder / "config.toml").read_text()


@pytest.mark.parametrize("owner", ["entities", "relations", "shared"])
def test_state_that_is_not_finite_is_no_checkpoint(here: None, tmp_path: Path, owner: str) -> None:
    def save(*arguments: Any, optimizer: OptimizerState, **settings: Any) -> Path:
        state = optimizer.shared["core"] if owner == "shared" else getattr(optimizer, owner)
        state["exp_avg"].view(-1)[3] = float("nan")
        return save_checkpoint(*arguments, optimizer=optimizer, **settings)

    with (
        patch.object(tasks, "save_checkpoint", save),
        pytest.raises(NonFiniteError, match=r"optimizer state 'exp_avg' of .* is not finite"),
    ):
        trained(tmp_path, optimizer="adam")
    assert not list((tmp_path / "run").rglob("*.safetensors"))
