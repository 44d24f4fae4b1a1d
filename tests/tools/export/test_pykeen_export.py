"""PyKEEN's files, read by a plain reader after its source, and by PyKEEN where it is installed."""

from __future__ import annotations

import csv
import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from exports import labelled_run, run_lines
from graphs import make_run, ring, tree
from kgshard_tools.export import export
from kgshard_tools.export.pykeen import _MISSING, _opcodes
from safetensors.numpy import load_file
from whole_models import (
    CORRUPTIONS,
    Array,
    Exported,
    assert_others_are_refused,
    export_whole,
    export_with_offset,
)

from kgshard.errors import ConfigError
from kgshard.models.link import SIDES, Side

MODELS = ["distmult", "cp", "simple", "rescal", "tucker", "tucker:5", "complex", "qmult", "quate"]
MODELS += ["transe", "transe-l1", "transh", "mure", "rotate"]
CASES = [(name, corruption) for name in MODELS for corruption in CORRUPTIONS]
FOLDERS = {"train": "training_triples", "valid": "validation_triples", "test": "testing_triples"}
MISREAD = ["NA", "nan", "null", "None", "N/A", "NULL", "#N/A", "<NA>", "-1.#IND"]
HOSTILE = [
    "a\tb",
    "c\nd",
    'quo"ted',
    '"',
    "lone\rreturn",
    "42",
    "True",
    "1e5",
    " NA",
    "na",
    "日本",
    "back\\slash",
    "nul\0",
]


