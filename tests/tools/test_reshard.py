"""reshard: other pieces, the same rows, optimizer state included."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
    write_graph,
)
from kgshard_tools.merge import merge_shards
from kgshard_tools.reshard import reshard
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import kgshard
from kgshard.config import TrainConfig
from kgshard.errors import ConfigError, RunError, ShardError
from kgshard.partition import RowPartition
from kgshard.runs import open_run
from kgshard.start import started_run


@pytest.mark.parametrize("shard_relations", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 12), (12, 4), (3, 3)])
def test_every_row_and_its_optimizer_state_keep_their_values(
    tmp_path: Path, before: int, after: int, shard_relations: bool
) -> None:
    run = make_run(
        tmp_path,
        ring(7, 3),
        dim=4,
        model="tucker",
        world_size=before,
        state=True,
        shard_relations=shard_relations,
    )
    reshard(run.folder, after, tmp_path / "new")
    new = open_run(tmp_path / "new").checkpoint
    assert new.world_size == after
    assert len(list(new.verify())) == len(list(new.folder.glob("*.safetensors")))
    for old_table, table in (
        (run.checkpoint.entities, new.entities),
        (run.checkpoint.relations, new.relations),
    ):
        np.testing.assert_array_equal(
            table.read(range(table.num_rows)), old_table.read(range(table.num_rows))
        )
    partition = RowPartition(7, after)
    assert [piece.rows for piece in new.entities.pieces] == [partition.rows_of(rank) for rank in range(after)]
    assert len(new.relations.pieces) == (after if shard_relations else 1)
    np.testing.assert_array_equal(new.shared["core"], run.checkpoint.shared["core"])
    for name, rows, dim in ((ENTITIES, 7, 4), (RELATIONS, 6, run.model.relation_dim)):
        for part, expected in optimizer_state(name, range(rows), dim).items():
            stored = new.optimizer_tables[f"{name}.{part}"]
            found = stored.read(range(rows))
            np.testing.assert_array_equal(found, expected.float().reshape(rows, -1).numpy())
    assert set(new.optimizer_shared) == {"core.exp_avg", "core.row_steps"}


def test_there_and_back_gives_the_same_files(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9, 2), dim=4, world_size=2, state=True)
    reshard(run.folder, 5, tmp_path / "five")
    reshard(tmp_path / "five", 2, tmp_path / "two")
    for path in run.checkpoint.folder.glob("*.safetensors"):
        assert (tmp_path / "two" / path.relative_to(run.folder)).read_bytes() == path.read_bytes()
    assert open_run(tmp_path / "two").checkpoint.manifest == run.checkpoint.manifest
    assert tree(tmp_path / "two" / "data") == tree(run.folder / "data")


def test_it_is_the_same_run(tmp_path: Path) -> None:
    """Best and newest stay what they were; answers and figures too."""
    run = begin_run(tmp_path, ring(9, 2), (), [("e0", "r0", "e5")], dim=4)
    values = np.random.default_rng(0).standard_normal((2, 9, 4))
    for step, best in ((1, True), (2, False)):
        save_tables(run, values[step - 1], np.ones((4, 4)), world_size=2, step=step, best=best)
    (run.folder / "metrics.jsonl").write_text("{}\n")
    reshard(run.folder, 3, tmp_path / "new")
    new = open_run(tmp_path / "new")
    assert new.info == run.info
    assert (new.open_checkpoint("best").step, new.open_checkpoint("latest").step) == (1, 2)
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == "{}\n"
    questions = ("e0", "r0", 5)
    assert (
        kgshard.load(new).predict_tails(*questions).results
        == kgshard.load(run).predict_tails(*questions).results
    )


def test_a_checkpoint_folder_is_a_source_too(tmp_path: Path) -> None:
    run = begin_run(tmp_path, ring(5), dim=2)
    for step, best in ((1, True), (2, False)):
        save_tables(run, np.full((5, 2), step), np.ones((2, 2)), step=step, best=best)
    reshard(run.open_checkpoint("latest").folder, 2, tmp_path / "new")
    new = open_run(tmp_path / "new")
    assert [path.name for path in (new.folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert (new.checkpoint.entities.read(range(5)) == 2).all()


def test_torch_consolidates_the_new_shards(tmp_path: Path) -> None:
    """Optimizer files lie beside them and disturb nobody: they carry torch's sharding metadata too."""
    run = make_run(tmp_path, ring(7, 2), dim=4, world_size=2, state=True)
    reshard(run.folder, 3, tmp_path / "new")
    folder = open_run(tmp_path / "new").checkpoint.folder
    names = [ENTITIES, RELATIONS, f"{ENTITIES}.exp_avg", f"{ENTITIES}.exp_avg_sq"]
    (tmp_path / "torch").mkdir()
    consolidate_safetensors_files(str(folder), str(tmp_path / "torch"), dict.fromkeys(names, 1))
    [path] = (tmp_path / "torch").glob("*.safetensors")
    tensors = load_file(path)
    assert torch.equal(tensors[ENTITIES], torch.from_numpy(run.checkpoint.entities.read(range(7)).copy()))
    expected = optimizer_state(ENTITIES, range(7), 4)
    assert torch.equal(tensors[f"{ENTITIES}.exp_avg"], expected["exp_avg"])
    assert torch.equal(tensors[f"{ENTITIES}.exp_avg_sq"], expected["exp_avg_sq"])


