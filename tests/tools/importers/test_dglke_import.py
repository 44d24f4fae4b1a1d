"""Models of DGL-KE score triples as its score_fun.py does, written again here in numpy (`edge_func`)."""

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

GAMMA, HIDDEN = 12.0, 4
EMB_INIT = (GAMMA + 2.0) / HIDDEN
Row = np.ndarray[Any, np.dtype[np.float64]]


def as_complex(row: Row) -> np.ndarray[Any, Any]:
    return row[: len(row) // 2] + 1j * row[len(row) // 2 :]


def rotate(h: Row, r: Row, t: Row) -> float:
    turned = as_complex(h) * np.exp(1j * r / (EMB_INIT / np.pi))
    return float(GAMMA - np.abs(turned - as_complex(t)).sum())


def simple(h: Row, r: Row, t: Row) -> float:
    (head_i, head_j), (tail_i, tail_j) = h.reshape(2, -1), t.reshape(2, -1)
    rel, rel_inv = r.reshape(2, -1)
    return float(np.clip((head_i * rel * tail_j + tail_i * rel_inv * head_j).sum() / 2, -20, 20))


FORMULAS: dict[str, tuple[int, int, Callable[[Row, Row, Row], float]]] = {
    "TransE": (4, 4, lambda h, r, t: float(GAMMA - np.sqrt(((h + r - t) ** 2).sum()))),
    "TransE_l1": (4, 4, lambda h, r, t: float(GAMMA - np.abs(h + r - t).sum())),
    "TransE_l2": (4, 4, lambda h, r, t: float(GAMMA - np.sqrt(((h + r - t) ** 2).sum()))),
    "DistMult": (4, 4, lambda h, r, t: float((h * r * t).sum())),
    "ComplEx": (
        8,
        8,
        lambda h, r, t: float((as_complex(h) * as_complex(r) * as_complex(t).conj()).sum().real),
    ),
    "RotatE": (8, 4, rotate),
    "RESCAL": (4, 16, lambda h, r, t: float(h @ (r.reshape(4, 4) @ t))),
    "SimplE": (8, 8, simple),
}
"""Floats an entity, floats a relation, and the score."""
OLD_KEYS = {"model": "model", "dim": "emb_size", "entities": "emap_file"}
NEW_KEYS = {"model": "model_name", "dim": "hidden_dim", "entities": "emp_file"}


def write_model(
    folder: Path, model: str, *, keys: dict[str, str] = NEW_KEYS, labels: str = "{}.tsv"
) -> tuple[Row, Row]:
    folder.mkdir()
    dim, relation_dim, _ = FORMULAS.get(model, (4, 4, None))
    config = {
        keys["model"]: model,
        keys["dim"]: HIDDEN,
        "gamma": GAMMA,
        "dataset": "toy",
        keys["entities"]: labels.format("entities"),
        "rmap_file": labels.format("relations"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    entities, relations = draw(13, dim, 1), draw(3, relation_dim, 2)
    np.save(folder / f"toy_{model}_entity.npy", entities)
    np.save(folder / f"toy_{model}_relation.npy", relations)
    write_dict(folder / labels.format("entities"), ENTITIES)
    write_dict(folder / labels.format("relations"), RELATIONS)
    return entities.astype(np.float64), relations.astype(np.float64)


@pytest.mark.parametrize("keys", [OLD_KEYS, NEW_KEYS])
@pytest.mark.parametrize("model", sorted(FORMULAS))
def test_scores_are_those_of_dgl_ke(tmp_path: Path, model: str, keys: dict[str, str]) -> None:
    entities, relations = write_model(tmp_path / "ckpt", model, keys=keys)
    run = import_run(tmp_path / "ckpt", tmp_path / "run")
    ids = draw_triples(50, 9)
    expected = [FORMULAS[model][2](entities[h], relations[r], entities[t]) for h, r, t in ids.tolist()]
    for side in ("tail", "head"):
        np.testing.assert_allclose(run_scores(run, ids, side=side), expected, atol=1e-5)


@pytest.mark.parametrize("labels", ["{}.dict", "{}.tsv", "my_{}.txt"])
def test_labels_are_found_by_the_name_in_the_config(tmp_path: Path, labels: str) -> None:
    write_model(tmp_path / "ckpt", "DistMult", labels=labels)
    run = import_run(tmp_path / "ckpt", tmp_path / "run")
    assert sorted(run.dataset.entities) == sorted(ENTITIES)


def test_triples_and_labels_may_lie_in_the_data_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "ckpt", "DistMult")
    splits = {"train": draw_triples(30, 1), "valid": draw_triples(4, 3), "test": draw_triples(5, 2)}
    write_splits(tmp_path / "data", splits)
    for kind in ("entities", "relations"):
        (tmp_path / "ckpt" / f"{kind}.tsv").rename(tmp_path / "data" / f"{kind}.tsv")
    run = import_run(tmp_path / "ckpt", tmp_path / "run", data=tmp_path / "data")
    for split, ids in splits.items():
        assert len(run.dataset.triples(split)) == len(np.unique(ids, axis=0))
    with pytest.raises(DataError, match=r"no entities.tsv .* in .*ckpt; say where it is \(--data\)"):
        import_run(tmp_path / "ckpt", tmp_path / "run2")


@pytest.mark.parametrize(
    ("model", "words"), [("TransR", "projections"), ("ConvE", "network"), ("X", "known")]
)
def test_what_cannot_be_said_exactly_is_refused_by_name(tmp_path: Path, model: str, words: str) -> None:
    write_model(tmp_path / "ckpt", model)
    with pytest.raises(ConfigError, match=f"'{model}' cannot be imported .*{words}"):
        import_run(tmp_path / "ckpt", tmp_path / "run")


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "ckpt", "DistMult")
    for kind in ("entity", "relation"):
        np.save(tmp_path / "ckpt" / f"other_TransE_{kind}.npy", draw(3, 4))
    with pytest.raises(DataError, match=r"expected one .* found other_TransE_entity.npy, toy_DistMult"):
        import_run(tmp_path / "ckpt", tmp_path / "run", format="dglke")


def change_config(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.parametrize("order", ["hrt", "htr", "rht", "rth", "thr", "trh"])
def test_columns_are_read_in_the_order_of_the_format(tmp_path: Path, order: str) -> None:
    """Entities and relations share their labels here, so no wrong order shows itself."""
    write_model(tmp_path / "ckpt", "DistMult")
    change_config(tmp_path / "ckpt", format=f"raw_udd_{order}", delimiter="\t")
    numbers = [str(number) for number in range(13)]
    write_dict(tmp_path / "ckpt" / "entities.tsv", numbers)
    write_dict(tmp_path / "ckpt" / "relations.tsv", numbers[:3])
    triples = [{"h": "0", "r": "2", "t": "1"}, {"h": "1", "r": "0", "t": "2"}]
    (tmp_path / "data").mkdir()
    lines = ["\t".join(triple[letter] for letter in order) + "\n" for triple in triples]
    (tmp_path / "data" / "train.txt").write_text("".join(lines))
    data = import_run(tmp_path / "ckpt", tmp_path / "run", data=tmp_path / "data").dataset
    named = [
        {"h": data.entities[h], "r": data.relations[r], "t": data.entities[t]}
        for h, r, t in data.triples("train").tolist()
    ]
    assert named == triples
    (tmp_path / "data" / "test.txt").write_text("\t".join({"h": "0", "r": "1", "t": "77"}[c] for c in order))
    with pytest.raises(DataError, match="triple 1 of test names the tail '77'"):
        import_run(tmp_path / "ckpt", tmp_path / "run2", data=tmp_path / "data")


REFUSED_FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"format": "udd_hrt"}, "its splits hold numbers, not labels"),
    "unknown": ({"format": "rdf"}, "format 'rdf' is not known"),
    "no order": ({"format": "raw_udd_hhh"}, "format 'raw_udd_hhh' is not known"),
    "delimiter": ({"format": "raw_udd_hrt", "delimiter": "|"}, r"delimiter '\|': only splits between TABs"),
}


