"""DGL-KE's files, read by a plain reader after its source, and by its own files where it is installed.

DGL-KE 0.1.2 needs DGL, which has no build for today's Python; its score functions, its dataset readers and
its readers of label files import without it.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exports import labelled_run
from graphs import make_run, ring, tree
from kgshard_tools.export import export
from whole_models import (
    CORRUPTIONS,
    Array,
    Exported,
    as_complex,
    assert_others_are_refused,
    export_whole,
    export_with_offset,
    module_of,
)

from kgshard.data.dataset import SPLITS
from kgshard.errors import ConfigError
from kgshard.models.link import SIDES, Side

MODELS = {
    "distmult": "DistMult",
    "rescal": "RESCAL",
    "complex": "ComplEx",
    "transe": "TransE_l2",
    "transe-l1": "TransE_l1",
    "rotate-moduli": "RotatE",
}
CASES = [(name, corruption) for name in MODELS for corruption in CORRUPTIONS]
DISTANCES = ["transe", "transe-l1", "rotate-moduli"]


def read_config(folder: Path) -> SimpleNamespace:
    config = json.loads((folder / "config.json").read_text())
    assert (config["model"], config["emb_size"]) == (config["model_name"], config["hidden_dim"])
    assert config["emap_file"] == config["emp_file"]
    return SimpleNamespace(**config)


def read_embeddings(case: Exported) -> tuple[Array, Array]:
    config = read_config(case.folder)
    entities, relations = (
        np.load(case.folder / f"{config.dataset}_{config.model}_{kind}.npy", mmap_mode="r")
        for kind in ("entity", "relation")
    )
    assert entities.dtype.str == relations.dtype.str == "<f4"
    assert entities.shape[1] == config.hidden_dim * (2 if config.double_ent else 1)
    return np.array(entities), np.array(relations)


def plain_scores(case: Exported, side: Side) -> Array:
    """Score as edge_func of dglke/models/pytorch/score_fun.py does."""
    config, tables = read_config(case.folder), read_embeddings(case)
    entities, relations = (table.astype(np.float64) for table in tables)
    h, r, t = case.as_asked(side).T
    head, rel, tail = entities[h], relations[r], entities[t]
    if config.model == "DistMult":
        return (head * rel * tail).sum(-1)
    if config.model == "RESCAL":
        return np.einsum("nd,nde,ne->n", head, rel.reshape(len(rel), config.hidden_dim, -1), tail)
    if config.model == "ComplEx":
        return np.real((as_complex(head) * as_complex(rel) * as_complex(tail).conj()).sum(-1))
    if config.model == "RotatE":
        phases = rel / ((config.gamma + 2.0) / config.hidden_dim / np.pi)
        return config.gamma - np.abs(as_complex(head) * np.exp(1j * phases) - as_complex(tail)).sum(-1)
    order = {"TransE_l2": 2, "TransE_l1": 1}[config.model]
    return config.gamma - np.linalg.norm(head + rel - tail, ord=order, axis=-1)


def its_scores(case: Exported, side: Side) -> Array:
    """Score by DGL-KE's own score functions."""
    functions = module_of("dglke", "models/pytorch/score_fun.py")
    config = read_config(case.folder)
    entities, relations = map(torch.from_numpy, read_embeddings(case))
    emb_init = (config.gamma + 2.0) / config.hidden_dim
    score = {
        "DistMult": lambda: functions.DistMultScore(),
        "RESCAL": lambda: functions.RESCALScore(config.hidden_dim, config.hidden_dim),
        "ComplEx": lambda: functions.ComplExScore(),
        "TransE_l2": lambda: functions.TransEScore(config.gamma, "l2"),
        "TransE_l1": lambda: functions.TransEScore(config.gamma, "l1"),
        "RotatE": lambda: functions.RotatEScore(config.gamma, emb_init),
    }[config.model]()
    h, r, t = (torch.from_numpy(np.ascontiguousarray(column)) for column in case.as_asked(side).T)
    edges = SimpleNamespace(src={"emb": entities[h]}, dst={"emb": entities[t]}, data={"emb": relations[r]})
    found: Array = score.edge_func(edges)["score"].numpy()
    return found


@pytest.mark.parametrize("scores", [plain_scores, its_scores])
@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_dglkes_formula_over_its_arrays_is_the_papers_over_ours(
    tmp_path: Path, name: str, corruption: str, scores: object
) -> None:
    assert callable(scores)
    case = export_whole(tmp_path, "dglke", name, corruption)
    assert read_config(case.folder).model == MODELS[name]
    for side in SIDES:
        case.assert_scored(side, scores(case, side))


@pytest.mark.parametrize("scores", [plain_scores, its_scores])
@pytest.mark.parametrize("offset", [12.0, 0.5, -1.0])
@pytest.mark.parametrize("name", DISTANCES)
def test_gamma_is_what_the_run_adds_to_scores(
    tmp_path: Path, name: str, offset: float, scores: object
) -> None:
    assert callable(scores)
    case = export_with_offset(tmp_path, "dglke", name, offset)
    assert read_config(case.folder).gamma == offset
    for side in SIDES:
        case.assert_scored(side, scores(case, side))
    assert any("logsigmoid" in note for note in case.written.notes)
    assert "'logsigmoid'" in case.written.python[1]


