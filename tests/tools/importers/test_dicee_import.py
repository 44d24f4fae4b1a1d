"""Run folders of dicee become runs with its scores, and with its own evaluation's figures.

The quick tests write folders as dicee 0.3.3 does and score by its formulas, written again here with torch.
The nightly one trains with the package itself.
"""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environments import dicee_python
from foreign import ENTITIES, Ids, draw, draw_triples, run_scores, write_splits
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.importers import import_run
from papers import PAPER
from torch import Tensor
from torch.nn.functional import normalize, pairwise_distance

from kgshard.errors import ConfigError, DataError, NonFiniteError
from kgshard.files import file_sha256

DIM = 16
SCRIPT = Path(__file__).resolve().parents[2] / "support" / "dicee_training.py"
RELATIONS = ["knows", "likes", "likes_inverse"]


def rotated(h: Tensor, phase: Tensor) -> Tensor:
    real, imaginary = h.chunk(2)
    return torch.cat(
        [real * phase.cos() - imaginary * phase.sin(), real * phase.sin() + imaginary * phase.cos()]
    )


def paper(name: str, *rows: Tensor, shared: dict[str, Any] | None = None) -> float:
    return PAPER[name](*(row.numpy().astype(np.float64) for row in rows), shared or {})


def distance(x: Tensor, y: Tensor) -> float:
    return float(pairwise_distance(x[None], y[None]))


def unit_octonions(r: Tensor) -> Tensor:
    return (r.view(8, -1) / r.view(8, -1).pow(2).sum(0).sqrt()).view(-1)


def keci(h: Tensor, r: Tensor, t: Tensor, *coefficients: float) -> float:
    """Cl(1, 1) by its multiplication table, without bivectors."""
    (h0, hp, hq), (r0, rp, rq), (t0, tp, tq) = (x.view(3, -1).double() for x in (h, r, t))
    hp, rp, hq, rq = coefficients[0] * hp, coefficients[0] * rp, coefficients[1] * hq, coefficients[1] * rq
    scalar, p, q = h0 * r0 + hp * rp - hq * rq, h0 * rp + r0 * hp, h0 * rq + r0 * hq
    return float((scalar * t0 + p * tp + q * tq).sum())


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], float]] = {
    "DistMult": lambda h, r, t: float((h * r * t).sum()),
    "ComplEx": lambda h, r, t: paper("complex", h, r, t),
    "TransE": lambda h, r, t: 4 - distance(h + r, t),
    "RotatE": lambda h, r, t: 6.0 - distance(rotated(h, r), t),
    "QMult": lambda h, r, t: paper("qmult", h, normalize(r.view(-1, 4), dim=-1).view(-1), t),
    "OMult": lambda h, r, t: paper("omult", h, unit_octonions(r), t),
    "DualE": lambda h, r, t: -paper("duale", h, r, t),
    "Keci": lambda h, r, t: keci(h, r, t, 0.7, -1.3),
    "CKeci": lambda h, r, t: keci(h, r, t, 0.7, -1.3),
}


def write_csv(path: Path, column: str, labels: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["", column])
        writer.writerows(enumerate(labels))


def with_inverses(ids: Ids, rows: Sequence[str]) -> Ids:
    """Return triples followed by their inverses, as dicee keeps them."""
    inverses = [[t, rows.index(f"{rows[r]}_inverse"), h] for h, r, t in ids.tolist()]
    return np.concatenate([ids, np.array(inverses, np.int64).reshape(-1, 3)])


