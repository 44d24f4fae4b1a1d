"""Models of PyKEEN score triples as PyKEEN does.

The quick tests write PyKEEN's files in the layout of 1.11.1 and score with its formulas, written again in
numpy over its own shapes. The nightly ones train with the package itself, in an environment of its own (in
the folder for temporary files, 1.5 GB; KGSHARD_PYKEEN_PYTHON names another interpreter that has it).
"""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environments import python_with
from foreign import ENTITIES, RELATIONS, draw, draw_triples, run_scores, write_splits
from kgshard_tools.importers.foreign import ForeignModel, ImportOptions
from kgshard_tools.importers.pykeen import PYKEEN
from kgshard_tools.importers.writer import write_run
from torch_files import StandIns, pykeen_representation, save_pykeen

import kgshard
from kgshard.errors import ConfigError, DataError

Array = np.ndarray[Any, Any]
Change = Callable[[StandIns, Any], object]
"""Changes a model before it is saved."""
D = 4


def complex_of(parts: Array) -> Array:
    return parts[..., 0] + 1j * parts[..., 1]


def hamilton(x: Array, y: Array) -> Array:
    """Return the products of quaternions [..., 4], by their definition."""
    a, b, c, d = np.moveaxis(x, -1, 0)
    e, f, g, h = np.moveaxis(y, -1, 0)
    return np.stack(
        [
            a * e - b * f - c * g - d * h,
            a * f + b * e + c * h - d * g,
            a * g - b * h + c * e + d * f,
            a * h + b * g - c * f + d * e,
        ],
        axis=-1,
    )


@dataclass(frozen=True)
class Case:
    """One of PyKEEN's interactions: its shapes, its score of rows h, r and t, and what equals it here."""

    interaction: str
    entities: list[tuple[int, ...]]
    relations: list[tuple[int, ...]]
    score: Callable[[list[Array], list[Array], list[Array]], float]
    scoring: str
    attributes: dict[str, Any] = field(default_factory=dict)
    normalizer: str | None = None


def norm_of_sum(p: int, *parts: Array) -> float:
    return -float((np.abs(sum(parts)) ** p).sum() ** (1 / p))


CORE = draw(5, D * D, 11).reshape(D, 5, D).astype(np.float64)  # [heads, relations, tails], as PyKEEN has it
BEFORE, AFTER = (np.abs(draw(4, D, seed)).astype(np.float64) for seed in (12, 13))
"""Weight, bias, running mean and running variance of TuckER's two batch normalisations."""


def normalised(x: Array, layer: Array) -> Array:
    weight, bias, mean, variance = layer
    return (x - mean) / np.sqrt(variance + 1e-5) * weight + bias  # type: ignore[no-any-return]


