"""`kgshard verify`: every file is as it was written, or the first that is not is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from graphs import make_run, ring, save_tables, tree
from kgshard_tools.cli import run as kgshard
from kgshard_tools.export import export
from kgshard_tools.index.build import build_index
from kgshard_tools.merge import merge_shards
from safetensors.numpy import load_file, save_file

import kgshard as ks
from kgshard.errors import RunError, ShardError, UsageError
from kgshard.runs import Run


@pytest.fixture(autouse=True)
def debug_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGSHARD_DEBUG", "")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, an index, a merged model and an export."""
    made = make_run(
        tmp_path_factory.mktemp("pristine"),
        ring(9, 2),
        [("e0", "r0", "e5")],
        [("e1", "r1", "e4")],
        model="tucker:3",
        dim=12,
        world_size=2,
    )
    shared = dict(made.checkpoint.shared)
    source = np.random.default_rng(2)
    tables = source.standard_normal((9, 12)), source.standard_normal((4, 3))
    save_tables(made, *tables, shared, step=5, best=True, world_size=3)
    save_tables(made, *tables, shared, step=6, world_size=2)
    build_index(made.folder)
    merge_shards(made.folder)
    export(made.folder)
    return made.folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def checked(path: Path, *, deep: bool = False) -> dict[str, str]:
    """Return every file that was found right, by its path below `path`, and how that is known."""
    return {str(Path(file.path).relative_to(path)): file.by for file in ks.verify(path, deep=deep).files}


def refusal(path: Path, *, deep: bool = False) -> str:
    with pytest.raises(UsageError) as caught:
        ks.verify(path, deep=deep)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_a_run_is_its_record_its_dataset_all_its_checkpoints_and_its_indexes(folder: Path) -> None:
    for deep in (False, True):
        found = checked(folder, deep=deep)
        steps = {"step-00000005": 3, "step-00000006": 2}
        assert set(found) == {
            *("run.json", "LATEST", "BEST"),
            *(f"data/{name}.npy" for name in ("train", "valid", "test")),
            *("data/data.json", "data/entities.parquet", "data/relations.parquet"),
            *(
                f"checkpoints/{step}/{name}"
                for step in steps
                for name in ("manifest.json", "relation.safetensors")
            ),
            *(f"checkpoints/{step}/shared.safetensors" for step in steps),
            *(
                f"checkpoints/{step}/entity-{rank + 1:05d}-of-{world:05d}.safetensors"
                for step, world in steps.items()
                for rank in range(world)
            ),
            *("index/index.json", "index/labels.sqlite", "index/links.faiss", "index/neighbors.faiss"),
        }
    hashed = {name for name, by in found.items() if by == "SHA-256"}
    assert {name for name in found if name.endswith((".safetensors", ".faiss", ".sqlite"))} <= hashed


@pytest.mark.parametrize("name", ["data", "index", "model", "export-numpy", "checkpoints/step-00000005"])
def test_each_part_can_be_asked_for_alone(folder: Path, tmp_path: Path, name: str) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(folder / name, alone)  # where no run is above it
    for place in (folder / name, alone):
        assert set(checked(place, deep=True)) == set(tree(place))


def test_it_changes_nothing(folder: Path) -> None:
    before = tree(folder)
    ks.verify(folder, deep=True)
    assert tree(folder) == before


