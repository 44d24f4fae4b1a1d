"""merge-shards: one file in row order, exact, and no memory for the table."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import (
    ENTITIES,
    RELATIONS,
    begin_run,
    make_run,
    optimizer_state,
    ring,
    save_tables,
    tree,
    write_sparse_checkpoint,
)
from kgshard_tools.merge import merge_shards
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file

from kgshard.errors import ConfigError, RunError, ShardError
from kgshard.runs import Run
from kgshard.shards import ITEM_BYTES, read_header

# VmHWM, not getrusage: a child's ru_maxrss begins at what its parent had when it forked.
MEASURE = """
import sys
from kgshard_tools.export import export
from kgshard_tools.merge import merge_shards
task, run, out = sys.argv[1:]
if task == "merge":
    merge_shards(run, out)
elif task == "merge as bfloat16":
    merge_shards(run, out, dtype="bfloat16")
elif task == "top degree":
    export(run, "numpy", out, top_degree=50)
else:
    export(run, *task.split()[:1], out, **({"dtype": "float16"} if "float16" in task else {}))
assert "torch" not in sys.modules
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
"""


def test_the_merged_rows_are_those_of_the_table(tmp_path: Path) -> None:
    source = np.random.default_rng(3)
    entities = source.standard_normal((7, 6)).astype(np.float32)
    relations = source.standard_normal((4, 6)).astype(np.float32)
    for world_size in (1, 2, 3, 12):  # 12 ranks: five of them own nothing
        folder = tmp_path / str(world_size)
        run = make_run(
            folder, ring(7, 2), dim=6, entities=entities, relations=relations, world_size=world_size
        )
        merge_shards(run.folder, folder / "merged.safetensors")
        merged = load_file(folder / "merged.safetensors")
        assert sorted(merged) == [ENTITIES, RELATIONS]
        np.testing.assert_array_equal(merged[ENTITIES], entities)
        np.testing.assert_array_equal(merged[RELATIONS], relations)


def test_twelve_shards_come_in_the_order_of_the_manifest(tmp_path: Path) -> None:
    """Sorted by number as text, file names would give 1, 10, 11, 12, 2."""
    rows = np.repeat(np.arange(30.0)[:, None], 2, axis=1)
    run = make_run(tmp_path, ring(30), dim=2, entities=rows, world_size=12)
    folder = run.checkpoint.folder
    manifest = json.loads((folder / "manifest.json").read_text())
    for index, piece in enumerate(manifest["tables"][ENTITIES]["pieces"]):
        name = f"part-{12 - index}.safetensors"  # neither text nor number order is row order
        os.rename(folder / piece["file"], folder / name)
        manifest["files"][name] = manifest["files"].pop(piece["file"])
        piece["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    merge_shards(run.folder, tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors")[ENTITIES][:, 0].tolist() == list(range(30))


def test_torch_and_safetensors_read_the_file_and_its_format(tmp_path: Path) -> None:
    entities = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    run = make_run(tmp_path, ring(5), dim=2, entities=entities, world_size=2)
    merge_shards(run.folder, tmp_path / "m.safetensors")
    tensors = load_torch_file(tmp_path / "m.safetensors")
    assert torch.equal(tensors[ENTITIES], torch.from_numpy(entities))
    with safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    entities = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    run = make_run(tmp_path, ring(5), dim=2, entities=entities, world_size=3, dtype=torch.bfloat16)
    merge_shards(run.folder, tmp_path / "m.safetensors")
    stored = load_torch_file(tmp_path / "m.safetensors")[ENTITIES]
    assert torch.equal(stored, torch.from_numpy(entities).to(torch.bfloat16))


def test_the_default_is_a_model_folder_with_labels_and_config(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2, world_size=2, model="distmult")
    written = merge_shards(run.folder)
    folder = run.folder / "model"
    names = ["README.md", "config.json", "entities.parquet", "model.safetensors", "relations.parquet"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert written.files == [str(folder / name) for name in names]
    assert written.rows == 5
    assert written.bytes == sum(path.stat().st_size for path in folder.iterdir())
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "kgshard",
        "score_function": "distmult",
        "embedding_dim": 2,
        "num_entities": 5,
        "num_relations": 1,
        "complex_layout": "halves",
        "torch_dtype": "float32",
        "kgshard_format": 1,
        "step": 1,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["vocab_sha256"] == run.dataset.vocabulary_sha256


def test_merging_again_replaces_the_earlier_result(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    merge_shards(run.folder)
    save_tables(run, np.full((5, 2), 8.0), np.zeros((2, 2)), step=2)
    merge_shards(run.folder)
    assert (load_file(run.folder / "model" / "model.safetensors")[ENTITIES] == 8).all()


def test_a_checkpoint_folder_is_a_source_too(tmp_path: Path) -> None:
    """A run itself stands for the checkpoint that did best on valid, where one was told to."""
    run = begin_run(tmp_path, ring(5), dim=2)
    best = save_tables(run, np.full((5, 2), 1.0), np.zeros((2, 2)), step=1, best=True)
    newest = save_tables(run, np.full((5, 2), 2.0), np.zeros((2, 2)), step=2, world_size=3)
    for source, value in ((best, 1.0), (newest, 2.0), (run.folder, 1.0)):
        merge_shards(source, tmp_path / "m.safetensors")
        assert (load_file(tmp_path / "m.safetensors")[ENTITIES] == value).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["tucker:3", "conve", "keci:1,1"])
def test_parameters_that_all_rows_share_are_merged_too(
    tmp_path: Path, model: str, dtype: torch.dtype
) -> None:
    """In bfloat16 five rows of three floats are 30 bytes; what follows must still be mappable."""
    dim = 3 if model == "tucker:3" else 15
    run = make_run(tmp_path, ring(5), dim=dim, model=model, world_size=2, dtype=dtype)
    merge_shards(run.folder, tmp_path / "m.safetensors")
    merged = load_torch_file(tmp_path / "m.safetensors")
    shared = run.checkpoint.shared
    assert set(shared) == set(run.model.scoring.shared_init(dim))
    assert set(merged) == {ENTITIES, RELATIONS, *(f"shared.{name}" for name in shared)}
    for name, values in shared.items():
        assert merged[f"shared.{name}"].dtype == torch.float32
        np.testing.assert_array_equal(merged[f"shared.{name}"].numpy(), values)
        assert values.any()
    for info in read_header(tmp_path / "m.safetensors")[0].values():
        assert info.offset % ITEM_BYTES[info.dtype] == 0
    for table in (run.checkpoint.entities, run.checkpoint.relations):
        assert merged[table.name].dtype == dtype
        np.testing.assert_array_equal(merged[table.name].float().numpy(), table.read(range(table.num_rows)))


def test_a_relative_checkpoint_folder_finds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ring(5), dim=2, entities=np.ones((5, 2)))
    monkeypatch.chdir(run.checkpoint.folder)
    merge_shards(".", tmp_path / "m.safetensors")
    assert (load_file(tmp_path / "m.safetensors")[ENTITIES] == 1).all()


def foreign_file(run: Run) -> Path:
    path = run.folder.parent / "thesis"
    path.write_text("mine")
    return path


def foreign_folder(run: Run) -> Path:
    path = run.folder.parent / "photos"
    path.mkdir()
    (path / "cat.jpg").write_bytes(b"mine")
    return path


def foreign_model(run: Run) -> Path:
    """Somebody else's model folder looks like ours, but for what config.json says."""
    path = run.folder.parent / "bert"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"mine")
    (path / "config.json").write_text('{"model_type": "bert"}')
    (path / "notes.txt").write_text("mine")
    return path