def write_folder(
    folder: Path,
    model: str,
    *,
    rows: Sequence[str] = RELATIONS,
    entities: Sequence[str] = ENTITIES,
    technique: str = "NegSample",
    splits: dict[str, Ids] | None = None,
    extra: dict[str, Tensor] | None = None,
    **config: Any,
) -> dict[str, Tensor]:
    """Write a run folder of dicee; return its state dict."""
    folder.mkdir()
    dim = 15 if "Keci" in model else DIM
    reciprocal = technique in ("KvsAll", "1vsAll")
    settings = {
        "model": model,
        "embedding_dim": dim,
        "scoring_technique": technique,
        "apply_reciprical_or_noise": reciprocal,
        "eval_model": "test",
        "normalization": None,
        "byte_pair_encoding": False,
        "p": 1,
        "q": 1,
    }
    (folder / "configuration.json").write_text(json.dumps(settings | config))
    relation_dim = dim // 2 if model == "RotatE" else dim
    state = {
        "entity_embeddings.weight": torch.from_numpy(draw(len(entities), dim, 1)),
        "relation_embeddings.weight": torch.from_numpy(draw(len(rows), relation_dim, 2)),
        **(extra or {}),
    }
    if "Keci" in model:
        state["p_coefficients.weight"] = torch.tensor([[0.7]])
        state["q_coefficients.weight"] = torch.tensor([[-1.3]])
    torch.save(state, folder / "model.pt")
    write_csv(folder / "entity_to_idx.csv", "entity", entities)
    write_csv(folder / "relation_to_idx.csv", "relation", rows)
    splits = splits or {"train": draw_triples(30, 3), "test": draw_triples(6, 4)}
    for split, ids in splits.items():
        np.save(folder / f"{split}_set.npy", with_inverses(ids, rows) if reciprocal else ids)
    return state


def formula_scores(model: str, state: dict[str, Tensor], ids: Ids) -> list[float]:
    entities, relations = state["entity_embeddings.weight"], state["relation_embeddings.weight"]
    return [FORMULAS[model](entities[h], relations[r], entities[t]) for h, r, t in ids.tolist()]


@pytest.mark.parametrize("model", sorted(FORMULAS))
def test_scores_are_those_of_dicee(tmp_path: Path, model: str) -> None:
    technique = "KvsAll" if "Keci" in model else "NegSample"
    rows = (
        [f"r{i}{end}" for i in range(3) for end in ("", "_inverse")] if technique == "KvsAll" else RELATIONS
    )
    splits = {"train": draw_triples(30, 3)}
    if technique == "KvsAll":
        splits["train"][:, 1] *= 2
    state = write_folder(tmp_path / "dicee", model, rows=rows, technique=technique, splits=splits)
    run = import_run(tmp_path / "dicee", tmp_path / "run")
    ids = draw_triples(60, 9)
    asked = ids * [1, 2, 1] if technique == "KvsAll" else ids
    np.testing.assert_allclose(
        run_scores(run, asked, relations=rows), formula_scores(model, state, asked), atol=1e-5
    )


@pytest.mark.parametrize("name", ["entity_embeddings.weight", "relation_embeddings.weight"])
def test_bfloat16_is_widened_exactly(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "dicee", "DistMult")
    state = torch.load(tmp_path / "dicee" / "model.pt", weights_only=True)
    halves = {key: value.to(torch.bfloat16) if key == name else value for key, value in state.items()}
    torch.save(halves, tmp_path / "dicee" / "model.pt")
    run = import_run(tmp_path / "dicee", tmp_path / "run")
    table = run.checkpoint.entities if name.startswith("entity") else run.checkpoint.relations
    vocabulary = run.dataset.entities if name.startswith("entity") else run.dataset.relations
    labels = ENTITIES if name.startswith("entity") else RELATIONS
    np.testing.assert_array_equal(table.gather(vocabulary.ids_of(labels)), halves[name].float().numpy())


