"""Exported arrays: what numpy loads is the table, and row i is label i."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from graphs import Triple, make_run, ring, save_tables, tree
from kgshard_tools.export import export
from kgshard_tools.export.labels import label_lines
from runs import begun_run

from kgshard.config import TrainConfig
from kgshard.errors import ConfigError, RunError

HOSTILE = [
    "back\\slash",
    "\\n",
    "\\",
    " leading and trailing ",
    "=1+1",
    '"quoted',
    "nan",
    "NA",
    "007",
    "line\u2028separator",
    "next\u0085line",
    "form\x0cfeed",
    "file\x1cseparator",
    "lone\rreturn",
    "no\ufeffbreak",
    "e\u0301 and é",
    "日本",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "#3",
    "x" * 5000,
]


def hostile_graph() -> list[Triple]:
    return [(label, f"likes {label}", HOSTILE[i - 1]) for i, label in enumerate(HOSTILE)]


def read_labels(path: Path) -> list[str]:
    """Read a label file as its description says: \\n is a newline, \\\\ a backslash."""
    labels = []
    for line in path.read_bytes().decode().split("\n")[:-1]:
        text, characters = "", iter(line)
        for character in characters:
            text += {"n": "\n", "\\": "\\"}[next(characters)] if character == "\\" else character
        labels.append(text)
    return labels


@pytest.mark.parametrize("model", ["distmult", "complex", "transe", "rotate"])
@pytest.mark.parametrize("corruption", ["reciprocal", "both-sides"])
def test_arrays_are_the_tables(tmp_path: Path, model: str, corruption: str) -> None:
    source = np.random.default_rng(1)
    relation_dim = 3 if model == "rotate" else 6
    entities = source.standard_normal((9, 6)).astype(np.float32)
    relations = source.standard_normal((4 if corruption == "reciprocal" else 2, relation_dim))
    run = make_run(
        tmp_path,
        ring(9, 2),
        entities=entities,
        relations=relations,
        dim=6,
        model=model,
        corruption=corruption,
        world_size=4,
    )
    out = tmp_path / "arrays"
    export(run.folder, "numpy", out)
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in out.glob("*.npy")}
    names = {"entities", "relations"} | ({"inverse_relations"} if corruption == "reciprocal" else set())
    assert set(arrays) == names
    assert arrays["entities"].shape == (9, 6)
    assert arrays["relations"].shape == (2, relation_dim)
    for array in arrays.values():
        assert isinstance(array, np.memmap)
        assert array.dtype.str == "<f4"
        assert array.flags.c_contiguous
    np.testing.assert_array_equal(arrays["entities"], entities)
    np.testing.assert_array_equal(arrays["relations"], relations[:2].astype(np.float32))
    if corruption == "reciprocal":
        np.testing.assert_array_equal(arrays["inverse_relations"], relations[2:].astype(np.float32))


@pytest.mark.parametrize("model", ["tucker", "conve", "keci"])
def test_parameters_that_all_rows_share_are_arrays_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    run = make_run(tmp_path, ring(9), dim=16, model=model, world_size=2)
    for _ in range(2):  # The second replaces the first.
        written = export(run.folder, "numpy", tmp_path / "arrays")
    shared = run.checkpoint.shared
    files = {path.name for path in (tmp_path / "arrays").glob("shared-*")}
    assert files == {f"shared-{name}.npy" for name in run.model.scoring.shared_init(16)}
    monkeypatch.chdir(tmp_path / "arrays")
    names: dict[str, Any] = {}
    for line in written.python:
        exec(line, names)
    assert set(names["shared"]) == set(shared)
    for name, values in names["shared"].items():
        assert values.dtype.str == "<f4"
        np.testing.assert_array_equal(values, shared[name])


def test_more_ranks_than_entities_export_the_same_rows(tmp_path: Path) -> None:
    rows = np.repeat(np.arange(3.0)[:, None], 2, axis=1)
    run = make_run(tmp_path, ring(3), dim=2, entities=rows, world_size=8)
    export(run.folder, "numpy", tmp_path / "arrays")
    np.testing.assert_array_equal(np.load(tmp_path / "arrays" / "entities.npy"), rows)


def test_row_i_is_label_i(tmp_path: Path) -> None:
    """Each row holds a number computed from the label that it must stand beside."""
    triples = ring(200)
    empty = make_run(tmp_path / "a", triples, dim=2)
    numbers = [[int(label[1:]), 0.0] for label in empty.dataset.entities]
    run = make_run(tmp_path / "b", triples, dim=2, entities=numbers, world_size=3)
    export(run.folder, "numpy", tmp_path / "arrays")
    array = np.load(tmp_path / "arrays" / "entities.npy")
    labels = read_labels(tmp_path / "arrays" / "entities.txt")
    assert [f"e{value:.0f}" for value in array[:, 0]] == labels
    assert sorted(labels) == sorted(f"e{i}" for i in range(200))


def test_hostile_labels_round_trip(tmp_path: Path) -> None:
    run = make_run(tmp_path, hostile_graph(), dim=2)
    out = tmp_path / "arrays"
    export(run.folder, "numpy", out)
    for name, wanted in (("entities", HOSTILE), ("relations", [f"likes {label}" for label in HOSTILE])):
        labels = read_labels(out / f"{name}.txt")
        assert sorted(labels) == sorted(wanted)
        table = pq.read_table(out / f"{name}.parquet")
        assert table["label"].to_pylist() == labels
        assert table["id"].to_pylist() == list(range(len(labels)))
        assert len((out / f"{name}.txt").read_bytes().split(b"\n")) == len(labels) + 1


def test_a_newline_in_a_label_takes_one_line(tmp_path: Path) -> None:
    """No TSV can hold such a label, so it goes straight to the writer."""
    labels = ["a\nb", "a\\nb", "\\\n\\", "", "\n"]
    (tmp_path / "labels.txt").write_bytes(label_lines(pa.array(labels)))
    assert (tmp_path / "labels.txt").read_bytes().count(b"\n") == len(labels)
    assert read_labels(tmp_path / "labels.txt") == labels


def test_a_name_that_is_entity_and_relation_keeps_both_rows(tmp_path: Path) -> None:
    triples = [("likes", "type", "Property"), ("a", "likes", "b"), ("a", "likes_inverse", "b")]
    run = make_run(tmp_path, triples, dim=2)
    export(run.folder, "numpy", tmp_path / "arrays")
    assert sorted(read_labels(tmp_path / "arrays" / "entities.txt")) == ["Property", "a", "b", "likes"]
    assert sorted(read_labels(tmp_path / "arrays" / "relations.txt")) == ["likes", "likes_inverse", "type"]
    assert np.load(tmp_path / "arrays" / "inverse_relations.npy").shape == (3, 2)


def test_bfloat16_is_widened_exactly_and_said_so(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    values[0] = [3.3e38, 1e-40, -0.0, 1e38]
    run = make_run(tmp_path, ring(7), dim=4, entities=values, dtype=torch.bfloat16, world_size=3)
    written = export(run.folder, "numpy", tmp_path / "arrays")
    array = np.load(tmp_path / "arrays" / "entities.npy")
    assert array.dtype.str == "<f4"
    rounded = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert array.tobytes() == rounded.tobytes()
    assert any("bfloat16 was widened" in note for note in written.notes)


def test_float32_says_nothing_of_widening(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(7), dim=4)
    written = export(run.folder, "numpy", tmp_path / "arrays")
    assert not any("widened" in note for note in written.notes)
    assert all((tmp_path / "arrays" / Path(file).name).is_file() for file in written.files)
    assert written.bytes == sum(path.stat().st_size for path in (tmp_path / "arrays").iterdir())
    assert written.rows == 7


def test_the_loading_lines_it_prints_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ring(7), dim=4)
    lines = export(run.folder, "numpy", tmp_path / "arrays").python
    assert len(lines) == 3
    monkeypatch.chdir(tmp_path / "arrays")
    names: dict[str, Any] = {}
    for line in lines:
        exec(line, names)
    assert names["labels"] == list(run.dataset.entities)
    assert names["entities"].shape == (7, 4)


def test_config_says_what_a_reader_needs(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(7, 2), dim=4, model="rotate", corruption="both-sides")
    export(run.folder, "numpy", tmp_path / "arrays")
    config = json.loads((tmp_path / "arrays" / "config.json").read_text())
    expected = {
        "score_function": "rotate",
        "embedding_dim": 4,
        "relation_dim": 2,
        "num_entities": 7,
        "num_relations": 2,
        "reciprocal": False,
        "metric": "l2",
        "complex_layout": "halves",
        "row_is_label": True,
    }
    assert {key: config[key] for key in expected} == expected


def test_the_default_folder_lies_in_the_run_and_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(7), dim=4)
    for _ in range(2):
        export(run.folder, "numpy")
    assert np.load(run.folder / "export-numpy" / "entities.npy").shape == (7, 4)


def test_an_unknown_format_lists_the_known(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(7), dim=4)
    with pytest.raises(ConfigError, match=r"'numpi'.*known: .*numpy"):
        export(run.folder, "numpi", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [{"cat.jpg": b"mine"}, {"config.json": b"{}"}, {"config.json": b"\xff"}])
def test_a_folder_of_something_else_is_kept(tmp_path: Path, content: dict[str, bytes]) -> None:
    run = make_run(tmp_path, ring(7), dim=4)
    (tmp_path / "out").mkdir()
    for name, data in content.items():
        (tmp_path / "out" / name).write_bytes(data)
    before = tree(tmp_path)
    with pytest.raises(RunError, match="not an export"):
        export(run.folder, "numpy", tmp_path / "out")
    assert tree(tmp_path) == before


def test_a_file_and_the_run_itself_are_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(7), dim=4)
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    for out in (tmp_path / "file", run.folder, run.folder / "data", run.checkpoint.folder):
        with pytest.raises(RunError):
            export(run.folder, "numpy", out)
    assert tree(tmp_path) == before


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    source = make_run(tmp_path, ring(7), dim=4).folder.parent / "source"
    run = begun_run(source, tmp_path / "unfinished", TrainConfig())
    with pytest.raises(RunError, match="no checkpoint yet"):
        export(run.folder, "numpy")


def test_a_link_as_output_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name, ring(5), dim=2, seed=seed) for seed, name in enumerate("ab"))
    export(first.folder, "numpy", tmp_path / "far")
    (tmp_path / "link").symlink_to("far")
    export(second.folder, "numpy", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    expected = second.checkpoint.entities.read(range(5))
    np.testing.assert_array_equal(np.load(tmp_path / "far" / "entities.npy"), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "far", "link"]


def test_an_earlier_export_is_replaced_from_inside_or_the_refusal_is_one_line(tmp_path: Path) -> None:
    """`-o .`: the folder that is replaced is the one the command runs in."""
    run = make_run(tmp_path / "a", ring(5), dim=2)
    out = tmp_path / "arrays"
    export(run.folder, "numpy", out)
    save_tables(run, np.ones((5, 2)), np.ones((2, 2)), step=2)
    command = [sys.executable, "-m", "kgshard", "export", str(run.folder), "-o", "."]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    assert done.stderr.count("\n") == (0 if done.returncode == 0 else 1)
    replaced = bool((np.load(out / "entities.npy") == 1).all())
    said_so = "entities.npy" in done.stdout and "5 entities, 0 bytes" not in done.stdout
    assert (done.returncode, replaced, said_so) in ((0, True, True), (2, False, False)), done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "arrays"]
