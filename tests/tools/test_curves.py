"""A run's curves are what it recorded, and a picture appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from graphs import begin_run
from kgshard_tools.curves import draw_curves, read_curves

from kgshard.errors import ConfigError, RunError
from kgshard.training.metrics_log import MetricsLog

METRICS = {"mrr": 0.25, "mr": 3.0, "hits@1": 0.1, "hits@3": 0.3, "hits@10": 0.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = begin_run(tmp_path / "n$\\foo$", [("a", "r", "b")]).folder
    log = MetricsLog(folder)
    log.epoch(epoch=1, step=10, loss=3.0)
    log.evaluation(epoch=2, step=15, figures={"valid": METRICS})
    log.epoch(epoch=2, step=20, loss=2.0)
    log.close()
    return folder


def test_losses_and_metrics_lie_at_their_epochs(run: Path) -> None:
    curves = read_curves(run)
    assert (curves.epochs, curves.losses) == ([1.0, 2.0], [3.0, 2.0])
    assert curves.evaluated == [1.5]
    assert curves.metrics == {"mrr": [0.25], "hits@10": [0.5], "hits@1": [0.1]}


def test_a_run_that_goes_on_may_be_in_the_middle_of_a_line(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "st')
    assert read_curves(run).losses == [3.0, 2.0]


def test_the_picture_is_a_png_beside_the_run_or_where_it_is_wanted(run: Path, tmp_path: Path) -> None:
    assert draw_curves(run) == run / "curves.png"
    other = draw_curves(run, tmp_path / "other.png")
    for path in (run / "curves.png", other):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("out", ["run.json", "nowhere/curves.png"])
def test_nothing_else_is_overwritten_or_made(run: Path, out: str) -> None:
    before = (run / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"expected a file ending in \.png, in a folder that exists"):
        draw_curves(run, run / out)
    assert (run / "run.json").read_bytes() == before


NO_EPOCH = json.dumps({"epoch": 0, "step": 1, "loss": 1.0})


@pytest.mark.parametrize("content", ["", "{}", f"{NO_EPOCH}\n", "[\n"])
def test_records_that_are_none_are_refused(run: Path, content: str) -> None:
    (run / "metrics.jsonl").write_text(content)
    with pytest.raises(RunError, match=r"metrics\.jsonl: "):
        draw_curves(run)
    assert not (run / "curves.png").exists()


def test_tensorboard_reads_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, tensorboard=True)
    log.epoch(epoch=1, step=10, loss=3.0)
    log.evaluation(epoch=1, step=10, figures={"valid": METRICS})
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 3.0)]
    assert [event.value for event in events.Scalars("valid/hits_at_10")] == [0.5]
