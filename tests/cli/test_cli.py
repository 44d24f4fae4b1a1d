"""The command line: what is printed where, in which shape, and what it costs to import."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from graphs import make_run, ring, tree, write_graph
from kgshard_tools.cli import COMMANDS, cli, run

import kgshard.api
from kgshard.config import DEFAULTS
from kgshard.models import SCORING
from kgshard.models.link import LinkModel
from kgshard.rank import run_task
from kgshard.runs import Run, open_run

ROOT = Path(__file__).parents[2]
KGSHARD = [sys.executable, "-m", "kgshard"]


@pytest.fixture(autouse=True)
def debug_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """--debug sets a variable of this process."""
    monkeypatch.setenv("KGSHARD_DEBUG", "")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that tests only read."""
    triples = [*ring(60, 2), ("Österreich", "r0", "Zürich"), ("Österreich", "r0", "日本")]
    return make_run(
        tmp_path_factory.mktemp("finished"),
        triples,
        [("Österreich", "r0", "e1")],
        [("Österreich", "r0", "e2")],
        model="complex",
        dim=8,
        world_size=2,
    )


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = said(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert "\\u" not in out  # labels stay readable
    value: dict[str, Any] = json.loads(out)
    return value


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, click.Command)
    return found


def first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_list_of_commands_says_what_the_command_says(name: str) -> None:
    assert first_sentence(command(name).help or "") == COMMANDS[name]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_and_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: kgshard {name}" in out
    assert "Example: kgshard" in out
    for option in ("--json", "--quiet", "--debug"):
        assert option in out
    for parameter in command(name).params:
        assert isinstance(parameter, click.Argument) or getattr(parameter, "help", None), parameter.name


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_in_the_readme(name: str) -> None:
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.skip("no README.md here")
    assert f"kgshard {name}" in readme.read_text()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_is_in_the_docs(name: str) -> None:
    page = ROOT / "docs" / "cli.md"
    if not page.is_file():
        pytest.skip("no docs/cli.md here")
    sections = [part for part in page.read_text().split("\n## ") if part.split()[0] == name]
    assert len(sections) == 1
    for parameter in command(name).params:
        shared = parameter.name in ("json", "quiet", "debug")
        shared |= name == "plan" and parameter.name in DEFAULTS  # They are told of train.
        if isinstance(parameter, click.Option) and not shared:
            assert any(spelling in sections[0] for spelling in parameter.opts), parameter.opts


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "--help")
    assert (code, err) == (0, "")
    for name in COMMANDS:
        assert f"\n  {name} " in out


def test_no_command_at_all_is_a_usage_error_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys)
    assert code == 2
    assert out == ""
    assert "merge-shards" in err
    assert "Error: Usage" not in err


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert version("kgshard") in said(capsys, "--version")[1]


ANSWER_KEYS = {"rank", "label", "id", "score", "known", "split", "folded", "probability"}
WRITTEN_KEYS = {"files", "rows", "bytes", "seconds"}


