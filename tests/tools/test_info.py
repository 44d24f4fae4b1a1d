"""`kgshard info`: what lies there, as it says itself, without opening anything that could run code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from graphs import begin_run, make_run, ring, save_tables, tree
from kgshard_tools.cli import run as kgshard
from kgshard_tools.export import export
from kgshard_tools.index.build import build_index
from kgshard_tools.info import info
from kgshard_tools.merge import merge_shards
from safetensors.numpy import save_file

import kgshard as ks
from kgshard.errors import RunError, ShardError
from kgshard.runs import Run

KEYS = {"path", "kind", "format", "details", "files", "readable_by"}


@pytest.fixture(autouse=True)
def debug_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGSHARD_DEBUG", "")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two ranks with an index, a merged model and an export."""
    made = make_run(
        tmp_path_factory.mktemp("finished"),
        ring(9, 2),
        [("e0", "r0", "e5")],
        model="tucker:3",
        dim=12,
        world_size=2,
    )
    build_index(made.folder)
    merge_shards(made.folder)
    export(made.folder)
    return made


def test_a_run_says_its_model_its_sizes_and_its_checkpoints(finished: Run) -> None:
    found = info(finished)
    details = found.details
    assert (found.kind, found.format) == ("run", "kgshard.run/1")
    expected = {"model": "tucker:3", "dim": 12, "entities": 9, "relations": 2, "reciprocal": True}
    assert {key: details[key] for key in expected} == expected
    assert details["id"] == finished.info.id
    assert details["vocabulary_sha256"] == finished.dataset.vocabulary_sha256
    (checkpoint,) = details["checkpoints"]
    expected = {
        "name": "step-00000001",
        "step": 1,
        "world_size": 2,
        "dtype": "F32",
        "latest": True,
        "best": False,
    }
    assert {key: checkpoint[key] for key in expected} == expected
    assert {each["file"] for each in details["indexes"]} == {"links.faiss", "neighbors.faiss"}
    assert found.readable_by == ["kgshard"]


def test_the_best_and_the_latest_checkpoint_are_told_apart(tmp_path: Path) -> None:
    run = begin_run(tmp_path, ring(5), dim=2)
    for step, best in ((3, True), (7, False)):
        save_tables(run, np.zeros((5, 2)), np.zeros((2, 2)), step=step, best=best)
    found = [(each["step"], each["best"], each["latest"]) for each in info(run).details["checkpoints"]]
    assert found == [(3, True, False), (7, False, True)]


def test_a_run_without_a_checkpoint_is_a_run(tmp_path: Path) -> None:
    found = info(begin_run(tmp_path, ring(5), dim=2))
    assert found.details["checkpoints"] == []
    assert any(line.split() == ["checkpoints", "none"] for line in found.lines())


def test_a_checkpoint_says_tables_pieces_and_hashes(finished: Run) -> None:
    folder = finished.checkpoint.folder
    found = info(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (found.kind, found.format) == ("checkpoint", "kgshard.checkpoint/1")
    entities = {"name": "entity_embedding.weight", "dtype": "F32", "shape": [9, 12], "pieces": 2}
    assert entities in found.details["tables"]
    assert found.details["run_id"] == finished.info.id
    assert {Path(file.path).name: file.sha256 for file in found.files} == {
        name: entry["sha256"] for name, entry in manifest["files"].items()
    }


def test_a_dataset_says_its_counts_and_sources(finished: Run) -> None:
    found = info(finished.folder / "data")
    expected = {"entities": 9, "relations": 2, "train": 9, "valid": 1, "test": 0}
    assert {key: found.details[key] for key in expected} == expected
    assert (found.kind, found.details["sources"][0]["file"]) == ("data", "train.tsv")


def test_an_index_folder_says_what_it_is_for_and_of_which_step(finished: Run) -> None:
    found = info(finished.folder / "index")
    assert found.kind == "index"
    assert {(each["file"], each["step"], each["rows"]) for each in found.details["indexes"]} == {
        ("links.faiss", 1, 9),
        ("neighbors.faiss", 1, 9),
    }
    assert all(file.sha256 for file in found.files)


def test_a_merged_model_and_an_export_say_which_run_they_are_of(finished: Run) -> None:
    for name, kind in (("model", "model"), ("export-numpy", "export")):
        found = info(finished.folder / name)
        assert found.kind == kind
        assert found.details["run_id"] == finished.info.id
        assert found.details["entities"] == 9
        assert {Path(file.path).name for file in found.files} == set(os.listdir(finished.folder / name))
    assert found.details["export_format"] == "numpy"
    assert found.readable_by[0].startswith("numpy")


@pytest.mark.parametrize("name", ["run.json", "data/data.json", "index/index.json", "model/config.json"])
def test_a_record_stands_for_its_folder(finished: Run, name: str) -> None:
    path = finished.folder / name
    assert info(path) == info(path.parent)


def test_a_shard_says_which_rows_it_holds(finished: Run) -> None:
    found = info(finished.checkpoint.folder / "entity-00002-of-00002.safetensors")
    assert found.details["shard_of"] == ["entity_embedding.weight, rows 5..8"]
    assert found.details["tensors"] == [{"name": "entity_embedding.weight", "dtype": "F32", "shape": [4, 12]}]


def test_any_safetensors_file_says_names_dtypes_shapes_and_metadata(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        name: np.ones((2, 3), dtype)
        for name, dtype in (
            ("b", bool),
            ("i1", np.int8),
            ("u8", np.uint64),
            ("f2", np.float16),
            ("f8", float),
        )
    }
    save_file(tensors, tmp_path / "any.safetensors", {"who": "me"})
    details = info(tmp_path / "any.safetensors").details
    assert {each["name"]: each["dtype"] for each in details["tensors"]} == {
        "b": "BOOL",
        "i1": "I8",
        "u8": "U64",
        "f2": "F16",
        "f8": "F64",
    }
    assert details["metadata"] == {"who": "me"}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (2, 1, 3)])