def test_a_line_for_every_file_and_one_in_the_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kgshard(["verify", str(folder)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"{len(lines)} files ok"
    size = (folder / "index" / "links.faiss").stat().st_size
    assert f"ok  {folder / 'index' / 'links.faiss'}  ({size:,} bytes)" in lines
    assert all(line.startswith(f"ok  {folder}/") for line in lines)
    assert kgshard(["verify", str(folder), "--json", "--deep"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert set(value) == {"path", "deep", "files", "seconds"}
    assert (value["deep"], len(value["files"])) == (True, len(lines))
    assert kgshard(["verify", str(folder), "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_the_first_bad_file_ends_it_with_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "checkpoints" / "step-00000006" / "entity-00002-of-00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for options in ([], ["-q"], ["--json"]):
        assert kgshard(["verify", str(folder), *options]) == 2
        said = capsys.readouterr()
        assert said.err == f"Error: {path}: SHA-256 differs from manifest.json (rank 1)\n"
        assert " ok" not in said.out
        assert str(path) not in said.out


def test_a_file_without_a_hash_says_so(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kgshard(["verify", str(pristine / "export-numpy")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "entities.npy" in line)
    assert line.endswith(" bytes; no hash: its structure only)")


def put_value(path: Path, position: int, value: float) -> None:
    """Overwrite a float32 that lies so many floats before the end of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) - 4 * position : len(content) - 4 * (position - 1) or None] = np.float32(
        value
    ).tobytes()
    path.write_bytes(content)


def rehash(folder: Path, name: str) -> None:
    """Let a manifest agree with what was done to a file."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"][name]["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    manifest.pop("seal", None)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_deep_names_the_entity_that_is_not_finite(folder: Path, value: float) -> None:
    """Its file agrees with its hash: it was written so."""
    checkpoint = folder / "checkpoints" / "step-00000006"
    name = "entity-00002-of-00002.safetensors"  # entities 5 to 8
    put_value(checkpoint / name, 12 + 3, value)
    rehash(checkpoint, name)
    assert checked(checkpoint)
    labels = pq.read_table(folder / "data" / "entities.parquet")["label"].to_pylist()
    words = f"{name}: entity 7 ({labels[7]!r}) is not finite (rank 1)"
    assert words in refusal(checkpoint, deep=True)
    assert words in refusal(folder, deep=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [("relation.safetensors", "relation row 3"), ("shared.safetensors", "shared parameter 'core'")],
)
def test_deep_looks_at_relations_and_shared_parameters_too(folder: Path, name: str, words: str) -> None:
    checkpoint = folder / "checkpoints" / "step-00000006"
    put_value(checkpoint / name, 1, np.nan)
    rehash(checkpoint, name)
    assert words in refusal(checkpoint, deep=True)


@pytest.mark.parametrize("name", ["model/model.safetensors", "export-numpy/entities.npy"])
def test_deep_names_the_entity_in_a_merged_model_and_an_export(folder: Path, name: str) -> None:
    path = folder / name
    forget_listing(path.parent)
    if path.suffix == ".npy":
        table = np.load(path)
        table[4, 1] = np.inf
        np.save(path, table)
    else:
        tensors = load_file(path)
        tensors["entity_embedding.weight"][4, 1] = np.inf
        save_file(tensors, path)
    label = pq.read_table(folder / "data" / "entities.parquet")["label"][4].as_py()
    assert checked(path.parent)
    assert f"{path}: entity 4 ({label!r}) is not finite" in refusal(path.parent, deep=True)


def test_deep_names_the_row_of_an_index(folder: Path) -> None:
    path = folder / "index" / "links.faiss"
    put_value(path, 12 * 2, np.nan)  # the first float of the last row but one
    record = json.loads((folder / "index" / "index.json").read_bytes())
    record["indexes"]["links"]["parts"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    record.pop("seal", None)
    (folder / "index" / "index.json").write_text(json.dumps(record))
    assert checked(folder / "index")
    label = pq.read_table(folder / "data" / "entities.parquet")["label"][7].as_py()
    assert f"links.faiss: entity 7 ({label!r}) is not finite" in refusal(folder, deep=True)


def forget_hashes(folder: Path) -> None:
    """Let data.json say nothing of its files, as one of an older kgshard."""
    record = json.loads((folder / "data.json").read_bytes())
    record.pop("files", None)
    record.pop("seal", None)
    (folder / "data.json").write_text(json.dumps(record))


def change_triples(change: Callable[[Any], Any], split: str = "train") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        np.save(folder / f"{split}.npy", change(np.load(folder / f"{split}.npy")))

    return damage


def change_labels(change: Callable[[pa.Table], pa.Table], name: str = "entities") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / f"{name}.parquet"
        table = change(pq.read_table(path))
        path.unlink()  # it may have a second name in an export
        pq.write_table(table, path)

    return damage


def put_id(value: int, column: int) -> Callable[[Any], Any]:
    def change(triples: Any) -> Any:
        triples[-1, column] = value
        return triples

    return change


def put_column(name: str, values: Callable[[pa.Array], pa.Array]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, values(table[name]))

    return change


def other_relations(triples: Any) -> Any:
    """Give every triple the other one of two relations."""
    triples[:, 1] = 1 - triples[:, 1]
    return triples


def renamed(labels: pa.Array) -> pa.Array:
    return pa.array([label.replace("e3", "x3") for label in labels.to_pylist()], pa.large_string())


DAMAGES: dict[str, tuple[Callable[[Path], None], bool, str]] = {
    "a triple too few": (change_triples(lambda triples: triples[:-1]), False, "train.npy"),
    "a column too few": (change_triples(lambda triples: triples[:, :2].copy()), False, "train.npy"),
    "floats": (change_triples(lambda triples: triples.astype(np.float32)), False, "train.npy"),
    "a split gone": (lambda folder: (folder / "valid.npy").unlink(), False, "valid.npy: missing"),
    "a label too few": (change_labels(lambda table: table.slice(0, 8)), False, "entities.parquet: 8 rows"),
    "no degrees": (change_labels(lambda table: table.drop_columns("degree")), False, "entities.parquet"),
    "head out of range": (change_triples(put_id(9, 0)), True, "train.npy: column 0 holds ids outside 0..8"),
    "relation out of range": (change_triples(put_id(2, 1), "valid"), True, "valid.npy: column 1"),
    "tail below 0": (change_triples(put_id(-1, 2), "test"), True, "test.npy: column 2"),
    "another head": (change_triples(put_id(0, 0)), True, "entities.parquet: degree of row"),
    "another relation": (change_triples(other_relations), True, "relations.parquet: degree"),
    "a label changed": (change_labels(put_column("label", renamed)), True, "data"),
    "labels in another order": (
        change_labels(put_column("label", lambda labels: labels.combine_chunks()[::-1])),
        True,
        "entities.parquet: 'e",
    ),
    "an id wrong": (
        change_labels(put_column("id", lambda ids: pa.array([0, 1, 2, 2, *range(4, 9)]))),
        True,
        "entities.parquet: id of row 3 is 2, expected 3",
    ),
    "a relation renamed": (
        change_labels(
            put_column("label", lambda labels: pa.array([f"{x}+" for x in labels.to_pylist()])), "relations"
        ),
        True,
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_a_dataset_without_hashes_is_checked_by_what_must_hold(folder: Path, kind: str) -> None:
    damage, needs_deep, words = DAMAGES[kind]
    data = folder / "data"
    forget_hashes(data)
    assert checked(data, deep=True)  # the control
    damage(data)
    assert words in refusal(data, deep=needs_deep)
    if needs_deep:
        assert checked(data)


def test_labels_of_another_vocabulary_are_refused_by_its_hash(folder: Path) -> None:
    """In order, as many, with the right ids: only the hash tells."""
    data = folder / "data"
    forget_hashes(data)
    record = json.loads((data / "data.json").read_bytes())
    record["vocabulary_sha256"] = "0" * 64
    (data / "data.json").write_text(json.dumps(record))
    assert checked(data)
    assert "labels are not those that the vocabulary's hash in data.json was made of" in refusal(
        data, deep=True
    )


def forget_listing(folder: Path) -> None:
    """Take from config.json what it says of the files beside it, as earlier versions said nothing."""
    path = folder / "config.json"
    record = json.loads(path.read_bytes())
    record.pop("files", None)
    path.write_text(json.dumps(record))


MODEL, ARRAYS = "model/model.safetensors", "export-numpy"
MODELS: list[tuple[str, Callable[[Path], object], str]] = [
    (f"{ARRAYS}/entities.npy", lambda path: np.save(path, np.load(path)[:-1]), "8 rows, but config.json"),
    (f"{ARRAYS}/relations.npy", lambda path: path.write_bytes(path.read_bytes()[:-4]), "its header says"),
    (f"{ARRAYS}/entities.txt", lambda path: path.write_text("e\n" * 8), "8 lines, but config.json says 9"),
    (MODEL, lambda path: path.write_bytes(path.read_bytes() + b"\0"), "not a safetensors file"),
    (MODEL, lambda path: save_file({"w": np.ones(1)}, path), "entity_embedding.weight is None"),
    (
        "model/config.json",
        lambda path: path.write_text(path.read_text().replace("9", "8")),
        "config.json says",
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), MODELS)
def test_a_model_or_export_without_hashes_is_checked_by_headers_and_rows(
    folder: Path, name: str, change: Callable[[Path], object], words: str
) -> None:
    forget_listing((folder / name).parent)
    change(folder / name)
    assert words in refusal((folder / name).parent)


@pytest.mark.parametrize("name", ["export-numpy/entities.npy", MODEL])
def test_a_length_in_config_json_is_compared_where_no_hash_is(folder: Path, name: str) -> None:
    path = folder / name
    assert checked(path.parent)
    path.write_bytes(path.read_bytes() + b"\0")
    assert f"{path}: {path.stat().st_size} bytes, but config.json says" in refusal(path.parent)


@pytest.mark.parametrize("place", ["export-numpy", "model"])
def test_hashes_in_config_json_are_compared(folder: Path, place: str) -> None:
    path = folder / place / "config.json"
    record = json.loads(path.read_bytes())
    names = [name for name in tree(folder / place) if name != "config.json"]
    record["files"] = {
        name: {
            "bytes": (folder / place / name).stat().st_size,
            "sha256": hashlib.sha256((folder / place / name).read_bytes()).hexdigest(),
        }
        for name in names
    }
    path.write_text(json.dumps(record))
    assert {name for name, by in checked(folder / place).items() if by == "SHA-256"} == set(names)
    victim = folder / place / names[-1]
    content = bytearray(victim.read_bytes())
    content[50] ^= 1
    victim.unlink()
    victim.write_bytes(content)
    assert str(victim) in refusal(folder / place)
    victim.unlink()
    assert str(victim) in refusal(folder / place)


def test_a_run_whose_parts_were_mixed_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", ring(9, 2), model="tucker:3", dim=12, world_size=2).folder
    build_index(other)
    for name in ("index", "checkpoints"):
        mixed = tmp_path / f"mixed-{name}"
        shutil.copytree(folder, mixed)
        shutil.rmtree(mixed / name)
        shutil.copytree(other / name, mixed / name)
        assert "files were mixed" in refusal(mixed)


def test_a_pointer_to_nothing_is_refused(folder: Path) -> None:
    (folder / "BEST").write_text("step-00000099\n")
    assert "no checkpoint step-00000099" in refusal(folder)


def test_single_files_are_checked_as_far_as_they_tell(folder: Path) -> None:
    for name in ("model/model.safetensors", "data/train.npy", "data/entities.parquet", "index/links.faiss"):
        (file,) = ks.verify(folder / name, deep=True).files
        assert (file.path, file.by) == (str(folder / name), "structure")
        cut = folder / f"cut{Path(name).suffix}"
        cut.write_bytes((folder / name).read_bytes()[:-4])
        assert str(cut) in refusal(cut)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_row_of_a_long_file_is_named_by_its_number(tmp_path: Path, dtype: Any) -> None:
    """Files are read in blocks."""
    table = np.zeros((40_000, 2), dtype)
    np.save(tmp_path / "long.npy", table)
    save_file({"long": table}, tmp_path / "long.safetensors")
    for name in ("long.npy", "long.safetensors"):
        assert ks.verify(tmp_path / name, deep=True).files
    table[33_333, 1] = np.inf
    np.save(tmp_path / "long.npy", table)
    save_file({"long": table}, tmp_path / "long.safetensors")
    for name in ("long.npy", "long.safetensors"):
        assert refusal(tmp_path / name, deep=True).endswith("row 33333 of long is not finite")


def test_a_pickle_is_not_verified(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04N.")
    with pytest.raises(RunError, match="does not open; nothing was checked"):
        ks.verify(tmp_path / "a.pkl")


def test_a_shard_error_carries_file_and_rank(folder: Path) -> None:
    path = folder / "checkpoints" / "step-00000005" / "entity-00003-of-00003.safetensors"
    put_value(path, 1, 0.25)
    with pytest.raises(ShardError) as caught:
        ks.verify(folder)
    assert (caught.value.file, caught.value.rank) == (str(path), 2)


def test_a_run_without_a_checkpoint_is_in_order(tmp_path: Path) -> None:
    run: Run = make_run(tmp_path, ring(5), dim=2)
    shutil.rmtree(run.folder / "checkpoints")
    (run.folder / "LATEST").unlink()
    assert "run.json" in checked(run.folder, deep=True)