def test_predict_tails_as_json(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    value = printed_json(
        capsys, "predict", finished.folder, "--head", "Österreich", "--relation", "r0", "-k", 62, "--known"
    )
    assert set(value) == {"query", "results"}
    asked = {"head": "Österreich", "relation": "r0", "k": 62}
    assert asked.items() <= value["query"].items()
    assert all(set(result) == ANSWER_KEYS for result in value["results"])
    assert [result["rank"] for result in value["results"]] == list(range(1, len(value["results"]) + 1))
    known = {result["label"]: result["split"] for result in value["results"] if result["known"]}
    assert known == {"Zürich": "train", "日本": "train", "e1": "valid", "e2": "test"}
    scores = [result["score"] for result in value["results"]]
    assert scores == sorted(scores, reverse=True)
    labels = list(finished.dataset.entities)
    assert all(labels[result["id"]] == result["label"] for result in value["results"])


def test_predict_leaves_known_triples_out(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    value = printed_json(
        capsys, "predict", finished.folder, "--head", "Österreich", "--relation", "r0", "-k", 99
    )
    labels = {result["label"] for result in value["results"]}
    assert labels == set(finished.dataset.entities) - {"Zürich", "日本", "e1", "e2"}


def test_predict_heads_as_json(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    value = printed_json(capsys, "predict", finished.folder, "--tail", "e5", "--relation", "r1")
    assert {"tail": "e5", "relation": "r1"}.items() <= value["query"].items()
    assert len(value["results"]) == 10


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2", "l1"])
def test_neighbors_as_json(finished: Run, capsys: pytest.CaptureFixture[str], metric: str) -> None:
    value = printed_json(capsys, "neighbors", finished.folder, "e3", "-k", "4", "--metric", metric)
    assert set(value) == {"query", "results"}
    assert {"entity": "e3", "metric": metric, "k": 4}.items() <= value["query"].items()
    assert all(set(result) == ANSWER_KEYS for result in value["results"])
    assert "e3" not in {result["label"] for result in value["results"]}


def test_vector_as_lines_and_as_json_is_the_row(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    row = list(finished.dataset.entities).index("Zürich")
    stored = finished.checkpoint.entities.read(range(row, row + 1))[0]
    _, out, _ = said(capsys, "vector", finished.folder, "Zürich")
    np.testing.assert_array_equal(np.array(out.split(), np.float32), stored)
    value = printed_json(capsys, "vector", finished.folder, "Zürich")
    assert (value["label"], value["id"]) == ("Zürich", row)
    np.testing.assert_array_equal(np.array(value["vector"], np.float32), stored)
    assert printed_json(capsys, "vector", finished.folder, f"#{row}") == value


def test_models_as_json_say_what_each_model_stores(capsys: pytest.CaptureFixture[str]) -> None:
    value = printed_json(capsys, "models", "--dim", 32)
    assert value["dim"] == 32
    assert [each["name"] for each in value["models"]] == list(SCORING)
    for each in value["models"]:
        scoring, name = SCORING[each["name"]], each["name"]
        model = LinkModel(name=name, dim=32, num_entities=9, num_relations=2, reciprocal=True)
        assert each["metric"] == model.metric.name
        assert each["relation_floats"] == model.relation_dim
        assert each["own_head_queries"] == scoring.has_head_queries
        assert each["relation_prediction"] == scoring.has_relation_queries
        assert each["shared"] == {key: list(how.shape) for key, how in scoring.shared_init(32).items()}
        assert each["refused"] is None
        assert re.search(r".*: .*\(.*(18|19|20)\d\d\b.*\)$", each["formula"]), each["formula"]


def test_models_as_a_table_say_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "models", "--dim", 200, "-q")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert set(SCORING) <= set(lines)
    formula = "TransE: -||h + r - t|| with the 2-norm or the 1-norm"
    assert " ".join(lines["transe-l1"].split()).startswith(f"transe-l1 l1 200 0 yes no {formula}")
    assert lines["rescal"].split()[1:6] == ["dot", "40,000", "0", "yes", "yes"]
    assert lines["tucker"].split()[1:6] == ["dot", "30", "1,200,000", "yes", "yes"]
    assert lines["conve"].split()[4] == "no"


def test_a_model_that_has_no_form_of_a_dimension_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["name"]: each for each in printed_json(capsys, "models", "--dim", 9)["models"]}
    assert found["complex"]["refused"] == "dim must be even for complex embeddings, got 9"
    assert found["complex"]["relation_floats"] is found["complex"]["shared"] is None
    assert found["distmult"]["refused"] is None
    _, out, _ = said(capsys, "models", "--dim", 9)
    (line,) = (line for line in out.splitlines() if line.startswith("complex "))
    assert "-  yes" in line
    assert line.endswith("dim must be even for complex embeddings, got 9")


@pytest.mark.parametrize("name", ["merge-shards", "export", "index", "ingest"])
def test_commands_that_write_files_say_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    made = make_run(tmp_path, ring(9), dim=4)
    source = made.folder if name != "ingest" else tmp_path / "source"
    out = [] if name == "index" else ["-o", tmp_path / "out"]
    value = printed_json(capsys, name, source, *out)
    assert set(value) >= WRITTEN_KEYS
    assert value["rows"] == 9
    assert value["seconds"] >= 0
    sizes = [Path(file).stat().st_size for file in value["files"]]
    assert 0 < value["bytes"] <= sum(sizes)


@pytest.mark.parametrize("name", ["merge-shards", "export", "index"])
def test_quiet_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    made = make_run(tmp_path, ring(9), dim=4)
    assert said(capsys, name, made.folder, "--quiet") == (0, "", "")
    assert len(list(made.folder.iterdir())) > 4


def test_words_for_people_name_files_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_run(tmp_path, ring(9), dim=4)
    code, out, err = said(capsys, "export", made.folder, "--format", "numpy", "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert str(tmp_path / "out" / "entities.npy") in out
    assert "9 entities" in out
    assert 'mmap_mode="r"' in out
    code, out, err = said(capsys, "neighbors", made.folder, "e0", "-k", 3)
    assert (code, err, out.count("\n")) == (0, "", 3)


def test_ingest_counts_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "train.tsv").write_text("a\tr\tb\n\na\tr\tb\nb\tr\tc\n")
    code, out, err = said(capsys, "ingest", tmp_path / "g", "-o", tmp_path / "data")
    assert (code, err) == (0, "")
    assert "3 entities, 1 relations" in out
    assert "train: 4 lines = 2 triples + 1 duplicates + 1 blank" in out


def shell(
    *arguments: object, stdin: int | None = subprocess.DEVNULL, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    command_line = [*KGSHARD, *map(str, arguments)]
    return subprocess.run(command_line, capture_output=True, stdin=stdin, check=False, **options)


def test_labels_are_utf8_in_a_c_locale(finished: Run) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("LANG", "PYTHONUTF8")}
    done = shell(
        "predict",
        finished.folder,
        *("--head", "Österreich", "--relation", "r0", "-k", 64, "--known"),
        env=environment | {"LC_ALL": "C"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "Zürich".encode() in done.stdout
    assert "日本".encode() in done.stdout


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_does_not_matter(finished: Run, tmp_path: Path, stream: str) -> None:
    redirect = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}[stream]
    out = tmp_path / "m.safetensors"
    script = f'"$@" {redirect}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *KGSHARD, "merge-shards", str(finished.folder), "-o", str(out)],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert out.is_file()


@pytest.mark.processes
@pytest.mark.parametrize("redirect", ["2>&-", "2>&1 >/dev/null | true"])
def test_training_goes_on_where_nobody_reads_what_it_says(tmp_path: Path, redirect: str) -> None:
    graph = write_graph(tmp_path / "graph", [(f"e{i}", "next", f"e{(i + 1) % 8}") for i in range(8)])
    call = ["train", str(graph), "-o", str(tmp_path / "run"), "--epochs", "1", "--dim", "4", "--json"]
    script = f'"$@" {redirect}'
    done = subprocess.run(["sh", "-c", script, "sh", *KGSHARD, *call], capture_output=True, check=False)
    assert done.stderr == b""
    assert open_run(tmp_path / "run").open_checkpoint().step > 0


def test_a_reader_that_has_seen_enough_is_no_error(finished: Run) -> None:
    """As `kgshard predict ... | head -1`, but certain: nobody reads at all."""
    process = subprocess.Popen(
        [*KGSHARD, "predict", str(finished.folder), "--head", "e0", "--relation", "r0", "-k", "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_a_working_directory_that_cannot_be_written_to(finished: Run, tmp_path: Path) -> None:
    # Even root cannot make a file in /proc.
    for arguments in (
        ("neighbors", finished.folder, "e0"),
        ("merge-shards", finished.folder, "-o", tmp_path / "m.safetensors"),
        ("export", finished.folder, "-o", tmp_path / "arrays"),
    ):
        done = shell(*arguments, cwd="/proc")
        assert (done.returncode, done.stderr) == (0, b"")


def test_no_home_and_an_empty_environment(finished: Run) -> None:
    done = shell("neighbors", finished.folder, "e0", "--json", env={})
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(json.loads(done.stdout)["results"]) == 10


def test_commands_that_need_no_torch_import_none(tmp_path: Path) -> None:
    made = make_run(tmp_path, ring(9), dim=4)
    script = (
        "import json, sys\n"
        "from kgshard_tools.cli import run\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    assert run(arguments) == 0, arguments\n"
        "    loaded = {'torch', 'faiss'} & set(sys.modules)\n"
        "    assert not loaded, (arguments, loaded)\n"
    )
    folder = str(made.folder)
    lines = [
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["models"],
        ["neighbors", folder, "e0"],
        ["vector", folder, "e0"],
        ["predict", folder, "--head", "e0", "--relation", "r0"],
        ["merge-shards", folder],
        ["export", folder],
        ["ingest", str(tmp_path / "source"), "-o", str(tmp_path / "data")],
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(lines)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_no_command() -> None:
    script = (
        "import sys\n"
        "from kgshard_tools.cli import run\n"
        "run(['--help'])\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in "
        "('torch', 'faiss', 'numpy', 'pyarrow') or name.startswith('kgshard_tools.commands.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_setting_can_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KGSHARD_TRAIN_DIM", "0")
    code, _, err = said(capsys, "train", "world", "-o", tmp_path / "run")
    assert (code, err) == (2, "Error: --dim must be >= 1, got 0\n")
    monkeypatch.setenv("KGSHARD_NEIGHBORS_K", "0")
    made = make_run(tmp_path / "a", ring(9), dim=4)
    code, _, err = said(capsys, "neighbors", made.folder, "e0")
    assert code == 2
    assert said(capsys, "neighbors", made.folder, "e0", "-k", 2)[0] == 0


def test_asking_changes_nothing_on_disk(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(finished.folder)
    for arguments in (
        ("predict", finished.folder, "--head", "e0", "--relation", "r0"),
        ("neighbors", finished.folder, "e0"),
        ("vector", finished.folder, "e0"),
    ):
        assert said(capsys, *arguments)[0] == 0
    assert tree(finished.folder) == before


def long_options() -> list[tuple[str, str]]:
    """Return every command with each of its options, in its long spelling where it has one."""
    pairs = []
    for name in COMMANDS:
        for parameter in command(name).params:
            if isinstance(parameter, click.Option):
                long = [spelling for spelling in parameter.opts if spelling.startswith("--")]
                pairs.append((name, (long or parameter.opts)[0]))
    return pairs


@pytest.mark.parametrize(("name", "option"), long_options())
def test_every_option_is_taken_from_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    variable = f"KGSHARD_{name}_{option.lstrip('-')}".upper().replace("-", "_")
    found = command(name)
    parent = click.Context(cli, info_name="kgshard", **cli.context_settings)
    context = click.Context(found, info_name=name, parent=parent)
    parameter = next(each for each in found.params if option in each.opts)
    assert parameter.resolve_envvar_value(context) is None
    monkeypatch.setenv(variable, "something")
    assert parameter.resolve_envvar_value(context) == "something"


def test_quiet_still_answers(
    finished: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for is no summary."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(kgshard.api, "run_on_ranks", lambda task, arguments, nproc: run_task(task, arguments))
    for arguments in (
        ("predict", finished.folder, "--head", "e0", "--relation", "r0"),
        ("neighbors", finished.folder, "e0"),
        ("vector", finished.folder, "e0"),
        ("evaluate", finished.folder),
    ):
        expected = said(capsys, *arguments)
        assert expected[0] == 0
        assert expected[1].count("\n") >= 3
        assert said(capsys, *arguments, "-q") == expected
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
    shutil.rmtree(finished.folder / "eval")


STEERING = "\x1b[2Jcleared\x07\u202e\x9b1m"


@pytest.fixture
def steering(tmp_path: Path) -> Path:
    return make_run(tmp_path, [*ring(5), ("e0", "r0", STEERING)], dim=4).folder


def is_inert(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def test_labels_in_a_table_cannot_steer_a_terminal_and_are_whole_in_json(
    steering: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ("neighbors", steering, "e1"),
        ("predict", steering, "--head", "e1", "--relation", "r0"),
    ):
        code, out, err = said(capsys, *arguments)
        assert (code, err) == (0, "")
        assert "cleared" in out
        assert is_inert(out)
        value = printed_json_of_any_label(capsys, *arguments)
        assert STEERING in {result["label"] for result in value["results"]}


def test_suggested_labels_cannot_steer_a_terminal(steering: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "vector", steering, STEERING + "x")
    assert (code, out) == (2, "")
    assert "Did you mean: " in err
    assert is_inert(err)


def printed_json_of_any_label(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = said(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    value: dict[str, Any] = json.loads(out)
    return value
