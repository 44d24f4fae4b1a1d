"""Published RotatE checkpoints rank as their authors' own evaluation logged it.

They were trained on UMLS and Kinship with the code of Sun et al. (2019). Entity rows are halves [real |
imaginary], relation values are phases times (gamma + 2) / (dim pi), and the score is gamma less the sum of
the moduli, which orders candidates as the model "rotate-moduli" does.
"""

from __future__ import annotations

import json
import re
from math import pi
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ranking_functions import sharded

from kgshard.exchange import SingleExchange
from kgshard.known import KnownLinks
from kgshard.models.link import SIDES, LinkModel
from kgshard.ranking.metrics import Ranks, ranking_metrics
from kgshard.ranking.ranker import Ranker

Ids = npt.NDArray[np.int32]
MRR = {
    ("umls", 50): 0.344034,
    ("umls", 500): 0.725813,
    ("umls", 1000): 0.739568,
    ("umls", 2000): 0.745872,
    ("kinship", 50): 0.058540,
    ("kinship", 500): 0.622616,
    ("kinship", 2000): 0.652190,
}
"""Filtered, both sides, test."""


def read_splits(folder: Path) -> dict[str, Ids]:
    """Return int32[n, 3] ids of every split's triples, by the checkpoints' own numbering."""
    ids: dict[str, dict[str, int]] = {}
    for kind in ("entities", "relations"):
        lines = (folder / f"{kind}.dict").read_text().splitlines()
        ids[kind] = {label: int(number) for number, label in (line.split("\t") for line in lines)}
    columns = ("entities", "relations", "entities")
    splits = {}
    for split in ("train", "valid", "test"):
        lines = (folder / f"{split}.txt").read_text().splitlines()
        rows = [
            [ids[kind][label] for kind, label in zip(columns, line.split("\t"), strict=True)]
            for line in lines
        ]
        splits[split] = np.array(rows, np.int32)
    return splits


def logged(folder: Path) -> dict[str, float]:
    """Return the last test metrics of a training log, six decimals each."""
    text = (folder / "train.log").read_text()
    return {
        name.lower(): float(value) for name, value in re.findall(r"Test (\S+) at step \d+: ([\d.]+)", text)
    }


def rank_test(folder: Path, splits: dict[str, Ids]) -> Ranks:
    """Rank test by the tables of one checkpoint, filtered by all three splits."""
    config = json.loads((folder / "config.json").read_text())
    entities, relations = (
        np.load(folder / f"{kind}_embedding.npy", allow_pickle=False) for kind in ("entity", "relation")
    )
    scale = (config["gamma"] + 2) / config["hidden_dim"]
    phases = torch.from_numpy((relations / (scale / pi)).astype(np.float32))
    model = LinkModel("rotate-moduli", entities.shape[1], len(entities), len(relations), reciprocal=False)
    ranker = Ranker(model, sharded(SingleExchange(), entities), phases)
    known = np.concatenate(list(splits.values()))
    return Ranks.join(
        [
            ranker.rank(side, splits["test"], KnownLinks(known, side, num_relations=len(relations)))
            for side in SIDES
        ]
    )


@pytest.mark.parametrize(
    ("graph", "dim"),
    [pytest.param(*key, marks=pytest.mark.nightly) if key[1] == 2000 else key for key in MRR],
)
def test_a_published_checkpoint_has_its_logged_metrics(shared_data: Path, graph: str, dim: int) -> None:
    folder = shared_data / f"rotate-{graph}" / f"RotatE_{dim}"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    found, expected = ranking_metrics(rank_test(folder, read_splits(folder.parent))), logged(folder)
    assert found["mrr"] == pytest.approx(MRR[graph, dim], abs=1e-6)
    assert expected.keys() == {"mrr", "mr", "hits@1", "hits@3", "hits@10"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6)
