"""An overlay's files as other tools see them: its triples, `info`, `verify`, and the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from brute_force import random_graph
from graphs import make_run
from kgshard_tools.cli import run as run_command
from kgshard_tools.info import info
from kgshard_tools.overlay import Overlay, fold_in
from kgshard_tools.stored import Stored, open_stored
from kgshard_tools.verify import verify
from safetensors.numpy import load_file, save_file

from kgshard.errors import RunError, ShardError
from kgshard.files import file_sha256, read_json, write_json
from kgshard.records import OverlayInfo, describe_file

GRAPH = random_graph(5, 30, 3)
LINES = [("new", "r0", "e3"), ("e4", "r1", "new"), ("new", "r2", "other"), ("new", "r0", "new")]
FILES = ["overlay.json", "entities.parquet", "vectors.safetensors", "triples.npy"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stored, Path]:
    """A run and its overlay, which tests only read."""
    folder = tmp_path_factory.mktemp("made")
    run = make_run(folder, *GRAPH.values(), model="complex", dim=8, seed=1)
    text = "".join("\t".join(line) + "\n" for line in [*LINES, LINES[0], ("e1", "r0", "e2")])
    (folder / "new.tsv").write_text(text)
    fold_in(run.folder, folder / "new.tsv", folder / "overlay", steps=1)
    return open_stored(run.folder), folder / "overlay"


@pytest.fixture
def copied(made: tuple[Stored, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "overlay"))


def forge(folder: Path, name: str) -> None:
    """Make overlay.json vouch for a file as it is now."""
    record = read_json(folder / "overlay.json", OverlayInfo)
    files = record.files | {name: describe_file(folder / name)}
    write_json(folder / "overlay.json", msgspec.structs.replace(record, files=files))


def test_an_overlay_holds_the_triples_that_rows_were_fitted_to(made: tuple[Stored, Path]) -> None:
    stored, folder = made
    overlay = Overlay.open(folder, stored)
    entities, relations = [*stored.dataset.entities, *overlay.labels], list(stored.dataset.relations)
    stored_triples = np.load(folder / "triples.npy", allow_pickle=False)
    np.testing.assert_array_equal(overlay.triples, stored_triples)
    assert overlay.triples.dtype == np.int64
    named = [(entities[h], relations[r], entities[t]) for h, r, t in stored_triples.tolist()]
    assert sorted(named) == sorted(LINES)
    assert stored_triples.tolist() == sorted(stored_triples.tolist())


@pytest.mark.parametrize(
    ("triples", "words"),
    [
        ([[0, 0, 30], [0, 0, 31]], r"holds <i8 \[2, 3\], expected <i8 \[4, 3\]"),
        ([[0, 0, 30]] * 3 + [[0, 0, 32]], "ids that are not those of this overlay"),
        ([[0, 0, 30]] * 3 + [[0, 3, 30]], "ids that are not those of this overlay"),
        ([[0, 0, 30]] * 3 + [[-1, 0, 30]], "ids that are not those of this overlay"),
        ([[0, 0, 30]] * 3 + [[0, 0, 1]], "ids that are not those of this overlay"),
    ],
)
def test_forged_triples_are_refused(
    made: tuple[Stored, Path], copied: Path, triples: npt.ArrayLike, words: str
) -> None:
    np.save(copied / "triples.npy", np.array(triples, np.int64))
    forge(copied, "triples.npy")
    with pytest.raises(ShardError, match=words):
        Overlay.open(copied, made[0])


def test_triples_of_another_kind_are_refused(made: tuple[Stored, Path], copied: Path) -> None:
    right = np.load(copied / "triples.npy", allow_pickle=False)
    for wrong in (right.astype(np.float64), right.astype(np.int32), np.asfortranarray(right)):
        np.save(copied / "triples.npy", wrong)
        forge(copied, "triples.npy")
        with pytest.raises(ShardError, match=r"triples\.npy: holds"):
            Overlay.open(copied, made[0])


@pytest.mark.parametrize("name", ["", "overlay.json"])
def test_info_says_what_an_overlay_is(made: tuple[Stored, Path], name: str) -> None:
    stored, folder = made
    found = info(folder / name)
    assert (found.kind, found.format, found.path) == ("overlay", "kgshard.overlay/1", str(folder))
    wanted = {"entities": 2, "first_id": 30, "dim": 8, "step": 1, "approximate": True}
    assert wanted.items() <= found.details.items()
    assert found.details["run_id"] == stored.run.info.id
    assert found.details["triples"]["triples"] == len(LINES)
    listed = {file.path: (file.bytes, file.sha256) for file in found.files}
    assert listed == {
        str(folder / name): ((folder / name).stat().st_size, file_sha256(folder / name))
        for name in FILES
        if name != "overlay.json"
    }
    assert found.lines()[0] == f"{folder}: an overlay: entities beside a run that were not trained"


@pytest.mark.parametrize("deep", [False, True])
def test_verify_checks_every_file_of_an_overlay(made: tuple[Stored, Path], deep: bool) -> None:
    found = verify(made[1], deep=deep)
    by = {Path(file.path).name: file.by for file in found.files}
    assert by == {name: "seal" if name == "overlay.json" else "SHA-256" for name in FILES}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_verify_names_what_is_damaged(copied: Path, name: str, damage: str) -> None:
    path, content = copied / name, (copied / name).read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    with pytest.raises(RunError, match=name.replace(".", r"\.")):
        verify(copied)


def test_verify_deep_reads_every_value(copied: Path) -> None:
    path = copied / "vectors.safetensors"
    tensors = load_file(path)
    tensors["entity_embedding.weight"][1, 3] = np.nan
    save_file(tensors, path)
    forge(copied, path.name)
    verify(copied)
    with pytest.raises(ShardError, match=r"row 1 of entity_embedding\.weight is not finite"):
        verify(copied, deep=True)


def test_a_record_that_names_files_elsewhere_is_refused(copied: Path) -> None:
    record = read_json(copied / "overlay.json", OverlayInfo)
    files = record.files | {"../x": record.files["triples.npy"]}
    write_json(copied / "overlay.json", msgspec.structs.replace(record, files=files))
    for look in (info, verify):
        with pytest.raises(ShardError, match=r"overlay\.json: .*\.\./x"):
            look(copied)


def test_the_command_line_folds_in_and_tells(
    made: tuple[Stored, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, folder = made
    out = tmp_path / "again"
    arguments = [str(stored.run.folder), str(folder.parent / "new.tsv"), "-o", str(out)]
    assert run_command(["fold-in", *arguments, "--steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2
    assert run_command(["info", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "overlay"
    assert run_command(["verify", str(out)]) == 0
    assert capsys.readouterr().out.endswith("4 files ok\n")
    assert run_command(["fold-in", *arguments]) == 2
    assert "holds an overlay already" in capsys.readouterr().err