CASES = {
    "TransE, p=1": Case(
        "TransEInteraction",
        [(D,)],
        [(D,)],
        lambda h, r, t: norm_of_sum(1, h[0], r[0], -t[0]),
        "transe-l1",
        {"p": 1, "power_norm": False},
    ),
    "TransE, p=2": Case(
        "TransEInteraction",
        [(D,)],
        [(D,)],
        lambda h, r, t: norm_of_sum(2, h[0], r[0], -t[0]),
        "transe",
        {"p": 2, "power_norm": False},
    ),
    "DistMult": Case(
        "DistMultInteraction", [(D,)], [(D,)], lambda h, r, t: float((h[0] * r[0] * t[0]).sum()), "distmult"
    ),
    "ComplEx": Case(
        "ComplExInteraction",
        [(D, 2)],
        [(D, 2)],
        lambda h, r, t: float((complex_of(h[0]) * complex_of(r[0]) * complex_of(t[0]).conj()).sum().real),
        "complex",
    ),
    "RotatE": Case(
        "RotatEInteraction",
        [(D, 2)],
        [(D, 2)],
        lambda h, r, t: -float(np.linalg.norm(complex_of(h[0]) * complex_of(r[0]) - complex_of(t[0]))),
        "rotate",
    ),
    "SimplE": Case(
        "SimplEInteraction",
        [(D,), (D,)],
        [(D,), (D,)],
        lambda h, r, t: float((h[0] * r[0] * t[0]).sum() + (t[1] * r[1] * h[1]).sum()) / 2,
        "distmult",
    ),
    "CP": Case(
        "CPInteraction",
        [(3, D), (3, D)],
        [(3, D)],
        lambda h, r, t: float((h[0] * r[0] * t[1]).sum()),
        "cp",
    ),
    "RESCAL": Case(
        "RESCALInteraction", [(D,)], [(D, D)], lambda h, r, t: float(h[0] @ r[0] @ t[0]), "rescal"
    ),
    "MuRE": Case(
        "MuREInteraction",
        [(D,), (), ()],
        [(D,), (D,)],
        lambda h, r, t: -float(((h[0] * r[1] + r[0] - t[0]) ** 2).sum()) + float(h[1]) + float(t[2]),
        "mure",
        {"p": 2, "power_norm": True},
    ),
    "QuatE": Case(
        "QuatEInteraction",
        [(D, 4)],
        [(D, 4)],
        lambda h, r, t: (
            -float((hamilton(h[0], r[0] / np.linalg.norm(r[0], axis=-1, keepdims=True)) * t[0]).sum())
        ),
        "quate",
        normalizer="pykeen.nn.quaternion.normalize",
    ),
    "QuatE, not normalised": Case(
        "QuatEInteraction",
        [(D, 4)],
        [(D, 4)],
        lambda h, r, t: -float((hamilton(h[0], r[0]) * t[0]).sum()),
        "qmult",
    ),
    "TuckER": Case(
        "TuckERInteraction",
        [(D,)],
        [(5,)],
        lambda h, r, t: float(
            normalised(np.einsum("ijk,i,j->k", CORE, normalised(h[0], BEFORE), r[0]), AFTER) @ t[0]
        ),
        "tucker:6",
        {"batch_norms": (BEFORE, AFTER)},
    ),
    "TuckER, not normalised": Case(
        "TuckERInteraction",
        [(D,)],
        [(5,)],
        lambda h, r, t: float(np.einsum("ijk,i,j,k->", CORE, h[0], r[0], t[0])),
        "tucker:5",
        {"batch_norms": None},
    ),
}


def draw_table(rows: int, shape: tuple[int, ...], seed: int) -> Array:
    return draw(rows, math.prod(shape), seed).reshape(rows, *shape)


def tables(case: Case, *, num_relation_rows: int = 3) -> tuple[list[Array], list[Array]]:
    """Draw the tables of a case, float32[rows, ...] each."""
    entities = [
        draw(13, int(np.prod(shape)), 20 + i).reshape(13, *shape) for i, shape in enumerate(case.entities)
    ]
    relations = [
        draw(num_relation_rows, int(np.prod(shape)), 30 + i).reshape(num_relation_rows, *shape)
        for i, shape in enumerate(case.relations)
    ]
    if case.interaction == "RotatEInteraction":
        relations = [rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in relations]
    return entities, relations


def interaction_of(stand_ins: StandIns, case: Case) -> torch.nn.Module:
    attributes = dict(case.attributes)
    layers = attributes.pop("batch_norms", None)
    made = stand_ins.module(f"pykeen.nn.modules.{case.interaction}", **attributes)
    if case.interaction == "TuckERInteraction":
        made.core_tensor = torch.nn.Parameter(torch.from_numpy(CORE.astype(np.float32)))
        for name, values in zip(
            ("head_batch_norm", "head_relation_batch_norm"), layers or (None, None), strict=True
        ):
            setattr(made, name, None if values is None else batch_norm(values))
    if case.interaction == "SimplEInteraction":
        made = stand_ins.module("pykeen.nn.modules.ClampedInteraction", base=made, clamp_score=None)
    return made


def batch_norm(values: Array) -> torch.nn.BatchNorm1d:
    layer = torch.nn.BatchNorm1d(D)
    weight, bias, mean, variance = torch.from_numpy(values.astype(np.float32))
    layer.load_state_dict(
        {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}, strict=False
    )
    return layer


