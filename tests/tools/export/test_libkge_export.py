"""LibKGE's files, read by a plain reader after its source, and by LibKGE where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import labelled_run, run_lines
from graphs import make_run, ring, tree
from kgshard_tools.export import export
from safetensors.numpy import load_file
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

MODELS = ["distmult", "cp", "simple", "rescal", "complex", "transe", "transe-l1", "transh", "rotate"]
MODELS += ["rotate-moduli"]
CASES = [(name, corruption) for name in MODELS for corruption in CORRUPTIONS]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read mappings of words, numbers and lists of words, nested by two spaces; keys become a.b.c."""
    options: dict[str, Any] = {}
    above: list[str] = []
    for line in path.read_text().splitlines():
        key, _, text = line.strip().partition(": ")
        above = [*above[: (len(line) - len(line.lstrip())) // 2], key.rstrip(":")]
        if text:
            options[".".join(above)] = text[1:-1].split(", ") if text.startswith("[") else text
    return options


def read_map(path: Path) -> list[str]:
    """Read as kge.dataset does: a line is an index, a tab and all the rest."""
    found: dict[int, str] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            key, value = line.split("\t", maxsplit=1)
            found[int(key)] = value.rstrip("\n")
    return [found[index] for index in range(len(found))]


def rescal(s: Array, p: Array, o: Array) -> Array:
    return np.einsum("nd,nde,ne->n", s, p.reshape(-1, s.shape[1], s.shape[1]), o)


def simple(s: Array, p: Array, o: Array) -> Array:
    (s1, s2), (forward, backward), (o1, o2) = (np.split(rows, 2, axis=1) for rows in (s, p, o))
    return ((s1 * forward * o2).sum(-1) + (s2 * backward * o1).sum(-1)) / 2


def transh(s: Array, p: Array, o: Array) -> Array:
    shift, normal = np.split(p, 2, axis=1)
    normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    down = [rows - (rows * normal).sum(-1, keepdims=True) * normal for rows in (s, o)]
    return down[0] + shift - down[1]


PRODUCTS = {
    "distmult": lambda s, p, o: (s * p * o).sum(-1),
    "cp": lambda s, p, o: (np.split(s, 2, axis=1)[0] * p * np.split(o, 2, axis=1)[1]).sum(-1),
    "simple": simple,
    "rescal": rescal,
    "complex": lambda s, p, o: np.real((as_complex(s) * as_complex(p) * as_complex(o).conj()).sum(-1)),
}
DIFFERENCES = {
    "transe": lambda s, p, o: s + p - o,
    "transh": transh,
    "rotate": lambda s, p, o: np.abs(as_complex(s) * np.exp(1j * p) - as_complex(o)),
}
"""What is measured by l_norm."""


def plain_scores(case: Exported, side: Side) -> Array:
    options = read_yaml(case.folder / "config.yaml")
    tensors = load_file(case.folder / "model.safetensors")
    entities, relations = (
        tensors[f"_{kind}_embedder._embeddings.weight"].astype(np.float64) for kind in ("entity", "relation")
    )
    model = options["model"]
    if model == "reciprocal_relations_model":
        model = options["reciprocal_relations_model.base_model.type"]
        assert options["import"] == ["reciprocal_relations_model", model]
    assert int(options[f"{model}.entity_embedder.dim"]) == entities.shape[1]
    assert int(options[f"{model}.relation_embedder.dim"]) == relations.shape[1]
    s, p, o = case.as_asked(side).T
    rows = entities[s], relations[p], entities[o]
    if model in PRODUCTS:
        return np.asarray(PRODUCTS[model](*rows))
    norm = float(options[f"{model}.l_norm"])
    return -np.linalg.norm(DIFFERENCES[model](*rows), ord=norm, axis=1)


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_libkges_formula_over_its_tensors_is_the_papers_over_ours(
    tmp_path: Path, name: str, corruption: str
) -> None:
    case = export_whole(tmp_path, "libkge", name, corruption)
    assert (read_yaml(case.folder / "config.yaml")["model"] == "reciprocal_relations_model") == (
        corruption == "reciprocal"
    )
    for side in SIDES:
        case.assert_scored(side, plain_scores(case, side))


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_libkge_scores_as_the_run_does(tmp_path: Path, name: str, corruption: str) -> None:
    pytest.importorskip("kge", reason="LibKGE loads the model")
    case = export_whole(tmp_path, "libkge", name, corruption)
    model = run_lines(case.written.python, case.folder)["model"]
    s, p, o = (torch.from_numpy(np.ascontiguousarray(column)) for column in case.questions.T)
    with torch.no_grad():
        case.assert_scored("tail", model.score_sp(s, p)[torch.arange(len(o)), o].numpy())
        case.assert_scored("head", model.score_po(p, o)[torch.arange(len(s)), s].numpy())


def test_libkge_reads_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kge", reason="LibKGE reads the dataset")
    case = export_whole(tmp_path, "libkge", "distmult")
    monkeypatch.chdir(case.folder)  # It reads maps when they are asked for.
    dataset = run_lines(case.written.python[:3], case.folder)["dataset"]
    for split in SPLITS:
        assert dataset.split(split).tolist() == case.triples(split)
    assert dataset.entity_ids() == dataset.entity_strings() == list(case.run.dataset.entities)
    assert dataset.relation_ids() == dataset.relation_strings() == list(case.run.dataset.relations)


def test_the_graph_is_whole_in_our_ids(tmp_path: Path) -> None:
    case = export_whole(tmp_path, "libkge", "distmult", "reciprocal")
    case.assert_replaceable()
    options = read_yaml(case.folder / "dataset.yaml")
    assert (options["dataset.num_entities"], options["dataset.num_relations"]) == ("30", "3")
    for split in SPLITS:
        path = case.folder / options[f"dataset.files.{split}.filename"]
        found = np.loadtxt(path, usecols=range(3), dtype=np.int32)  # As LibKGE does.
        assert found.tolist() == case.triples(split)
        assert options[f"dataset.files.{split}.size"] == str(len(found))
        assert options[f"dataset.files.{split}.type"] == "triples"
    for kind, wanted in (("entity", case.run.dataset.entities), ("relation", case.run.dataset.relations)):
        for key in ("ids", "strings"):
            assert options[f"dataset.files.{kind}_{key}.type"] == "map"
            path = case.folder / options[f"dataset.files.{kind}_{key}.filename"]
            assert read_map(path) == list(wanted)


def test_labels_come_back_but_those_that_break_lines(tmp_path: Path) -> None:
    labels = ["NA", "a b", "42", "a\tb", '"', " lead and trail ", "\u2028", "next\x85line", "日本", "#"]
    run = labelled_run(tmp_path / "a", labels, ["likes"], dim=4)
    export(run.folder, "libkge", tmp_path / "out")
    assert read_map(tmp_path / "out" / "entity_ids.del") == list(run.dataset.entities)
    for label in ("a\nb", "a\rb"):
        run = labelled_run(tmp_path / repr(label)[1:-1], ["x", "y", label], [label], dim=4)
        before = tree(tmp_path)
        with pytest.raises(ConfigError) as error:
            export(run.folder, "libkge", tmp_path / "refused")
        assert f"entity {label!r}, relation {label!r}" in str(error.value)
        assert tree(tmp_path) == before
    export(run.folder, "libkge", tmp_path / "escaped", label_escape="percent")
    assert "a%0Db" in read_map(tmp_path / "escaped" / "entity_ids.del")


def test_models_that_libkge_lacks_are_refused(tmp_path: Path) -> None:
    assert_others_are_refused(tmp_path, "libkge", set(MODELS))


def test_a_split_of_one_triple_is_warned_of(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), ring(5)[:1], dim=4)
    notes = export(run.folder, "libkge", tmp_path / "out").notes
    assert [note for note in notes if note.startswith("valid is one triple")]
    assert np.loadtxt(tmp_path / "out" / "valid.del", dtype=np.int32).shape == (3,)


def test_what_is_added_to_scores_is_said(tmp_path: Path) -> None:
    case = export_with_offset(tmp_path, "libkge", "rotate-moduli", 9.0)
    assert any("lower by 9" in note for note in case.written.notes)
    case.assert_scored("head", plain_scores(case, "head") + 9)
