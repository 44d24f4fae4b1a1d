"""`kgshard evaluate` prints its protocol with every figure, and says of estimates that they are some."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kgshard_tools.cli import run as run_command
from kgshard_tools.results import MAX_GROUPS, Evaluation
from ranking_functions import begin_run, chain, random_tables, save_on_threads

import kgshard
from kgshard.ranking.protocol import protocol_line
from kgshard.runs import Run

NUM_RELATIONS = MAX_GROUPS + 5
STEERING = "\x1b[2Jcleared"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with more relations in test than a table shows; one of them would steer a terminal."""
    links = [(f"e{i % 50}", f"r{i % NUM_RELATIONS}", f"e{(7 * i + i // 50 + 1) % 50}") for i in range(150)]
    links = [(h, STEERING if r == "r0" else r, t) for h, r, t in links]
    run = begin_run(
        tmp_path_factory.mktemp("run"), train=[*chain(50), *links[60:]], test=[*links[:60], links[61]]
    )
    save_on_threads(run, 2, *random_tables(run, 1))
    return run


@pytest.fixture
def said(finished: Run, here: None, capsys: pytest.CaptureFixture[str]) -> Any:
    def say(*arguments: str) -> list[str]:
        code = run_command(["evaluate", str(finished.folder), *arguments])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out.splitlines()

    return say


def test_the_protocol_comes_first_and_then_both_sides_and_each(finished: Run, said: Any) -> None:
    protocol, header, *rows, ties = said()
    result = kgshard.evaluate(finished)
    assert protocol == protocol_line(result["protocol"])
    assert protocol.startswith("test: all 61 triples, 122 queries among all 50 entities")
    assert header.split() == ["mrr", "mr", "hits@1", "hits@3", "hits@10", "amr", "amri"]
    assert [row.split()[0] for row in rows] == ["both", "head", "tail"]
    for row, part in zip(rows, ("metrics", "head", "tail"), strict=True):
        cells = [f"{value:.1f}" if name == "mr" else f"{value:.4f}" for name, value in result[part].items()]
        assert row.split()[1:] == cells
    assert ties.startswith("mrr by ties: realistic 0.")


@pytest.mark.parametrize("side", ["head", "tail"])
def test_one_side_has_one_row(said: Any, side: str) -> None:
    protocol, _, row, _ = said("--sides", side, "--raw", "--ties", "pessimistic")
    assert row.split()[0] == side
    for words in (f"{side}s asked", "filtered by nothing", "pessimistic ranks"):
        assert words in protocol


def test_an_estimate_is_called_one_and_has_its_margin_below_every_row(finished: Run, said: Any) -> None:
    protocol, _, *rows, _ = said("--sample", "20", "--seed", "4")
    assert "ESTIMATE from 20 of 61 triples, seed 4" in protocol
    assert [row.split()[0] for row in rows] == ["both", "±95", "head", "±95", "tail", "±95"]
    low, high = kgshard.evaluate(finished, sample=20, seed=4)["intervals"]["metrics"]["mrr"]
    assert rows[1].split()[2] == f"{(high - low) / 2:.4f}"


def test_a_breakdown_shows_its_largest_groups_and_json_all(finished: Run, said: Any) -> None:
    lines = said("--by", "relation", "--by", "side")
    assert lines[7].split() == [
        *("triples", "mrr", "hits@10", "head", "mrr", "head", "hits@10", "tail", "mrr", "tail", "hits@10"),
        "relation",
    ]
    groups = lines[8 : 8 + MAX_GROUPS]
    counts = [int(line.split()[0]) for line in groups]
    assert counts == sorted(counts, reverse=True)
    assert lines[8 + MAX_GROUPS] == "and 5 more; --json has them all"
    assert [line.split()[-1] for line in lines[-2:]] == ["head", "tail"]
    assert all(line.isprintable() for line in lines)
    [printed] = said("--by", "relation", "--json")
    assert len(json.loads(printed)["by"]["relation"]) == NUM_RELATIONS
    assert any(group["label"] == STEERING for group in json.loads(printed)["by"]["relation"])


def test_a_breakdown_of_an_estimate_says_that_it_is_one(said: Any) -> None:
    assert said("--sample", "20", "--by", "side")[-3].endswith("side (estimates; --json has their intervals)")


def test_a_checkpoint_is_chosen_by_name(finished: Run, said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("latest", "step-00000001"):
        assert "; step-00000001; step 1" in said("--checkpoint", name)[0]
    for name, words in (("best", "no best checkpoint"), ("step-00000002", "step-00000002")):
        assert run_command(["evaluate", str(finished.folder), "--checkpoint", name]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sides", "left"], "--sides: unknown value 'left' (known: both, tail, head)"),
        (["--by", "colour"], "--by: unknown value 'colour' (known: relation, side, degree, cardinality)"),
        (["--ties", "half"], "--ties: unknown value 'half' (known: realistic, optimistic, pessimistic)"),
        (["--sample", "0"], "--sample must be a whole number >= 2, got 0"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    finished: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run_command(["evaluate", str(finished.folder), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_an_evaluation_of_an_older_version_is_still_shown() -> None:
    metrics = {"mrr": 0.5, "mr": 2.0, "hits@1": 0.0, "hits@3": 1.0, "hits@10": 1.0}
    protocol = {
        **dict.fromkeys(("triples", "queries", "candidates", "step"), 2),
        "filter": [],
        "sides": ["head", "tail"],
        "split": "test",
        "filtered": False,
        "ties": "realistic",
        "head_queries": "inverse relations",
    }
    result = {"protocol": protocol, "metrics": metrics, "head": metrics, "tail": metrics}
    assert len(Evaluation(result).lines()) == 5
