"""A run keeps its newest checkpoint and the one that did best on valid, and opens either by name."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import begin_run, ring, save_tables
from ranking_functions import random_tables

from kgshard import checkpoint as module
from kgshard.errors import RankFailureError, RunError
from kgshard.runs import Run, open_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin_run(tmp_path, ring(5), model="distmult", dim=4)


def save(run: Run, step: int, *, best: bool = False, **how: Any) -> None:
    """Save tables drawn by step."""
    save_tables(run, *random_tables(run, step), step=step, best=best, **how)


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def steps(run: Run) -> list[int]:
    """Return the steps of the best, the newest and the default checkpoint."""
    opened = open_run(run.folder)
    return [opened.open_checkpoint(name).step for name in ("best", "latest", None)]


def test_checkpoints_that_are_neither_best_nor_newest_are_removed(run: Run) -> None:
    save(run, 1)
    assert checkpoints(run) == ["step-00000001"]
    save(run, 2, best=True)
    assert checkpoints(run) == ["step-00000002"]
    save(run, 3)
    assert checkpoints(run) == ["step-00000002", "step-00000003"]
    save(run, 4)
    assert checkpoints(run) == ["step-00000002", "step-00000004"]
    assert steps(run) == [2, 4, 2]
    save(run, 5, best=True)
    assert checkpoints(run) == ["step-00000005"]
    save(run, 6)
    assert checkpoints(run) == ["step-00000005", "step-00000006"]
    assert steps(run) == [5, 6, 5]


def test_the_best_is_opened_where_there_is_one_else_the_newest(run: Run) -> None:
    for step, best, opened in ((1, False, 1), (2, True, 2), (3, False, 2)):
        save(run, step, best=best)
        tables = open_run(run.folder).checkpoint
        assert tables.step == opened
        np.testing.assert_array_equal(tables.entities.read(range(5)), random_tables(run, opened)[0])


def test_a_checkpoint_is_opened_by_its_name(run: Run) -> None:
    save(run, 1, best=True)
    save(run, 2)
    for name, step in (("step-00000001", 1), ("step-00000002", 2), ("best", 1), ("latest", 2)):
        assert open_run(run.folder).open_checkpoint(name).step == step


def test_a_checkpoint_that_is_not_there_is_refused_by_name(run: Run) -> None:
    with pytest.raises(RunError, match="no checkpoint yet; training did not get that far"):
        run.open_checkpoint("latest")
    save(run, 1)
    with pytest.raises(RunError, match=r"no best checkpoint; .* not evaluated while it trained"):
        run.open_checkpoint("best")
    with pytest.raises(RunError, match=r"no checkpoint step-00000007 \(there are: step-00000001\)"):
        run.open_checkpoint("step-00000007")
    for name in ("newest", "", "step-1", "../../elsewhere", "step-00000001/", "BEST"):
        with pytest.raises(RunError, match="is no checkpoint's name"):
            run.open_checkpoint(name)


@pytest.mark.parametrize("pointer", ["LATEST", "BEST"])
@pytest.mark.parametrize("content", [b"", b"../data\n", b"\xff\xfe", b"step-00000001 and more\n"])
def test_a_pointer_that_names_no_checkpoint_is_refused(run: Run, pointer: str, content: bytes) -> None:
    save(run, 1, best=True)
    (run.folder / pointer).write_bytes(content)
    with pytest.raises(RunError, match="is no checkpoint's name") as caught:
        run.open_checkpoint(pointer.lower())
    assert len(str(caught.value).splitlines()) == 1


def test_only_checkpoints_are_removed(run: Run) -> None:
    save(run, 1)
    others = ["notes", "step-00000001-copy", "old-step-00000001"]
    for name in others:
        (run.folder / "checkpoints" / name).mkdir()
    save(run, 2)
    assert checkpoints(run) == sorted([*others, "step-00000002"])


def test_steps_of_more_than_eight_digits_are_removed_too(run: Run) -> None:
    save(run, 123_456_789)
    save(run, 1_234_567_890)
    assert checkpoints(run) == ["step-1234567890"]


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("what", ["write_blocks", "write_json", "place"])
def test_a_failed_write_leaves_the_best_and_the_newest(
    run: Run, monkeypatch: pytest.MonkeyPatch, what: str, best: bool
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    save(run, 1, best=True)
    save(run, 2)
    before = sorted(run.folder.rglob("*"))
    with monkeypatch.context() as context:
        context.setattr(module, what, fail)
        with pytest.raises((OSError, RankFailureError)):
            save(run, 3, best=best, world_size=2)
    assert sorted(run.folder.rglob("*")) == before
    assert steps(run) == [1, 2, 1]
