"""A damaged checkpoint is refused by name; whole ones of the right run are opened."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranking_functions import begin_run, chain, random_tables, save_on_threads

from kgshard.errors import RunError, ShardError
from kgshard.runs import Checkpoint, Run, checkpoint_name, open_checkpoint, open_run, shard_name
from kgshard.shards import ENTITIES, RELATIONS, header_bytes

NUM_ROWS, WORLD_SIZE = 8, 4


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 entities with a checkpoint of 4 ranks, two rows each."""
    run = begin_run(tmp_path_factory.mktemp("pristine"), train=chain(NUM_ROWS))
    save_on_threads(run, WORLD_SIZE, *random_tables(run, 1), step=5)
    return run.folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to damage."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step-00000005"


def shard(folder: Path, rank: int) -> Path:
    return folder / shard_name(rank, WORLD_SIZE)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def open_tables(folder: Path) -> Checkpoint:
    """Open a checkpoint as its users do: through its run, with both tables."""
    checkpoint = open_run(folder.parents[1]).checkpoint
    assert checkpoint.entities.num_rows == NUM_ROWS
    assert checkpoint.relations.num_rows == 1
    return checkpoint


def refusal(folder: Path) -> ShardError:
    with pytest.raises(ShardError) as caught:
        open_tables(folder)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def test_an_undamaged_copy_is_opened(folder: Path, pristine: Path) -> None:
    """A control for all refusals below."""
    copied, original = open_tables(folder), open_run(pristine).checkpoint
    np.testing.assert_array_equal(
        copied.entities.read(range(NUM_ROWS)), original.entities.read(range(NUM_ROWS))
    )
    assert sorted(path.name for path in copied.verify()) == [
        *(shard_name(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)),
        "relation.safetensors",
    ]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SIZES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "zero bytes": empty,
    "truncated": truncate,
    "longer": lengthen,
    "a folder": become_a_folder,
}


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("kind", sorted(SIZES))
def test_a_shard_that_is_not_all_there_is_refused_by_file_and_rank(
    folder: Path, kind: str, rank: int
) -> None:
    path = shard(folder, rank)
    SIZES[kind](path)
    error = refusal(folder)
    assert str(path) in str(error)
    assert f"rank {rank}" in str(error)
    assert (error.file, error.rank) == (str(path), rank)


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_a_relation_file_that_is_not_all_there_is_refused_by_file(folder: Path, kind: str) -> None:
    path = folder / "relation.safetensors"
    SIZES[kind](path)
    assert refusal(folder).file == str(path)


def test_both_sizes_are_named(folder: Path) -> None:
    size = shard(folder, 1).stat().st_size
    truncate(shard(folder, 1))
    assert f"{size - 1} bytes, expected {size} (rank 1)" in str(refusal(folder))


def test_swapped_shards_are_refused_by_file(folder: Path) -> None:
    """Ranks 2 and 3 in each other's files: same length, but their headers say where their rows begin."""
    second, third = shard(folder, 1), shard(folder, 2)
    assert second.stat().st_size == third.stat().st_size
    one, other = second.read_bytes(), third.read_bytes()
    second.write_bytes(other)
    third.write_bytes(one)
    error = refusal(folder)
    assert str(second) in str(error)
    assert error.rank == 1