def test_a_relation_named_like_an_inverse_is_a_relation(tmp_path: Path) -> None:
    """`likes` is an entity and a relation, `likes_inverse` a relation of the graph (dicee#390)."""
    entities = ["likes", "Property", "a", "b"]
    train = np.array([[0, 0, 1], [2, 1, 3], [3, 2, 2]])  # likes type Property; a likes b; b likes_inverse a
    rows = ["type", "likes", "likes_inverse"]
    write_folder(tmp_path / "sampled", "DistMult", rows=rows, entities=entities, splits={"train": train})
    run = import_run(tmp_path / "sampled", tmp_path / "run")
    assert not run.model.reciprocal
    assert sorted(run.dataset.relations) == sorted(rows)
    assert "likes" in run.dataset.entities

    inverses = ["type", "type_inverse", "likes", "likes_inverse", "likes_inverse_inverse"]
    state = write_folder(
        tmp_path / "all",
        "DistMult",
        rows=inverses,
        entities=entities,
        technique="KvsAll",
        splits={"train": np.array([[0, 0, 1], [2, 2, 3], [3, 3, 2]])},
    )
    run = import_run(tmp_path / "all", tmp_path / "run2")
    assert run.model.reciprocal
    assert sorted(run.dataset.relations) == sorted(rows)
    assert run.info.imported is not None
    assert any(
        "'likes_inverse' is a relation and dicee's inverse" in line for line in run.info.imported.decisions
    )
    table = state["relation_embeddings.weight"].numpy()
    num = len(rows)
    for label in rows:
        row = run.dataset.relations.id_of(label)
        own, inverse = run.checkpoint.relations.gather([row, row + num])
        np.testing.assert_array_equal(own, table[inverses.index(label)])
        np.testing.assert_array_equal(inverse, table[inverses.index(f"{label}_inverse")])


def test_only_the_first_half_of_a_split_is_of_the_graph(tmp_path: Path) -> None:
    rows = ["x", "x_inverse"]
    splits = {"train": np.array([[0, 0, 1], [1, 0, 2]]), "test": np.array([[2, 0, 3]])}
    write_folder(tmp_path / "dicee", "ComplEx", rows=rows, technique="1vsAll", splits=splits)
    run = import_run(tmp_path / "dicee", tmp_path / "run")
    assert [len(run.dataset.triples(split)) for split in ("train", "valid", "test")] == [2, 0, 1]
    np.save(tmp_path / "dicee" / "train_set.npy", np.array([[0, 0, 1], [1, 0, 0]]))
    with pytest.raises(DataError, match="second half is not the inverses of the first"):
        import_run(tmp_path / "dicee", tmp_path / "run2")
    write_splits(tmp_path / "data", splits, relations=rows)
    assert import_run(tmp_path / "dicee", tmp_path / "run2", data=tmp_path / "data").model == run.model


def test_without_an_evaluation_dicee_made_no_inverses(tmp_path: Path) -> None:
    write_folder(tmp_path / "dicee", "ComplEx", apply_reciprical_or_noise=True, eval_model=None)
    assert not import_run(tmp_path / "dicee", tmp_path / "run").model.reciprocal