@pytest.mark.parametrize("dtype", ["<f4", "<i8", "|b1", ">f8"])
def test_an_array_says_what_numpy_says_of_it(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(shape, dtype))
    assert info(path).details == {"dtype": dtype, "shape": list(shape), "order": "C"}


def test_an_array_in_fortran_order_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(np.zeros((2, 3))))
    assert info(tmp_path / "a.npy").details["order"] == "Fortran"


def test_an_array_of_objects_is_refused_and_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ShardError, match="objects"):
        info(tmp_path / "a.npy")


def test_a_parquet_file_says_rows_and_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": ["a", "b"], "x": [1.0, 2.0]}), tmp_path / "t.parquet")
    assert info(tmp_path / "t.parquet").details == {
        "rows": 2,
        "columns": [{"name": "label", "type": "string"}, {"name": "x", "type": "double"}],
    }


@pytest.mark.parametrize(
    ("factory", "metric", "words"),
    [
        ("Flat", faiss.METRIC_L2, ("flat", "L2")),
        ("Flat", faiss.METRIC_INNER_PRODUCT, ("flat", "inner product")),
        ("Flat", faiss.METRIC_L1, ("flat", "L1")),
        ("HNSW8", faiss.METRIC_L2, ("HNSW, flat", "L2")),
        ("IVF2,Flat", faiss.METRIC_INNER_PRODUCT, ("IVF, flat", "inner product")),
        ("PCA4,Flat", faiss.METRIC_L2, ("behind a transform", "L2")),
        ("SQ8", faiss.METRIC_L2, ("scalar quantizer", "L2")),
    ],
)
def test_an_index_file_says_what_faiss_says_of_it(
    tmp_path: Path, factory: str, metric: int, words: tuple[str, str]
) -> None:
    rows = np.random.default_rng(1).standard_normal((100, 8)).astype(np.float32)
    index = faiss.index_factory(8, factory, metric)
    index.train(rows)
    index.add(rows)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    details = info(tmp_path / "x.faiss").details
    assert (details["type"], details["metric"]) == words
    assert (details["vectors"], details["dim"]) == (index.ntotal, index.d) == (100, 8)


