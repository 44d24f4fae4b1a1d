"""Checkpoints of the RotatE paper's code score triples as that code does.

The formulas here are the code's, written again in numpy; that real checkpoints rank as their logs say is in
tests/core/ranking/test_rotate_checkpoints.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import ENTITIES, RELATIONS, draw, draw_triples, run_scores, write_dict, write_splits
from kgshard_tools.importers import import_run

from kgshard import ingest
from kgshard.errors import ConfigError, DataError

GAMMA, HIDDEN = 6.0, 4
RANGE = (GAMMA + 2.0) / HIDDEN
Row = np.ndarray[Any, np.dtype[np.float64]]


def as_complex(row: Row) -> np.ndarray[Any, Any]:
    return row[: len(row) // 2] + 1j * row[len(row) // 2 :]


def rotate(h: Row, r: Row, t: Row) -> float:
    turned = as_complex(h) * np.exp(1j * r / (RANGE / 3.14159262358979323846))
    return float(GAMMA - np.abs(turned - as_complex(t)).sum())


FORMULAS: dict[str, tuple[int, int, Callable[[Row, Row, Row], float]]] = {
    "TransE": (4, 4, lambda h, r, t: float(GAMMA - np.abs(h + r - t).sum())),
    "DistMult": (4, 4, lambda h, r, t: float((h * r * t).sum())),
    "ComplEx": (
        8,
        8,
        lambda h, r, t: float((as_complex(h) * as_complex(r) * as_complex(t).conj()).sum().real),
    ),
    "RotatE": (8, 4, rotate),
}
"""Floats an entity, floats a relation, and the score."""


def write_checkpoint(folder: Path, model: str, *, data: Path) -> tuple[Row, Row]:
    folder.mkdir(parents=True)
    dim, relation_dim, _ = FORMULAS.get(model, (4, 4, None))
    config = {"model": model, "hidden_dim": HIDDEN, "gamma": GAMMA, "nentity": 13, "nrelation": 3}
    (folder / "config.json").write_text(json.dumps(config))
    entities, relations = draw(13, dim, 1), draw(3, relation_dim, 2)
    np.save(folder / "entity_embedding.npy", entities)
    np.save(folder / "relation_embedding.npy", relations)
    write_splits(data, {"train": draw_triples(30, 1), "test": draw_triples(5, 2)})
    write_dict(data / "entities.dict", ENTITIES)
    write_dict(data / "relations.dict", RELATIONS)
    return entities.astype(np.float64), relations.astype(np.float64)


@pytest.mark.parametrize("where", ["beside", "above", "--data"])
@pytest.mark.parametrize("model", sorted(FORMULAS))
def test_scores_are_those_of_the_papers_code(tmp_path: Path, model: str, where: str) -> None:
    folder = tmp_path / "umls" / "checkpoint"
    data = {"beside": folder, "above": folder.parent, "--data": tmp_path / "data"}[where]
    entities, relations = write_checkpoint(folder, model, data=data)
    run = import_run(folder, tmp_path / "run", data=data if where == "--data" else None)
    ids = draw_triples(50, 9)
    expected = [FORMULAS[model][2](entities[h], relations[r], entities[t]) for h, r, t in ids.tolist()]
    for side in ("tail", "head"):
        np.testing.assert_allclose(run_scores(run, ids, side=side), expected, atol=1e-5)
    assert run.info.imported is not None
    assert run.info.imported.files[:3] == ["config.json", "entity_embedding.npy", "relation_embedding.npy"]


@pytest.mark.parametrize(("model", "words"), [("pRotatE", "trained modulus"), ("TransX", "known: TransE")])
def test_what_cannot_be_said_exactly_is_refused_by_name(tmp_path: Path, model: str, words: str) -> None:
    write_checkpoint(tmp_path / "checkpoint", model, data=tmp_path)
    with pytest.raises(ConfigError, match=f"{model}.*{words}"):
        import_run(tmp_path / "checkpoint", tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "RotatE", "gamma": 6}, "has no 'hidden_dim'"),
        ({"model": "RotatE", "gamma": "six", "hidden_dim": 4}, "six"),
        ({"model": "RotatE", "gamma": 6, "hidden_dim": 0}, "make no range"),
        (["RotatE"], "config.json"),
    ],
)
def test_a_config_that_lacks_something_is_named(tmp_path: Path, config: object, words: str) -> None:
    write_checkpoint(tmp_path / "checkpoint", "RotatE", data=tmp_path)
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=words):
        import_run(tmp_path / "checkpoint", tmp_path / "run")


def test_missing_labels_say_where_they_were_looked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "TransE", data=tmp_path)
    (tmp_path / "relations.dict").unlink()
    with pytest.raises(DataError, match=r"no relations.dict in .*checkpoint.*--data"):
        import_run(tmp_path / "checkpoint", tmp_path / "run")


@pytest.mark.parametrize("prepared", [False, True])
def test_data_may_be_splits_alone(tmp_path: Path, prepared: bool) -> None:
    """Labels are then those beside the checkpoint, or above it."""
    write_checkpoint(tmp_path / "umls" / "checkpoint", "TransE", data=tmp_path / "umls")
    data = tmp_path / "data"
    write_splits(data, {"train": draw_triples(20, 7)})
    if prepared:
        data = ingest(data, tmp_path / "prepared").folder
    run = import_run(tmp_path / "umls" / "checkpoint", tmp_path / "run", data=data)
    assert len(run.dataset.triples("train")) == len(np.unique(draw_triples(20, 7), axis=0))
    assert len(run.dataset.triples("test")) == 0


def test_labels_in_the_data_folder_come_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "TransE", data=tmp_path / "checkpoint")
    write_splits(tmp_path / "data", {"train": draw_triples(20, 7)}, [f"x{name}" for name in ENTITIES])
    write_dict(tmp_path / "data" / "entities.dict", [f"x{name}" for name in ENTITIES])
    run = import_run(tmp_path / "checkpoint", tmp_path / "run", data=tmp_path / "data")
    assert sorted(run.dataset.entities) == sorted(f"x{name}" for name in ENTITIES)


def test_a_gamma_beyond_all_floats_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "TransE", data=tmp_path)
    (tmp_path / "checkpoint" / "config.json").write_text(
        '{"model": "TransE", "hidden_dim": 4, "gamma": ' + "1" * 400 + "}"
    )
    with pytest.raises(DataError, match=r"config.json: "):
        import_run(tmp_path / "checkpoint", tmp_path / "run")