def test_products_take_no_gamma(tmp_path: Path) -> None:
    case = export_with_offset(tmp_path, "dglke", "complex", 9.0)
    assert any("lower by 9" in note for note in case.written.notes)
    case.assert_scored("head", plain_scores(case, "head") + 9)


def test_angles_that_no_gamma_can_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gamma of -2"):
        export_with_offset(tmp_path, "dglke", "rotate-moduli", -2.0)


def read_labels(path: Path) -> list[str]:
    """Read as dglke.utils does."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert {len(row) for row in rows} <= {2}
    return [row[1] for row in rows]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_graph_is_whole_in_our_ids(tmp_path: Path, corruption: str) -> None:
    case = export_whole(tmp_path, "dglke", "distmult", corruption)
    relations = list(case.run.dataset.relations)
    inverses = [f"{label}_inverse" for label in relations] if corruption == "reciprocal" else []
    assert read_labels(case.folder / "entities.tsv") == list(case.run.dataset.entities)
    assert read_labels(case.folder / "relations.tsv") == [*relations, *inverses]
    for split in SPLITS:
        text = (case.folder / f"{split}.tsv").read_text()
        assert [[int(number) for number in line.split("\t")] for line in text.splitlines()] == case.triples(
            split
        )
    assert any("RELATION_inverse" in note for note in case.written.notes) == bool(inverses)


def test_dglke_reads_the_graph_and_the_labels(tmp_path: Path) -> None:
    readers, utilities = module_of("dglke", "dataloader/KGDataset.py"), module_of("dglke", "utils.py")
    case = export_whole(tmp_path, "dglke", "distmult", "reciprocal")
    files = [f"{name}.tsv" for name in ("entities", "relations", *SPLITS)]
    dataset = readers.KGDatasetUDD(str(case.folder), "kgshard", "\t", files, "hrt")
    assert (dataset.n_entities, dataset.n_relations) == (30, 6)
    for split in SPLITS:
        assert np.stack(getattr(dataset, split), axis=1).tolist() == case.triples(split)
    found = utilities.load_raw_emb_mapping(case.folder / "entities.tsv")
    assert found == dict(enumerate(case.run.dataset.entities))


def test_inverses_take_a_name_that_no_relation_has(tmp_path: Path) -> None:
    """Case B47: a relation is already called so."""
    triples = [("likes", "type", "Property"), ("a", "likes", "b"), ("a", "likes_inverse", "b")]
    run = make_run(tmp_path, triples, dim=4)
    notes = export(run.folder, "dglke", tmp_path / "out").notes
    labels = read_labels(tmp_path / "out" / "relations.tsv")
    assert len(set(labels)) == 6
    assert labels[:3] == list(run.dataset.relations)
    assert labels[3:] == [f"{label}_inverse_" for label in labels[:3]]
    assert any("RELATION_inverse_" in note for note in notes)


def test_labels_come_back_but_those_that_break_lines(tmp_path: Path) -> None:
    labels = ["NA", "a b", "42", "a\tb", '"', '"quoted" more', 'in"side', " lead ", "\u2028", "日本", "#"]
    run = labelled_run(tmp_path / "a", labels, ["likes", "a\tb"], dim=4)
    export(run.folder, "dglke", tmp_path / "out")
    assert read_labels(tmp_path / "out" / "entities.tsv") == list(run.dataset.entities)
    assert len((tmp_path / "out" / "entities.tsv").read_bytes().split(b"\n")) == len(labels) + 1
    for label in ("a\nb", "a\rb", "a\0b"):
        run = labelled_run(tmp_path / f"{ord(label[1])}", ["x", "y", label], ["r"], dim=4)
        before = tree(tmp_path)
        with pytest.raises(ConfigError) as error:
            export(run.folder, "dglke", tmp_path / "refused")
        assert f"entity {label!r}" in str(error.value)
        assert tree(tmp_path) == before
    export(run.folder, "dglke", tmp_path / "escaped", label_escape="underscore")
    assert sorted(read_labels(tmp_path / "escaped" / "entities.tsv")) == ["a_b", "x", "y"]


def test_models_that_dglke_lacks_are_refused(tmp_path: Path) -> None:
    assert_others_are_refused(tmp_path, "dglke", set(MODELS))


def test_empty_files_are_warned_of(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=4)
    notes = export(run.folder, "dglke", tmp_path / "out").notes
    assert [note for note in notes if note.startswith("valid and test: no triples")]


def test_config_is_also_ours(tmp_path: Path) -> None:
    case = export_whole(tmp_path, "dglke", "rotate-moduli", "reciprocal")
    config = read_config(case.folder)
    assert (config.score_function, config.embedding_dim, config.export_format) == (
        "rotate-moduli",
        12,
        "dglke",
    )
    assert (config.dataset, config.hidden_dim, config.double_ent, config.gamma) == ("kgshard", 6, True, 0.0)
    case.assert_replaceable()
