"""`kgshard predict` and `kgshard neighbors`: one question, batches, streams, and what they say and cost."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from graphs import make_run, ring
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.cli import run

from kgshard.runs import Run

KGSHARD = [sys.executable, "-m", "kgshard"]
PATIENCE = 60
"""Seconds after which an answer is not coming."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that tests only read; e0 has nine tails of r0."""
    train = [*ring(40, 2), *(("e0", "r0", f"e{i}") for i in range(2, 10)), ("Zürich", "r1", "-")]
    folder = tmp_path_factory.mktemp("finished")
    return make_run(folder, train, [("e0", "r0", "e20")], model="complex", dim=8, world_size=2)


@pytest.fixture(scope="module")
def model(finished: Run) -> TrainedModel:
    return load(finished.folder)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answers_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    """Return what a command prints as NDJSON."""
    code, out, err = said(capsys, *arguments)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.split("\n")[:-1]]


def labels(answers: dict[str, Any]) -> list[str]:
    return [result["label"] for result in answers["results"]]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (("--head", "e0", "--relation", "r0"), "tail"),
        (("--relation", "r0", "--tail", "e5"), "head"),
        (("--head", "e0", "--tail", "e5"), "relation"),
    ],
)
def test_any_two_parts_ask_for_the_third(
    finished: Run, model: TrainedModel, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], asked: str
) -> None:
    [found] = answers_of(capsys, "predict", finished.folder, *given, "--known", "--json")
    names = dict(zip((option.removeprefix("--") for option in given[::2]), given[1::2], strict=True))
    assert found["query"]["asked"] == asked
    ask = {"tail": model.predict_tails, "head": model.predict_heads, "relation": model.predict_relations}[
        asked
    ]
    assert found == ask(**names, known=True).to_dict()  # type: ignore[operator]