def test_labels_are_read_as_pandas_wrote_them(tmp_path: Path) -> None:
    labels = ['"q,x"', "a,b", "a\nb", " c ", *ENTITIES[4:]]
    write_folder(tmp_path / "dicee", "DistMult", entities=labels)
    assert sorted(import_run(tmp_path / "dicee", tmp_path / "run").dataset.entities) == sorted(labels)
    write_csv(tmp_path / "dicee" / "entity_to_idx.csv", "entity", ["", *ENTITIES[1:]])
    with pytest.raises(DataError, match="row 0 has no label; dicee took a label such as NA"):
        import_run(tmp_path / "dicee", tmp_path / "run2")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "MuRE": ("MuRE", {}, "distance is not squared"),
    "TransH": ("TransH", {}, "distance is squared"),
    "unknown": ("Shallom", {}, "known: DistMult"),
    "normalised": ("ComplEx", {"normalization": "LayerNorm"}, "normalization 'LayerNorm'"),
    "byte pairs": ("ComplEx", {"byte_pair_encoding": True}, "byte_pair_encoding"),
    "bivectors": ("Keci", {"p": 2, "technique": "KvsAll"}, "Keci with p = 2, q = 1: .* bivectors"),
    "batch": ("Keci", {"p": 1}, "NegSample trains that"),
    "a layer": ("ComplEx", {"extra": {"fc.weight": torch.ones(2)}}, "no model here takes: fc.weight"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_said_exactly_is_refused_by_name(tmp_path: Path, case: str) -> None:
    model, changed, words = REFUSED[case]
    rows = [f"r{i}{end}" for i in range(3) for end in ("", "_inverse")]
    splits = {"train": draw_triples(30, 3) * [1, 2, 1]}
    write_folder(tmp_path / "dicee", model, rows=rows, splits=splits, **changed)
    with pytest.raises(ConfigError, match=words):
        import_run(tmp_path / "dicee", tmp_path / "run")


def test_a_relation_whose_norm_is_zero_is_refused(tmp_path: Path) -> None:
    """dicee itself scores nothing but NaN with it."""
    zero = {"relation_embeddings.weight": torch.zeros(3, DIM)}
    write_folder(tmp_path / "dicee", "OMult", extra=zero)
    with pytest.raises(NonFiniteError, match="relation row"):
        import_run(tmp_path / "dicee", tmp_path / "run")


def test_tables_and_labels_must_be_as_many(tmp_path: Path) -> None:
    write_folder(tmp_path / "dicee", "DistMult")
    write_csv(tmp_path / "dicee" / "entity_to_idx.csv", "entity", [*ENTITIES, "one more"])
    with pytest.raises(DataError, match=r"entity_embeddings.weight has 13 rows, but there are 14 labels"):
        import_run(tmp_path / "dicee", tmp_path / "run")


def write_keci(folder: Path, **config: Any) -> None:
    rows = ["x", "x_inverse"]
    splits = {"train": draw_triples(9, 1, relations=1)}
    write_folder(folder, "Keci", rows=rows, technique="KvsAll", splits=splits, **config)


@pytest.mark.parametrize("changed", [{"p": None}, {"p": None, "q": None}, {"q": None}])
def test_p_and_q_that_are_not_said_are_0(tmp_path: Path, changed: dict[str, Any]) -> None:
    write_keci(tmp_path / "dicee", **changed)
    path = tmp_path / "dicee" / "model.pt"
    state = torch.load(path, weights_only=True)
    for kind in ("entity", "relation"):  # A width for one part, for two and for three.
        state[f"{kind}_embeddings.weight"] = state[f"{kind}_embeddings.weight"][:, :12].clone()
    signature = {"p": 1, "q": 1} | dict.fromkeys(changed, 0)
    for key, value in signature.items():
        if not value:
            del state[f"{key}_coefficients.weight"]
    torch.save(state, path)
    assert import_run(tmp_path / "dicee", tmp_path / "run").model.name == "keci:{p},{q}".format(**signature)
    text = (tmp_path / "dicee" / "configuration.json").read_text()
    config = {key: value for key, value in json.loads(text).items() if key not in changed}
    (tmp_path / "dicee" / "configuration.json").write_text(json.dumps(config))
    assert import_run(tmp_path / "dicee", tmp_path / "run2").model.name == "keci:{p},{q}".format(**signature)


@pytest.mark.parametrize("value", ["x", -1, 1.5, True])
def test_p_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    write_keci(tmp_path / "dicee", p=value)
    with pytest.raises(DataError, match=r"configuration.json: p is .*, expected a number from 0"):
        import_run(tmp_path / "dicee", tmp_path / "run")


@pytest.mark.parametrize("model", ["QMult", "OMult"])
def test_a_width_that_is_no_multiple_is_refused(tmp_path: Path, model: str) -> None:
    write_folder(tmp_path / "dicee", model)
    state = {"entity_embeddings.weight": torch.ones(13, 6), "relation_embeddings.weight": torch.ones(3, 6)}
    torch.save(state, tmp_path / "dicee" / "model.pt")
    with pytest.raises(ConfigError, match=f"dicee, {model.lower()}: .*dim"):
        import_run(tmp_path / "dicee", tmp_path / "run")


@pytest.mark.parametrize("technique", ["NegSample", "KvsAll"])
@pytest.mark.parametrize(("column", "number"), [(1, -1), (1, 99), (0, 99), (2, -1)])
def test_a_number_without_a_label_is_refused(
    tmp_path: Path, technique: str, column: int, number: int
) -> None:
    rows = ["x", "x_inverse"]
    splits = {"train": draw_triples(9, 1, relations=1)}
    write_folder(tmp_path / "dicee", "DistMult", rows=rows, technique=technique, splits=splits)
    ids = np.load(tmp_path / "dicee" / "train_set.npy")
    ids[0, column] = number
    np.save(tmp_path / "dicee" / "train_set.npy", ids)
    kind = ("head", "relation", "tail")[column]
    with pytest.raises(DataError, match=rf"train_set.npy: {kind} numbers run from .* labels for 0.."):
        import_run(tmp_path / "dicee", tmp_path / "run")


HOSTILE_IDS = {
    "zip": b"PK\x03\x04xx",
    "brackets": b"\x93NUMPY\x01\x00\x28\x23" + b"(" * 9000,
    "floats": None,
}


@pytest.mark.parametrize("case", sorted(HOSTILE_IDS))
def test_hostile_splits_are_refused_by_name(tmp_path: Path, case: str) -> None:
    write_folder(tmp_path / "dicee", "DistMult")
    path, content = tmp_path / "dicee" / "train_set.npy", HOSTILE_IDS[case]
    if content is None:
        np.save(path, np.ones((3, 3)))
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"train_set.npy: "):
        import_run(tmp_path / "dicee", tmp_path / "run")