def test_a_weight_map_says_its_files(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model-00001-of-00001.safetensors")
    record = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(record))
    for place in (path, tmp_path):
        found = info(place)
        assert (found.kind, found.details) == ("weight map", {"tensors": 1, "total_size": 8})
        assert [Path(file.path).name for file in found.files] == ["model-00001-of-00001.safetensors"]
    for name in ("../a", "/etc/passwd", "absent.safetensors"):
        path.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(RunError, match="name"):
            info(path)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_a_pickle_is_named_and_never_opened(tmp_path: Path) -> None:
    """Whatever it is called, and wherever it lies (B77)."""
    mark = tmp_path / "ran"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / f"{protocol}.bin").write_bytes(pickle.dumps(Bomb(mark), protocol))
        assert info(tmp_path / f"{protocol}.bin").kind == "pickle"
    torch.save({"w": torch.zeros(2), "x": Bomb(mark)}, tmp_path / "model.pt")
    torch.save([Bomb(mark)], tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert info(tmp_path / "model.pt").kind == "torch"
    assert info(tmp_path / "old.pth").kind == "pickle"
    assert any("kgshard import" in reader for reader in info(tmp_path / "model.pt").readable_by)
    assert not mark.exists()
    pickle.loads((tmp_path / "2.bin").read_bytes())  # the control: it would have
    assert mark.exists()


def test_a_pickle_beside_an_index_is_left_alone(finished: Run, tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(finished.folder, folder)
    for name in ("index/index.pkl", "index/links.faiss.pkl", "data/entities.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    info(folder), info(folder / "index"), ks.verify(folder, deep=True)
    (folder / "data" / "entities.parquet").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(RunError, match=r"entities\.parquet"):
        ks.verify(folder)
    assert not mark.exists()


def unknown_things(folder: Path) -> dict[str, Path]:
    (folder / "empty").mkdir()
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text('{"model_type": "bert"}')
    (folder / "text.tsv").write_text("a\tb\tc\n")
    (folder / "nothing").write_bytes(b"")
    (folder / "circle").symlink_to(folder / "circle")
    os.mkfifo(folder / "pipe")
    with zipfile.ZipFile(folder / "some.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    return {path.name: path for path in folder.iterdir()} | {"none": folder / "none"}


def test_what_nobody_knows_is_one_line_that_says_what_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, path in unknown_things(tmp_path).items():
        for command in ("info", "verify"):
            assert kgshard([command, str(path)]) == 2, name
            said = capsys.readouterr()
            assert (said.out, said.err.count("\n")) == ("", 1), name
            assert said.err.startswith(f"Error: {path}: "), name
    with pytest.raises(RunError, match=r"looked for run\.json"):
        info(tmp_path / "empty")
    with pytest.raises(RunError, match="by its first bytes"):
        info(tmp_path / "text.tsv")


@pytest.mark.parametrize("name", ["a.npy", "a.parquet", "a.faiss", "a.safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY\x01\x00\xff\xff", b"PAR1", b"IxF2\xff\xff\xff\xff", bytes(100)]
)
def test_a_file_that_is_not_what_its_name_says_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    assert kgshard(["info", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert str(tmp_path / name) in said.err


def test_as_json_it_is_one_object_and_as_text_aligned_lines(
    finished: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(finished.folder)
    places = ["", "data", "index", "model", "export-numpy", "data/train.npy", "model/model.safetensors"]
    for place in places:
        path = str(finished.folder / place).rstrip("/")
        assert kgshard(["info", path, "--json"]) == 0
        value = json.loads(capsys.readouterr().out)
        assert set(value) == KEYS
        assert value["path"] == path
        assert all(set(file) == {"path", "bytes", "sha256"} for file in value["files"])
        assert kgshard(["info", path, "-q"]) == 0  # it is the answer
        first, *rest = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{path}: ")
        column = len(rest[0]) - len(rest[0].removeprefix("format").lstrip())
        assert rest[0].startswith("format ")
        assert all(line[column - 2 : column] == "  " and line[column] != " " for line in rest)
    assert tree(finished.folder) == before


def test_neither_command_imports_torch_or_faiss_or_a_users_model(finished: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    record = json.loads((folder / "run.json").read_bytes())
    record["model"]["score_function"] = "evil:Model"
    (tmp_path / "evil-run").mkdir()
    shutil.copytree(folder / "data", tmp_path / "evil-run" / "data")
    (tmp_path / "evil-run" / "run.json").write_text(json.dumps(record))
    script = (
        "import sys\n"
        "from kgshard_tools.cli import run\n"
        "folder, evil = sys.argv[1:]\n"
        "assert run(['info', evil]) == 0\n"
        "assert run(['info', folder]) == run(['verify', folder, '--deep']) == 0\n"
        "assert not {'torch', 'faiss'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "evil-run")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "evil:Model" in done.stdout


def test_labels_and_names_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "a.safetensors", {"k": "\x1b[2J\u202e"})
    assert kgshard(["info", str(tmp_path / "a.safetensors")]) == 0
    out = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in out)
