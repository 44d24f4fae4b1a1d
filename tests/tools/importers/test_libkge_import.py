"""Models of LibKGE score triples as LibKGE ranks them.

LibKGE is on no package registry. The files are written in the layout of its sources, by torch.save, and the
formulas are those of its scorers (combine="sp_" and "_po"), written again in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import ENTITIES, RELATIONS, draw, draw_triples, run_scores, write_dict, write_splits
from kgshard_tools.importers.foreign import ForeignModel, ImportOptions
from kgshard_tools.importers.libkge import LIBKGE
from kgshard_tools.importers.writer import write_run
from torch_files import StandIns

from kgshard.errors import ConfigError, DataError

Row = np.ndarray[Any, Any]
D = 6


def parts(row: Row) -> tuple[Row, Row]:
    return row[: len(row) // 2], row[len(row) // 2 :]


def as_complex(row: Row) -> Row:
    return parts(row)[0] + 1j * parts(row)[1]


def rotated(h: Row, r: Row, t: Row) -> Row:
    """Return the moduli of what a rotation leaves between head and tail."""
    return np.abs(as_complex(h) * np.exp(1j * r) - as_complex(t))


FORMULAS: dict[str, tuple[str, float | None, int, Callable[[Row, Row, Row], float], str]] = {
    "distmult": ("distmult", None, D, lambda h, r, t: float((h * r * t).sum()), "distmult"),
    "complex": (
        "complex",
        None,
        D,
        lambda h, r, t: float((as_complex(h) * as_complex(r) * as_complex(t).conj()).sum().real),
        "complex",
    ),
    "rescal": ("rescal", None, D * D, lambda h, r, t: float(h @ r.reshape(D, D) @ t), "rescal"),
    "cp": ("cp", None, D // 2, lambda h, r, t: float((parts(h)[0] * r * parts(t)[1]).sum()), "cp"),
    "simple": (
        "simple",
        None,
        D,
        lambda h, r, t: (
            float(
                (parts(h)[0] * parts(r)[0] * parts(t)[1]).sum()
                + (parts(h)[1] * parts(r)[1] * parts(t)[0]).sum()
            )
            / 2
        ),
        "simple",
    ),
    "transe, 1": ("transe", 1.0, D, lambda h, r, t: -float(np.abs(h + r - t).sum()), "transe-l1"),
    "transe, 2": ("transe", 2.0, D, lambda h, r, t: -float(np.linalg.norm(h + r - t)), "transe"),
    "rotate, 1": ("rotate", 1.0, D // 2, lambda h, r, t: -float(rotated(h, r, t).sum()), "rotate-moduli"),
    "rotate, 2": ("rotate", 2.0, D // 2, lambda h, r, t: -float(np.linalg.norm(rotated(h, r, t))), "rotate"),
}
"""LibKGE's name, its l_norm, floats a relation, its score, and kgshard's name."""

FILES = {
    **{split: {"filename": f"{split}.del", "type": "triples"} for split in ("train", "valid", "test")},
    **{key: {"filename": f"{key}.del", "type": "map"} for key in ("entity_ids", "relation_ids")},
}


def options(model: str, norm: float | None, *, reciprocal: bool) -> dict[str, Any]:
    """Return what Config.options of a training job says."""
    found: dict[str, Any] = {
        "job": {"type": "train", "device": "cpu"},
        "dataset": {"name": "toy", "num_entities": 13, "num_relations": 3, "files": FILES},
        "model": model,
        model: {"class_name": "X", "entity_embedder": {"type": "lookup_embedder", "+++": "+++"}},
    }
    if norm is not None:
        found[model]["l_norm"] = norm
    if reciprocal:
        found["model"] = "reciprocal_relations_model"
        found["reciprocal_relations_model"] = {"base_model": {"type": model, "+++": "+++"}}
    return found


def write_checkpoint(
    path: Path,
    name: str,
    *,
    reciprocal: bool = False,
    legacy: bool = False,
    packaged: bool = False,
    attribute: str = "_embeddings",
    relations: list[str] = RELATIONS,
    change: Callable[[dict[str, Any]], object] = lambda options: None,
) -> tuple[Row, Row]:
    """Write a checkpoint as LibKGE does, and return its tables, float64."""
    model, norm, relation_dim, _, _ = FORMULAS[name]
    entity_rows, relation_rows = draw(13, D, 1), draw(6 if reciprocal else 3, relation_dim, 2)
    tables = {"entity": torch.from_numpy(entity_rows), "relation": torch.from_numpy(relation_rows)}
    prefixes = ["_base_model.", ""] if reciprocal else [""]  # The wrapper shares its base model's embedders.
    state = {
        f"{prefix}_{kind}_embedder.{attribute}.weight": table
        for kind, table in tables.items()
        for prefix in prefixes
    }
    settings = options(model, norm, reciprocal=reciprocal)
    change(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with StandIns() as stand_ins:
        config: Any = stand_ins.named("kge.config.Config")()
        config.options, config.folder, config.log_folder = settings, "local/experiments/x", None
        content = {
            "type": "train",
            "epoch": 2,
            "valid_trace": [{"epoch": 1, "mean_reciprocal_rank_filtered": 0.3}],
            "model": (state, {"train_config": config}),
            "optimizer_state_dict": {"state": {0: {"step": 3, "sum": torch.zeros(13, D)}}},
            "config": config,
            "dataset": {"num_entities": 13, "num_relations": 3},
        }
        if packaged:
            content["dataset"]["meta"] = {"entity_ids": ENTITIES, "relation_ids": relations}  # type: ignore[index]
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return entity_rows.astype(np.float64), relation_rows.astype(np.float64)


def write_dataset(folder: Path) -> None:
    """Write LibKGE's own form of a graph."""
    folder.mkdir(parents=True)
    write_dict(folder / "entity_ids.del", ENTITIES)
    write_dict(folder / "relation_ids.del", RELATIONS)
    for seed, split in enumerate(("train", "valid", "test")):
        lines = ["\t".join(map(str, triple)) + "\n" for triple in draw_triples(20, seed).tolist()]
        (folder / f"{split}.del").write_text("".join(lines))