def read_labels(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t")
    assert header == ["id", "label"]
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    return [label for _, label in rows]


def read_triples(path: Path) -> list[list[int]]:
    lines = gzip.decompress(path.read_bytes()).decode().split("\n")
    assert lines[0] == "head\trelation\ttail"
    assert lines[-1] == ""
    return [[int(text) for text in line.split("\t")] for line in lines[1:-1]]


def as_numbers(rows: Array, count: int) -> Array:
    """Read numbers of `count` parts that lie side by side: [n, k, count]."""
    return rows.reshape(len(rows), -1, count).astype(np.float64)


def as_complex(rows: Array) -> Array:
    parts = as_numbers(rows, 2)
    return parts[..., 0] + 1j * parts[..., 1]


def hamilton(x: Array, y: Array) -> Array:
    a, b, c, d = np.moveaxis(x, -1, 0)
    e, f, g, h = np.moveaxis(y, -1, 0)
    product = [a * e - b * f - c * g - d * h, a * f + b * e + c * h - d * g]
    product += [a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e]
    return np.stack(product, axis=-1)


def norms(difference: Array, p: int = 2) -> Array:
    return np.linalg.norm(difference, ord=p, axis=-1)


def quate(h: list[Array], r: list[Array], t: list[Array], c: dict[str, object], core: Array) -> Array:
    relation = as_numbers(r[0], 4)
    if "relation_normalizer" not in c:
        relation = relation / np.linalg.norm(relation, axis=-1, keepdims=True)
    return -(hamilton(as_numbers(h[0], 4), relation) * as_numbers(t[0], 4)).sum((-1, -2))


def transh(h: list[Array], r: list[Array], t: list[Array], c: dict[str, object], core: Array) -> Array:
    w, d = r
    assert c["scoring_fct_norm"] == 2
    down = [rows - (rows * w).sum(-1, keepdims=True) * w for rows in (h[0], t[0])]
    return -norms(down[0] + d - down[1])


def rescal(h: list[Array], r: list[Array], t: list[Array], c: dict[str, object], core: Array) -> Array:
    dim = h[0].shape[1]
    return np.einsum("nd,nde,ne->n", h[0], r[0].reshape(-1, dim, dim), t[0])


Formula = Callable[[list[Array], list[Array], list[Array], dict[str, object], Array], Array]
PYKEEN: dict[str, Formula] = {
    "DistMult": lambda h, r, t, c, core: (h[0] * r[0] * t[0]).sum(-1),
    "CP": lambda h, r, t, c, core: (h[0] * r[0] * t[1]).sum(-1),
    "RESCAL": rescal,
    "TuckER": lambda h, r, t, c, core: np.einsum("ni,nj,nk,ijk->n", h[0], r[0], t[0], core),
    "ComplEx": lambda h, r, t, c, core: np.real(
        (as_complex(h[0]) * as_complex(r[0]) * np.conj(as_complex(t[0]))).sum(-1)
    ),
    "QuatE": quate,
    "TransE": lambda h, r, t, c, core: -norms(h[0] + r[0] - t[0], int(str(c["scoring_fct_norm"]))),
    "TransH": transh,
    "MuRE": lambda h, r, t, c, core: -(norms(h[0] * r[1] + r[0] - t[0]) ** 2) + h[1][:, 0] + t[2][:, 0],
    "RotatE": lambda h, r, t, c, core: -norms(as_complex(h[0]) * as_complex(r[0]) - as_complex(t[0])),
}
"""Scores by the interactions of pykeen.nn.modules 1.11.1; `c` are the model's arguments."""


def plain_scores(case: Exported, side: Side) -> Array:
    tensors = {
        name: array.astype(np.float64) for name, array in load_file(case.folder / "model.safetensors").items()
    }
    config = json.loads((case.folder / "config.json").read_text())["pykeen"]

    def rows(kind: str, ids: Array) -> list[Array]:
        names = [f"{kind}_representations.{number}._embeddings.weight" for number in range(3)]
        return [tensors[name][ids] for name in names if name in tensors]

    h, r, t = case.questions.T
    if case.run.model.reciprocal:
        h, r, t = (h, 2 * r, t) if side == "tail" else (t, 2 * r + 1, h)
    core = tensors.get("interaction.core_tensor", np.empty(0))
    return PYKEEN[config["model"]](rows("entity", h), rows("relation", r), rows("entity", t), config, core)


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_pykeens_formula_over_its_tensors_is_the_papers_over_ours(
    tmp_path: Path, name: str, corruption: str
) -> None:
    case = export_whole(tmp_path, "pykeen", name, corruption)
    for side in SIDES:
        case.assert_scored(side, plain_scores(case, side))


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_pykeen_scores_as_the_run_does(tmp_path: Path, name: str, corruption: str) -> None:
    pytest.importorskip("pykeen", reason="PyKEEN loads the model")
    case = export_whole(tmp_path, "pykeen", name, corruption)
    model = run_lines(case.written.python, case.folder)["model"]
    loaded, state = load_file(case.folder / "model.safetensors"), model.state_dict()
    assert {key for key in state if "_embeddings" in key or "core" in key} == set(loaded)
    hrt = torch.from_numpy(case.questions)
    with torch.no_grad():
        tails = model.predict_t(hrt[:, :2])[torch.arange(len(hrt)), hrt[:, 2]]
        heads = model.predict_h(hrt[:, 1:])[torch.arange(len(hrt)), hrt[:, 0]]
        case.assert_scored("tail", tails.numpy())
        case.assert_scored("head", heads.numpy())
        case.assert_scored("tail", model.predict_hrt(hrt)[:, 0].numpy())


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_graph_is_whole_in_our_ids(tmp_path: Path, corruption: str) -> None:
    case = export_whole(tmp_path, "pykeen", "distmult", corruption)
    dataset = case.run.dataset
    for split, name in FOLDERS.items():
        folder = case.folder / name
        assert read_triples(folder / "numeric_triples.tsv.gz") == case.triples(split)
        assert read_labels(folder / "entity_to_id.tsv.gz") == list(dataset.entities)
        assert read_labels(folder / "relation_to_id.tsv.gz") == list(dataset.relations)
        assert torch.load(folder / "base.pth", weights_only=True) == {
            "num_entities": 30,
            "num_relations": 3,
            "create_inverse_triples": corruption == "reciprocal" and split == "train",
            "metadata": {},
        }


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_pykeen_reads_every_factory(tmp_path: Path, corruption: str) -> None:
    triples = pytest.importorskip("pykeen.triples", reason="PyKEEN reads the factories")
    case = export_whole(tmp_path, "pykeen", "distmult", corruption)
    for split, name in FOLDERS.items():
        factory = triples.TriplesFactory.from_path_binary(case.folder / name)
        assert factory.mapped_triples.tolist() == case.triples(split)
        assert factory.entity_to_id == {label: i for i, label in enumerate(case.run.dataset.entities)}
        assert factory.relation_to_id == {label: i for i, label in enumerate(case.run.dataset.relations)}
        assert factory.real_num_relations == 3


def test_a_graph_without_test_triples_has_empty_factories(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=4)
    export(run.folder, "pykeen", tmp_path / "out")
    assert read_triples(tmp_path / "out" / FOLDERS["test"] / "numeric_triples.tsv.gz") == []


def test_models_that_pykeen_scores_otherwise_are_refused(tmp_path: Path) -> None:
    known = {name for name in MODELS if ":" not in name}
    assert_others_are_refused(tmp_path, "pykeen", known)


@pytest.mark.parametrize("label", MISREAD)
def test_labels_that_pandas_takes_for_nothing_are_refused_by_name(tmp_path: Path, label: str) -> None:
    run = labelled_run(tmp_path, ["a", label, "b"], ["likes", "NaN"], dim=4)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="pandas") as error:
        export(run.folder, "pykeen", tmp_path / "out")
    assert repr(label) in str(error.value)
    assert "relation 'NaN'" in str(error.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("labels", [["42", "7", "007"], ["1.5", "-2e3", "inf"], ["True", "false", "TRUE"]])
def test_labels_are_refused_where_all_are_numbers_or_truth_values(tmp_path: Path, labels: list[str]) -> None:
    run = labelled_run(tmp_path, labels, ["likes"], dim=4)
    with pytest.raises(ConfigError, match=r"cannot say 3 of the labels .*pandas"):
        export(run.folder, "pykeen", tmp_path / "out")
    export(run.folder, "pykeen", tmp_path / "out", label_escape="percent")
    found = read_labels(tmp_path / "out" / FOLDERS["train"] / "entity_to_id.tsv.gz")
    assert [unquote(label) for label in found] == list(run.dataset.entities)
    assert not set(found) & set(labels)


@pytest.mark.parametrize("escape", ["percent", "refuse"])
def test_pandas_reads_back_every_label(tmp_path: Path, escape: str) -> None:
    """What is not refused comes back; what is escaped leads back."""
    pandas = pytest.importorskip("pandas", reason="PyKEEN reads labels by it")
    labels = HOSTILE + ([*_MISSING, "50%"] if escape == "percent" else [])
    run = labelled_run(tmp_path, labels, ["NA" if escape == "percent" else "likes", "x"], dim=4)
    export(run.folder, "pykeen", tmp_path / "out", label_escape=escape)  # type: ignore[arg-type]
    for name, wanted in (("entity", run.dataset.entities), ("relation", run.dataset.relations)):
        path = tmp_path / "out" / FOLDERS["train"] / f"{name}_to_id.tsv.gz"
        frame = pandas.read_csv(path, sep="\t")
        found = frame["label"].tolist()
        assert frame["id"].tolist() == list(range(len(wanted)))
        assert all(isinstance(label, str) for label in found)
        undone = [
            ("" if label == "%" else unquote(label)) if escape == "percent" else label for label in found
        ]
        assert undone == list(wanted)


def test_all_that_is_refused_is_what_pandas_misreads(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="PyKEEN reads labels by it")
    for label in [*_MISSING, ""]:
        (tmp_path / "x.tsv").write_text(f'id\tlabel\n0\ta\n1\t"{label}"\n')
        assert pandas.read_csv(tmp_path / "x.tsv", sep="\t")["label"].isna().tolist() == [False, True]
    parsers = pytest.importorskip("pandas._libs.parsers", reason="where pandas keeps them")
    assert {*_MISSING, ""} == set(parsers.STR_NA_VALUES)


def test_what_is_added_to_scores_is_said(tmp_path: Path) -> None:
    case = export_with_offset(tmp_path, "pykeen", "transe", 9.0)
    assert any("lower by 9" in note for note in case.written.notes)
    case.assert_scored("tail", plain_scores(case, "tail") + 9)


def test_rows_cannot_be_left_out_or_scaled(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=4)
    for asked in ({"top_degree": 2}, {"normalize": True}, {"dtype": "float16"}):
        with pytest.raises(ConfigError):
            export(run.folder, "pykeen", tmp_path / "out", **asked)  # type: ignore[arg-type]


def test_bfloat16_is_widened_and_said_so(tmp_path: Path) -> None:
    case = export_whole(tmp_path, "pykeen", "rotate", "reciprocal", dtype=torch.bfloat16)
    assert any("bfloat16 was widened" in note for note in case.written.notes)
    case.assert_scored("tail", plain_scores(case, "tail"))


def test_an_export_replaces_an_equal_one(tmp_path: Path) -> None:
    export_whole(tmp_path, "pykeen", "complex").assert_replaceable()


@pytest.mark.parametrize("number", [0, 1, 127, 128, 255, 256, 2**31, 2**40, -1])
def test_numbers_of_any_size_unpickle(tmp_path: Path, number: int) -> None:
    value = {"a": number, "b": True, "c": {"d": "é", "e": False}, "f": {}}
    torch.save(value, tmp_path / "x.pth")
    with zipfile.ZipFile(tmp_path / "x.pth") as theirs, zipfile.ZipFile(tmp_path / "y.pth", "w") as ours:
        for name in theirs.namelist():
            content = b"\x80\x02" + _opcodes(value) + b"." if name.endswith("data.pkl") else theirs.read(name)
            ours.writestr(name, content)
    assert torch.load(tmp_path / "y.pth", weights_only=True) == value