def write_results(
    folder: Path,
    case: Case,
    *,
    inverse: bool = False,
    labels: list[str] = ENTITIES,
    change: Change = lambda stand_ins, model: None,
) -> tuple[list[Array], list[Array]]:
    """Write the results of a case and return its tables, float64."""
    entities, relations = tables(case, num_relation_rows=6 if inverse else 3)
    with StandIns() as stand_ins:
        model = stand_ins.module(
            "pykeen.models.nbase.ERModel",
            interaction=interaction_of(stand_ins, case),
            entity_representations=torch.nn.ModuleList(
                [pykeen_representation(stand_ins, rows) for rows in entities]
            ),
            relation_representations=torch.nn.ModuleList(
                [pykeen_representation(stand_ins, rows, normalizer=case.normalizer) for rows in relations]
            ),
            use_inverse_triples=inverse,
            predict_with_sigmoid=False,
            relation_inverter=stand_ins.named("pykeen.inverse.DefaultRelationInverter")(),
        )
        change(stand_ins, model)
        save_pykeen(folder, model, draw_triples(40, 3), labels, RELATIONS)
    return [rows.astype(np.float64) for rows in entities], [rows.astype(np.float64) for rows in relations]


def read(folder: Path, data: Path | None = None) -> ForeignModel:
    return PYKEEN.read(folder, ImportOptions(data=data))


def score(case: Case, entities: list[Array], relations: list[Array], h: int, r: int, t: int) -> float:
    """Return PyKEEN's score of one triple of ids."""
    head, relation, tail = (
        [table[row] for table in tables] for tables, row in ((entities, h), (relations, r), (entities, t))
    )
    return case.score(head, relation, tail)


