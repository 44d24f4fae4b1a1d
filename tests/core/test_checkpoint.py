"""Checkpoints are there whole or not at all, and every rank learns why not."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranking_functions import (
    Floats,
    begin_run,
    chain,
    random_tables,
    save_on_threads,
    save_tables,
    sharded,
)
from safetensors.numpy import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from worlds import GlooPool, ThreadWorld

from kgshard import checkpoint as module
from kgshard.checkpoint import save_checkpoint
from kgshard.errors import NonFiniteError, RankFailureError
from kgshard.exchange import Exchange
from kgshard.files import TEMPORARY_PREFIX, file_sha256
from kgshard.partition import RowPartition
from kgshard.runs import Run, open_run
from kgshard.shards import ENTITIES, RELATIONS, write_blocks
from kgshard.table import ShardedTable


def run_of(folder: Path, num_entities: int, **settings: Any) -> Run:
    return begin_run(folder, train=chain(num_entities), **settings)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("num_entities", [2, 3, 11])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_is_saved_is_what_is_opened(tmp_path: Path, world_size: int, num_entities: int) -> None:
    """On any number of ranks, some of which may own no row (B28)."""
    run = run_of(tmp_path, num_entities, model="rotate", dim=6)
    entities, relations = random_tables(run, 1)
    folder = save_on_threads(run, world_size, entities, relations, step=7)
    opened = open_run(run.folder).checkpoint
    assert opened.folder == folder
    assert (opened.step, opened.world_size) == (7, world_size)
    assert [len(piece.rows) for piece in opened.entities.pieces] == [
        len(RowPartition(num_entities, world_size).rows_of(rank)) for rank in range(world_size)
    ]
    np.testing.assert_array_equal(opened.entities.read(range(num_entities)), entities)
    np.testing.assert_array_equal(opened.relations.read(range(len(relations))), relations)
    assert len(list(opened.verify())) == world_size + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_table_dtype_is_kept_and_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    run = run_of(tmp_path, 5)
    values = torch.tensor(random_tables(run, 2)[0]).to(dtype)
    ThreadWorld(2).run(save_typed, str(run.folder), values)
    opened = open_run(run.folder).checkpoint
    np.testing.assert_array_equal(opened.entities.read(range(5)), values.float().numpy())
    assert (
        opened.entities.dtype == {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    )


def save_typed(exchange: Exchange, folder: str, values: torch.Tensor) -> None:
    partition = RowPartition(len(values), exchange.world_size)
    rows = partition.rows_of(exchange.rank)
    table = ShardedTable(values[rows.start : rows.stop], partition, exchange)
    save_checkpoint(open_run(folder), table, torch.ones(1, 4), step=1, epoch=1)


def test_rows_that_are_not_in_c_order_are_saved_right(tmp_path: Path) -> None:
    """Writing the memory of a transposed or strided tensor as it lies would scramble it (B49)."""
    run = run_of(tmp_path, 6)
    relations = torch.ones(run.model.num_relation_rows, run.model.relation_dim)
    square = torch.arange(48, dtype=torch.float32)
    for step, values in enumerate((square[:24].view(4, 6).T, square.view(6, 8)[:, ::2]), 1):
        assert not values.is_contiguous()
        ThreadWorld(1).run(save_typed_step, str(run.folder), values, relations, step)
        opened = open_run(run.folder).checkpoint
        np.testing.assert_array_equal(opened.entities.read(range(6)), values.numpy())


def save_typed_step(
    exchange: Exchange, folder: str, values: torch.Tensor, relations: torch.Tensor, step: int
) -> None:
    table = ShardedTable(values, RowPartition(len(values), 1), exchange)
    save_checkpoint(open_run(folder), table, relations, step=step, epoch=1)


def test_tables_of_several_blocks_are_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_ROWS", 2)
    run = run_of(tmp_path, 11)
    entities, relations = random_tables(run, 3)
    save_on_threads(run, 2, entities, relations)
    opened = open_run(run.folder).checkpoint
    np.testing.assert_array_equal(opened.entities.read(range(11)), entities)
    assert len(list(opened.verify())) == 3


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    run = run_of(tmp_path, 5)
    entities, relations = random_tables(run, 4)
    folder = save_on_threads(run, 2, entities, relations, step=12)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "kgshard.checkpoint/1"
    assert manifest["run_id"] == json.loads((run.folder / "run.json").read_text())["id"]
    assert manifest["vocabulary_sha256"] == run.dataset.vocabulary_sha256
    assert (manifest["step"], manifest["epoch"], manifest["world_size"]) == (12, 1, 2)
    table = manifest["tables"][ENTITIES]
    assert (table["dtype"], table["shape"]) == ("F32", [5, 4])
    assert [(piece["rank"], piece["rows"]) for piece in table["pieces"]] == [(0, [0, 3]), (1, [3, 5])]
    assert manifest["tables"][RELATIONS]["shape"] == [1, 4]
    on_disk = {path.name: path for path in folder.iterdir() if path.name != "manifest.json"}
    assert manifest["files"] == {
        name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for name, path in on_disk.items()
    }
    assert (run.folder / "LATEST").read_text().strip() == folder.name == "step-00000012"


def test_a_checkpoint_is_all_there_is_afterwards(tmp_path: Path) -> None:
    run = run_of(tmp_path, 5)
    before = names(run.folder)
    save_on_threads(run, 3, *random_tables(run, 5), step=2)
    added = set(names(run.folder)) - set(before)
    shards = {f"checkpoints/step-00000002/entity-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)}
    assert added == shards | {
        "LATEST",
        "checkpoints",
        "checkpoints/step-00000002",
        "checkpoints/step-00000002/manifest.json",
        "checkpoints/step-00000002/relation.safetensors",
    }


def test_twelve_ranks_are_put_together_by_the_manifest(tmp_path: Path) -> None:
    """Names sorted as text give 1, 10, 11, 2 (B45). Row i holds i; names here say nothing about rows."""
    run = run_of(tmp_path, 30)
    entities = np.repeat(np.arange(30, dtype=np.float32)[:, None], 4, axis=1)
    folder = save_on_threads(run, 12, entities, np.ones((1, 4), np.float32))
    manifest = json.loads((folder / "manifest.json").read_text())
    table = manifest["tables"][ENTITIES]
    for piece in table["pieces"]:
        other = f"{97 * piece['rank'] % 13}.safetensors"
        (folder / piece["file"]).rename(folder / other)
        manifest["files"][other] = manifest["files"].pop(piece["file"])
        piece["file"] = other
    del manifest["seal"]  # it is of the text as it was
    (folder / "manifest.json").write_text(json.dumps(manifest))
    opened = open_run(run.folder).checkpoint
    assert opened.entities.read(range(30))[:, 0].tolist() == list(range(30))
    assert len(list(opened.verify())) == 13


@pytest.mark.processes
def test_gloo_ranks_save_the_same_tables(tmp_path: Path, gloo_pool: GlooPool) -> None:
    run = run_of(tmp_path, 7)
    entities, relations = random_tables(run, 8)
    gloo_pool.run(3, tmp_path, save_tables, str(run.folder), entities, relations, 4)
    opened = open_run(run.folder).checkpoint
    np.testing.assert_array_equal(opened.entities.read(range(7)), entities)
    assert opened.world_size == 3


class Fault:
    """Makes one call fail with ENOSPC, on one rank or for one name."""

    def __init__(self, patch: pytest.MonkeyPatch, what: str) -> None:
        self.patch = patch
        getattr(self, what)()

    def _fail(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def shard_of_rank_1(self) -> None:
        self._fail_write("entity-00002-of")

    def shard_of_rank_0(self) -> None:
        self._fail_write("entity-00001-of")

    def relations(self) -> None:
        self._fail_write("relation.")

    def _fail_write(self, start: str) -> None:
        real = write_blocks

        def write(file: Any, blocks: Any) -> tuple[int, str]:
            if Path(file.name).name.startswith(start):
                file.write(b"half")
                self._fail()
            return real(file, blocks)

        self.patch.setattr(module, "write_blocks", write)

    def manifest(self) -> None:
        self.patch.setattr(module, "write_json", lambda *_: self._fail())

    def folder_sync(self) -> None:
        self.patch.setattr(module, "sync_tree", lambda *_: self._fail())

    def rename(self) -> None:
        self.patch.setattr(module, "place", lambda *_: self._fail())

    def temporary_folder(self) -> None:
        real = Path.mkdir

        def mkdir(path: Path, *arguments: Any, **keywords: Any) -> None:
            if path.name.startswith(TEMPORARY_PREFIX):
                self._fail()
            real(path, *arguments, **keywords)

        self.patch.setattr(Path, "mkdir", mkdir)


FAULTS = {
    "shard_of_rank_1": 1,
    "shard_of_rank_0": 0,
    "relations": 0,
    "manifest": 0,
    "folder_sync": 0,
    "rename": 0,
    "temporary_folder": 0,
}
"""Name of a fault to the rank it happens on."""


def try_to_save(
    exchange: Exchange, folder: str, entities: Floats, relations: Floats, step: int
) -> Exception | None:
    try:
        save_checkpoint(
            open_run(folder), sharded(exchange, entities), torch.tensor(relations), step=step, epoch=1
        )
    except Exception as error:
        return error
    return None


def errors_of_failed_save(
    run: Run, world_size: int, fault: str, patch: pytest.MonkeyPatch
) -> list[Exception | None]:
    tables = random_tables(run, 9)
    with patch.context() as context:
        Fault(context, fault)
        outcomes: list[Exception | None] = ThreadWorld(world_size).run(
            try_to_save, str(run.folder), *tables, 2
        )
    return outcomes


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_failed_write_reaches_every_rank_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, world_size: int
) -> None:
    errors = errors_of_failed_save(run_of(tmp_path, 7), world_size, fault, monkeypatch)
    for rank, error in enumerate(errors):
        if rank == FAULTS[fault]:
            assert isinstance(error, OSError)
            assert error.errno == errno.ENOSPC
        else:
            assert isinstance(error, RankFailureError)
            assert f"rank {FAULTS[fault]}: OSError" in str(error)
            assert os.strerror(errno.ENOSPC) in str(error)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_failed_write_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run = run_of(tmp_path, 7)
    before = random_tables(run, 10)
    save_on_threads(run, 2, *before, step=1)
    assert all(errors_of_failed_save(run, 2, fault, monkeypatch))
    opened = open_run(run.folder).checkpoint
    assert opened.step == 1
    np.testing.assert_array_equal(opened.entities.read(range(7)), before[0])
    assert not (run.folder / "checkpoints" / "step-00000002").exists()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_failed_write_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run = run_of(tmp_path, 7)
    save_on_threads(run, 2, *random_tables(run, 11), step=1)
    before = names(run.folder)
    errors_of_failed_save(run, 2, fault, monkeypatch)
    assert names(run.folder) == before


def test_after_a_failed_write_the_same_step_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a killed rank left its temporary folder behind (B24)."""
    run = run_of(tmp_path, 7)
    errors_of_failed_save(run, 2, "shard_of_rank_1", monkeypatch)
    stray = run.folder / "checkpoints" / f"{TEMPORARY_PREFIX}0123456789ab-step-00000002"
    stray.mkdir(parents=True)
    (stray / "entity-00001-of-00002.safetensors").write_bytes(b"half")
    tables = random_tables(run, 12)
    save_on_threads(run, 2, *tables, step=2)
    opened = open_run(run.folder).checkpoint
    assert opened.step == 2
    np.testing.assert_array_equal(opened.entities.read(range(7)), tables[0])


