"""A user's mistake is one line on stderr and exit code 2, and nothing was written."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from graphs import make_run, ring, tree
from kgshard_tools import cli
from kgshard_tools.cli import run


@pytest.fixture(autouse=True)
def debug_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """--debug sets a variable of this process."""
    monkeypatch.setenv("KGSHARD_DEBUG", "")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, a graph, a malformed graph and things that are neither; the working directory."""
    make_run(tmp_path, ring(9), dim=4, world_size=2)
    for name, text in (("two", "a\tr\tb\nc\tr\n"), ("four", "a\tr\tb\tc\n"), ("nothing", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.tsv").write_text(text)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"mine")
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PREDICT = ["predict", "run", "--relation", "r0"]
TRAIN = ["train", "source", "-o", "out"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "missing data": (["train", "nowhere", "-o", "out"], "nowhere: no such folder"),
    "data is a file": (["train", "file", "-o", "out"], "file: is a file"),
    "data without train": (["train", "photos", "-o", "out"], "no train file"),
    "data argument forgotten": (["train", "-o", "out"], "DATA"),
    "out forgotten": (["train", "source"], "--out"),
    "2 columns": (["train", "two", "-o", "out"], "train.tsv:2: 2 columns, expected 3"),
    "4 columns": (["ingest", "four", "-o", "out"], "train.tsv:1: 4 columns, expected 3"),
    "no triples": (["train", "nothing", "-o", "out"], "no triples"),
    "dim 0": ([*TRAIN, "--dim", "0"], "--dim must be >= 1, got 0"),
    "odd dim": ([*TRAIN, "--dim", "7", "--model", "complex"], "--dim 7"),
    "dim in words": ([*TRAIN, "--dim", "ten"], "--dim"),
    "models of dim 0": (["models", "--dim", "0"], "--dim must be >= 1, got 0"),
    "epochs 0": ([*TRAIN, "--epochs", "0"], "--epochs must be >= 1, got 0"),
    "batch size 0": ([*TRAIN, "--batch-size", "0"], "--batch-size must be >= 1"),
    "no negatives": ([*TRAIN, "--negatives", "0"], "--negatives must be >= 1"),
    "lr 0": ([*TRAIN, "--lr", "0"], "--lr must be a number > 0, got 0"),
    "lr nan": ([*TRAIN, "--lr", "nan"], "--lr must be a number > 0, got nan"),
    "n3 below 0": ([*TRAIN, "--n3", "-1"], "--n3"),
    "nproc 0": ([*TRAIN, "--nproc-per-node", "0"], "--nproc-per-node must be >= 1, got 0"),
    "nproc below 0": (["evaluate", "run", "--nproc-per-node", "-2"], "--nproc-per-node must be >= 1, got -2"),
    "unknown model": ([*TRAIN, "--model", "complx"], "did you mean complex?"),
    "unknown optimizer": ([*TRAIN, "--optimizer", "rmsprop"], "known: adagrad"),
    "unknown corruption": ([*TRAIN, "--corruption", "none"], "--corruption"),
    "unknown device": ([*TRAIN, "--device", "tpu"], "--device"),
    "unknown option": ([*TRAIN, "--dimm", "3"], "--dimm"),
    "unknown command": (["trian", "source"], "trian"),
    "out is a run": (["train", "source", "-o", "run"], "--overwrite"),
    "out is something else": (["train", "source", "-o", "photos"], "not a kgshard run"),
    "out is something else, overwriting": (
        ["train", "source", "-o", "photos", "--overwrite"],
        "not a kgshard",
    ),
    "out is a file": (["train", "source", "-o", "file"], "file"),
    "ingest over something else": (["ingest", "source", "-o", "photos"], "not a prepared dataset"),
    "ingest over a run": (["ingest", "source", "-o", "run"], "not a prepared dataset"),
    "merge over something else": (["merge-shards", "run", "-o", "photos"], "not a merged model"),
    "merge over a folder of that name": (["merge-shards", "run", "-o", "folder.safetensors"], "folder.safe"),
    "export over something else": (["export", "run", "-o", "photos"], "not an export"),
    "unknown format": (["export", "run", "--format", "csv2"], "known: numpy"),
    "unknown purpose": (["index", "run", "--for", "love"], "--for"),
    "unknown index type": (["index", "run", "--type", "best"], "--type"),
    "unknown split": (["evaluate", "run", "--split", "tst"], "tst"),
    "unknown relation": (["predict", "run", "--head", "e0", "--relation", "r7"], "no relation 'r7'"),
    "unknown entity": ([*PREDICT, "--head", "e77"], "Did you mean"),
    "unknown neighbour": (["neighbors", "run", "nobody at all"], "no entity 'nobody at all'"),
    "unknown vector": (["vector", "run", "nobody at all"], "no entity"),
    "row out of range": (["vector", "run", "#9"], "no entity '#9'"),
    "neither head nor tail": (PREDICT, "--head"),
    "both head and tail": ([*PREDICT, "--head", "e0", "--tail", "e1"], "--tail"),
    "k 0": ([*PREDICT, "--head", "e0", "-k", "0"], "-k must be a whole number"),
    "k below 0": (["neighbors", "run", "e0", "-k", "-3"], "-k must be a whole number"),
    "k too large": (["neighbors", "run", "e0", "-k", "1000000000"], "-k must be a whole number"),
    "k in words": (["neighbors", "run", "e0", "-k", "ten"], "-k"),
    "unknown metric": (["neighbors", "run", "e0", "--metric", "euclid"], "'cosine', 'dot', 'l2', 'l1'"),
    **{
        f"{command} of no run": ([command, place, *more], words)
        for command, more in (
            ("evaluate", []),
            ("merge-shards", []),
            ("export", []),
            ("index", []),
            ("predict", ["--head", "e0", "--relation", "r0"]),
            ("neighbors", ["e0"]),
            ("vector", ["e0"]),
        )
        for place, words in (("photos", "run"),)
    },
    "no such run": (["vector", "nowhere", "e0"], "nowhere"),
}


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_a_mistake_is_one_line_and_exit_code_2(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments, words = MISTAKES[name]
    (place / "folder.safetensors").mkdir()
    before = tree(place)
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("Error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert tree(place) == before


def test_the_same_line_is_correct_without_the_mistake(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The negative control: the place itself provokes no error."""
    assert run([*PREDICT, "--head", "e0"]) == 0
    assert run(["merge-shards", "run", "-o", "out"]) == 0
    assert run(["ingest", "source", "-o", "data"]) == 0
    assert capsys.readouterr().err == ""


def truncate_a_shard(folder: Path) -> str:
    path = sorted(folder.glob("checkpoints/*/entity-*"))[1]
    path.write_bytes(path.read_bytes()[:-4])
    return path.name


def lose_a_shard(folder: Path) -> str:
    path = sorted(folder.glob("checkpoints/*/entity-*"))[0]
    path.unlink()
    return path.name


def garble_the_manifest(folder: Path) -> str:
    path = next(folder.glob("checkpoints/*/manifest.json"))
    path.write_text("{")
    return path.parent.name


def garble_run_json(folder: Path) -> str:
    (folder / "run.json").write_text("[]")
    return "run.json"


def garble_the_vocabulary(folder: Path) -> str:
    path = folder / "data" / "entities.parquet"
    path.unlink()  # a second name of the dataset's file may share its bytes
    path.write_bytes(b"no parquet")
    return "entities.parquet"


def garble_the_index(folder: Path) -> str:
    (folder / "index").mkdir()
    (folder / "index" / "index.json").write_text("{")
    return "index.json"


def garble_latest(folder: Path) -> str:
    (folder / "LATEST").write_text("step-99999999\n")
    return "step-99999999"


@pytest.mark.parametrize(
    "damage",
    [
        truncate_a_shard,
        lose_a_shard,
        garble_the_manifest,
        garble_run_json,
        garble_the_vocabulary,
        garble_the_index,
        garble_latest,
    ],
)
def test_a_damaged_run_is_one_line_that_names_the_file(
    place: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], str]
) -> None:
    name = damage(place / "run")
    assert run(["neighbors", "run", "e0"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert name in captured.err
    assert "Traceback" not in captured.err


def test_a_run_without_a_checkpoint_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run" / "LATEST").unlink()
    for arguments in (["evaluate", "run", "--split", "train"], ["export", "run"], ["vector", "run", "e0"]):
        assert run(arguments) == 2
        assert "no checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "vector", "run", "x"], ["vector", "run", "x", "--debug"]])
def test_debug_shows_a_traceback_before_the_line(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "Error: no entity 'x'"


def test_a_fault_of_our_own_is_one_line_and_exit_code_1(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(cli.cli, "main", broken)
    assert run(["vector", "run", "e0"]) == 1
    assert capsys.readouterr().err == "Error: ValueError: first line\n"


def test_an_interruption_is_exit_code_130(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.cli, "main", interrupted)
    assert run(["vector", "run", "e0"]) == 130
    assert capsys.readouterr().err == "Error: interrupted\n"


def test_a_full_disk_is_one_line_and_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/proc takes no folder, whoever asks."""
    assert run(["export", "run", "-o", "/proc/arrays"]) in (1, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "/proc" in err


def test_a_path_with_a_newline_stays_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["vector", "no\nrun", "e0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_real_program_ends_with_code_and_line(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kgshard", "train", "two", "-o", "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "Error: two/train.tsv:2: 2 columns, expected 3\n"
    assert not (place / "out").exists()


WRITERS = {
    "ingest": ["ingest", "source", "-o", "mine", "--overwrite"],
    "train": ["train", "source", "-o", "mine", "--overwrite"],
    "merge-shards": ["merge-shards", "run", "-o", "mine"],
    "export": ["export", "run", "-o", "mine"],
}
MARKS = ("data.json", "run.json", "config.json", "manifest.json")


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_folder_that_only_looks_like_ours_is_never_replaced(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Half the projects of the world have a data.json, a run.json or a config.json."""
    (place / "mine").mkdir()
    for text in (b"{}", b'{"format": "theirs", "id": "1"}', b"[]"):
        for mark in MARKS:
            (place / "mine" / mark).write_bytes(text)
        (place / "mine" / "thesis.txt").write_text("mine")
        before = tree(place)
        assert run(WRITERS[name]) == 2
        assert "mine: exists and is not " in capsys.readouterr().err
        assert tree(place) == before


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_what_kgshard_wrote_is_not_replaced_with_a_file_of_somebody_else_in_it(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name == "train":
        (place / "run").rename(place / "mine")
    else:
        assert run(WRITERS[name]) == run(WRITERS[name]) == 0  # the control: alone, it is replaced
    (place / "mine" / "thesis.txt").write_text("mine")
    capsys.readouterr()
    before = tree(place)
    assert run(WRITERS[name]) == 2
    assert "mine: holds 'thesis.txt', which kgshard did not write" in capsys.readouterr().err
    assert tree(place) == before


def test_ingest_replaces_a_dataset_only_with_overwrite(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["ingest", "source", "-o", "data"]
    assert run(line) == 0
    capsys.readouterr()
    before = tree(place)
    assert run(line) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    assert tree(place) == before
    assert run([*line, "--overwrite"]) == 0


@pytest.mark.parametrize(("value", "shown"), [("0", False), ("", False), ("false", False), ("1", True)])
def test_the_debug_variable_can_be_switched_off(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    shown: bool,
) -> None:
    monkeypatch.setenv("KGSHARD_DEBUG", value)
    assert run(["vector", "run", "x"]) == 2
    assert ("Traceback" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_under_torchrun_only_train_runs(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every rank would do the whole of it, and all would write the same files."""
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(variable, value)
    before = tree(place)
    code = run([name, "run", *("-o", "out") * (name in ("ingest", "export", "merge-shards"))])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert ("torchrun is for kgshard train" in captured.err) == (name != "train")
    assert tree(place) == before


SLOW_EXPORT = """
import sys, time
from kgshard_tools import export
from kgshard_tools.cli import main
def write_slowly(stored, folder):
    (folder / "entities.npy").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(600)
export.FORMATS["numpy"] = export.Format("slow", write_slowly, ())
main(sys.argv[1:])
"""


def test_a_terminated_command_leaves_nothing_half_written(place: Path) -> None:
    before = tree(place)
    command = [sys.executable, "-c", SLOW_EXPORT, "export", "run", "-o", "new/arrays"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert tree(place) != before
        process.terminate()
        _, err = process.communicate()
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")
    assert tree(place) == before
