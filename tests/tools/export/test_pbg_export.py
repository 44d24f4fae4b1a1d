"""PyTorch-BigGraph's files, read by h5py alone after its source, and by PBG where it is installed."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import exported, labelled_run, run_lines
from graphs import make_run, ring, tree
from kgshard_tools.export import export
from kgshard_tools.export.pbg import _json_names
from whole_models import (
    CORRUPTIONS,
    Array,
    Exported,
    as_complex,
    assert_others_are_refused,
    export_whole,
    export_with_offset,
)

from kgshard.data.dataset import SPLITS
from kgshard.errors import ConfigError
from kgshard.models.link import SIDES, Side

MODELS = ["distmult", "rescal", "complex", "transe", "rotate"]
CASES = [(name, corruption) for name in MODELS for corruption in CORRUPTIONS]


def hdf5() -> Any:
    """Return h5py, or skip the test."""
    return pytest.importorskip("h5py", reason="PBG's files are HDF5")


def read_tensor(path: Path, name: str) -> Array:
    with hdf5().File(path) as file:
        assert file.attrs["format_version"] == 1
        array: Array = file[name][...]
    assert array.dtype == np.float32
    return array.astype(np.float64)


def operate(folder: Path, side: str, operator: str, rows: Array, relations: Array) -> Array:
    """Apply a side's dynamic operator, as torchbiggraph.model does."""

    def parameter(name: str) -> Array:
        path = folder / "checkpoint_path" / "model.v1.h5"
        found: Array = read_tensor(path, f"model/relations/0/operator/{side}/{name}")[relations]
        return found

    if operator == "translation":
        return rows + parameter("translations")
    if operator == "diagonal":
        return parameter("diagonals") * rows
    if operator == "linear":
        return np.einsum("nij,nj->ni", parameter("linear_transformations"), rows)
    assert operator == "complex_diagonal"
    product = as_complex(rows) * (parameter("real") + 1j * parameter("imag"))
    return np.concatenate([product.real, product.imag], axis=1)


def plain_scores(case: Exported, side: Side) -> Array:
    config = json.loads((case.folder / "checkpoint_path" / "config.json").read_text())
    entities = read_tensor(case.folder / "checkpoint_path" / "embeddings_all_0.v1.h5", "embeddings")
    (relation,) = config["relations"]
    h, r, t = case.questions.T
    operated, anchors, candidates = ("lhs", h, t) if side == "tail" else ("rhs", t, h)
    queries = operate(case.folder, operated, relation["operator"], entities[anchors], r)
    if config["comparator"] == "dot":
        return (queries * entities[candidates]).sum(-1)
    assert config["comparator"] == "l2"
    return -np.linalg.norm(queries - entities[candidates], axis=-1)


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_pbgs_operators_over_its_tensors_are_the_paper_over_ours(
    tmp_path: Path, name: str, corruption: str
) -> None:
    hdf5()
    case = export_whole(tmp_path, "pbg", name, corruption)
    for side in SIDES:
        case.assert_scored(side, plain_scores(case, side))


def embedded(names: dict[str, Any]) -> Any:
    """Return the model of the printed lines with its entities on both sides, as PBG's training sets them."""
    sides = pytest.importorskip("torchbiggraph.types", reason="PBG scores").Side
    for side in (sides.LHS, sides.RHS):
        names["model"].set_embeddings("all", torch.nn.Parameter(names["embeddings"]), side)
    return names["model"]


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_pbg_scores_as_the_run_does(tmp_path: Path, name: str, corruption: str) -> None:
    hdf5()
    edges = pytest.importorskip("torchbiggraph.edgelist", reason="PBG loads the model")
    lists = pytest.importorskip("torchbiggraph.entitylist", reason="PBG loads the model")
    case = export_whole(tmp_path, "pbg", name, corruption)
    model = embedded(run_lines(case.written.python, case.folder))
    h, r, t = (torch.from_numpy(np.ascontiguousarray(column)) for column in case.questions.T)
    heads, tails = (lists.EntityList.from_tensor(ids) for ids in (h, t))
    with torch.no_grad():
        scores = model(edges.EdgeList(heads, tails, r))
    case.assert_scored("tail", scores.rhs_pos.numpy())
    case.assert_scored("head", scores.lhs_pos.numpy())