def test_a_faultless_save_has_no_errors(tmp_path: Path) -> None:
    """A control for the faults above."""
    run = run_of(tmp_path, 7)
    assert ThreadWorld(2).run(try_to_save, str(run.folder), *random_tables(run, 13), 2) == [None, None]


def load_by_torch(folder: Path, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Load tensors of a checkpoint folder through torch's own distributed checkpoint reader."""
    state = {name.replace("__", "."): torch.full(shape, torch.nan) for name, shape in shapes.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("num_entities", "world_size"), [(11, 1), (11, 4), (3, 4), (2, 4)])
def test_torch_loads_a_checkpoint_to_the_same_values(
    tmp_path: Path, num_entities: int, world_size: int
) -> None:
    run = run_of(tmp_path, num_entities)
    entities, relations = random_tables(run, 14)
    folder = save_on_threads(run, world_size, entities, relations)
    loaded = load_by_torch(
        folder, entity_embedding__weight=entities.shape, relation_embedding__weight=relations.shape
    )
    np.testing.assert_array_equal(loaded[ENTITIES].numpy(), entities)
    np.testing.assert_array_equal(loaded[RELATIONS].numpy(), relations)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("num_entities", "world_size"), [(11, 1), (11, 4), (3, 4), (2, 4)])
def test_torch_merges_a_checkpoint_to_the_same_values(
    tmp_path: Path, num_entities: int, world_size: int
) -> None:
    run = run_of(tmp_path, num_entities)
    entities, relations = random_tables(run, 15)
    folder = save_on_threads(run, world_size, entities, relations)
    merged = tmp_path / "merged"
    merged.mkdir()
    consolidate_safetensors_files(str(folder), str(merged), {ENTITIES: 1, RELATIONS: 1})
    [path] = merged.glob("*.safetensors")
    loaded = load_file(path)
    np.testing.assert_array_equal(loaded[ENTITIES], entities)
    np.testing.assert_array_equal(loaded[RELATIONS], relations)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 6])
