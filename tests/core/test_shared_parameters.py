"""Parameters that all rows share are in a checkpoint once, and come back exactly or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from graphs import Floats, begin_run, make_run, ring, save_tables, tree
from ranking_functions import random_tables, sharded
from safetensors.numpy import load_file, save_file
from worlds import ThreadWorld

from kgshard.checkpoint import save_checkpoint
from kgshard.errors import NonFiniteError, ShardError
from kgshard.exchange import Exchange
from kgshard.files import file_sha256
from kgshard.runs import Run, open_run
from kgshard.shards import read_tensors

SHARED = "shared.safetensors"


def drawn_by(run: Run, seed: int) -> dict[str, Floats]:
    """Return what make_run draws after both tables."""
    source, model = np.random.default_rng(seed), run.model
    source.standard_normal((model.num_entities, model.dim))
    source.standard_normal((model.num_relation_rows, model.relation_dim))
    inits = model.scoring.shared_init(model.dim)
    return {name: source.standard_normal(how.shape).astype(np.float32) for name, how in inits.items()}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("model", ["tucker", "conve"])
def test_they_are_saved_once_and_read_exactly(tmp_path: Path, model: str, world_size: int) -> None:
    run = make_run(tmp_path, ring(5), model=model, dim=12, world_size=world_size, seed=3)
    expected, opened = drawn_by(run, seed=3), open_run(run.folder).checkpoint
    assert set(opened.shared) == set(expected) == set(run.model.scoring.shared_init(12))
    for name, values in expected.items():
        assert opened.shared[name].dtype == np.float32
        np.testing.assert_array_equal(opened.shared[name], values)
    assert len(list(opened.verify())) == world_size + 2


def test_the_manifest_names_them_and_their_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), model="tucker", dim=4, world_size=2)
    folder = run.checkpoint.folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["shared"] == {"core": [4, 4, 4]}
    path = folder / SHARED
    assert manifest["files"][SHARED] == {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    np.testing.assert_array_equal(load_file(path)["core"], run.checkpoint.shared["core"])


def test_a_model_that_has_none_writes_no_file_for_them(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), model="distmult", dim=4)
    assert run.checkpoint.shared == {}
    assert not (run.checkpoint.folder / SHARED).exists()


# --- what is not finite is never saved, and never read


def save_with(
    exchange: Exchange, folder: str, entities: Floats, relations: Floats, shared: dict[str, Floats]
) -> Exception | None:
    tensors = {name: torch.from_numpy(values) for name, values in shared.items()}
    table, run = sharded(exchange, entities), open_run(folder)
    try:
        save_checkpoint(run, table, torch.tensor(relations), tensors, step=2, epoch=1)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ones_that_are_not_finite_are_refused_on_every_rank(tmp_path: Path, world_size: int) -> None:
    run = begin_run(tmp_path, ring(5), model="distmult", dim=4)
    before = tree(run.folder)
    shared = {"core": np.ones((2, 2, 2), np.float32), "bias": np.array([0.0, np.nan], np.float32)}
    errors = ThreadWorld(world_size).run(save_with, str(run.folder), *random_tables(run, 1), shared)
    words = "shared parameter 'bias' is not finite; no checkpoint was written; lower --lr"
    assert [str(error) for error in errors] == [words] * world_size
    assert {type(error) for error in errors} == {NonFiniteError}
    assert tree(run.folder) == before


def test_stored_ones_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    run = begin_run(tmp_path, ring(5), model="tucker", dim=4)
    core = np.full((4, 4, 4), np.inf)
    save_tables(run, np.ones((5, 4)), np.ones((2, 4)), {"core": core})
    with pytest.raises(NonFiniteError, match=r"shared\.safetensors: shared parameter 'core' is not finite"):
        run.checkpoint.shared  # noqa: B018


# --- damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a core of 4 x 4 x 4."""
    return make_run(tmp_path, ring(5), model="tucker", dim=4).checkpoint.folder


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def refusal(folder: Path) -> ShardError:
    with pytest.raises(ShardError) as caught:
        open_run(folder.parents[1]).checkpoint.shared  # noqa: B018
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def forget(manifest: dict[str, Any]) -> None:
    manifest["files"].pop(SHARED)


def test_a_file_that_is_missing_or_of_another_length_is_refused(folder: Path) -> None:
    whole = (folder / SHARED).read_bytes()
    for damage in (b"", whole[:-1], whole + b"\0"):
        (folder / SHARED).write_bytes(damage)
        assert "shared.safetensors" in str(refusal(folder))
    (folder / SHARED).unlink()
    assert "shared.safetensors: missing" in str(refusal(folder))


def test_a_file_that_the_manifest_does_not_know_is_refused(folder: Path) -> None:
    edit(folder, forget)
    assert "is not in manifest.json" in str(refusal(folder))


@pytest.mark.parametrize("shapes", [{}, {"core": [4, 4]}, {"nucleus": [4, 4, 4]}, {"core": [2, 8, 4]}])
def test_other_names_or_shapes_than_the_models_are_refused(folder: Path, shapes: dict[str, Any]) -> None:
    edit(folder, lambda manifest: manifest.update(shared=shapes))
    assert f"shared parameters are {shapes}, expected {{'core': [4, 4, 4]}}" in str(refusal(folder))


@pytest.mark.parametrize(("name", "shape"), [("core", (2, 8, 4)), ("core", (64,)), ("nucl", (4, 4, 4))])
def test_other_names_or_shapes_than_the_manifests_are_refused(
    folder: Path, name: str, shape: tuple[int, ...]
) -> None:
    path = folder / SHARED
    save_file({name: np.zeros(shape, np.float32)}, path)
    described = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    edit(folder, lambda manifest: manifest["files"].update({SHARED: described}))
    error = refusal(folder)
    assert error.file == str(path)
    assert f"holds {{'{name}': {list(shape)}}}, but manifest.json says {{'core': [4, 4, 4]}}" in str(error)


def test_a_flipped_bit_is_found(folder: Path) -> None:
    checkpoint = open_run(folder.parents[1]).checkpoint
    whole = bytearray((folder / SHARED).read_bytes())
    whole[-3] ^= 1
    (folder / SHARED).write_bytes(whole)
    with pytest.raises(ShardError, match=r"shared\.safetensors: SHA-256 differs"):
        list(checkpoint.verify())


# --- small files read whole


def test_all_tensors_of_a_file_are_read_as_float32(tmp_path: Path) -> None:
    tensors: dict[str, npt.NDArray[Any]] = {
        "half": np.arange(6, dtype=np.float16).reshape(1, 2, 3),
        "single": np.array([0.1, -2.5], np.float32),
        "empty": np.empty((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "t.safetensors")
    found = read_tensors(tmp_path / "t.safetensors")
    assert set(found) == set(tensors)
    for name, values in tensors.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], values.astype(np.float32))


def test_a_tensor_that_is_none_of_floats_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"steps": np.arange(3, dtype=np.int64)}, path)
    with pytest.raises(ShardError, match="steps is I64, expected one of F32, BF16, F16") as caught:
        read_tensors(path)
    assert caught.value.file == str(path)