def test_shards_swapped_after_opening_are_found_by_their_hashes(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    second, third = shard(folder, 1), shard(folder, 2)
    one, other = second.read_bytes(), third.read_bytes()
    second.write_bytes(other)
    third.write_bytes(one)
    with pytest.raises(ShardError, match="SHA-256 differs") as caught:
        list(checkpoint.verify())
    assert caught.value.file == str(second)


def test_a_shard_of_another_step_is_found_by_its_hash(folder: Path, pristine: Path) -> None:
    run, stale = open_run(folder.parents[1]), shard(folder, 3).read_bytes()
    later = save_on_threads(run, WORLD_SIZE, *random_tables(run, 2), step=6)
    shard(later, 3).write_bytes(stale)
    with pytest.raises(ShardError, match="SHA-256 differs") as caught:
        list(open_run(run.folder).checkpoint.verify())
    assert caught.value.file == str(shard(later, 3))


def test_single_flipped_bits_are_found(folder: Path) -> None:
    """50 of 50, in headers and in data; the file is named."""
    source = random.Random(3)
    checkpoint = open_checkpoint(folder)
    files = sorted(json.loads((folder / "manifest.json").read_text())["files"])
    for _ in range(50):
        path = folder / source.choice(files)
        whole = bytearray(path.read_bytes())
        position, bit = source.randrange(len(whole)), 1 << source.randrange(8)
        whole[position] ^= bit
        path.write_bytes(whole)
        with pytest.raises(ShardError, match="SHA-256 differs") as caught:
            list(checkpoint.verify())
        assert caught.value.file == str(path)
        whole[position] ^= bit
        path.write_bytes(whole)
    assert len(list(checkpoint.verify())) == WORLD_SIZE + 1


def test_a_file_that_vanishes_before_it_is_verified_is_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    shard(folder, 2).unlink()
    with pytest.raises(ShardError, match="entity-00003"):
        list(checkpoint.verify())


def set_rows(rank: int, start: int, stop: int) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tables"][ENTITIES]["pieces"][rank]["rows"] = [start, stop]

    return change


def drop_rank(rank: int) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        piece = manifest["tables"][ENTITIES]["pieces"].pop(rank)
        del manifest["files"][piece["file"]]

    return change


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "gap": (set_rows(2, 5, 7), "entity-00003"),
    "overlap": (set_rows(2, 3, 5), "entity-00003"),
    "longer range": (set_rows(3, 6, 9), "entity-00004"),
    "backwards": (set_rows(1, 4, 2), "entity-00002"),
    "first rank gone": (drop_rank(0), "entity-00002"),
    "middle rank gone": (drop_rank(2), "entity-00004"),
    "last rank gone": (drop_rank(3), "step-00000005"),
    "foreign run": (lambda m: m.update(run_id="0" * 32), "run_id is not that of"),
    "foreign vocabulary": (
        lambda m: m.update(vocabulary_sha256="0" * 64),
        "vocabulary_sha256 is not that of",
    ),
    "other shape": (lambda m: m["tables"][ENTITIES].update(shape=[9, 4]), "step-00000005"),
    "other dtype": (lambda m: m["tables"][ENTITIES].update(dtype="F16"), "step-00000005"),
    "other format": (lambda m: m.update(format="kgshard.checkpoint/2"), "manifest.json"),
    "no run id": (lambda m: m.pop("run_id"), "manifest.json"),
    "no files": (lambda m: m.pop("files"), "manifest.json"),
    "no tables": (lambda m: m.pop("tables"), "manifest.json"),
    "no entities": (lambda m: m["tables"].pop(ENTITIES), "manifest.json"),
    "no relations": (lambda m: m["tables"].pop(RELATIONS), "manifest.json"),
    "no pieces": (lambda m: m["tables"][ENTITIES].update(pieces=[]), "step-00000005"),
    "files a list": (lambda m: m.update(files=[]), "manifest.json"),
    "shard not among the files": (lambda m: m["files"].pop(shard_name(1, WORLD_SIZE)), "manifest.json"),
    "another folder's file": (
        lambda m: m["files"].update({"../../../run.json": {"bytes": 1, "sha256": ""}}),
        r"run.json",
    ),
}


@pytest.mark.parametrize("kind", sorted(MANIFESTS))
def test_a_manifest_that_does_not_fit_is_refused_naming_what(folder: Path, kind: str) -> None:
    change, named = MANIFESTS[kind]
    edit(folder, change)
    assert named in str(refusal(folder))