@pytest.mark.parametrize("name", CASES)
def test_scores_are_pykeens(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    entities, relations = write_results(tmp_path / "results", case)
    foreign = read(tmp_path / "results")
    assert foreign.scoring == case.scoring
    run = write_run(foreign, tmp_path / "run")
    ids = draw_triples(60, 9)
    expected = [score(case, entities, relations, *triple) for triple in ids.tolist()]
    for side in ("tail", "head"):
        np.testing.assert_allclose(run_scores(run, ids, side=side), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["TransE, p=1", "ComplEx", "RotatE", "SimplE", "TuckER", "QuatE"])
def test_heads_are_asked_by_pykeens_inverse_relations(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    entities, relations = write_results(tmp_path / "results", case, inverse=True)
    foreign = read(tmp_path / "results")
    assert foreign.reciprocal
    run = write_run(foreign, tmp_path / "run")
    ids = draw_triples(60, 9)
    tails = [score(case, entities, relations, h, 2 * r, t) for h, r, t in ids.tolist()]
    heads = [score(case, entities, relations, t, 2 * r + 1, h) for h, r, t in ids.tolist()]
    np.testing.assert_allclose(run_scores(run, ids, side="tail"), tails, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(run_scores(run, ids, side="head"), heads, atol=1e-5, rtol=1e-5)


def test_labels_are_text_whatever_they_look_like(tmp_path: Path) -> None:
    labels = [
        "NA",
        "null",
        "007",
        "1e3",
        "",
        ' "quoted" ',
        "a\tb",
        "c\nd",
        "nan",
        '"',
        "#x",
        "Zoë",
        "\u2028\r",
    ]
    write_results(tmp_path / "results", CASES["DistMult"], labels=labels)
    assert list(read(tmp_path / "results").entity_labels) == labels


def test_training_triples_are_pykeens_and_the_others_come_from_data(tmp_path: Path) -> None:
    write_results(tmp_path / "results", CASES["DistMult"])
    alone = read(tmp_path / "results")
    assert list(alone.triples) == ["train"]
    assert np.array_equal(alone.triples["train"], draw_triples(40, 3))
    assert any("--data" in decision for decision in alone.decisions)
    splits = {"train": draw_triples(40, 3), "valid": draw_triples(5, 4), "test": draw_triples(6, 5)}
    write_splits(tmp_path / "data", splits)
    foreign = read(tmp_path / "results", tmp_path / "data")
    assert {split: ids.tolist() for split, ids in foreign.triples.items()} == {
        split: ids.tolist() for split, ids in splits.items()
    }


def other_interaction(name: str, **attributes: object) -> Change:
    def change(stand_ins: StandIns, model: torch.nn.Module) -> None:
        model.interaction = stand_ins.module(f"pykeen.nn.modules.{name}", **attributes)

    return change


def other_representation(
    kind: str, normalizer: str | None = None
) -> Callable[[StandIns, torch.nn.Module], object]:
    def change(stand_ins: StandIns, model: torch.nn.Module) -> None:
        made = pykeen_representation(stand_ins, draw(13, D), kind=kind, normalizer=normalizer)
        model.entity_representations = torch.nn.ModuleList([made])

    return change


def own_interaction(stand_ins: StandIns, model: Any) -> None:
    model.interaction = stand_ins.module("mine.TransEInteraction", p=1, power_norm=False)


def other_inverter(stand_ins: StandIns, model: torch.nn.Module) -> None:
    model.relation_inverter = stand_ins.named("mine.BlockRelationInverter")()


REFUSED: dict[str, tuple[Change, str]] = {
    "TransH": (other_interaction("TransHInteraction", p=2), "TransHInteraction.*unit length"),
    "a class of the same name": (own_interaction, r"mine\.TransEInteraction cannot be imported"),
    "NTN": (other_interaction("NTNInteraction"), "NTNInteraction cannot be imported exactly .known: TransE"),
    "the squared distance": (other_interaction("TransEInteraction", p=2, power_norm=True), "to that power"),
    "another norm": (other_interaction("TransEInteraction", p=3, power_norm=False), "norm 3"),
    "MuRE's plain norm": (other_interaction("MuREInteraction", p=2, power_norm=False), "squared 2-norm"),
    "no rotation": (other_interaction("RotatEInteraction"), "do not have the shapes|moduli"),
    "clamped scores": (
        other_interaction("ClampedInteraction", clamp_score=(-20, 20)),
        "scores are clamped",
    ),
    "low rank": (other_representation("LowRankRepresentation"), "LowRankRepresentation.*more than a table"),
    "normalised entities": (
        other_representation("Embedding", "torch.nn.functional.normalize"),
        "entities go through a normalizer",
    ),
    "another numbering of inverses": (other_inverter, "BlockRelationInverter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_exactly_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    write_results(tmp_path / "results", CASES["DistMult"], change=change)
    with pytest.raises((ConfigError, DataError), match=words) as caught:
        read(tmp_path / "results")
    assert "trained_model.pkl" in str(caught.value)


def test_relations_that_are_no_rotations_are_refused(tmp_path: Path) -> None:
    def stretch(stand_ins: StandIns, model: Any) -> None:
        model.relation_representations[0]._embeddings.weight.data *= 1.1

    write_results(tmp_path / "results", CASES["RotatE"], change=stretch)
    with pytest.raises(ConfigError, match="moduli are not 1"):
        read(tmp_path / "results")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "entity_to_id.tsv.gz",
            b"id\tlabel\n0\ta\n0\tb\n",
            r"entity_to_id.tsv.gz:3: expected an id of",
        ),
        ("entity_to_id.tsv.gz", b"id\tlabel\n0\ta\n2\tb\n", "none has number 1"),
        ("entity_to_id.tsv.gz", b"0\ta\n", "expected a header"),
        ("entity_to_id.tsv.gz", b"id\tlabel\n0\ta\n", "13 rows, but training_triples numbers 1 entities"),
        ("numeric_triples.tsv.gz", b"head\trelation\ttail\n0\t0\t13\n", "beyond 13 entities"),
        ("numeric_triples.tsv.gz", b"head\trelation\ttail\n0\t0\tx\n", "no triples of ids"),
        ("numeric_triples.tsv.gz", b"h\tr\tt\n0\t0\t0\n", "no triples of ids"),
    ],
)
def test_files_that_do_not_fit_are_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    write_results(tmp_path / "results", CASES["DistMult"])
    (tmp_path / "results" / "training_triples" / name).write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=words):
        read(tmp_path / "results")


def test_results_without_labels_are_refused(tmp_path: Path) -> None:
    write_results(tmp_path / "results", CASES["DistMult"])
    (tmp_path / "results" / "training_triples" / "entity_to_id.tsv.gz").unlink()
    with pytest.raises(DataError, match=r"entity_to_id.tsv.gz: missing"):
        read(tmp_path / "results")


def test_the_folder_is_known_by_its_files(tmp_path: Path) -> None:
    write_results(tmp_path / "results", CASES["DistMult"])
    assert PYKEEN.recognises(tmp_path / "results")
    assert not PYKEEN.recognises(tmp_path)


# --- The package itself --------------------------------------------------------------------------------

TRAINING = """
import json, sys
from pathlib import Path
import numpy as np
from pykeen.pipeline import pipeline

out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
for name, (model, arguments, inverse) in cases.items():
    result = pipeline(
        dataset="Nations",
        dataset_kwargs=dict(create_inverse_triples=inverse),
        model=model,
        model_kwargs=arguments,
        training_kwargs=dict(num_epochs=2, use_tqdm=False),
        evaluation_kwargs=dict(use_tqdm=False),
        random_seed=1,
        device="cpu",
    )
    result.save_to_directory(out / name)
    triples = result.training.mapped_triples
    np.save(out / name / "scores.npy", result.model.predict_hrt(triples).detach().numpy()[:, 0])
    heads = result.model.predict_h(triples[:, 1:]).detach().gather(1, triples[:, :1])
    np.save(out / name / "heads.npy", heads.numpy()[:, 0])
"""
TRAINED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "TransE, p=1": ("TransE", {"embedding_dim": 8}, False),
    "TransE, p=2": ("TransE", {"embedding_dim": 8, "scoring_fct_norm": 2}, False),
    "TransE, inverse": ("TransE", {"embedding_dim": 8}, True),
    "DistMult": ("DistMult", {"embedding_dim": 8}, False),
    "ComplEx": ("ComplEx", {"embedding_dim": 8}, False),
    "ComplEx, inverse": ("ComplEx", {"embedding_dim": 8}, True),
    "RotatE": ("RotatE", {"embedding_dim": 8}, False),
    "SimplE": ("SimplE", {"embedding_dim": 8}, False),
    "CP": ("CP", {"embedding_dim": 4, "rank": 3}, False),
    "RESCAL": ("RESCAL", {"embedding_dim": 6}, False),
    "MuRE": ("MuRE", {"embedding_dim": 8}, False),
    "QuatE": ("QuatE", {"embedding_dim": 4}, False),
    "TuckER": ("TuckER", {"embedding_dim": 6, "relation_dim": 5}, False),
    "TuckER, inverse": ("TuckER", {"embedding_dim": 6}, True),
    "TuckER, not normalised": ("TuckER", {"embedding_dim": 6, "apply_batch_normalization": False}, False),
}