def test_a_row_of_two_labels_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "dicee", "DistMult")
    path = tmp_path / "dicee" / "entity_to_idx.csv"
    path.write_text(path.read_text() + "3,another\n")
    with pytest.raises(DataError, match="row 3 occurs twice, of 'e3' and of 'another'"):
        import_run(tmp_path / "dicee", tmp_path / "run")
    path.unlink()
    numbers = {label: min(row, 11) for row, label in enumerate(ENTITIES)}
    write_pickle(tmp_path / "dicee" / "entity_to_idx.p", numbers)
    with pytest.raises(DataError, match="row 11 occurs twice, of 'e11' and of 'e12'"):
        import_run(tmp_path / "dicee", tmp_path / "run")


def write_pickle(path: Path, labels: dict[str, int]) -> None:
    """Write a dict as Python's first pickles said it: text, read by whatever reads pickles."""
    items = "".join(f"V{label}\nI{row}\ns" for label, row in labels.items())
    path.write_bytes(f"(d{items}.".encode())


def test_pickled_labels_of_older_versions_are_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "dicee", "DistMult")
    first = import_run(tmp_path / "dicee", tmp_path / "run")
    for kind, labels in (("entity", ENTITIES), ("relation", RELATIONS)):
        (tmp_path / "dicee" / f"{kind}_to_idx.csv").unlink()
        write_pickle(tmp_path / "dicee" / f"{kind}_to_idx.p", {label: i for i, label in enumerate(labels)})
    second = import_run(tmp_path / "dicee", tmp_path / "run2")
    assert second.dataset.vocabulary_sha256 == first.dataset.vocabulary_sha256
    rows = range(13)
    np.testing.assert_array_equal(second.checkpoint.entities.read(rows), first.checkpoint.entities.read(rows))
    (tmp_path / "dicee" / "entity_to_idx.p").write_bytes(b"]q\x00.")
    with pytest.raises(DataError, match=r"entity_to_idx.p: is no dict of labels to numbers"):
        import_run(tmp_path / "dicee", tmp_path / "run3")


def test_labels_with_line_ends_of_their_own_stay(tmp_path: Path) -> None:
    entities = ["a\r\nb", *ENTITIES[1:]]
    write_folder(tmp_path / "dicee", "DistMult", entities=entities)
    assert sorted(import_run(tmp_path / "dicee", tmp_path / "run").dataset.entities) == sorted(entities)


def test_labels_may_lie_in_the_data_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "dicee", "DistMult")
    write_splits(tmp_path / "data", {"train": draw_triples(9, 1)}, relations=RELATIONS)
    for kind in ("entity", "relation"):
        name = f"{kind}_to_idx.csv"
        (tmp_path / "dicee" / name).rename(tmp_path / "data" / name)
    run = import_run(tmp_path / "dicee", tmp_path / "run", data=tmp_path / "data")
    assert sorted(run.dataset.relations) == sorted(RELATIONS)