def one_shard(run: Run) -> Path:
    return next(run.checkpoint.folder.glob("entity-*.safetensors"))


@pytest.mark.parametrize(
    "place",
    [
        foreign_file,
        foreign_folder,
        foreign_model,
        one_shard,
        lambda run: run.folder,
        lambda run: run.folder / "data",
        lambda run: run.folder / "checkpoints",
        lambda run: run.checkpoint.folder,
    ],
    ids=["file", "folder", "foreign model", "own shard", "run", "data", "checkpoints", "checkpoint"],
)
def test_what_is_not_a_merged_model_is_never_overwritten(tmp_path: Path, place: object) -> None:
    assert callable(place)
    run = make_run(tmp_path, ring(5), dim=2, world_size=2)
    out = place(run)
    before = tree(tmp_path)
    with pytest.raises(RunError):
        merge_shards(run.folder, out)
    assert tree(tmp_path) == before


def test_a_run_is_refused_even_where_a_model_lies_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    (run.folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(RunError):
        merge_shards(run.folder, run.folder)
    assert run.checkpoint.folder.is_dir()


def flip_a_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << 4
    path.write_bytes(data)


def test_verify_finds_a_flipped_bit_in_every_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2, world_size=2)
    merge_shards(run.folder, verify=True)
    before = tree(run.folder / "model")
    for path in sorted(run.checkpoint.folder.glob("*.safetensors")):
        flip_a_bit(path, -3)
        with pytest.raises(ShardError, match="SHA-256") as caught:
            merge_shards(run.folder, verify=True)
        assert caught.value.file == str(path)
        assert tree(run.folder / "model") == before
        flip_a_bit(path, -3)
    merge_shards(run.folder, verify=True)