@pytest.fixture(scope="session")
def pykeen_python() -> Path:
    """An interpreter that has PyKEEN."""
    if named := os.environ.get("KGSHARD_PYKEEN_PYTHON"):
        return Path(named)
    return python_with("pykeen==1.11.1")


@pytest.fixture(scope="session")
def trained(pykeen_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of every model in TRAINED."""
    folder = tmp_path_factory.mktemp("pykeen")
    command = [str(pykeen_python), "-c", TRAINING, str(folder), json.dumps(TRAINED)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINED)
def test_a_model_that_pykeen_trained_scores_and_ranks_as_in_pykeen(
    name: str, trained: Path, tmp_path: Path, shared_data: Path, here: None
) -> None:
    foreign = read(trained / name, shared_data / "Nations")
    run = write_run(foreign, tmp_path / "run")
    ids = np.asarray(foreign.triples["train"])
    labels = foreign.entity_labels, foreign.relation_labels
    for side, file in (("tail", "scores.npy"), ("head", "heads.npy")):
        expected = np.load(trained / name / file, allow_pickle=False)
        np.testing.assert_allclose(run_scores(run, ids, *labels, side=side), expected, atol=1e-5, rtol=1e-5)
    metrics = json.loads((trained / name / "results.json").read_text())["metrics"]
    expected_mrr = metrics["both"]["realistic"]["inverse_harmonic_mean_rank"]
    assert kgshard.evaluate(run)["metrics"]["mrr"] == pytest.approx(expected_mrr, abs=1e-6)
