"""What a trained model answers is its paper's formula over the exported arrays, for every model there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import BruteForce, ask, assert_answers, random_graph
from graphs import make_run
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.export import export
from kgshard_tools.index.build import build_index
from kgshard_tools.merge import merge_shards
from papers import PAPER
from safetensors.numpy import load_file

from kgshard.errors import ConfigError, RunError
from kgshard.files import check_replaceable
from kgshard.models import SCORING, find_scoring
from kgshard.models.link import SIDES, Side
from kgshard.runs import run_names

NUM_ENTITIES, NUM_RELATIONS = 80, 2
GRAPH = random_graph(7, NUM_ENTITIES, NUM_RELATIONS)
QUESTIONS = [("e0", "r0"), ("e5", "r1"), ("e40", "r0")]
NAMES = sorted({*SCORING, "tucker:5", "keci:1,2", "ckeci:2,0", "conve:2"} & {*SCORING, *PAPER})
CASES: list[tuple[str, str]] = [
    (name, corruption)
    for name in NAMES
    for corruption in ("reciprocal", "both-sides")
    if corruption == "reciprocal" or find_scoring(name).has_head_queries
]


@dataclass
class Case:
    """One run of a model with random rows, the first ten copied to the last ten."""

    folder: Path
    scanned: TrainedModel
    indexed: TrainedModel
    brute: BruteForce


def fitting_dim(name: str) -> int:
    """Return the least dimension from 12 on that the model has a form of."""
    for dim in range(12, 40):
        try:
            find_scoring(name).check_dim(dim)
        except ConfigError:
            continue
        return dim
    raise AssertionError(name)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Case]:
    made: dict[tuple[str, str], Case] = {}

    def case(name: str, corruption: str) -> Case:
        if (name, corruption) not in made:
            folder = tmp_path_factory.mktemp("case")
            dim = fitting_dim(name)
            entities = np.random.default_rng(11).standard_normal((NUM_ENTITIES, dim))
            entities[-10:] = entities[:10]
            settings: dict[str, Any] = {"model": name, "dim": dim, "corruption": corruption}
            run = make_run(folder, *GRAPH.values(), entities=entities, world_size=3, seed=4, **settings)
            export(run.folder, "numpy", folder / "arrays")
            scanned, indexed = load(run.folder), load(run.folder)
            for question in QUESTIONS:  # Sources are found when first asked: now, while there is no index.
                for side in SIDES:
                    ask(scanned, side, *question, 1)
            build_index(run.folder)
            brute = BruteForce(folder / "arrays", name, GRAPH)
            made[name, corruption] = Case(run.folder, scanned, indexed, brute)
        return made[name, corruption]

    return case


def test_every_model_has_its_paper() -> None:
    assert set(SCORING) <= set(PAPER)
    assert len(CASES) == 2 * len(NAMES) - sum(not find_scoring(name).has_head_queries for name in NAMES)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_the_ten_best_are_those_of_brute_force(
    cases: Callable[[str, str], Case], name: str, corruption: str, side: Side
) -> None:
    case = cases(name, corruption)
    for anchor, relation in QUESTIONS:
        for known in (False, True):
            wanted = case.brute.best(side, anchor, relation, 10, known=known)
            answers = ask(case.scanned, side, anchor, relation, 10, known=known)
            assert_answers(answers, wanted, rtol=1e-10)
            assert ask(case.indexed, side, anchor, relation, 10, known=known) == answers


@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_an_index_was_asked_where_there_is_one(
    cases: Callable[[str, str], Case], name: str, corruption: str
) -> None:
    """The control of the test above: answers of a scan would equal themselves."""
    case = cases(name, corruption)
    kinds = {type(case.indexed.links.source(side)).__name__ for side in SIDES}
    searchable = find_scoring(name).metric.name in ("dot", "l2", "l1")
    assert kinds == {"FlatIndex" if searchable else "Scan"}
    assert {type(case.scanned.links.source(side)).__name__ for side in SIDES} == {"Scan"}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "corruption"), CASES)
def test_a_triple_scores_the_same_alone_in_a_batch_and_among_all(
    cases: Callable[[str, str], Case], name: str, corruption: str, side: Side
) -> None:
    case = cases(name, corruption)
    for anchor, relation in QUESTIONS[:2]:
        wanted = dict(case.brute.best(side, anchor, relation, NUM_ENTITIES, known=True))
        others = [f"e{i}" for i in range(0, NUM_ENTITIES, 7)]
        triples = [
            (anchor, relation, each) if side == "tail" else (each, relation, anchor) for each in others
        ]
        batch = case.scanned.score(triples, side=side)
        assert batch.dtype == np.float64
        alone = [case.scanned.score([triple], side=side)[0] for triple in triples]
        everyone = ask(case.scanned, side, anchor, relation, NUM_ENTITIES, known=True)
        among_all = {answer.label: answer.score for answer in everyone}
        expected = [wanted[each] for each in others]
        for scores in (batch, alone, [among_all[each] for each in others]):
            np.testing.assert_allclose(scores, expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(batch, alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_the_merged_file_holds_what_the_export_holds(
    cases: Callable[[str, str], Case], name: str, tmp_path: Path
) -> None:
    case = cases(name, "reciprocal")
    merge_shards(case.folder, tmp_path / "m.safetensors")
    merged, brute = load_file(tmp_path / "m.safetensors"), case.brute
    assert brute.inverses is not None
    relations = np.concatenate([brute.relations, brute.inverses])
    np.testing.assert_array_equal(merged.pop("entity_embedding.weight"), brute.entities)
    np.testing.assert_array_equal(merged.pop("relation_embedding.weight"), relations)
    assert set(merged) == {f"shared.{parameter}" for parameter in brute.shared}
    for parameter, values in brute.shared.items():
        np.testing.assert_array_equal(merged[f"shared.{parameter}"], values)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_and_neighbours_are_those_of_the_rows_as_they_are(
    cases: Callable[[str, str], Case], name: str
) -> None:
    """Whatever the model makes of rows for its own questions."""
    case = cases(name, "reciprocal")
    trained = load(case.folder)  # Its index of neighbours was built.
    row = case.brute.labels.index("e3")
    np.testing.assert_array_equal(trained["e3"], case.brute.entities[row])
    rows = case.brute.entities / np.linalg.norm(case.brute.entities, axis=1, keepdims=True)
    cosines = rows @ rows[row]
    cosines[row] = -np.inf
    answers = trained.most_similar("e3", 10)
    assert [answer.id for answer in answers] == np.argsort(-cosines, kind="stable")[:10].tolist()


@pytest.mark.parametrize("name", ["mure", "tucker"])
def test_all_that_tools_write_into_a_run_is_known_to_be_ours(tmp_path: Path, name: str) -> None:
    """Else --overwrite would refuse the run for what kgshard itself wrote there."""
    settings: dict[str, Any] = {"model": name, "dim": 6, "corruption": "both-sides"}
    run = make_run(tmp_path, *GRAPH.values(), **settings)
    build_index(run.folder)
    export(run.folder, "numpy")
    merge_shards(run.folder)
    check_replaceable(run.folder, ours=True, names=run_names(run.folder), what="a run")
    (run.folder / "index" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"index/notes\.txt"):
        check_replaceable(run.folder, ours=True, names=run_names(run.folder), what="a run")


def test_the_paper_of_another_model_gives_other_answers(cases: Callable[[str, str], Case]) -> None:
    """The negative control: another norm, another direction, another metric."""
    for name, other in (("transe", "transe-l1"), ("rotate", "rotate-moduli"), ("qmult", "quate")):
        case = cases(name, "both-sides")
        wrong = BruteForce(case.folder.parent / "arrays", other, GRAPH)
        labels = ask(case.scanned, "tail", "e1", "r1", 20, known=True).labels
        assert labels != [label for label, _ in wrong.best("tail", "e1", "r1", 20, known=True)]
        assert labels != [label for label, _ in case.brute.best("head", "e1", "r1", 20, known=True)]


def test_models_with_no_query_for_heads_answer_them_by_inverse_relations(
    cases: Callable[[str, str], Case],
) -> None:
    case = cases("conve", "reciprocal")
    assert case.scanned.predict_heads("r0", "e0", 3).query["by"] == "inverse relation"