def test_rows_that_are_not_finite_are_refused_on_every_rank_and_nothing_is_written(
    tmp_path: Path, world_size: int, value: float, row: int
) -> None:
    run = run_of(tmp_path, 7)
    entities, relations = random_tables(run, 16)
    entities[row, 2] = value
    before = names(run.folder)
    errors = ThreadWorld(world_size).run(try_to_save, str(run.folder), entities, relations, 2)
    owner = 0 if row == 0 else world_size - 1
    expected = [RankFailureError] * world_size
    assert [type(error) for error in errors] == [
        NonFiniteError if rank == owner else kind for rank, kind in enumerate(expected)
    ]
    words = f"entity {row} ({run.dataset.entities[row]!r}) is not finite; no checkpoint was written"
    assert all(words in str(error) for error in errors)
    assert names(run.folder) == before


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_relations_that_are_not_finite_are_refused_on_every_rank(
    tmp_path: Path, world_size: int, value: float
) -> None:
    run = run_of(tmp_path, 7)
    save_on_threads(run, 2, *random_tables(run, 17), step=1)
    before = names(run.folder)
    entities, relations = random_tables(run, 18)
    relations[0, 3] = value
    errors = ThreadWorld(world_size).run(try_to_save, str(run.folder), entities, relations, 2)
    assert [type(error) for error in errors] == [NonFiniteError] * world_size
    assert names(run.folder) == before
    assert open_run(run.folder).checkpoint.step == 1