def test_a_missing_shard_is_named_with_its_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(6), dim=2, world_size=3)
    path = sorted(run.checkpoint.folder.glob("entity-*"))[1]
    path.unlink()
    with pytest.raises(ShardError, match=r"entity-00002-of-00003.*rank 1") as caught:
        merge_shards(run.folder)
    assert caught.value.rank == 1
    assert not (run.folder / "model").exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run, other = (make_run(tmp_path / name, ring(5), dim=2) for name in "ab")
    ours, theirs = run.checkpoint.folder, other.checkpoint.folder
    for path in theirs.iterdir():
        (ours / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ShardError, match="run_id"):
        merge_shards(run.folder)


@pytest.mark.parametrize(
    "task",
    [
        *("merge", "merge as bfloat16", "numpy", "numpy float16", "parquet", "safetensors", "top degree"),
        "word2vec-bin",
    ],
)
def test_memory_does_not_grow_with_the_table(tmp_path: Path, task: str) -> None:
    peaks = []
    for num_mebibytes in (16, 200):
        folder = tmp_path / str(num_mebibytes)
        # 64 rows of 4 bytes a number for each mebibyte: more rows, not longer ones.
        settings = {"model": "distmult", "corruption": "both-sides"}
        run = begin_run(folder, ring(64 * num_mebibytes), dim=4096, **settings)
        write_sparse_checkpoint(run, num_shards=4)
        out = folder / ("m.safetensors" if task.startswith("merge") else "out")
        command = [sys.executable, "-c", MEASURE, task, str(run.folder), str(out)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
        shutil.rmtree(folder)
    small, large = peaks
    assert large - small < 32 << 10  # KiB, of 184 MiB more


def test_a_link_as_output_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ring(5), dim=2)
    (tmp_path / "far").mkdir()
    for name in ("m.safetensors", "folder"):
        merge_shards(run.folder, tmp_path / "far" / name)
        (tmp_path / name).symlink_to(tmp_path / "far" / name)
    changed = run.checkpoint.entities.read(range(5)) + 1
    save_tables(run, changed, run.checkpoint.relations.read(range(2)), step=2)
    for name, file in (("m.safetensors", "m.safetensors"), ("folder", "folder/model.safetensors")):
        merge_shards(run.folder, tmp_path / name)
        assert (tmp_path / name).is_symlink()
        np.testing.assert_array_equal(load_file(tmp_path / "far" / file)[ENTITIES], changed)
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["folder", "m.safetensors"]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_a_dtype_is_kept_widened_or_rounded_as_torch_rounds(
    tmp_path: Path, stored: torch.dtype, wanted: str
) -> None:
    values = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    run = make_run(tmp_path, ring(9), dim=4, entities=values, world_size=2, dtype=stored, model="tucker")
    written = merge_shards(run.folder, tmp_path / "m.safetensors", dtype=wanted)
    tensors = load_torch_file(tmp_path / "m.safetensors")
    target = getattr(torch, wanted)
    assert torch.equal(tensors[ENTITIES], torch.from_numpy(values).to(stored).to(target))
    assert tensors[RELATIONS].dtype == target
    assert tensors["shared.core"].dtype == torch.float32
    said = [note for note in written.notes if "widened" in note or "rounded" in note]
    assert len(said) == (stored != target)


