"""OpenKE's files, read by a plain reader after its source, and by OpenKE where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import AWKWARD, labelled_run, run_lines
from graphs import make_run, ring, tree
from kgshard_tools.export import export
from whole_models import (
    CORRUPTIONS,
    Array,
    Exported,
    assert_others_are_refused,
    export_whole,
    export_with_offset,
)

from kgshard.data.dataset import SPLITS
from kgshard.errors import ConfigError
from kgshard.models.link import SIDES, Side

MODELS = ["distmult", "rescal", "complex", "transe", "transe-l1", "transh", "rotate-moduli"]
CASES = [(name, corruption) for name in MODELS for corruption in CORRUPTIONS]
Rows = dict[str, Array]


def distance(m: dict[str, Any], difference: Array) -> Array:
    assert m["norm_flag"] is False
    found: Array = m["margin"] - np.linalg.norm(difference, ord=m["p_norm"], axis=-1)
    return found


def transh(m: dict[str, Any], h: Rows, r: Rows, t: Rows) -> Array:
    normal = r["norm_vector"] / np.linalg.norm(r["norm_vector"], axis=-1, keepdims=True)
    down = [
        rows["ent_embeddings"] - (rows["ent_embeddings"] * normal).sum(-1, keepdims=True) * normal
        for rows in (h, t)
    ]
    return distance(m, down[0] + r["rel_embeddings"] - down[1])


def complex_(m: dict[str, Any], h: Rows, r: Rows, t: Rows) -> Array:
    (a, b), (c, d), (e, f) = (
        (rows[f"{kind}_re_embeddings"], rows[f"{kind}_im_embeddings"])
        for kind, rows in (("ent", h), ("rel", r), ("ent", t))
    )
    return np.sum(a * e * c + b * f * c + a * f * d - b * e * d, axis=-1)


def rotate(m: dict[str, Any], h: Rows, r: Rows, t: Rows) -> Array:
    phases = r["rel_embeddings"] / ((m["margin"] + m["epsilon"]) / m["dim"] / np.pi)
    (a, b), (e, f) = (np.split(rows["ent_embeddings"], 2, axis=-1) for rows in (h, t))
    turned = (a + 1j * b) * np.exp(1j * phases)
    found: Array = m["margin"] - np.abs(turned - (e + 1j * f)).sum(-1)
    return found


def rescal(m: dict[str, Any], h: Rows, r: Rows, t: Rows) -> Array:
    matrices = r["rel_matrices"].reshape(-1, m["dim"], m["dim"])
    return -np.einsum("nd,nde,ne->n", h["ent_embeddings"], matrices, t["ent_embeddings"])


FORWARD = {
    "DistMult": lambda m, h, r, t: (h["ent_embeddings"] * r["rel_embeddings"] * t["ent_embeddings"]).sum(-1),
    "RESCAL": rescal,
    "ComplEx": complex_,
    "TransE": lambda m, h, r, t: distance(m, h["ent_embeddings"] + r["rel_embeddings"] - t["ent_embeddings"]),
    "TransH": transh,
    "RotatE": rotate,
}
"""What `forward` of openke.module.model returns."""


def read_parameters(case: Exported) -> tuple[dict[str, Any], Rows]:
    settings = json.loads((case.folder / "config.json").read_text())["openke"]
    parameters = json.loads((case.folder / "parameters.json").read_text())
    rows = {name.removesuffix(".weight"): np.array(values) for name, values in parameters.items()}
    for name, values in rows.items():
        assert len(values) == settings["ent_tot" if name.startswith("ent_") else "rel_tot"]
    return settings, rows


def plain_scores(case: Exported, side: Side) -> Array:
    settings, rows = read_parameters(case)
    h, r, t = case.as_asked(side).T
    entities = {name: values for name, values in rows.items() if name.startswith("ent_")}
    relations = {name: values for name, values in rows.items() if name not in entities}
    head, rel, tail = (
        {name: values[ids] for name, values in table.items()}
        for table, ids in ((entities, h), (relations, r), (entities, t))
    )
    return np.asarray(FORWARD[settings["model"]](settings, head, rel, tail))


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_openkes_formula_over_its_parameters_is_the_papers_over_ours(
    tmp_path: Path, name: str, corruption: str
) -> None:
    case = export_whole(tmp_path, "openke", name, corruption)
    for side in SIDES:
        case.assert_scored(side, plain_scores(case, side))


def its_data(ids: Array) -> dict[str, Any]:
    columns = (torch.from_numpy(np.ascontiguousarray(column)) for column in ids.T)
    return dict(zip(("batch_h", "batch_r", "batch_t"), columns, strict=True)) | {"mode": "normal"}


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_openke_scores_as_the_run_does(tmp_path: Path, name: str, corruption: str) -> None:
    pytest.importorskip("openke.module.model", reason="OpenKE loads the model")
    case = export_whole(tmp_path, "openke", name, corruption)
    model = run_lines(case.written.python, case.folder)["model"]
    for side in SIDES:
        with torch.no_grad():
            data = its_data(case.as_asked(side))
            case.assert_scored(side, model(data).numpy())
            ranked = np.argsort(model.predict(data), kind="stable")  # It ranks the lowest first.
        assert np.all(np.diff(case.wanted(side)[ranked]) <= 1e-4)


@pytest.mark.parametrize("name", ["transe", "transe-l1", "transh", "rotate-moduli"])
@pytest.mark.parametrize("offset", [12.0, -1.5])
def test_the_margin_is_what_the_run_adds_to_scores(tmp_path: Path, name: str, offset: float) -> None:
    case = export_with_offset(tmp_path, "openke", name, offset)
    assert read_parameters(case)[0]["margin"] == offset
    for side in SIDES:
        case.assert_scored(side, plain_scores(case, side))


def test_products_take_no_margin(tmp_path: Path) -> None:
    case = export_with_offset(tmp_path, "openke", "complex", 9.0)
    assert any("lower by 9" in note for note in case.written.notes)
    case.assert_scored("head", plain_scores(case, "head") + 9)


def test_angles_that_no_margin_can_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gamma of -3"):
        export_with_offset(tmp_path, "openke", "rotate-moduli", -3.0)


def numbers(path: Path) -> list[int]:
    """Read as fscanf of base/Reader.h does: numbers, whatever is between them."""
    return [int(text) for text in path.read_text().split()]


def read_names(path: Path) -> list[str]:
    count, *lines = path.read_bytes().decode().split("\n")
    assert lines.pop() == ""
    assert int(count) == len(lines)
    pairs = [line.split("\t") for line in lines]
    assert [int(number) for _, number in pairs] == list(range(len(pairs)))
    return [name for name, _ in pairs]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_graph_is_whole_in_our_ids_head_tail_relation(tmp_path: Path, corruption: str) -> None:
    case = export_whole(tmp_path, "openke", "distmult", corruption)
    case.assert_replaceable()
    for split in SPLITS:
        count, *ids = numbers(case.folder / f"{split}2id.txt")
        assert len(ids) == 3 * count
        triples = np.array(ids).reshape(-1, 3)[:, [0, 2, 1]].tolist()
        assert triples == case.triples(split)
    relations = list(case.run.dataset.relations)
    inverses = [f"{label}_inverse" for label in relations] if corruption == "reciprocal" else []
    assert read_names(case.folder / "entity2id.txt") == list(case.run.dataset.entities)
    assert read_names(case.folder / "relation2id.txt") == [*relations, *inverses]


def test_parameters_are_the_rows_to_the_bit(tmp_path: Path) -> None:
    run = labelled_run(
        tmp_path, [f"e{i}" for i in range(9)], ["r", "s"], dim=6, model="distmult", world_size=3
    )
    export(run.folder, "openke", tmp_path / "out")
    parameters = json.loads((tmp_path / "out" / "parameters.json").read_text())
    found = torch.Tensor(parameters["ent_embeddings.weight"])  # As load_parameters makes it.
    stored = run.checkpoint.entities.read(range(9))
    assert found.numpy().tobytes() == np.ascontiguousarray(stored).tobytes()
    assert np.float32(AWKWARD[0]) in stored
    assert set(parameters) == {"ent_embeddings.weight", "rel_embeddings.weight"}


def test_rows_that_take_several_blocks_are_one_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgshard_tools.rows.BLOCK_ROWS", 5)
    case = export_whole(tmp_path, "openke", "rescal", "reciprocal")
    for side in SIDES:
        case.assert_scored(side, plain_scores(case, side))


def test_labels_that_break_lines_or_fields_are_refused(tmp_path: Path) -> None:
    labels = ["NA", "a b", "42", '"', " lead ", "\u2028", "日本"]
    run = labelled_run(tmp_path / "a", labels, ["likes"], dim=4)
    export(run.folder, "openke", tmp_path / "out")
    assert read_names(tmp_path / "out" / "entity2id.txt") == list(run.dataset.entities)
    for label in ("a\nb", "a\rb", "a\tb"):
        run = labelled_run(tmp_path / f"{ord(label[1])}", ["x", "y", label], [label], dim=4)
        before = tree(tmp_path)
        with pytest.raises(ConfigError) as error:
            export(run.folder, "openke", tmp_path / "refused")
        assert f"entity {label!r}, relation {label!r}" in str(error.value)
        assert tree(tmp_path) == before
    export(run.folder, "openke", tmp_path / "escaped", label_escape="percent")
    assert read_names(tmp_path / "escaped" / "relation2id.txt") == ["a%09b", "a%09b_inverse"]


def test_models_that_openke_scores_otherwise_are_refused(tmp_path: Path) -> None:
    assert_others_are_refused(tmp_path, "openke", set(MODELS))


def test_a_missing_type_file_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=4)
    notes = export(run.folder, "openke", tmp_path / "out").notes
    assert any("type_constrain=False" in note for note in notes)
