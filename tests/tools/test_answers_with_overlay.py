"""A run with its overlay, asked by name: against arrays, papers' formulas and the text of the graph."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from brute_force import Array, BruteForce, ask, assert_answers, random_graph
from click.testing import CliRunner
from graphs import Triple, make_run, tree
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.commands.vector import command as vector
from kgshard_tools.export import export
from kgshard_tools.index.build import build_index
from kgshard_tools.overlay import extend, fold_in
from kgshard_tools.questions import Question, Wanted
from kgshard_tools.stored import open_stored
from kgshard_tools.triple_scores import TripleScorer
from safetensors.numpy import load_file

import kgshard
from kgshard.errors import ConfigError, RunError, UnknownEntityError

NUM_ENTITIES, NUM_RELATIONS, DIM = 40, 3, 8
GRAPH = random_graph(9, NUM_ENTITIES, NUM_RELATIONS)
HOSTILE = ["#3", "\x1b[31mred", "a\u2028b", "u\u0308"]
"""#3 is a label here, and so comes before row 3."""
ADDED: list[Triple] = [
    ("new", "r0", "e3"),
    ("new", "r0", "e4"),
    ("e4", "r1", "new"),
    ("new", "r2", "other"),
    *((label, "r1", "e5") for label in HOSTILE),
]
LABELS = {"new", "other", *HOSTILE}
ANCHORS = [("e0", "r0"), ("e4", "r1"), ("new", "r0"), ("other", "r2"), ("e5", "r1"), ("#3", "r1")]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tables are tiny: on busy cores two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """A run with an overlay, asked and computed."""

    def __init__(self, folder: Path, model: str, corruption: str) -> None:
        self.run = make_run(
            folder, *GRAPH.values(), model=model, dim=DIM, corruption=corruption, world_size=3, seed=4
        )
        lines = ["\t".join(triple) + "\n" for triple in ADDED]
        (folder / "new.tsv").write_bytes("".join(lines).encode())
        self.overlay = folder / "overlay"
        fold_in(self.run.folder, folder / "new.tsv", self.overlay, steps=5)
        self.model = load(self.run.folder, self.overlay)
        export(self.run.folder, "numpy", folder / "arrays")
        self.brute = BruteForce(folder / "arrays", model, GRAPH | {"overlay": ADDED})
        added = load_file(self.overlay / "vectors.safetensors")["entity_embedding.weight"]
        self.brute.entities = np.concatenate([self.brute.entities, added.astype(np.float64)])
        self.brute.labels += pq.read_table(self.overlay / "entities.parquet")["label"].to_pylist()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Make each once."""
    made: dict[tuple[str, str], Case] = {}

    def get(model: str = "complex", corruption: str = "reciprocal") -> Case:
        if (model, corruption) not in made:
            made[model, corruption] = Case(tmp_path_factory.mktemp("case"), model, corruption)
        return made[model, corruption]

    return get


some_models = pytest.mark.parametrize(
    ("name", "corruption"), [("complex", "reciprocal"), ("mure", "both-sides"), ("transh", "reciprocal")]
)
both_sides = pytest.mark.parametrize("side", ["tail", "head"])


@some_models
@both_sides
@pytest.mark.parametrize("known", [False, True])
def test_answers_are_those_of_brute_force_over_both_tables(
    case: Callable[..., Case], name: str, corruption: str, side: str, known: bool
) -> None:
    found, num_folded = case(name, corruption), 0
    for anchor, relation in ANCHORS:
        answers = ask(found.model, side, anchor, relation, 100, known=known)
        assert_answers(answers, found.brute.best(side, anchor, relation, 100, known=known))
        assert answers.query.get("approximate", False) is (anchor in LABELS)
        assert answers.query["exact"] is True
        for answer in answers:
            assert answer.folded is (answer.label in LABELS)
            assert found.brute.labels[answer.id] == answer.label
            num_folded += answer.folded
    assert num_folded > 10


@both_sides
def test_triples_of_the_overlay_are_known(case: Callable[..., Case], side: str) -> None:
    found, num_overlay = case(), 0
    for anchor, relation in ANCHORS:
        wanted = found.brute.known(side, anchor, relation)
        shown = ask(found.model, side, anchor, relation, 100, known=True)
        assert {answer.label: answer.split for answer in shown if answer.known} == wanted
        assert shown.query["num_known"] == len(wanted)
        num_overlay += list(wanted.values()).count("overlay")
    assert num_overlay >= 2
    relations = found.model.predict_relations("new", "other", known=True)
    assert {answer.label for answer in relations if answer.split == "overlay"} == {"r2"}
    assert relations.query["approximate"] is True
    assert not any(answer.folded for answer in relations)
    assert "approximate" not in found.model.predict_relations("e1", "e2").query


def test_many_questions_at_once_are_answered_as_one_by_one(case: Callable[..., Case]) -> None:
    model = case().model
    questions = [Question(head=head, relation=f"r{place % 3}") for place, head in enumerate(model)]
    together = model.predict(questions, Wanted(k=7, known=True))
    for question, answers in zip(questions, together, strict=True):
        alone = model.predict_tails(str(question.head), str(question.relation), 7, known=True)
        assert answers.to_dict() == alone.to_dict()


def test_candidates_may_be_folded_in(case: Callable[..., Case]) -> None:
    found = case()
    candidates = ["other", "e7", "new", "#3"]
    answers = found.model.predict_tails("e0", "r1", candidates=candidates, known=True)
    scores = dict(found.brute.best("tail", "e0", "r1", 100, known=True))
    wanted = sorted(((label, scores[label]) for label in candidates), key=lambda each: -each[1])
    assert_answers(answers, wanted)
    seen = found.model.predict_tails("e0", "r1", 100, candidates="seen", known=True)
    assert set(seen.labels) == {tail for _, relation, tail in GRAPH["train"] if relation == "r1"}


def similarities(found: Case, name: str, metric: str) -> Array:
    rows, row = found.brute.entities, found.brute.entities[found.brute.labels.index(name)]
    if metric in ("cosine", "dot"):
        products: Array = rows @ row
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(row)
        return products / lengths if metric == "cosine" else products
    differences: Array = rows - row
    return -np.linalg.norm(differences, axis=1, ord=2 if metric == "l2" else 1)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2", "l1"])
@pytest.mark.parametrize("name", ["new", "e3"])
def test_neighbours_are_found_in_both_tables(case: Callable[..., Case], metric: Any, name: str) -> None:
    found = case()
    answers = found.model.most_similar(name, 100, metric=metric)
    scores = similarities(found, name, metric)
    order = [row for row in np.argsort(-scores, kind="stable") if found.brute.labels[row] != name]
    assert_answers(answers, [(found.brute.labels[row], float(scores[row])) for row in order], rtol=1e-9)
    assert {answer.label for answer in answers if answer.folded} == LABELS - {name}
    assert answers.query.get("approximate", False) is (name == "new")


def test_a_model_holds_the_entities_of_both(case: Callable[..., Case]) -> None:
    found = case()
    model = found.model
    assert len(model) == len(found.brute.labels) == NUM_ENTITIES + len(LABELS)
    assert list(model) == found.brute.labels
    assert all(label in model for label in LABELS)
    assert "nobody" not in model
    names = ["other", "e1", "\x1b[31mred", "new"]
    wanted = found.brute.entities[[found.brute.labels.index(name) for name in names]]
    np.testing.assert_array_equal(model.vectors(names), wanted.astype(np.float32))
    np.testing.assert_array_equal(model["new"], wanted[3].astype(np.float32))
    np.testing.assert_array_equal(model["#3"], found.brute.entities[found.brute.labels.index("#3")])
    np.testing.assert_array_equal(model.to_numpy()[0], found.brute.entities.astype(np.float32))
    np.testing.assert_array_equal(model[f"#{NUM_ENTITIES}"], found.brute.entities[NUM_ENTITIES])
    assert f"46 entities ({len(LABELS)} folded in)" in repr(model)
    with pytest.raises(UnknownEntityError, match="Did you mean: other"):
        model["othr"]


@both_sides
def test_triples_score_as_they_do_among_answers(case: Callable[..., Case], side: Any) -> None:
    found = case()
    scores = found.model.score(ADDED, side=side)
    for score, (head, relation, tail) in zip(scores, ADDED, strict=True):
        anchor, answer = (head, tail) if side == "tail" else (tail, head)
        wanted = found.brute.scores(side, anchor, relation)[found.brute.labels.index(answer)]
        assert score == pytest.approx(wanted, rel=1e-12)


def test_indexes_of_the_run_answer_without_an_overlay_only(tmp_path: Path) -> None:
    found = Case(tmp_path, "distmult", "reciprocal")
    build_index(found.run.folder, "both")
    before = tree(found.run.folder)
    model = load(found.run.folder, found.overlay)
    assert_answers(
        model.predict_tails("new", "r1", 100), found.brute.best("tail", "new", "r1", 100, known=False)
    )
    assert LABELS - {"new"} <= set(model.most_similar("new", 100).labels)
    plain = load(found.run.folder)
    assert len(plain) == NUM_ENTITIES
    assert "new" not in plain
    answers = plain.predict_tails("e4", "r1", 100, known=True)
    assert not any(answer.folded or answer.split == "overlay" for answer in answers)
    assert tree(found.run.folder) == before


def test_tables_and_json_say_who_was_folded_in(case: Callable[..., Case]) -> None:
    model = case().model
    answers = model.predict_tails("new", "r2", 100, known=True)
    lines = answers.lines()
    assert lines[-1] == "      approximate: who is asked about was folded in, not trained"
    [line] = [line for line in lines if "other" in line]
    assert line.endswith("known (overlay), folded in")
    assert any("^[[31mred" in line or "\\x1b[31mred" in line for line in lines)
    assert not any("\x1b" in line for line in lines)
    result = json.loads(json.dumps(answers.to_dict()))
    assert result["query"]["approximate"] is True
    assert {each["label"] for each in result["results"] if each["folded"]} == LABELS
    assert "approximate" not in "\n".join(model.predict_tails("e0", "r0").lines())


def test_scores_of_triples_say_who_was_folded_in(case: Callable[..., Case]) -> None:
    found = case()
    scorer = TripleScorer(extend(open_stored(found.run.folder), found.overlay))
    triples = [("e0", "r0", "e1"), ("new", "r0", "e1"), ("e1", "r1", "other")]
    scores = scorer.score([dict(zip(("head", "relation", "tail"), each, strict=True)) for each in triples])
    assert [score.approximate for score in scores] == [False, True, True]
    assert ["approximate" in score.to_dict() for score in scores] == [False, True, True]
    assert [score.line().endswith("(folded in)") for score in scores] == [False, True, True]


def test_what_takes_a_run_takes_no_run_with_an_overlay(case: Callable[..., Case], tmp_path: Path) -> None:
    model = case().model
    with pytest.raises(ConfigError, match="a model with an overlay: a run is evaluated without one"):
        model.evaluate("test")
    with pytest.raises(ConfigError, match="a model with an overlay: only what"):
        kgshard.export(model, "numpy", tmp_path / "arrays")
    assert list(tmp_path.iterdir()) == []


def test_an_overlay_of_another_run_is_refused(case: Callable[..., Case], tmp_path: Path) -> None:
    found = case()
    other = make_run(tmp_path, *GRAPH.values(), model="complex", dim=DIM)
    with pytest.raises(RunError, match="was folded into another run"):
        kgshard.load(other.folder, found.overlay)
    with pytest.raises(RunError, match="no such overlay folder"):
        kgshard.load(found.run.folder, tmp_path / "nothing")


def test_loading_an_overlay_imports_no_torch(case: Callable[..., Case]) -> None:
    found = case()
    code = (
        "import sys, kgshard\nmodel = kgshard.load(*sys.argv[1:])\n"
        "assert len(model.predict_tails('new', 'r0')) == 10\nassert 'torch' not in sys.modules"
    )
    arguments = [str(found.run.folder), str(found.overlay)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_command_vector_takes_an_overlay(case: Callable[..., Case]) -> None:
    found = case()
    arguments = [str(found.run.folder), "new", "--with", str(found.overlay), "--json"]
    done = CliRunner().invoke(vector, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    row = found.brute.labels.index("new")
    assert (result["label"], result["id"], result["folded"]) == ("new", row, True)
    np.testing.assert_array_equal(np.float32(result["vector"]), found.brute.entities[row].astype(np.float32))


def test_an_extended_run_reads_like_any(case: Callable[..., Case]) -> None:
    found = case()
    stored = open_stored(found.run.folder)
    whole = extend(stored, found.overlay)
    assert whole.dataset.num_entities == whole.model.num_entities == len(whole.dataset.entities)
    assert whole.checkpoint.entities.num_rows == whole.model.num_entities
    assert whole.dataset.vocabulary_sha256 == stored.dataset.vocabulary_sha256
    assert whole.dataset.splits == ("train", "valid", "test", "overlay")
    labels, relations = whole.dataset.entities, whole.dataset.relations
    triples = {(labels[h], relations[r], labels[t]) for h, r, t in whole.dataset.triples("overlay").tolist()}
    assert triples == set(ADDED)
    for split in stored.dataset.splits:
        np.testing.assert_array_equal(whole.dataset.triples(split), stored.dataset.triples(split))
    np.testing.assert_array_equal(whole.dataset.known_triples(), stored.dataset.known_triples())
    assert isinstance(found.model, TrainedModel)