@pytest.mark.parametrize("kind", ["gap", "overlap", "middle rank gone"])
def test_rows_out_of_place_are_refused_by_file(folder: Path, kind: str) -> None:
    change, named = MANIFESTS[kind]
    edit(folder, change)
    assert named in refusal(folder).file


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    """A manifest's names are data, and data never form paths."""
    outside = folder.parent / "outside.safetensors"
    shutil.move(shard(folder, 1), outside)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"].pop(shard_name(1, WORLD_SIZE))
        manifest["tables"][ENTITIES]["pieces"][1]["file"] = "../outside.safetensors"

    edit(folder, change)
    assert str(refusal(folder)).startswith(str(folder / "manifest.json"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\x80\x04pickle", b"\xff\xfe", b"[" * 100_000]
)
def test_a_manifest_that_is_none_is_refused(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    assert str(folder) in str(refusal(folder))


def test_a_folder_without_a_manifest_is_no_checkpoint(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    assert "not a complete checkpoint" in str(refusal(folder))


def test_a_shard_of_another_shape_or_name_is_refused(folder: Path) -> None:
    """Same number of bytes, but a single axis, or another tensor."""
    path = shard(folder, 0)
    whole = path.read_bytes()
    for before, after in ((b"[2,4]", b"[8]  "), (b"[2,4]", b"[4,2]"), (b'"entity_emb', b'"entitx_emb')):
        path.write_bytes(whole.replace(before, after))
        assert path.stat().st_size == len(whole)
        assert path.read_bytes() != whole
        assert str(path) in str(refusal(folder))


def test_a_file_that_is_no_safetensors_file_is_refused(folder: Path) -> None:
    path = shard(folder, 1)
    path.write_bytes(b"\x80\x04" + bytes(path.stat().st_size - 2))
    error = refusal(folder)
    assert str(path) in str(error)


@pytest.mark.parametrize("name", ["entity-00005-of-00004.safetensors", "old.safetensors"])
def test_a_shard_that_the_manifest_does_not_know_is_refused(folder: Path, name: str) -> None:
    """torch's reader would take it for rows of the table."""
    (folder / name).write_bytes(header_bytes({ENTITIES: ("F32", (0, 4))}, {}))
    assert name in str(refusal(folder))


def test_a_checkpoint_under_another_steps_name_is_refused(folder: Path) -> None:
    other = folder.with_name("step-00000009")
    folder.rename(other)
    (folder.parents[1] / "LATEST").write_text("step-00000009\n")
    assert "step-00000009" in str(refusal(other))


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    run = begin_run(tmp_path, train=chain(3))
    with pytest.raises(RunError, match="no checkpoint yet"):
        run.checkpoint  # noqa: B018


def test_a_latest_that_names_nothing_is_refused(folder: Path) -> None:
    (folder.parents[1] / "LATEST").write_text("step-00000077\n")
    with pytest.raises(RunError, match="no checkpoint step-00000077"):
        open_run(folder.parents[1]).open_checkpoint()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such run folder"):
        open_run(tmp_path / "none")
    with pytest.raises(RunError, match=r"not a run \(no run\.json\)"):
        open_run(tmp_path)
    for content in (b"", b"{", b"[]", b'{"format": "kgshard.run/2"}', b"\xff"):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(RunError, match=r"run\.json"):
            open_run(tmp_path)


def test_a_run_whose_data_are_gone_is_refused_at_once(folder: Path) -> None:
    shutil.rmtree(folder.parents[1] / "data")
    with pytest.raises(RunError, match="not a prepared dataset"):
        open_run(folder.parents[1])


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    runs: list[Run] = []
    for name in ("one", "two"):
        run = begin_run(tmp_path / name, train=chain(4))
        save_on_threads(run, 2, *random_tables(run, 4), step=1)
        runs.append(run)
    target = runs[0].folder / "checkpoints"
    shutil.rmtree(target)
    shutil.copytree(runs[1].folder / "checkpoints", target)
    with pytest.raises(ShardError, match=r"run_id is not that of .*files were mixed"):
        open_run(runs[0].folder).checkpoint  # noqa: B018


def test_names_sort_as_their_steps_do() -> None:
    assert checkpoint_name(1) < checkpoint_name(20) < checkpoint_name(12_000)
    assert shard_name(0, 4) == "entity-00001-of-00004.safetensors"