def test_a_run_is_replaced_only_when_told_to_and_never_by_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ring(5), dim=2, world_size=2)
    other = make_run(tmp_path / "b", ring(5), dim=2)
    before = tree(tmp_path)
    with pytest.raises(RunError, match=r"holds a run already; .*--overwrite"):
        reshard(run.folder, 3, other.folder)
    for out in (run.folder, tmp_path / "a" / "." / "run"):
        with pytest.raises(RunError, match="is the run itself"):
            reshard(run.folder, 3, out, overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_text("mine")
    with pytest.raises(RunError, match="not a kgshard run"):
        reshard(run.folder, 3, tmp_path / "photos", overwrite=True)
    shutil.rmtree(tmp_path / "photos")
    assert tree(tmp_path) == before
    reshard(run.folder, 3, other.folder, overwrite=True)
    assert open_run(other.folder).info.id == run.info.id


@pytest.mark.parametrize("world_size", [0, -1, 100_000])
def test_a_world_size_that_is_none_is_refused(tmp_path: Path, world_size: int) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    with pytest.raises(ConfigError, match="--world-size must be from 1 to 99999"):
        reshard(run.folder, world_size, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_verify_finds_a_flipped_bit_in_optimizer_state(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2, world_size=2, state=True)
    path = run.checkpoint.folder / "optim-00002-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    for act in (
        lambda: reshard(run.folder, 3, tmp_path / "new", verify=True),
        lambda: merge_shards(run.folder, tmp_path / "m.safetensors", include=["optimizer"], verify=True),
    ):
        with pytest.raises(ShardError, match=r"optim-00002-of-00002.*SHA-256"):
            act()
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "m.safetensors").exists()


def test_a_run_that_is_being_trained_is_not_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ring(5), dim=2)
    source = write_graph(tmp_path / "source", ring(5), [], [])
    with started_run(source, tmp_path / "live", TrainConfig(dim=2)):
        before = tree(tmp_path / "live")
        with pytest.raises(RunError, match="is being written by pid"):
            reshard(run.folder, 2, tmp_path / "live")
        assert tree(tmp_path / "live") == before


def test_labels_and_triples_are_verified_too(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    path = run.folder / "data" / "train.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ShardError, match=r"train\.npy: SHA-256 differs"):
        reshard(run.folder, 2, tmp_path / "new", verify=True)
    assert not (tmp_path / "new").exists()


def test_figures_go_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=2)
    (run.folder / "eval").mkdir()
    (run.folder / "eval" / "test-full-filtered.json").write_text("{}")
    reshard(run.folder, 2, tmp_path / "new")
    assert (tmp_path / "new" / "eval" / "test-full-filtered.json").read_text() == "{}"


def test_the_command_says_what_it_wrote_and_how_to_load_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), [], [("e0", "r0", "e3")], dim=2)
    command = [sys.executable, "-m", "kgshard", "reshard", str(run.folder), "-o", str(tmp_path / "new")]
    done = subprocess.run(
        [*command, "--world-size", "3", "--json"], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert set(said) == {"files", "rows", "bytes", "seconds", "notes", "python", "peak_memory"}
    assert said["bytes"] == sum(Path(file).stat().st_size for file in said["files"])
    assert open_run(tmp_path / "new").checkpoint.world_size == 3
    refused = subprocess.run([*command, "--world-size", "0"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
