"""`kgshard import` finds the format by itself, prints what was decided, and says what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from foreign import ENTITIES, RELATIONS, draw, write_dict
from kgshard_tools.cli import run as run_command
from kgshard_tools.importers import IMPORTERS, import_run

from kgshard.errors import ConfigError, DataError


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    folder = tmp_path / "arrays"
    folder.mkdir()
    np.save(folder / "entities.npy", draw(13, 6, 1))
    np.save(folder / "relations.npy", draw(3, 6, 2))
    write_dict(folder / "entities.tsv", ENTITIES)
    write_dict(folder / "relations.tsv", RELATIONS)
    return folder


def test_the_command_prints_what_was_decided(
    arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert run_command(["import", str(arrays), "-o", out, "--model", "distmult"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[:2] == [
        f"{out}: distmult of dim 6, made by numpy arrays",
        "13 entities, 3 relations",
    ]
    assert any("given with --model" in line for line in lines)
    again = ["import", str(arrays), "-o", out, "--model", "distmult", "--overwrite", "--json"]
    assert run_command(again) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["run"], value["checkpoint"]) == (out, f"{out}/checkpoints/step-00000000")
    assert value["decisions"]
    assert run_command([*again[:-1], "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: no such folder or file"),
        (["."], "no known format (npy: entities.npy and relations.npy; "),
        (["arrays", "--format", "csv"], "--format: unknown value 'csv' (known: auto, npy, rotate, dglke"),
        (["arrays", "--data", "nowhere"], "nowhere: no such folder (--data)"),
        (["arrays", "--model", "nonsense"], "unknown scoring function 'nonsense'"),
        (["arrays"], "give --model"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    arrays: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["import", *arguments, "-o", "run"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert words in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays"]


def test_a_folder_of_two_formats_must_be_named(arrays: Path, tmp_path: Path) -> None:
    (arrays / "config.json").write_text("{}")
    np.save(arrays / "entity_embedding.npy", draw(3, 4))
    np.save(arrays / "relation_embedding.npy", draw(3, 4))
    with pytest.raises(ConfigError, match="looks like npy and rotate; choose one with --format"):
        import_run(arrays, tmp_path / "run", model="distmult")
    import_run(arrays, tmp_path / "run", format="npy", model="distmult")


@pytest.mark.parametrize("name", sorted(IMPORTERS))
def test_no_format_takes_an_empty_folder_or_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"\x00\xff not a model")
    model = "distmult" if IMPORTERS[name].takes_model else None
    for source in ("empty", "file"):
        assert not IMPORTERS[name].recognises(tmp_path / source)
        with pytest.raises(DataError, match=source):
            import_run(tmp_path / source, tmp_path / "run", format=name, model=model)
    assert not (tmp_path / "run").exists()


def test_importing_needs_no_torch(arrays: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from kgshard_tools.cli import run;"
        "code = run(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    arguments = ["import", str(arrays), "-o", str(tmp_path / "run"), "--model", "distmult"]
    assert subprocess.run([sys.executable, "-c", script, *arguments]).returncode == 0


@pytest.mark.parametrize("name", sorted(set(IMPORTERS) - {"npy"}))
def test_a_model_is_not_given_where_the_source_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--model: {name} says itself which model it is"):
        import_run(tmp_path, tmp_path / "run", format=name, model="distmult")


def test_the_help_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["import", "--help"]) == 0
    *others, last = ["auto", *IMPORTERS]
    assert f"{', '.join(others)} or {last}." in " ".join(capsys.readouterr().out.split())


def test_two_imports_to_one_place_do_not_replace_each_other(arrays: Path, tmp_path: Path) -> None:
    """Whichever comes second is refused, while the first works and after it."""
    command = [sys.executable, "-m", "kgshard", "import", str(arrays), "-o", str(tmp_path / "run")]
    arguments = [*command, "--model", "distmult", "--json"]
    begun = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    ended = [(process.communicate(), process.returncode) for process in begun]
    assert sorted(code for _, code in ended) == [0, 2]
    [refused] = [said.decode() for (_, said), code in ended if code == 2]
    assert any(words in refused for words in ("is being written by", "holds a run already", "just now"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays", "run"]