def test_a_normalization_spelt_none_is_none(tmp_path: Path) -> None:
    write_folder(tmp_path / "dicee", "DistMult", normalization="None")
    assert import_run(tmp_path / "dicee", tmp_path / "run").model.name == "distmult"


def test_the_epsilon_of_a_distance_is_kept(tmp_path: Path) -> None:
    """Where rows are as small as that, a score without it is another."""
    state = write_folder(tmp_path / "dicee", "TransE")
    tiny = {name: table * 1e-7 for name, table in state.items()}
    torch.save(tiny, tmp_path / "dicee" / "model.pt")
    run, ids = import_run(tmp_path / "dicee", tmp_path / "run"), draw_triples(20, 9)
    table = tiny["entity_embeddings.weight"].double(), tiny["relation_embeddings.weight"].double()
    gaps = [
        torch.linalg.vector_norm(table[0][h] + table[1][r] - table[0][t] + 1e-6) for h, r, t in ids.tolist()
    ]
    rows = run.dataset.relations.ids_of(RELATIONS)
    np.testing.assert_allclose(
        run.checkpoint.relations.gather(rows), table[1].numpy() + 1e-6, rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(4 - run_scores(run, ids, relations=RELATIONS), gaps, rtol=0, atol=1e-6)
    assert run.dataset.info.splits["train"].sha256 == file_sha256(tmp_path / "dicee" / "train_set.npy")


@pytest.fixture(scope="module")
def python() -> Path:
    return dicee_python()


def probe_gap(folder: Path, model: TrainedModel) -> float:
    """Return the largest difference between dicee's scores of its probe and a run's."""
    ids, expected = np.load(folder / "probe_triples.npy"), np.load(folder / "probe_scores.npy")
    labels = []
    for kind in ("entity", "relation"):
        with (folder / f"{kind}_to_idx.csv").open(newline="") as file:
            labels.append([label for _, label in list(csv.reader(file))[1:]])
    entities, rows = labels
    is_relation = np.array([row in model.relations for row in rows])[ids[:, 1]]
    scores = np.empty(len(ids))
    scores[is_relation] = run_scores(model, ids[is_relation], entities, rows)
    own = [row.removesuffix("_inverse") for row in rows]
    turned = ids[~is_relation][:, [2, 1, 0]]
    scores[~is_relation] = run_scores(model, turned, entities, own, side="head")
    return float(np.abs(scores - expected).max())


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "ComplEx", "scoring_technique": "KvsAll", "embedding_dim": 32},
        {"model": "Keci", "scoring_technique": "1vsAll", "embedding_dim": 33, "p": 1, "q": 1},
        {"model": "RotatE", "scoring_technique": "NegSample", "embedding_dim": 32, "neg_ratio": 5},
        {"model": "QMult", "scoring_technique": "NegSample", "embedding_dim": 32, "neg_ratio": 5},
    ],
    ids=lambda settings: f"{settings['model']}-{settings['scoring_technique']}",
)
def test_a_model_that_dicee_trained_has_its_scores_and_metrics(
    shared_data: Path, python: Path, tmp_path: Path, here: None, settings: dict[str, Any]
) -> None:
    """dicee's Test figures are filtered by all splits and over both sides: by inverses where it made them."""
    folder = tmp_path / "dicee"
    command = [str(python), str(SCRIPT), str(shared_data / "UMLS"), str(folder)]
    given = json.dumps({"num_epochs": 3, "lr": 0.05, **settings})
    done = subprocess.run([*command, given], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = load(import_run(folder, tmp_path / "run"))
    assert probe_gap(folder, model) < 1e-5
    reported = json.loads((folder / "eval_report.json").read_text())["Test"]
    metrics = model.evaluate("test").to_dict()["metrics"]
    assert metrics["mrr"] == pytest.approx(reported["MRR"], abs=1e-6)
    assert metrics["hits@10"] == pytest.approx(reported["H@10"], abs=1e-6)