def test_pbg_reads_edges_names_and_counts_and_writes_its_tsv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hdf5()
    storages = pytest.importorskip("torchbiggraph.graph_storages", reason="PBG reads the graph")
    converter = pytest.importorskip("torchbiggraph.converters.export_to_tsv", reason="PBG reads the model")
    case = export_whole(tmp_path, "pbg", "transe", "reciprocal")
    monkeypatch.chdir(case.folder)
    for split in SPLITS:
        edges = storages.EDGE_STORAGES.make_instance(f"edges/{split}").load_edges(0, 0)
        columns = (edges.lhs.to_tensor(), edges.rel, edges.rhs.to_tensor())
        assert torch.stack(columns, 1).tolist() == case.triples(split)
    names = storages.ENTITY_STORAGES.make_instance("entity_path")
    assert names.load_names("all", 0) == list(case.run.dataset.entities)
    assert names.load_count("all", 0) == 30
    config = run_lines(case.written.python[:2], case.folder)["config"]
    entities, relations = StringIO(), StringIO()
    converter.make_tsv(config, entities, relations)
    rows = [line.split("\t") for line in entities.getvalue().splitlines()]
    assert [row[0] for row in rows] == list(case.run.dataset.entities)
    np.testing.assert_allclose(np.array([row[1:] for row in rows], np.float64), case.entities, atol=1e-6)
    found = {
        tuple(row[:2]): row[5:] for row in (line.split("\t") for line in relations.getvalue().splitlines())
    }
    for i, label in enumerate(case.run.dataset.relations):
        for side, row in (("lhs", i), ("rhs", i + 3)):
            np.testing.assert_allclose(np.array(found[label, side], float), case.relations[row], atol=1e-6)


def test_the_graph_is_whole_in_our_ids(tmp_path: Path) -> None:
    hdf5()
    case = export_whole(tmp_path, "pbg", "distmult")
    case.assert_replaceable()
    for split in SPLITS:
        with hdf5().File(case.folder / "edges" / split / "edges_0_0.h5") as file:
            assert file.attrs["format_version"] == 1
            columns = [file[name][...] for name in ("lhs", "rel", "rhs")]
        assert all(column.dtype == np.int64 for column in columns)
        assert np.stack(columns, 1).tolist() == case.triples(split)
    names = case.folder / "entity_path"
    assert json.loads((names / "entity_names_all_0.json").read_text()) == list(case.run.dataset.entities)
    assert json.loads((names / "dynamic_rel_names.json").read_text()) == list(case.run.dataset.relations)
    assert (names / "entity_count_all_0.txt").read_text() == "30\n"
    assert (names / "dynamic_rel_count.txt").read_text() == "3\n"
    assert (case.folder / "checkpoint_path" / "checkpoint_version.txt").read_text() == "1\n"


def test_parameters_say_their_names_in_the_state_dict(tmp_path: Path) -> None:
    hdf5()
    case = export_whole(tmp_path, "pbg", "complex")
    with hdf5().File(case.folder / "checkpoint_path" / "model.v1.h5") as file:
        operators = file["model/relations/0/operator"]
        keys = {
            operators[f"{side}/{name}"].attrs["state_dict_key"]
            for side in operators
            for name in operators[side]
        }
    assert keys == {f"{side}_operators.0.{part}" for side in ("lhs", "rhs") for part in ("real", "imag")}


def test_any_label_can_be_said(tmp_path: Path) -> None:
    hdf5()
    labels = ["a\tb", "c\nd", '"', "NA", "\u2028", "日本", "nul\0", "back\\slash"]
    run = labelled_run(tmp_path, labels, ["likes", "is\npart"], dim=4)
    export(run.folder, "pbg", tmp_path / "out")
    names = tmp_path / "out" / "entity_path"
    assert json.loads((names / "entity_names_all_0.json").read_text()) == list(run.dataset.entities)
    assert json.loads((names / "dynamic_rel_names.json").read_text()) == list(run.dataset.relations)


def test_names_of_several_blocks_are_one_list(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(8195), dim=2)
    pieces = list(_json_names(exported(run).entities))
    assert len(pieces) == 2
    assert json.loads(b"[" + b"".join(pieces) + b"]") == list(run.dataset.entities)


def test_a_graph_without_test_triples_has_no_edges_there(tmp_path: Path) -> None:
    hdf5()
    run = make_run(tmp_path, ring(5), dim=4)
    export(run.folder, "pbg", tmp_path / "out")
    with hdf5().File(tmp_path / "out" / "edges" / "test" / "edges_0_0.h5") as file:
        assert file["rel"].shape == (0,)


def test_models_that_pbg_has_no_operator_for_are_refused(tmp_path: Path) -> None:
    assert_others_are_refused(tmp_path, "pbg", set(MODELS))


def test_what_is_added_to_scores_is_said(tmp_path: Path) -> None:
    hdf5()
    case = export_with_offset(tmp_path, "pbg", "transe", 9.0)
    assert any("lower by 9" in note for note in case.written.notes)
    case.assert_scored("head", plain_scores(case, "head") + 9)


def test_without_h5py_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ring(5), dim=4)
    before = tree(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"pip install 'kgshard\[pbg\]'"):
        export(run.folder, "pbg", tmp_path / "out")
    assert tree(tmp_path) == before
