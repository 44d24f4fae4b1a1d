"""Folding entities into a run from a file, the overlay on disk, and what it adds to labels and rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import torch
from brute_force import random_graph
from click.testing import CliRunner
from graphs import make_run, save_tables, stored_table, tree
from kgshard_tools.commands.fold_in import command
from kgshard_tools.overlay import ExtendedTable, ExtendedVocabulary, FoldedIn, Overlay, fold_in
from kgshard_tools.stored import Stored, open_stored
from safetensors.numpy import load_file

from kgshard.errors import (
    ConfigError,
    DataError,
    RunError,
    ShardError,
    UnknownEntityError,
    UnknownRelationError,
)
from kgshard.files import check_seal
from kgshard.runs import Run

GRAPH = random_graph(5, 30, 3)
LINES = [
    ("new", "r0", "e3"),
    ("e4", "r1", "new"),
    ("new", "r2", "other"),
    ("#12", "r0", "e5"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tables are tiny: on busy cores two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that tests only read."""
    folder = tmp_path_factory.mktemp("run")
    return make_run(folder, *GRAPH.values(), model="complex", dim=8, world_size=3, seed=1)


def written(folder: Path, lines: object = LINES, name: str = "new.tsv") -> Path:
    path = folder / name
    if isinstance(lines, bytes):
        path.write_bytes(lines)
    else:
        path.write_bytes("".join("\t".join(line) + "\n" for line in lines).encode())  # type: ignore[attr-defined]
    return path


def folded(run: Run, folder: Path, lines: object = LINES, **how: Any) -> tuple[FoldedIn, Overlay]:
    result = fold_in(run.folder, written(folder, lines), folder / "overlay", **({"steps": 5} | how))
    return result, Overlay.open(folder / "overlay", open_stored(run.folder))


@pytest.fixture(scope="module")
def opened(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stored, Overlay]:
    _, overlay = folded(run, tmp_path_factory.mktemp("overlay"))
    return open_stored(run.folder), overlay


def test_an_overlay_holds_labels_and_vectors_behind_those_of_the_run(run: Run, tmp_path: Path) -> None:
    before = tree(run.folder)
    result, overlay = folded(run, tmp_path)
    assert sorted(overlay.labels) == ["#12", "new", "other"]
    assert overlay.vectors.shape == (3, 8)
    assert overlay.vectors.dtype == np.float32
    for place, label in enumerate(overlay.labels):
        assert overlay.find(label) == 30 + place
    assert overlay.find("e3") is None
    assert dict(zip(overlay.labels, overlay.degrees.tolist(), strict=True)) == {
        "#12": 1,
        "new": 3,
        "other": 1,
    }
    assert overlay.is_new(np.array([0, 29, 30, 32])).tolist() == [False, False, True, True]
    assert tree(run.folder) == before
    assert [(entity.id, entity.label) for entity in result.entities] == list(enumerate(overlay.labels, 30))
    for entity, row in zip(result.entities, overlay.vectors, strict=True):
        assert entity.norm == pytest.approx(np.linalg.norm(row))
        assert entity.loss_after <= entity.loss_before


def test_other_programs_read_the_files(run: Run, tmp_path: Path) -> None:
    _, overlay = folded(run, tmp_path)
    table = pq.read_table(tmp_path / "overlay" / "entities.parquet")
    assert table["id"].to_pylist() == [30, 31, 32]
    assert table["label"].to_pylist() == overlay.labels
    tensors = load_file(tmp_path / "overlay" / "vectors.safetensors")
    np.testing.assert_array_equal(tensors["entity_embedding.weight"], overlay.vectors)
    record = json.loads((tmp_path / "overlay" / "overlay.json").read_text())
    assert record["format"] == "kgshard.overlay/1"
    assert record["approximate"] is True
    assert (record["run_id"], record["step"]) == (run.info.id, 1)
    assert check_seal(tmp_path / "overlay" / "overlay.json")


def test_every_line_is_accounted_for(run: Run, tmp_path: Path) -> None:
    lines = b"new\tr0\te3\n\nnew\tr0\te3\r\ne1\tr0\te2\nnew\tr0\tnew\n"
    result, overlay = folded(run, tmp_path, lines)
    assert result.counts == {"lines": 5, "triples": 2, "duplicates": 1, "blank": 1, "known": 1}
    assert overlay.info.counts == result.counts
    assert overlay.degrees.tolist() == [2]
    assert "5 lines = 2 triples + 1 duplicates + 1 blank + 1 that name no new entity" in result.lines()