def read(source: Path, data: Path | None = None) -> ForeignModel:
    return LIBKGE.read(source, ImportOptions(data=data))


@pytest.mark.parametrize("reciprocal", [False, True], ids=["plain", "reciprocal"])
@pytest.mark.parametrize("name", FORMULAS)
def test_scores_are_those_that_libkge_ranks_by(name: str, reciprocal: bool, tmp_path: Path) -> None:
    entities, relations = write_checkpoint(tmp_path / "x" / "checkpoint_best.pt", name, reciprocal=reciprocal)
    write_dataset(tmp_path / "data")
    foreign = read(tmp_path / "x", tmp_path / "data")
    assert (foreign.scoring, foreign.reciprocal) == (FORMULAS[name][4], reciprocal)
    run = write_run(foreign, tmp_path / "run")
    ids = draw_triples(50, 9)
    formula = FORMULAS[name][3]
    tails = [formula(entities[h], relations[r], entities[t]) for h, r, t in ids.tolist()]
    heads = (
        [formula(entities[t], relations[r + 3], entities[h]) for h, r, t in ids.tolist()]
        if reciprocal
        else tails
    )
    np.testing.assert_allclose(run_scores(run, ids, side="tail"), tails, atol=1e-5)
    np.testing.assert_allclose(run_scores(run, ids, side="head"), heads, atol=1e-5)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("attribute", ["_embeddings", "embeddings"])
def test_a_packaged_model_holds_its_labels(attribute: str, legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "toy-complex.pt"
    entities, _ = write_checkpoint(path, "complex", packaged=True, legacy=legacy, attribute=attribute)
    assert LIBKGE.recognises(path)
    foreign = read(path)
    assert (list(foreign.entity_labels), list(foreign.relation_labels)) == (ENTITIES, RELATIONS)
    assert np.array_equal(foreign.entities, entities.astype(np.float32))
    assert not foreign.triples
    assert any("--data" in decision for decision in foreign.decisions)


def test_labels_that_libkge_made_for_reciprocal_relations_are_left_out(tmp_path: Path) -> None:
    made = [f"{label}_reciprocal" for label in RELATIONS]
    path = tmp_path / "toy.pt"
    write_checkpoint(path, "complex", reciprocal=True, packaged=True, relations=RELATIONS + made)
    assert list(read(path).relation_labels) == RELATIONS
    write_checkpoint(path, "complex", packaged=True, relations=[*RELATIONS, "one more"])
    with pytest.raises(DataError, match="3 relations, but labels of 13 and 4"):
        read(path)


def test_a_packaged_model_takes_triples_of_labels(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "toy.pt", "complex", packaged=True)
    splits = {"train": draw_triples(20, 0), "test": draw_triples(5, 1)}
    write_splits(tmp_path / "data", splits)
    foreign = read(tmp_path / "toy.pt", tmp_path / "data")
    assert {split: ids.tolist() for split, ids in foreign.triples.items()} == {
        split: ids.tolist() for split, ids in splits.items()
    }


def test_triples_of_ids_come_from_libkges_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "toy.pt", "complex", packaged=True)
    write_dataset(tmp_path / "data")
    (tmp_path / "data" / "train.txt").write_text("not\tread\n")
    foreign = read(tmp_path / "toy.pt", tmp_path / "data")
    assert list(foreign.triples) == ["train", "valid", "test"]
    for seed, ids in enumerate(foreign.triples.values()):
        assert np.array_equal(ids, draw_triples(20, seed))