@pytest.mark.parametrize("case", sorted(REFUSED_FORMATS))
def test_splits_that_cannot_be_read_are_refused_by_name(tmp_path: Path, case: str) -> None:
    changed, words = REFUSED_FORMATS[case]
    write_model(tmp_path / "ckpt", "DistMult")
    delimiter = changed.get("delimiter", "\t")
    for kind, labels in (("entities", ENTITIES), ("relations", RELATIONS)):
        lines = "".join(f"{number}{delimiter}{label}\n" for number, label in enumerate(labels))
        (tmp_path / "ckpt" / f"{kind}.tsv").write_text(lines)
    change_config(tmp_path / "ckpt", **changed)
    write_splits(tmp_path / "data", {"train": draw_triples(30, 1)})
    with pytest.raises(ConfigError, match=f"config.json: .*{words}.*kgshard ingest"):
        import_run(tmp_path / "ckpt", tmp_path / "run", data=tmp_path / "data")
    ingest(tmp_path / "data", tmp_path / "prepared")
    run = import_run(tmp_path / "ckpt", tmp_path / "run", data=tmp_path / "prepared")
    assert sorted(run.dataset.entities) == sorted(ENTITIES)


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "ckpt", "DistMult")
    change_config(tmp_path / "ckpt", model_name="TransE")
    with pytest.raises(DataError, match=r"toy_DistMult_entity.npy: is not named as a table of TransE"):
        import_run(tmp_path / "ckpt", tmp_path / "run")


def test_a_gamma_beyond_all_floats_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "ckpt", "TransE")
    path = tmp_path / "ckpt" / "config.json"
    path.write_text(path.read_text().replace("12.0", "1" * 400))
    with pytest.raises(DataError, match=r"config.json: "):
        import_run(tmp_path / "ckpt", tmp_path / "run")


def test_angles_of_another_precision_are_told(tmp_path: Path) -> None:
    entities, relations = write_model(tmp_path / "ckpt", "RotatE")
    np.save(tmp_path / "ckpt" / "toy_RotatE_relation.npy", relations)
    run = import_run(tmp_path / "ckpt", tmp_path / "run")
    assert run.info.imported is not None
    assert "relation rows were float64; they are rounded to float32" in run.info.imported.decisions
    ids = draw_triples(9, 1)
    expected = [rotate(entities[h], relations[r], entities[t]) for h, r, t in ids.tolist()]
    np.testing.assert_allclose(run_scores(run, ids), expected, atol=1e-5)