def test_what_float16_cannot_hold_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    values = np.ones((5, 2))
    values[2, 0] = 70000
    run = make_run(tmp_path, ring(5), dim=2, entities=values)
    label = run.dataset.entities[2]
    with pytest.raises(ConfigError, match=rf"entity 2 \('{label}'\) holds 70000, which float16 cannot"):
        merge_shards(run.folder, tmp_path / "m.safetensors", dtype="float16")
    assert not (tmp_path / "m.safetensors").exists()
    with pytest.raises(ConfigError, match="--dtype: unknown value 'int8'"):
        merge_shards(run.folder, tmp_path / "m.safetensors", dtype="int8")


def test_a_largest_size_gives_files_that_a_hub_reads(tmp_path: Path) -> None:
    """A file for the entities, which alone are larger; the others share one."""
    run = make_run(tmp_path, ring(50, 3), dim=6, model="tucker:2", world_size=3)
    merge_shards(run.folder, tmp_path / "m", max_file_size="400")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    merged = {}
    for name, file in index["weight_map"].items():
        merged[name] = load_file(tmp_path / "m" / file)[name]
    assert set(merged) == {ENTITIES, RELATIONS, "shared.core"}
    np.testing.assert_array_equal(merged[ENTITIES], run.checkpoint.entities.read(range(50)))
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index["weight_map"][ENTITIES] == files[0]
    assert {index["weight_map"][name] for name in (RELATIONS, "shared.core")} == {files[1]}
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in merged.values())