def test_files_have_the_names_that_the_checkpoint_says(tmp_path: Path) -> None:
    def rename(settings: dict[str, Any]) -> None:
        settings["dataset"]["files"] = FILES | {"train": {"filename": "../elsewhere/train_sample.del"}}

    write_checkpoint(tmp_path / "toy.pt", "complex", change=rename)
    write_dataset(tmp_path / "data")
    (tmp_path / "data" / "train_sample.del").write_text("0\t0\t1\textra\n")
    assert read(tmp_path / "toy.pt", tmp_path / "data").triples["train"].tolist() == [[0, 0, 1]]


def test_the_norm_of_a_wrapped_model_is_its_own(tmp_path: Path) -> None:
    def wrap(settings: dict[str, Any]) -> None:
        settings["reciprocal_relations_model"]["base_model"]["l_norm"] = 2.0

    write_checkpoint(tmp_path / "toy.pt", "transe, 1", reciprocal=True, packaged=True, change=wrap)
    assert read(tmp_path / "toy.pt").scoring == "transe"


def test_the_best_checkpoint_is_read_or_else_the_last(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "x" / "checkpoint_00005.pt", "transe, 1", packaged=True)
    write_checkpoint(tmp_path / "x" / "checkpoint_00010.pt", "complex", packaged=True)
    assert LIBKGE.recognises(tmp_path / "x")
    assert read(tmp_path / "x").scoring == "complex"
    write_checkpoint(tmp_path / "x" / "checkpoint_best.pt", "distmult", packaged=True)
    foreign = read(tmp_path / "x")
    assert foreign.scoring == "distmult"
    assert "read from checkpoint_best.pt" in foreign.decisions


def test_other_files_are_not_taken_for_libkges(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    (tmp_path / "text.pt").write_text("text")
    assert not any(LIBKGE.recognises(path) for path in (tmp_path, *tmp_path.iterdir()))
    with pytest.raises(DataError, match="no checkpoint of LibKGE"):
        read(tmp_path / "model.pt")


def named(model: str) -> Callable[[dict[str, Any]], object]:
    return lambda settings: settings.update(model=model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (named("conve"), "'conve'.*batches"),
        (named("transh"), "'transh'.*not projected"),
        (named("relational_tucker3"), "'relational_tucker3'.*known: distmult"),
        (lambda settings: settings["transe"].update(l_norm=3.0), "l_norm 3.0"),
    ],
)
def test_what_cannot_be_said_exactly_is_refused_by_name(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "toy.pt", "transe, 1", packaged=True, change=change)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "toy.pt")


def test_embeddings_that_are_no_table_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "toy.pt", "complex", packaged=True, attribute="base_embedder._embeddings")
    with pytest.raises(ConfigError, match="no lookup_embedder's"):
        read(tmp_path / "toy.pt")


def test_labels_must_be_somewhere_and_the_same_everywhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "bare.pt", "complex")
    with pytest.raises(DataError, match=r"holds no labels.*--data"):
        read(tmp_path / "bare.pt")
    write_checkpoint(tmp_path / "packaged.pt", "complex", packaged=True)
    write_dataset(tmp_path / "data")
    write_dict(tmp_path / "data" / "entity_ids.del", ENTITIES[::-1])
    with pytest.raises(DataError, match=r"entity_ids\.del: other labels"):
        read(tmp_path / "packaged.pt", tmp_path / "data")


def test_another_graphs_labels_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "bare.pt", "complex")
    write_dataset(tmp_path / "data")
    write_dict(tmp_path / "data" / "entity_ids.del", ENTITIES[:-1])
    with pytest.raises(DataError, match="rows of 13 entities and 3 relations, but labels of 12 and 3"):
        read(tmp_path / "bare.pt", tmp_path / "data")


def nested(depth: int) -> tuple[object, ...]:
    """Two references to one tuple of two references, and so on: to hash it takes 2**depth steps."""
    value: tuple[object, ...] = ()
    for _ in range(depth):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda settings: settings["transe"].update(l_norm=nested(60)), "option transe.l_norm is a tuple"),
        (lambda settings: settings["transe"].update(l_norm=[1]), "option transe.l_norm is a list"),
        (lambda settings: settings.update(model=["transe"]), "option model is a list"),
    ],
)
def test_options_that_are_no_numbers_and_no_text_are_never_compared(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "toy.pt", "transe, 1", packaged=True, change=change)
    with pytest.raises(DataError, match=words):
        read(tmp_path / "toy.pt")