def test_the_order_of_lines_does_not_matter(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folded(run, tmp_path / "a")
    folded(run, tmp_path / "b", [*reversed(LINES), LINES[1]])
    for name in ("entities.parquet", "vectors.safetensors"):
        assert (tmp_path / "a/overlay" / name).read_bytes() == (tmp_path / "b/overlay" / name).read_bytes()


HOSTILE = ["#12", "  ", "a\u2028b", "\x00", "\x1b[31m", '"q"', "../x", "NA", "ü", "u\u0308", "\r", "-"]


def test_hostile_labels_stay_as_they_are(run: Run, tmp_path: Path) -> None:
    lines = [(label, "r0", "e3") for label in HOSTILE]
    _, overlay = folded(run, tmp_path, lines)
    assert set(overlay.labels) == set(HOSTILE)
    assert all(overlay.find(label) is not None for label in HOSTILE)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (
            b"new\tr0\te3\n\nnew\tr01\te3\n",
            UnknownRelationError,
            r"new\.tsv:3: no relation 'r01'\. Did you mean: r",
        ),
        (b"new\tr0\n", DataError, r"new\.tsv:1: 2 columns, expected 3"),
        (b"", DataError, r"none of 0 triples names an entity that .* has not"),
        (b"e1\tr0\te2\n", DataError, r"none of 1 triples names an entity"),
        (b"new\tr0\te1\na\tr0\tb\n", DataError, r"no triple ties '[ab]', even by other new entities"),
    ],
)
def test_what_cannot_be_folded_in_is_refused(
    run: Run, tmp_path: Path, content: bytes, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fold_in(run.folder, written(tmp_path, content), tmp_path / "overlay")
    assert [path.name for path in tmp_path.iterdir()] == ["new.tsv"]


@pytest.mark.parametrize(("setting", "value"), [("steps", -1), ("steps", 10**9), ("seed", -1)])
def test_settings_out_of_range_are_refused(run: Run, tmp_path: Path, setting: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"--{setting} must be"):
        fold_in(run.folder, written(tmp_path), tmp_path / "overlay", **{setting: value})  # type: ignore[arg-type]


def test_only_an_overlay_is_replaced_and_only_when_told(run: Run, tmp_path: Path) -> None:
    result, _ = folded(run, tmp_path)
    before = tree(tmp_path)
    with pytest.raises(RunError, match="holds an overlay already"):
        folded(run, tmp_path)
    assert tree(tmp_path) == before
    folded(run, tmp_path, [("someone", "r0", "e1")], overwrite=True)
    assert Overlay.open(tmp_path / "overlay", open_stored(run.folder)).labels == ["someone"]
    (tmp_path / "overlay" / "mine.txt").write_text("x")
    with pytest.raises(RunError, match=r"holds 'mine\.txt', which kgshard did not write"):
        folded(run, tmp_path, overwrite=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a").write_text("x")
    with pytest.raises(RunError, match="exists and is not an overlay"):
        fold_in(run.folder, tmp_path / "new.tsv", tmp_path / "docs", overwrite=True)
    for inside in (run.folder, run.folder / "overlay"):
        with pytest.raises(RunError, match=r"is the run itself|lies in a run"):
            fold_in(run.folder, tmp_path / "new.tsv", inside, overwrite=True)
    assert result.rows == 3


@pytest.mark.parametrize("name", ["overlay.json", "entities.parquet", "vectors.safetensors", "triples.npy"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_overlay_is_refused(
    opened: tuple[Stored, Overlay], tmp_path: Path, name: str, damage: str
) -> None:
    stored, overlay = opened
    shutil.copytree(overlay.folder, tmp_path / "overlay")
    path = tmp_path / "overlay" / name
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    with pytest.raises(RunError, match=name.replace(".", r"\.")):
        Overlay.open(tmp_path / "overlay", stored)


def test_a_forged_overlay_is_refused(run: Run, tmp_path: Path) -> None:
    """Hashes and seal are right, but what they vouch for contradicts the run."""
    for label, words in (("e3", "is an entity of the run already"), ("new", "ids or labels")):
        shutil.rmtree(tmp_path / "overlay", ignore_errors=True)
        folded(run, tmp_path, [("new", "r0", "e3"), ("other", "r0", "e3")])
        _relabel(tmp_path / "overlay", label)
        with pytest.raises(ShardError, match=words):
            Overlay.open(tmp_path / "overlay", open_stored(run.folder))


def _relabel(folder: Path, label: str) -> None:
    import msgspec
    import pyarrow as pa

    from kgshard.files import read_json, write_json
    from kgshard.records import OverlayInfo, describe_file

    path = folder / "entities.parquet"
    table = pq.read_table(path)
    place = table["label"].to_pylist().index("other")
    labels = [label if row == place else name for row, name in enumerate(table["label"].to_pylist())]
    pq.write_table(table.set_column(1, "label", pa.array(labels, pa.large_string())), path)
    info = read_json(folder / "overlay.json", OverlayInfo)
    files = info.files | {path.name: describe_file(path)}
    write_json(folder / "overlay.json", msgspec.structs.replace(info, files=files))


def test_an_overlay_of_another_run_or_step_is_refused(run: Run, tmp_path: Path) -> None:
    folded(run, tmp_path)
    other = make_run(tmp_path / "other", *GRAPH.values(), model="complex", dim=8, seed=1)
    with pytest.raises(RunError, match="was folded into another run"):
        Overlay.open(tmp_path / "overlay", open_stored(other.folder))
    fold_in(other.folder, tmp_path / "new.tsv", tmp_path / "second", steps=0)
    rows = np.ones((30, 8))
    save_tables(other, rows, np.ones((6, 8)), step=2)
    with pytest.raises(
        RunError, match=r"was folded into step 1 of .*, whose rows are now of step 2; fold in again"
    ):
        Overlay.open(tmp_path / "second", open_stored(other.folder))


@pytest.mark.parametrize("where", ["missing", "other"])
def test_what_is_no_overlay_says_so(run: Run, tmp_path: Path, where: str) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match=r"no such overlay folder|not an overlay \(no overlay\.json\)"):
        Overlay.open(tmp_path / where, open_stored(run.folder))


def test_labels_are_those_of_the_run_and_then_those_of_the_overlay(opened: tuple[Stored, Overlay]) -> None:
    stored, overlay = opened
    base = stored.dataset.entities
    labels: ExtendedVocabulary = overlay.extend_vocabulary(base)
    everything = [*base, *overlay.labels]
    assert list(labels) == everything
    assert len(labels) == 33
    assert [labels[place] for place in range(33)] == everything
    assert [labels.find(label) for label in everything] == list(range(33))
    assert labels.ids_of(["other", "e3", "#31", "#2"]).tolist() == [
        everything.index("other"),
        everything.index("e3"),
        31,
        2,
    ]
    assert labels.id_of("#12") == everything.index("#12")  # A label comes before a row.
    ids = np.array([31, 2, 30, 32, 2])
    assert labels.labels_of(ids) == [everything[place] for place in ids]
    assert labels.labels_of(ids[:0]) == []
    assert labels.degrees.tolist() == [*base.degrees.tolist(), *overlay.degrees.tolist()]
    assert "other" in labels
    assert "nobody" not in labels
    assert labels.row_name(32) == f"entity 32 ({everything[32]!r})"
    assert labels.sha256 == base.sha256
    for outside in (33, -1):
        with pytest.raises(IndexError):
            labels[outside]
    with pytest.raises(UnknownEntityError, match=r"no entity 'othr'\. Did you mean: other"):
        labels.id_of("othr")
    with pytest.raises(UnknownEntityError):
        labels.id_of("#33")
    with pytest.raises(TypeError):
        labels.save(Path("anywhere"))


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_rows_are_those_of_the_run_and_then_those_of_the_overlay(tmp_path: Path, num_pieces: int) -> None:
    draw = np.random.default_rng(0)
    base, added = draw.standard_normal((10, 4)).astype("f4"), draw.standard_normal((3, 4)).astype("f4")
    table = ExtendedTable(stored_table(tmp_path, base, num_pieces=num_pieces), stored_table(tmp_path, added))
    everything = np.concatenate([base, added])
    assert (table.num_rows, table.dim, table.shape, table.dtype) == (13, 4, (13, 4), "F32")
    for start in range(14):
        for stop in range(start, 14):
            np.testing.assert_array_equal(table.read(range(start, stop)), everything[start:stop])
    ids = draw.integers(0, 13, 50)
    np.testing.assert_array_equal(table.gather(ids), everything[ids])
    assert table.gather([]).shape == (0, 4)
    blocks = list(table.blocks(size=4))
    np.testing.assert_array_equal(np.concatenate([values for _, values in blocks]), everything)
    assert [block for block, _ in blocks] == [range(4), range(4, 8), range(8, 12), range(12, 13)]
    assert sum(length for _, _, length in table.byte_ranges(range(10))) == base.nbytes
    refused: list[Callable[[], object]] = [
        lambda: table.read(range(9, 14)),
        lambda: table.gather([13]),
        lambda: table.gather([-1]),
        lambda: table.byte_ranges(),
    ]
    for read in refused:
        with pytest.raises(IndexError):
            read()


def test_rows_behind_a_bfloat16_table_keep_their_bits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *GRAPH.values(), model="distmult", dim=8, dtype=torch.bfloat16)
    _, overlay = folded(run, tmp_path)
    stored = open_stored(run.folder)
    table = overlay.extend_table(stored.checkpoint.entities)
    assert table.dtype == "BF16"
    np.testing.assert_array_equal(table.gather([31, 0])[0], overlay.vectors[1])
    np.testing.assert_array_equal(
        table.read(range(28, 33))[:2], stored.checkpoint.entities.read(range(28, 30))
    )


def test_the_command_says_what_it_did(run: Run, tmp_path: Path) -> None:
    arguments = [str(run.folder), str(written(tmp_path)), "-o", str(tmp_path / "overlay"), "--steps", "3"]
    done = CliRunner().invoke(command, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert {"files", "rows", "bytes", "seconds", "approximate", "typical_norm", "counts", "entities"} <= set(
        result
    )
    assert result["rows"] == 3
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "overlay").iterdir())
    assert {Path(name).name for name in result["files"]} == {
        "overlay.json",
        "entities.parquet",
        "vectors.safetensors",
        "triples.npy",
    }
    again = CliRunner().invoke(command, [*arguments, "--overwrite"])
    assert "approximate: these rows were fitted to their triples alone" in again.stdout
    assert "had not converged; more --steps would fit them better" in again.stdout
    assert "a trained row's norm is typically" in again.stdout


def test_triples_come_from_stdin_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    folded(run, tmp_path / "file")
    code = "from kgshard_tools.commands.fold_in import command; command()"
    arguments = [str(run.folder), "-", "-o", str(tmp_path / "overlay"), "--steps", "5", "-q"]
    text = (tmp_path / "file" / "new.tsv").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=text,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    vectors = [folder / "overlay" / "vectors.safetensors" for folder in (tmp_path, tmp_path / "file")]
    # Another process may add in another order.
    tables = [load_file(path)["entity_embedding.weight"] for path in vectors]
    np.testing.assert_allclose(*tables, rtol=1e-4, atol=1e-5)


def test_opening_an_overlay_imports_no_torch(opened: tuple[Stored, Overlay]) -> None:
    stored, overlay = opened
    code = (
        "import sys\nfrom kgshard_tools.overlay import Overlay\n"
        "from kgshard_tools.stored import open_stored\n"
        "overlay = Overlay.open(sys.argv[2], open_stored(sys.argv[1]))\n"
        "assert overlay.vectors.shape == (3, 8)\nassert 'torch' not in sys.modules"
    )
    arguments = [str(stored.run.folder), str(overlay.folder)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, env=os.environ, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_run_trained_on_a_device_that_is_not_here_can_be_folded_into(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record.pop("seal", None)
    record["config"]["device"] = "cuda:63"
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    result = fold_in(tmp_path / "run", written(tmp_path), tmp_path / "overlay", steps=1)
    assert result.rows == 3


def test_vectors_do_not_depend_on_the_shards(run: Run, tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", *GRAPH.values(), model="complex", dim=8, world_size=1, seed=1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    vectors: list[npt.NDArray[np.float32]] = [
        folded(each, tmp_path / name)[1].vectors for each, name in ((run, "a"), (whole, "b"))
    ]
    np.testing.assert_array_equal(*vectors)