def test_candidates_seen_and_a_least_score_narrow_the_answers(
    finished: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ask = ("predict", finished.folder, "--head", "e30", "--relation", "r0", "--json", "-k", 99, "--known")
    [everything] = answers_of(capsys, *ask)
    (tmp_path / "some.txt").write_text("e1\nZürich\r\n")
    [some] = answers_of(capsys, *ask, "--candidates", tmp_path / "some.txt")
    assert labels(some) == [label for label in labels(everything) if label in ("e1", "Zürich")]
    [seen] = answers_of(capsys, *ask, "--seen")
    tails = {f"e{i}" for i in (*range(1, 40, 2), *range(2, 10))}
    assert labels(seen) == [label for label in labels(everything) if label in tails]
    least = everything["results"][4]["score"]
    [best] = answers_of(capsys, *ask, "--min-score", least)
    assert labels(best) == labels(everything)[:5]
    [exact] = answers_of(capsys, *ask, "--exact")
    assert exact == everything


def test_a_file_of_questions_is_answered_line_by_line(
    finished: Run, model: TrainedModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "q.tsv").write_text("e0\tr0\t\n\tr1\t-\n\nZürich\t\te3\n")
    found = answers_of(capsys, "predict", finished.folder, "--queries", tmp_path / "q.tsv", "-k", 3)
    assert found == [
        model.predict_tails("e0", "r0", 3).to_dict(),
        model.predict_heads("r1", "-", 3).to_dict(),
        model.predict_relations("Zürich", "e3", 3).to_dict(),
    ]


def test_a_file_of_answers_is_reported_as_every_file_is(
    finished: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "q.tsv").write_text("e0\tr0\t\ne1\tr0\t\n")
    ask = ("predict", finished.folder, "--queries", tmp_path / "q.tsv", "-k", 3)
    out = tmp_path / "made" / "answers.parquet"
    [written] = answers_of(capsys, *ask, "-o", out, "--json")
    assert written["files"] == [str(out)]
    assert (written["questions"], written["rows"], written["failed"]) == (2, 6, 0)
    assert written["bytes"] == out.stat().st_size
    assert written["seconds"] > 0
    assert pq.read_table(out).column("head").to_pylist() == ["e0"] * 3 + ["e1"] * 3
    code, text, err = said(capsys, *ask, "-o", out)
    assert (code, err) == (0, "")
    assert text.startswith(f"{out}\n2 questions, 6 answers, ")
    assert said(capsys, *ask, "-o", out, "--quiet") == (0, "", "")


def test_a_single_question_can_be_written_to_a_file(
    finished: Run, model: TrainedModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "a.json"
    code, _, err = said(
        capsys, "predict", finished.folder, "--head", "e0", "--relation", "r0", "-o", out, "--quiet"
    )
    assert (code, err) == (0, "")
    assert json.loads(out.read_text()) == [model.predict_tails("e0", "r0").to_dict()]


def test_several_names_have_a_table_each_below_the_name(
    finished: Run, model: TrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, "neighbors", finished.folder, "e0", "Zürich", "-k", 2)
    assert (code, err) == (0, "")
    near = [model.most_similar(name, 2).lines() for name in ("e0", "Zürich")]
    assert out.split("\n") == ["e0", *near[0], "Zürich", *near[1], ""]
    found = answers_of(
        capsys, "neighbors", finished.folder, "e0", "Zürich", "-k", 2, "--json", "--metric", "l1"
    )
    assert found == [model.most_similar(name, 2, metric="l1").to_dict() for name in ("e0", "Zürich")]


def test_neighbours_of_a_file_of_names(
    finished: Run, model: TrainedModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "names.txt").write_text("e0\n-\nZürich\n")
    found = answers_of(capsys, "neighbors", finished.folder, "--queries", tmp_path / "names.txt", "-k", 2)
    assert found == [model.most_similar(name, 2).to_dict() for name in ("e0", "-", "Zürich")]


def test_a_name_that_does_not_exist_ends_a_list_where_it_stands(
    finished: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("neighbors", finished.folder, "e0", "e77", "e1", "-k", 1)
    code, out, err = said(capsys, *ask)
    assert (code, out.split("\n")[0], out.count("\n")) == (2, "e0", 2)
    assert err.startswith("Error: no entity 'e77'. Did you mean:")
    code, out, err = said(
        capsys, "neighbors", finished.folder, "e0", "e77", "e1", "-k", 1, "--on-error", "skip"
    )
    assert (code, out.count("\n")) == (0, 6)
    assert "\ne77\n      no entity 'e77'" in out
    assert err.startswith("1 of 3 questions failed; the first: no entity 'e77'")


def test_errors_that_are_skipped_are_counted_on_stderr(
    finished: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "q.tsv").write_text("e0\tr0\t\ne77\tr0\t\nbad\n")
    ask = ("predict", finished.folder, "--queries", tmp_path / "q.tsv", "--on-error", "skip")
    code, out, err = said(capsys, *ask)
    found = [json.loads(line) for line in out.split("\n")[:-1]]
    assert (code, [each.get("line") for each in found]) == (0, [None, 2, 3])
    assert err.count("\n") == 1
    assert err.startswith(f"2 of 3 questions failed; the first: {tmp_path / 'q.tsv'}:2: no entity 'e77'.")
    assert said(capsys, *ask, "--quiet")[2] == ""
    (tmp_path / "q.tsv").write_text("e77\tr0\t\nbad\n")
    code, out, err = said(capsys, *ask)
    assert (code, out.count("\n"), err.count("\n")) == (2, 2, 1)
    assert err.startswith("Error: no question could be answered; the first: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict"], "give two of --head, --relation and --tail, or --queries"),
        (["predict", "--head", "e0"], "give two of"),
        (["predict", "--head", "e0", "--relation", "r0", "--tail", "e1"], "give two of"),
        (["predict", "--head", "e0", "--queries", "q.tsv"], "give two of"),
        (["predict", "--queries", "q.tsv", "--seen", "--candidates", "c.txt"], "not both"),
        (
            ["predict", "--queries", "q.tsv", "--candidates", "c.txt"],
            "c.txt:2: no entity 'e77'. Did",
        ),
        (["predict", "--queries", "q.tsv", "--candidates", "none.txt"], "none.txt: No such file"),
        (["predict", "--queries", "q.tsv", "--candidates", "empty.txt"], "empty.txt: names no entity"),
        (["predict", "--queries", "q.tsv", "--seen"], "candidates are entities"),
        (["predict", "--queries", "q.tsv", "-k", "0"], "-k must be"),
        (["predict", "--queries", "q.tsv", "-o", "a.csv"], "--out a.csv"),
        (["predict", "--queries", "q.csv"], "q.csv: the name does not tell"),
        (["predict", "--queries", "bad.tsv", "-o", "a.tsv"], "bad.tsv:2: 1 columns, expected 3"),
        (["neighbors"], "give one NAME or more, or --queries"),
        (["neighbors", "e0", "--queries", "n.txt"], "give one NAME or more, or --queries"),
        (["neighbors", "--queries", "n.txt", "-o", "a.json"], "n.txt:2: no entity 'e77'"),
    ],
)
def test_a_mistake_is_one_line_exit_code_2_and_no_file(
    finished: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "q.tsv": "e0\t\te1\n",
        "bad.tsv": "e0\tr0\t\ne1\n",
        "n.txt": "e0\ne77\n",
        "c.txt": "e1\ne77\n",
        "empty.txt": "\n",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    command, *options = arguments
    code, out, err = said(capsys, command, finished.folder, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [*KGSHARD, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as started:
        yield started


def exchange(started: subprocess.Popen[bytes], line: str) -> dict[str, Any]:
    """Send a line, and wait for a line of answer, which may come in parts."""
    assert started.stdin is not None
    assert started.stdout is not None
    started.stdin.write(line.encode() + b"\n")
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([started.stdout], [], [], PATIENCE)
        assert ready, "no answer"
        part = started.stdout.read(1 << 16)
        assert part, "ended"
        text += part
    answer: dict[str, Any] = json.loads(text)
    return answer


def test_a_stream_answers_each_line_before_the_next_comes(finished: Run, model: TrainedModel) -> None:
    with process("predict", finished.folder, "--queries", "-", "-k", 2) as started:
        for name in ("e0", "e1", "Zürich"):
            found = exchange(started, json.dumps({"head": name, "relation": "r1"}))
            assert found == model.predict_tails(name, "r1", 2).to_dict()
        assert started.stdin is not None
        assert started.stderr is not None
        started.stdin.write(b'{"head": "e77", "relation": "r1"}\n')
        message = started.stderr.read()
        assert message.startswith(b"Error: stdin:4: no entity 'e77'. Did you mean")
        assert started.wait() == 2


def test_names_on_stdin_are_answered_as_they_come(finished: Run, model: TrainedModel) -> None:
    with process("neighbors", finished.folder, "-", "-k", 2, "--json") as started:
        for name in ("e0", "-", "Zürich"):
            assert exchange(started, name) == model.most_similar(name, 2).to_dict()
        assert started.stdin is not None
        started.stdin.close()
        assert started.wait() == 0


def test_many_lines_at_once_are_all_answered_in_order(finished: Run) -> None:
    names = [f"e{i % 40}" for i in range(3000)]
    text = "".join(json.dumps({"head": name, "relation": "r0"}) + "\n" for name in names)
    done = subprocess.run(
        [*KGSHARD, "predict", str(finished.folder), "--queries", "-", "-k", "1"],
        input=text.encode(),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line)["query"]["head"] for line in done.stdout.splitlines()] == names


def test_a_reader_of_a_stream_may_leave(finished: Run, tmp_path: Path) -> None:
    (tmp_path / "q.tsv").write_text("e0\tr0\t\n" * 20_000)
    script, more = '"$@" | head -n 2', ["--queries", str(tmp_path / "q.tsv"), "-k", "5"]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script, "sh", *KGSHARD, "predict", str(finished.folder), *more],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 2


def test_a_stream_from_a_closed_stdin_is_refused(finished: Run) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *KGSHARD, "predict", str(finished.folder), "--queries", "-"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"Error: stdin: is closed\n"


def test_labels_that_would_steer_a_terminal_are_shown_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = [*ring(5), ("\x1b[2Jx", "r0", "e0")]
    folder = make_run(tmp_path, train, dim=4).folder
    code, out, _ = said(capsys, "neighbors", folder, "\x1b[2Jx", "e1", "-k", 5)
    assert code == 0
    assert "\x1b" not in out
    assert out.startswith("\\x1b[2Jx\n")


@pytest.mark.parametrize("place", ["data/data.json", "data/entities.parquet", "run.json", "new.ndjson"])
def test_answers_are_never_written_into_a_run(
    finished: Run, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    path = finished.folder / place
    before = path.read_bytes() if path.exists() else None
    for name, *given in (
        ["predict", "--head", "e0", "--relation", "r0"],
        ["neighbors", "e0"],
        ["score", "--head", "e0", "--relation", "r0", "--tail", "e1"],
    ):
        code, _, error = said(capsys, name, finished.folder, *given, "-o", path)
        assert (code, error.count("\n")) == (2, 1)
        assert "which kgshard wrote; choose another folder" in error
        assert (path.read_bytes() if path.exists() else None) == before


def test_answers_do_not_replace_their_questions(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q.ndjson"
    path.write_text('{"head": "e0", "relation": "r0"}\n')
    code, _, error = said(capsys, "predict", finished.folder, "--queries", path, "-o", path)
    assert code == 2
    assert "is what is read" in error
    assert path.read_text() == '{"head": "e0", "relation": "r0"}\n'


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_least_score_is_a_number(finished: Run, capsys: pytest.CaptureFixture[str], value: str) -> None:
    question = ["--head", "e0", "--relation", "r0", "--min-score", value]
    code, _, error = said(capsys, "predict", finished.folder, *question)
    assert code == 2
    assert "--min-score must be a finite number" in error
