"""The whole way on the bundled graph: train on two ranks, evaluate, merge, export, index, answer by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from graphs import ENTITIES, RELATIONS
from safetensors.numpy import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import kgshard

pytestmark = pytest.mark.processes

SETTINGS: dict[str, Any] = {"model": "distmult", "dim": 16, "epochs": 4, "batch_size": 256, "seed": 3}


@dataclass(frozen=True)
class Way:
    """What one call of each step left behind."""

    folder: Path
    run: Path
    evaluations: list[dict[str, Any]]


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Way:
    folder = tmp_path_factory.mktemp("python")
    run = kgshard.train("world", out=folder / "run", nproc_per_node=2, quiet=True, **SETTINGS)
    evaluations = [kgshard.evaluate(run.folder, nproc_per_node=world_size) for world_size in (1, 2)]
    kgshard.merge_shards(run.folder, folder / "merged.safetensors", verify=True)
    kgshard.export(run.folder, "numpy", folder / "arrays")
    kgshard.build_index(run.folder)
    return Way(folder, run.folder, evaluations)


def labels(folder: Path, name: str) -> list[str]:
    return (folder / "arrays" / f"{name}.txt").read_text().split("\n")[:-1]


def test_two_ranks_wrote_two_shards_and_a_log(way: Way) -> None:
    checkpoint = kgshard.open_run(way.run).checkpoint
    assert len(list(checkpoint.folder.glob("entity-*-of-00002.safetensors"))) == 2
    lines = [json.loads(line) for line in (way.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert checkpoint.step == lines[-1]["step"] == 4 * -(-4747 // 256)


def test_metrics_do_not_depend_on_the_ranks_that_evaluate(way: Way) -> None:
    alone, together = way.evaluations
    assert alone == together
    assert alone["protocol"]["triples"] == 264
    assert alone["metrics"]["mrr"] > 0.1  # an untrained model has about 0.004


def test_metrics_are_those_of_the_exported_arrays(way: Way) -> None:
    """Filtered ranks by brute force over the numpy files and the text of the graph."""
    arrays = {path.stem: np.load(path).astype(np.float64) for path in (way.folder / "arrays").glob("*.npy")}
    entity = {label: row for row, label in enumerate(labels(way.folder, "entities"))}
    relation = {label: row for row, label in enumerate(labels(way.folder, "relations"))}
    graph = Path(kgshard.__file__ or "").parent / "data" / "graphs" / "world"
    triples = {
        split: [line.split("\t") for line in (graph / f"{split}.tsv").read_text().split("\n") if line]
        for split in ("train", "valid", "test")
    }
    known: dict[tuple[str, str, str], set[int]] = {}
    for h, r, t in chain.from_iterable(triples.values()):
        known.setdefault(("tail", h, r), set()).add(entity[t])
        known.setdefault(("head", t, r), set()).add(entity[h])
    ranks = []
    for h, r, t in triples["test"]:
        for side, anchor, answer in (("tail", h, t), ("head", t, h)):
            rows = arrays["relations" if side == "tail" else "inverse_relations"]
            scores = arrays["entities"] @ (arrays["entities"][entity[anchor]] * rows[relation[r]])
            others = np.delete(scores, sorted(known[side, anchor, r]))
            true = scores[entity[answer]]
            ranks.append(1 + (others > true).sum() + (others == true).sum() / 2)
    metrics = way.evaluations[0]["metrics"]
    assert metrics["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), rel=1e-9)
    assert metrics["mr"] == pytest.approx(np.mean(ranks), rel=1e-9)
    assert metrics["hits@10"] == pytest.approx(np.mean(np.array(ranks) <= 10), rel=1e-9)


def test_the_merged_table_is_what_torch_consolidates(way: Way, tmp_path: Path) -> None:
    checkpoint = kgshard.open_run(way.run).checkpoint
    consolidate_safetensors_files(str(checkpoint.folder), str(tmp_path), {ENTITIES: 1, RELATIONS: 1})
    theirs: dict[str, Any] = {}
    for path in tmp_path.glob("*.safetensors"):
        theirs |= load_file(path)
    ours = load_file(way.folder / "merged.safetensors")
    assert sorted(ours) == sorted(theirs) == [ENTITIES, RELATIONS]
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name])


def test_torch_loads_the_shards_as_they_lie(way: Way) -> None:
    merged = load_file(way.folder / "merged.safetensors")[ENTITIES]
    state = {ENTITIES: torch.zeros(merged.shape)}
    folder = kgshard.open_run(way.run).checkpoint.folder
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    np.testing.assert_array_equal(state[ENTITIES].numpy(), merged)


def test_merged_exported_indexed_and_loaded_rows_are_the_same(way: Way) -> None:
    merged = load_file(way.folder / "merged.safetensors")[ENTITIES]
    exported = np.load(way.folder / "arrays" / "entities.npy", mmap_mode="r")
    index = faiss.read_index(str(way.run / "index" / "links.faiss"))
    model = kgshard.load(way.run)
    france = labels(way.folder, "entities").index("France")
    np.testing.assert_array_equal(merged, exported)
    np.testing.assert_array_equal(index.reconstruct_n(0, index.ntotal), exported)
    np.testing.assert_array_equal(model.to_numpy()[0], exported)
    np.testing.assert_array_equal(model["France"], exported[france])


def test_answers_by_name_know_the_graph(way: Way) -> None:
    model = kgshard.load(way.run)
    shown = model.predict_tails("France", "uses currency", k=len(model), known=True)
    assert {answer.label: answer.split for answer in shown if answer.known}.get("Euro") is not None
    left = model.predict_tails("France", "uses currency", k=len(model))
    assert "Euro" not in left.labels
    assert len(model.most_similar("France", k=5)) == 5
    assert model.evaluate("valid").metrics["mrr"] > 0.1


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shell")
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items() if name != "dim"]
    done = shell(
        *("train", "world", "-o", str(folder / "run"), "--nproc-per-node", "2", "--json", "--quiet"),
        *settings,
        environment={"KGSHARD_TRAIN_DIM": "16"},
    )
    (folder / "train.json").write_text(done)
    return folder


def shell(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run the installed command; it must succeed and say nothing on stderr."""
    program = Path(sys.executable).with_name("kgshard")
    done = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (environment or {}),
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_command_line_trains_as_python_does(command_line: Path, way: Way) -> None:
    said = json.loads((command_line / "train.json").read_text())
    assert set(said) == {"run", "checkpoint", "epochs", "seconds", "metrics"}
    assert said["epochs"] == 4
    assert Path(said["checkpoint"]).parent.parent == Path(said["run"]) == command_line / "run"
    tables = []
    for run in (command_line / "run", way.run):
        checkpoint = kgshard.open_run(run).checkpoint
        tables.append(checkpoint.entities.read(range(checkpoint.entities.num_rows)))
    assert tables[0].shape[1] == 16
    np.testing.assert_allclose(tables[0], tables[1], atol=1e-6)


