"""`kgshard plan` and `kgshard train --dry-run`: what they print, and that they write nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from graphs import ring, tree, write_graph
from kgshard_tools.cli import run

import kgshard.api

GRAPH = ("--num-entities", "180000000", "--num-relations", "1000", "--num-triples", "1000000000")
TIMED = {"triples_per_second": 150.0, "steps": 8}


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = said(capsys, *arguments, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    value: dict[str, Any] = json.loads(out)
    return value


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small graph; steps of all ranks are said to have taken TIMED."""
    monkeypatch.setattr(kgshard.api, "run_on_ranks", lambda task, arguments, nproc: TIMED)
    return write_graph(tmp_path / "graph", ring(300, 3), ring(10))


def test_a_plan_as_json(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = printed(capsys, "plan", graph, "--dim", 8, "--nproc-per-node", 2, "--set", "epochs=3")
    assert set(value) == {
        *("graph", "settings", "nproc_per_node", "rank", "checkpoint", "memory", "gpu", "disk"),
        *("fits", "largest", "suggestions", "speed"),
    }
    assert {"entities": 300, "relations": 3, "triples": 300, "valid": 10}.items() <= value["graph"].items()
    assert (value["settings"]["dim"], value["settings"]["epochs"]) == (8, 3)
    rank = value["rank"]
    assert (rank["entities"], rank["relations"]) == (150 * 8 * 4, 6 * 8 * 4)
    assert rank["total"] == sum(rank.values()) - rank["total"]
    assert value["checkpoint"] == 2 * 306 * 8 * 4
    assert value["memory"]["needed"] > 2 * rank["total"]
    assert (value["fits"], value["suggestions"], value["gpu"]) == (True, [], None)
    assert value["largest"] > 300
    assert value["speed"] == TIMED | {"entities": 300, "epoch_seconds": 2.0, "training_seconds": 6.0}


def test_a_plan_in_lines(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "plan", graph, "--dim", 8, "--nproc-per-node", 2)
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first.startswith(
        "300 entities, 3 relations, 300 triples; complex, dim 8, float32, adagrad; 2 ranks"
    )
    assert "entities     4.8 KB" in lines
    assert "process      220.0 MB" in lines
    assert any(line.startswith("activations  at most ") for line in lines)
    assert lines[-2].startswith("fits; up to ")
    assert lines[-1].startswith("150 triples/s: 2.0 s an epoch, 40.0 s for 20, evaluations apart")


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    dry = printed(capsys, "train", graph, "-o", tmp_path / "run", "--dim", 8, "--dry-run")
    assert tree(tmp_path) == before
    plan = printed(capsys, "plan", graph, "-o", tmp_path, "--dim", 8)
    varying = ("memory", "disk", "largest")
    assert {k: v for k, v in dry.items() if k not in varying} == {
        k: v for k, v in plan.items() if k not in varying
    }


@pytest.mark.usefixtures("graph")
def test_what_does_not_fit_ends_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--dim", 512, "--optimizer", "adam", "--probe", 0)
    code, out, err = said(capsys, "plan", *GRAPH, *settings)
    assert (code, err) == (0, "")
    assert "does not fit (too little memory" in out
    assert "memory is enough with " in out
    assert "triples/s" not in out
    value = printed(capsys, "plan", *GRAPH, *settings)
    assert (value["fits"], value["speed"]) == (False, None)
    assert value["suggestions"]
    assert all(each["memory"] <= value["memory"]["available"] for each in value["suggestions"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give DATA, or all of --num-entities, --num-relations and --num-triples"),
        (GRAPH[:4], "give DATA, or all of --num-entities, --num-relations and --num-triples"),
        (
            ("world", *GRAPH),
            "--num-entities, --num-relations and --num-triples stand in place of DATA; drop one",
        ),
        ((*GRAPH, "--num-entities", 0), "--num-entities must be >= 1, got 0"),
        ((*GRAPH, "--probe", -1), "--probe must be a number of seconds >= 0, got -1.0"),
        ((*GRAPH, "--probe", "nan"), "--probe must be a number of seconds >= 0, got nan"),
        ((*GRAPH, "--nproc-per-node", 0), "--nproc-per-node must be >= 1, got 0"),
        ((*GRAPH, "--margin", 2), "--margin has no effect here: it needs --loss margin or self-adversarial"),
        (("nowhere",), "nowhere: no such folder, and no bundled graph of that name (world)"),
    ],
)
def test_a_plan_of_nothing_is_refused(
    arguments: tuple[object, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "plan", *arguments) == (2, "", f"Error: {words}\n")