def test_one_file_is_enough_where_all_fits(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    merge_shards(run.folder, max_file_size="5GB")
    assert not (run.folder / "model" / "model.safetensors.index.json").exists()
    merge_shards(run.folder, max_file_size="10B")
    assert not (run.folder / "model" / "model.safetensors").exists()
    merge_shards(run.folder)  # What is left of other sizes goes.
    assert [path.name for path in (run.folder / "model").glob("*.safetensors*")] == ["model.safetensors"]


def test_several_files_need_a_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    with pytest.raises(ConfigError, match="--max-file-size makes several files"):
        merge_shards(run.folder, tmp_path / "m.safetensors", max_file_size="1GB")
    for size in ("5 parsecs", "0", "-1", "", "1e9"):
        with pytest.raises(ConfigError, match="--max-file-size"):
            merge_shards(run.folder, tmp_path / "m", max_file_size=size)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("world_size", [1, 2, 12])
@pytest.mark.parametrize("shard_relations", [False, True])
def test_optimizer_state_is_merged_as_it_is_stored(
    tmp_path: Path, world_size: int, shard_relations: bool
) -> None:
    run = make_run(
        tmp_path,
        ring(7, 2),
        dim=4,
        model="tucker",
        world_size=world_size,
        state=True,
        shard_relations=shard_relations,
    )
    merge_shards(run.folder, include=["optimizer"])
    tensors = load_torch_file(run.folder / "model" / "optimizer.safetensors")
    for name, rows, dim in ((ENTITIES, 7, 4), (RELATIONS, 4, run.model.relation_dim)):
        for part, expected in optimizer_state(name, range(rows), dim).items():
            assert torch.equal(tensors[f"{name}.{part}"], expected.reshape(rows, -1))
    core = torch.from_numpy(run.checkpoint.shared["core"])
    assert torch.equal(tensors["shared.core.exp_avg"], core + 1)
    assert set(load_file(run.folder / "model" / "model.safetensors")) == {ENTITIES, RELATIONS, "shared.core"}
    config = json.loads((run.folder / "model" / "config.json").read_text())
    assert config["optimizer"] == {"name": "adam-rowstep", "num_steps": 3}
    merge_shards(run.folder, tmp_path / "m.safetensors", include=["optimizer"])
    assert set(load_torch_file(tmp_path / "m.safetensors")) == {*tensors, ENTITIES, RELATIONS, "shared.core"}


def test_a_run_without_optimizer_state_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    with pytest.raises(RunError, match=r"no optimizer state.*--no-save-optimizer"):
        merge_shards(run.folder, include=["optimizer"])
    with pytest.raises(ConfigError, match="--include: unknown value 'labels'"):
        merge_shards(run.folder, include=["labels"])


def test_verify_writes_down_the_hashes_of_what_was_merged(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2, state=True)
    merge_shards(run.folder, verify=True, include=["optimizer"])
    folder = run.folder / "model"
    files = json.loads((folder / "config.json").read_text())["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {"config.json"}
    for name, entry in files.items():
        raw = (folder / name).read_bytes()
        assert entry == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    out = tmp_path / "m.safetensors"
    notes = merge_shards(run.folder, out, verify=True).notes
    assert notes == [f"SHA-256 {hashlib.sha256(out.read_bytes()).hexdigest()}"]


def test_the_lines_of_python_load_what_was_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    lines = merge_shards(run.folder).python
    assert len(lines) == 3
    monkeypatch.chdir(run.folder / "model")
    names: dict[str, torch.Tensor] = {}
    for line in lines:
        exec(line, names)
    np.testing.assert_array_equal(names["row"].numpy(), run.checkpoint.entities.read(range(1)))


def test_progress_adds_up_to_the_tables(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(50, 3), dim=6, world_size=3)
    done: list[int] = []
    merge_shards(run.folder, advance=done.append)
    assert sum(done) == sum(
        table.num_rows * table.dim * 4 for table in (run.checkpoint.entities, run.checkpoint.relations)
    )
    done.clear()
    merge_shards(run.folder, dtype="bfloat16", advance=done.append)
    assert sum(done) == sum(
        table.num_rows * table.dim * 2 for table in (run.checkpoint.entities, run.checkpoint.relations)
    )


def link_to_a_shard(run: Run) -> Path:
    link = run.folder.parent / "l.safetensors"
    link.symlink_to(next(run.checkpoint.folder.glob("entity-*.safetensors")))
    return link


def foreign_tensors(run: Run) -> Path:
    path = run.folder.parent / "bert.safetensors"
    save_file({"w": np.ones((2, 2), np.float32)}, path)
    return path


def text_of_that_name(run: Run) -> Path:
    path = run.folder.parent / "notes.safetensors"
    path.write_text("mine")
    return path


def pipe(run: Run) -> Path:
    path = run.folder.parent / "p.safetensors"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    "place",
    [
        link_to_a_shard,
        foreign_tensors,
        text_of_that_name,
        pipe,
        lambda run: run.folder / "checkpoints" / "m.safetensors",
        lambda run: run.folder / "m.safetensors",
        lambda run: run.checkpoint.folder / "m.safetensors",
    ],
)
def test_no_file_but_a_merged_model_is_ever_replaced(tmp_path: Path, place: Callable[[Run], Path]) -> None:
    run = make_run(tmp_path, ring(5), dim=2, world_size=2)
    out = place(run)
    before = tree(tmp_path)
    with pytest.raises(RunError):
        merge_shards(run.folder, out)
    assert tree(tmp_path) == before
    merge_shards(run.folder, tmp_path / "deep" / "er" / "m.safetensors")
    merge_shards(run.folder, tmp_path / "deep" / "er" / "m.safetensors")


def test_an_optimizer_without_state_is_said_to_have_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2, state=True)
    manifest = run.checkpoint.folder / "manifest.json"
    record = json.loads(manifest.read_text())
    for name in [name for name in record["files"] if name.startswith("optim-")]:
        del record["files"][name]
        (run.checkpoint.folder / name).unlink()
    record["optimizer"] = {"name": "sgd", "num_steps": 3}
    record.pop("seal", None)
    manifest.write_text(json.dumps(record))
    assert "sgd keeps no state but its 3 steps" in merge_shards(run.folder, include=["optimizer"]).notes
    config = json.loads((run.folder / "model" / "config.json").read_text())
    assert config["optimizer"] == {"name": "sgd", "num_steps": 3}


def test_more_shards_than_file_descriptors(tmp_path: Path) -> None:
    """Promise 23: 101 shards, 64 descriptors, and rows that pass through."""
    run = make_run(tmp_path, ring(300), dim=4, world_size=101)
    command = [sys.executable, "-m", "kgshard", "merge-shards", str(run.folder), "--dtype", "bfloat16"]
    shell = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command]
    done = subprocess.run(shell, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    merged = load_torch_file(run.folder / "model" / "model.safetensors")[ENTITIES]
    assert torch.equal(merged, torch.from_numpy(run.checkpoint.entities.read(range(300)).copy()).bfloat16())
