"""A model in a file of one's own goes the whole way by its name: nothing else is told of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from graphs import ring, write_graph
from safetensors.numpy import load_file

pytestmark = pytest.mark.processes

MODULE = '''
"""Gated: -sum_i |g_i h_i + r_i - t_i| - sum_i |(g_i h_i + r_i)^2 - t_i^2|, g shared by all relations."""

from kgshard.models.arrays import concat
from kgshard.models.metric import METRICS
from kgshard.models.scoring import Init, Scoring, SharedInit


class Gated(Scoring):
    metric = METRICS["l1"]
    has_head_queries = False

    def shared_init(self, dim):
        return {"gate": SharedInit((dim,), Init("uniform", 0.5, center=1.0))}

    def entity_init(self, dim):
        return Init("normal", 0.5)

    def query_tails(self, heads, relations):
        moved = self.shared["gate"] * heads + relations
        return concat([moved, moved * moved])

    def candidates(self, side, rows):
        return concat([rows, rows * rows])
'''

Array = npt.NDArray[np.float64]


def gated(gate: Array, heads: Array, relation: Array, tails: Array) -> Array:
    """The formula, again."""
    moved = gate * heads + relation
    scores: Array = -np.abs(moved - tails).sum(-1) - np.abs(moved**2 - tails**2).sum(-1)
    return scores


class Way:
    """Commands run one after the other in a folder, and the arrays they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrays: dict[str, Array] = {}
        self.labels: list[str] = []

    def kgshard(self, *arguments: str) -> dict[str, Any]:
        """Run one command where the module can be imported from; return what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "kgshard", *arguments, "--json"],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder / "modules"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        value: dict[str, Any] = json.loads(done.stdout)
        return value

    def read_export(self) -> None:
        files = (self.folder / "run" / "export-numpy").glob("*.npy")
        self.arrays = {path.stem: np.load(path).astype(np.float64) for path in files}
        text = (self.folder / "run" / "export-numpy" / "entities.txt").read_text()
        self.labels = text.splitlines()

    def scores(self, side: str, anchor: str) -> Array:
        """Return the score of every entity as the missing end of a link of relation r0."""
        rows = self.arrays["relations" if side == "tail" else "inverse_relations"]
        entities = self.arrays["entities"]
        anchor_row = entities[self.labels.index(anchor)]
        return gated(self.arrays["shared-gate"], anchor_row, rows[0], entities)


TRAIN = ring(60)
TEST = [(f"e{i}", "r0", f"e{i + 2}") for i in range(5)]


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Way:
    folder = tmp_path_factory.mktemp("own")
    (folder / "modules").mkdir()
    (folder / "modules" / "own_model.py").write_text(MODULE)
    write_graph(folder / "graph", TRAIN, test=TEST)
    way = Way(folder)
    settings = ["--model", "own_model:Gated", "--dim", "6", "--epochs", "2", "--batch-size", "16"]
    way.kgshard("train", "graph", "-o", "run", "--nproc-per-node", "2", "-q", *settings)
    way.kgshard("export", "run")
    way.read_export()
    return way


def test_what_all_rows_share_was_trained_and_exported(way: Way) -> None:
    assert way.arrays["entities"].shape == (60, 6)
    gate = way.arrays["shared-gate"]
    assert gate.shape == (6,)
    assert (np.abs(gate - 1) <= 1.5).all()
    config = json.loads((way.folder / "run" / "export-numpy" / "config.json").read_text())
    assert (config["score_function"], config["metric"]) == ("own_model:Gated", "l1")


@pytest.mark.parametrize("side", ["tail", "head"])
def test_answers_are_those_of_the_formula_with_and_without_an_index(way: Way, side: str) -> None:
    """The entity with the best known answer left out; before and after `kgshard index`."""
    anchor = "e7"
    question = ["--head", anchor] if side == "tail" else ["--tail", anchor]
    known = "e8" if side == "tail" else "e6"
    scores = way.scores(side, anchor)
    scores[way.labels.index(known)] = -np.inf
    wanted = np.argsort(-scores)[:10]
    scanned = way.kgshard("predict", "run", "--relation", "r0", *question)
    way.kgshard("index", "run")
    indexed = way.kgshard("predict", "run", "--relation", "r0", *question)
    (way.folder / "run" / "index" / "index.json").unlink()
    assert indexed == scanned
    assert [answer["id"] for answer in scanned["results"]] == wanted.tolist()
    np.testing.assert_allclose([a["score"] for a in scanned["results"]], scores[wanted], rtol=1e-12)


def test_metrics_are_those_of_the_formula(way: Way) -> None:
    found = way.kgshard("evaluate", "run", "--nproc-per-node", "2")["metrics"]["mrr"]
    links = {*TRAIN, *TEST}
    reciprocals = []
    for h, _, t in TEST:
        for side, anchor, answer in (("tail", h, t), ("head", t, h)):
            scores = way.scores(side, anchor)
            true = scores[way.labels.index(answer)]
            others = [
                score
                for label, score in zip(way.labels, scores, strict=True)
                if ((anchor, "r0", label) if side == "tail" else (label, "r0", anchor)) not in links
            ]
            reciprocals.append(1 / (1 + sum(score > true for score in others)))
    assert found == pytest.approx(np.mean(reciprocals), rel=1e-9)


def test_the_merged_file_holds_what_all_rows_share(way: Way) -> None:
    way.kgshard("merge-shards", "run", "-o", "merged.safetensors")
    merged = load_file(way.folder / "merged.safetensors")
    np.testing.assert_array_equal(merged["shared.gate"], way.arrays["shared-gate"])


def test_where_the_file_cannot_be_found_the_name_is_said(way: Way) -> None:
    """The control: it was PYTHONPATH that let ranks and answers find it."""
    done = subprocess.run(
        [sys.executable, "-m", "kgshard", "predict", "run", "--relation", "r0", "--head", "e0"],
        cwd=way.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "own_model:Gated" in done.stderr
