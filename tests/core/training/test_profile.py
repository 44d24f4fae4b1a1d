"""`kgshard train --profile`: where a step's time goes, and the least it could take."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from graphs import write_graph

import kgshard.api
from kgshard.config import TrainConfig
from kgshard.optim import SparseAdam
from kgshard.routing import RowGradient
from kgshard.stages import Stage, measured, stage
from kgshard.training.profile import Limits, profile_of


def test_a_stage_has_its_own_time_and_not_that_of_stages_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at this clock finds that a second went by."""
    ticks = count()
    monkeypatch.setattr("kgshard.stages.time.perf_counter", lambda: float(next(ticks)))
    with measured() as stages:
        for _ in range(2):
            with stage("outer") as work:
                work.moves(3)
                with stage("inner") as part:
                    part.multiplies(5)
                with stage("inner"):
                    pass
    # outer, inner, outer, inner, outer: a second each.
    assert stages == {"outer": Stage(6.0, 6, 0), "inner": Stage(4.0, 0, 10)}


def test_who_waits_is_asked_before_each_look_at_the_clock() -> None:
    looks: list[str] = []
    with measured(lambda: looks.append("settled")), stage("one"):
        looks.append("inside")
    assert looks == ["settled", "inside", "settled"]


def test_nothing_is_measured_outside_a_measured_block() -> None:
    with measured() as stages:
        pass
    with stage("later") as work:
        work.moves(1)
    assert stages == {}


def test_a_floor_is_the_longer_of_moving_and_multiplying() -> None:
    limits = Limits(bytes_per_second=10.0, flops_per_second=100.0)
    assert limits.floor(Stage(0.0, 20, 100)) == 2.0
    assert limits.floor(Stage(0.0, 20, 500)) == 5.0
    assert limits.best(Limits(30.0, 1.0)) == Limits(30.0, 100.0)


def test_a_profile_is_of_one_step_and_backward_does_twice_the_products() -> None:
    stages = {"scores": Stage(1.0, 100, 1000), "loss": Stage(0.5, 20, 0), "backward": Stage(4.0, 0, 0)}
    profile = profile_of(stages, Limits(10.0, 100.0), seconds=8.0, num_steps=2)
    assert profile["stages"] == {
        "scores": {"milliseconds": 500.0, "floor_milliseconds": 5000.0, "bytes": 50, "flops": 500},
        "loss": {"milliseconds": 250.0, "floor_milliseconds": 1000.0, "bytes": 10, "flops": 0},
        "backward": {"milliseconds": 2000.0, "floor_milliseconds": 10000.0, "bytes": 60, "flops": 1000},
        "other": {"milliseconds": 1250.0, "floor_milliseconds": 0.0, "bytes": 0, "flops": 0},
    }
    assert (profile["milliseconds"], profile["floor_milliseconds"], profile["ratio"]) == (4000, 16000, 0.25)
    assert stages["backward"] == Stage(4.0, 0, 0)


def test_an_update_reads_gradients_and_reads_and_writes_rows_and_their_state() -> None:
    gradient = RowGradient(torch.tensor([1, 4, 7]), torch.ones(3, 8))
    with measured() as stages:
        SparseAdam(torch.zeros(10, 8), lr=0.1).step(gradient)
    assert stages["optimizer"].num_bytes == 3 * 8 * 4 * (1 + 2 * 3)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_training_tells_the_work_of_its_steps(tmp_path: Path, nproc: int) -> None:
    """40 triples in steps of 20 ask 40 questions each, a half on each of two ranks, of 16 negatives."""
    triples = [(f"e{i}", "next", f"e{(i + 1) % 40}") for i in range(40)]
    graph = write_graph(tmp_path / "graph", triples, triples[:1], triples[:1])
    config = TrainConfig(dim=8, epochs=3, batch_size=20, negatives=16, device="cpu", optimizer="adam")
    result = kgshard.api.train_config(graph, tmp_path / "run", config, nproc, quiet=True, profile=True)
    profile, stages = result["profile"], result["profile"]["stages"]
    assert profile["steps"] == 6
    assert sum(each["milliseconds"] for each in stages.values()) == pytest.approx(profile["milliseconds"])
    assert stages["scores"]["flops"] == 2 * (40 // nproc) * 16 * 8
    assert stages["backward"]["flops"] == 2 * stages["scores"]["flops"]
    assert stages["loss"]["bytes"] == 2 * (40 // nproc) * 16 * 4
    assert (stages["rows exchanged"]["bytes"] > 0) == (nproc > 1)