def test_the_command_line_evaluates_as_python_does(command_line: Path, way: Way) -> None:
    said = json.loads(shell("evaluate", str(way.run), "--split", "test", "--json"))
    assert set(said) == {"protocol", "metrics", "head", "tail", "ties"}
    names = {"mrr", "mr", "hits@1", "hits@3", "hits@10", "amr", "amri"}
    assert set(said["metrics"]) == set(said["head"]) == names
    assert said == way.evaluations[0]
    assert json.loads((way.run / "eval" / "test-full-filtered.json").read_text()) == said


def test_the_command_line_goes_the_whole_way(command_line: Path) -> None:
    run, merged, arrays = (str(command_line / name) for name in ("run", "m.safetensors", "arrays"))
    shell("merge-shards", run, "-o", merged, "--verify")
    shell("export", run, "--format", "numpy", "-o", arrays)
    shell("index", run)
    np.testing.assert_array_equal(load_file(merged)[ENTITIES], np.load(f"{arrays}/entities.npy"))
    said = json.loads(shell("predict", run, "--head", "France", "--relation", "located in", "--json"))
    assert len(said["results"]) == 10
    assert all(not result["known"] for result in said["results"])
    assert len(shell("neighbors", run, "France", "-k", "5").splitlines()) == 5
    vector = np.array(shell("vector", run, "France").split(), np.float32)
    np.testing.assert_array_equal(vector, np.load(f"{arrays}/entities.npy")[labels_row(arrays, "France")])


def labels_row(arrays: str, label: str) -> int:
    return labels(Path(arrays).parent, "entities").index(label)
