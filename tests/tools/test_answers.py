"""Asking a run by name: answers, vectors, similar entities, refusals. See also test_every_model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from brute_force import BruteForce, ask, assert_answers, random_graph
from graphs import begin_run, make_run, ring, save_tables
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.export import export
from kgshard_tools.index.build import build_index
from kgshard_tools.search import Scan

import kgshard
import kgshard.api
from kgshard.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    RunError,
    UnknownEntityError,
    UnknownNameError,
    UnknownRelationError,
)
from kgshard.files import AnyPath

Array = npt.NDArray[Any]
NUM_ENTITIES, NUM_RELATIONS, DIM = 150, 3, 8
GRAPH = random_graph(7, NUM_ENTITIES, NUM_RELATIONS)

Case = tuple[TrainedModel, BruteForce]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Case]:
    """Make each model once, with rows where the first ten are copied to the last ten."""
    made: dict[tuple[str, str], Case] = {}

    def case(model: str, corruption: str) -> Case:
        if (model, corruption) not in made:
            folder = tmp_path_factory.mktemp(f"{model}-{corruption}")
            entities = np.random.default_rng(11).standard_normal((NUM_ENTITIES, DIM))
            entities[-10:] = entities[:10]
            run = make_run(
                folder,
                *GRAPH.values(),
                entities=entities,
                world_size=3,
                seed=4,
                model=model,
                dim=DIM,
                corruption=corruption,
            )
            export(run.folder, "numpy", folder / "arrays")
            made[model, corruption] = load(run.folder), BruteForce(folder / "arrays", model, GRAPH)
        return made[model, corruption]

    return case


QUESTIONS = [(f"e{i}", f"r{i % NUM_RELATIONS}") for i in (0, 1, 2, 5, 11, 80)]
some_models = pytest.mark.parametrize("model", ["complex", "mure", "transh"])
both_sides = pytest.mark.parametrize("side", ["tail", "head"])


@some_models
@both_sides
def test_known_answers_are_left_out_or_shown_with_their_split(
    cases: Callable[[str, str], Case], model: str, side: str
) -> None:
    trained, brute = cases(model, "reciprocal")
    num_known = 0
    for anchor, relation in QUESTIONS:
        wanted = brute.known(side, anchor, relation)
        num_known += len(wanted)
        shown = ask(trained, side, anchor, relation, NUM_ENTITIES, known=True)
        assert {a.label: a.split for a in shown if a.known} == wanted
        assert all(a.split is None for a in shown if not a.known)
        left = ask(trained, side, anchor, relation, NUM_ENTITIES)
        assert set(left.labels) == set(trained.entities) - set(wanted)
        assert not any(a.known for a in left)
        assert left.query["num_known"] == len(wanted)
    assert num_known > 5


@pytest.mark.parametrize("indexed", [False, True])
def test_an_entity_with_5000_known_tails(tmp_path: Path, indexed: bool) -> None:
    known = [("hub", "links", f"e{i}") for i in range(5000)]
    graph = {
        "train": [*known[:4000], *[(f"new{i}", "links", "hub") for i in range(40)]],
        "valid": known[4000:4500],
        "test": known[4500:],
    }
    run = make_run(tmp_path, *graph.values(), model="distmult", dim=4, corruption="both-sides", world_size=2)
    export(run.folder, "numpy", tmp_path / "arrays")
    if indexed:
        build_index(run.folder, "links")
    brute = BruteForce(tmp_path / "arrays", "distmult", graph)
    model = load(run.folder)
    assert_answers(
        model.predict_tails("hub", "links", 10), brute.best("tail", "hub", "links", 10, known=False)
    )
    everything = model.predict_tails("hub", "links", 10_000)
    assert sorted(everything.labels) == sorted(["hub", *(f"new{i}" for i in range(40))])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("model", ["distmult", "transe", "transe-l1", "transh", "protate", "cp", "conve"])
def test_a_constant_table_is_answered_in_row_order(tmp_path: Path, model: str, indexed: bool) -> None:
    run = make_run(tmp_path, ring(200), model=model, dim=6, entities=np.full((200, 6), 0.3))
    if indexed:
        build_index(run.folder)
    trained = load(run.folder)
    (known,) = (answer.id for answer in trained.predict_tails("e0", "r0", 200, known=True) if answer.known)
    wanted = [row for row in range(200) if row != known]
    assert [answer.id for answer in trained.predict_tails("e0", "r0", 200)] == wanted
    assert [answer.id for answer in trained.predict_tails("e0", "r0", 10)] == wanted[:10]


def test_scoring_no_triples_gives_no_scores(cases: Callable[[str, str], Case]) -> None:
    trained, _ = cases("complex", "reciprocal")
    assert trained.score([]).shape == (0,)


SIMILAR: dict[str, Callable[[Array, Array], Array]] = {
    "cosine": lambda q, e: (e @ q) / (np.sqrt((q * q).sum()) * np.sqrt((e * e).sum(-1))),
    "dot": lambda q, e: e @ q,
    "l2": lambda q, e: -np.sqrt(((e - q) ** 2).sum(-1)),
    "l1": lambda q, e: -np.abs(e - q).sum(-1),
}


@pytest.mark.parametrize("metric", sorted(SIMILAR))
def test_the_most_similar_are_those_of_brute_force(cases: Callable[[str, str], Case], metric: Any) -> None:
    trained, brute = cases("distmult", "reciprocal")
    for name in ("e3", "e77", trained.entities[0]):  # row 0 has a copy
        row = brute.labels.index(name)
        scores = SIMILAR[metric](brute.entities[row], brute.entities)
        scores[row] = -np.inf
        answers = trained.most_similar(name, 10, metric=metric)
        wanted = np.argsort(-scores, kind="stable")[:10]
        assert [answer.id for answer in answers] == wanted.tolist()
        np.testing.assert_allclose([a.score for a in answers], scores[wanted], rtol=1e-12, atol=1e-12)
        assert name not in answers.labels


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 20.0, 1e-3])
def test_the_cosine_stays_within_one(tmp_path: Path, indexed: bool, scale: float) -> None:
    """Parallel rows, whose cosine rounding would push past 1."""
    direction = np.random.default_rng(0).standard_normal(7)
    factors = np.concatenate([np.arange(1, 41), -np.arange(1, 41)]) * scale / 3
    run = make_run(tmp_path, ring(80), model="distmult", dim=7, entities=factors[:, None] * direction)
    if indexed:
        build_index(run.folder)
    scores = [answer.score for answer in load(run.folder).most_similar(run.dataset.entities[4], 79)]
    assert all(-1 <= score <= 1 for score in scores)
    np.testing.assert_allclose(scores, [1.0] * 39 + [-1.0] * 40, atol=1e-6)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_row_of_zeros_has_cosine_zero(tmp_path: Path, indexed: bool) -> None:
    entities = np.array([[1.0, 0], [2, 0], [0, 0], [-1, 0]])
    run = make_run(tmp_path, ring(4), model="distmult", dim=2, entities=entities)
    if indexed:
        build_index(run.folder)
    trained = load(run.folder)
    answers = trained.most_similar("#0", 10)
    assert [(a.id, a.score) for a in answers] == [(1, 1.0), (2, 0.0), (3, -1.0)]
    assert [(a.id, a.score) for a in trained.most_similar("#2", 10)] == [(0, 0.0), (1, 0.0), (3, 0.0)]


def test_an_unknown_metric_lists_the_known(cases: Callable[[str, str], Case]) -> None:
    trained, _ = cases("distmult", "reciprocal")
    with pytest.raises(ConfigError, match=r"'euclid'.*cosine, dot, l2, l1"):
        trained.most_similar("e1", metric="euclid")  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, -1, 10**9])
def test_k_out_of_range_says_the_range(cases: Callable[[str, str], Case], k: int) -> None:
    trained, _ = cases("distmult", "reciprocal")
    questions: list[Callable[[], object]] = [
        lambda: trained.predict_tails("e1", "r1", k),
        lambda: trained.predict_heads("r1", "e1", k),
        lambda: trained.most_similar("e1", k),
    ]
    for question in questions:
        with pytest.raises(ConfigError, match=f"a whole number from 1 to 1,000,000, got {k}"):
            question()


def test_vectors_are_the_exported_rows(cases: Callable[[str, str], Case]) -> None:
    trained, brute = cases("rotate", "reciprocal")
    names = ["e9", "e0", "e9", "#5"]
    rows = [brute.labels.index(name) for name in names[:3]] + [5]
    vectors = trained.vectors(names)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, brute.entities[rows])
    np.testing.assert_array_equal(trained["e9"], brute.entities[rows[0]])
    assert trained.vectors([]).shape == (0, DIM)
    entities, relations = trained.to_numpy()
    assert entities.dtype == relations.dtype == np.float32
    np.testing.assert_array_equal(entities, brute.entities)
    np.testing.assert_array_equal(relations, brute.relations)


def test_to_numpy_gives_arrays_of_ones_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), model="distmult", dim=2, entities=np.ones((5, 2)))
    for array in load(run.folder).to_numpy():
        array[:] = 9
    assert (load(run.folder).to_numpy()[0] == 1).all()


def test_a_model_is_a_container_of_names(cases: Callable[[str, str], Case]) -> None:
    trained, _ = cases("rotate", "reciprocal")
    assert "e0" in trained
    assert "nobody" not in trained
    assert 7 not in trained
    assert len(trained) == NUM_ENTITIES
    assert repr(trained) == "TrainedModel(rotate, dim=8, 150 entities, 3 relations, step 1)"


def test_a_label_that_reads_like_a_row_is_the_label(tmp_path: Path) -> None:
    run = make_run(tmp_path, [("#0", "r", "#1"), ("a", "r", "b")], model="distmult", dim=2)
    trained = load(run.folder)
    np.testing.assert_array_equal(trained["#0"], trained.to_numpy()[0][list(trained.entities).index("#0")])
    for name in ("#4", "#-1", "#", "#1x", "#²"):
        with pytest.raises(UnknownEntityError):
            trained[name]


def test_unknown_names_suggest_near_ones(tmp_path: Path) -> None:
    triples = [("Berlin", "capital of", "Germany"), ("Bern", "capital of", "Switzerland")]
    run = make_run(tmp_path, triples, model="distmult", dim=2)
    trained = load(run.folder)
    with pytest.raises(UnknownEntityError, match=r"no entity 'Berln'\. Did you mean: Berlin") as caught:
        trained["Berln"]
    assert caught.value.name == "Berln"
    assert caught.value.suggestions[0] == "Berlin"
    with pytest.raises(UnknownRelationError, match=r"no relation 'captal of'\. Did you mean: capital of\?"):
        trained.predict_heads("captal of", "Germany")
    with pytest.raises(UnknownEntityError, match=r"^no entity 'zzzzzzzz'$"):
        trained.most_similar("zzzzzzzz")
    with pytest.raises(UnknownNameError):
        trained.score([("Berlin", "capital of", "Nowhere at all")])


def limited(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Make a search that never ends fail instead of hanging the tests."""
    calls = iter(range(50))

    def counted(*arguments: Any) -> Any:
        assert next(calls, None) is not None, "search keeps fetching"
        return fetch(*arguments)

    return counted


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_never_silently_missing(
    tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With or without an index: B74's vanishing entity."""
    monkeypatch.setattr(Scan, "fetch", limited(Scan.fetch))
    entities = np.random.default_rng(0).standard_normal((60, 4))
    entities[5, 1] = value
    run = make_run(tmp_path, ring(60), model="distmult", dim=4, entities=entities)
    trained = load(run.folder)
    other, lost = trained.entities[6], trained.entities[5]
    questions: list[Callable[[], object]] = [
        lambda: trained.predict_tails(other, "r0", 3, known=True),
        lambda: trained.most_similar(other, 3),
        lambda: trained.most_similar(other, 3, metric="l2"),
    ]
    for question in questions:
        with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=lost):
            question()


def test_a_query_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), model="distmult", dim=4, relations=np.full((2, 4), np.nan))
    with pytest.raises(NonFiniteError, match=r"e0.*r0"):
        load(run.folder).predict_tails("e0", "r0")


def test_a_checkpoint_folder_can_be_asked_too(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), model="distmult", dim=4)
    assert load(run.checkpoint.folder).to_numpy()[0].shape == (9, 4)
    with pytest.raises(RunError, match="neither a run"):
        load(tmp_path)


def test_answers_come_without_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), model="rotate", dim=4)
    script = (
        "import sys, kgshard\n"
        "m = kgshard.load(sys.argv[1])\n"
        "m['e1']; m.most_similar('e1'); m.predict_tails('e1', 'r0'); m.score([('e1', 'r0', 'e2')])\n"
        "m.predict_heads('r0', 'e1'); m.to_numpy(); print(sorted({'torch', 'faiss'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run.folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_checkpoint_that_was_opened_is_the_one_evaluated(tmp_path: Path, here: None) -> None:
    """Entities on a line, one apart: a step of +1 finds every neighbour, a step of -1 none."""
    triples = [(f"e{i}", "next", f"e{i + 1}") for i in range(9)]
    run = begin_run(tmp_path, triples[:7], test=triples[7:], model="transe", dim=1, corruption="both-sides")
    places = [[float(label[1:])] for label in run.dataset.entities]
    good = save_tables(run, places, [[1.0]], step=1, best=True)
    bad = save_tables(run, places, [[-1.0]], step=2)
    assert load(good).evaluate().metrics["mrr"] == 1.0
    assert load(good).evaluate().result["protocol"]["step"] == 1
    assert load(run.folder).evaluate().result["protocol"]["step"] == 1
    newest = load(bad).evaluate()
    assert newest.metrics["hits@1"] == 0.0
    assert newest.result["protocol"]["step"] == 2


def test_a_split_that_cannot_be_ranked_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: object) -> dict[str, Any]:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(kgshard.api, "run_on_ranks", started)
    run = make_run(tmp_path, ring(5), model="distmult", dim=4)
    for split, words in (("test", "split 'test' holds no triples"), ("tst", "no split 'tst'")):
        with pytest.raises(DataError, match=words):
            kgshard.evaluate(run, split=split)
        with pytest.raises(DataError, match=words):
            load(run).evaluate(split)
    with pytest.raises(AssertionError, match="ranks were started"):
        kgshard.evaluate(run, split="train")


def test_a_result_that_cannot_be_kept_is_still_returned(
    tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, ring(5), test=ring(2), model="distmult", dim=4)
    expected = kgshard.evaluate(run)
    assert capsys.readouterr().err == ""
    shutil.rmtree(run.folder / "eval")
    (run.folder / "eval").write_text("in the way")
    assert kgshard.evaluate(run)["metrics"] == expected["metrics"]
    err = capsys.readouterr().err
    assert re.fullmatch(r"Warning: .*test-full-filtered\.json was not written: .*\n", err)
    assert (run.folder / "eval").read_text() == "in the way"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return load(make_run(tmp_path_factory.mktemp("small"), ring(9), model="distmult", dim=4))


@pytest.mark.parametrize("side", ["both", "", None, "Tail"])
def test_a_side_is_head_or_tail(small: TrainedModel, side: Any) -> None:
    with pytest.raises(ConfigError, match="side: unknown value"):
        small.score([("e0", "r0", "e1")], side=side)


@pytest.mark.parametrize("k", [True, False, 2.5, 2.0, "2", None, 0])
def test_a_number_of_answers_is_a_whole_number(small: TrainedModel, k: Any) -> None:
    questions: list[Callable[[], object]] = [
        lambda: small.predict_tails("e0", "r0", k),
        lambda: small.predict_heads("r0", "e0", k),
        lambda: small.most_similar("e0", k),
    ]
    for question in questions:
        with pytest.raises(ConfigError, match="-k must be a whole number"):
            question()


def test_numpys_whole_numbers_are_whole_numbers(small: TrainedModel) -> None:
    for answers in (
        small.predict_tails("e0", "r0", np.int64(2)),  # type: ignore[arg-type]
        small.most_similar("e0", np.int32(2)),  # type: ignore[arg-type]
    ):
        assert len(answers) == 2
        assert json.loads(json.dumps(answers.to_dict()))["query"]["k"] == 2


def test_a_name_is_not_taken_for_its_letters(small: TrainedModel) -> None:
    with pytest.raises(TypeError, match=r"for one use model\['e0'\]"):
        small.vectors("e0")
    np.testing.assert_array_equal(small.vectors(["e0"])[0], small["e0"])


def test_a_model_is_a_collection_of_labels(small: TrainedModel) -> None:
    labels = list(small)
    assert sorted(labels) == sorted(f"e{i}" for i in range(9))
    assert labels[:2] == [small.entities[0], small.entities[1]]
    assert len(small) == 9
    assert "e0" in small
    assert "e9" not in small


def test_what_was_opened_stands_for_its_folder(tmp_path: Path, small: TrainedModel, here: None) -> None:
    run = make_run(tmp_path / "a", ring(9), test=ring(2), model="distmult", dim=4)
    trained = kgshard.load(run)
    row = trained["e3"]
    np.testing.assert_array_equal(kgshard.load(trained)["e3"], row)
    same: list[AnyPath] = [run, trained, run.folder, str(run.folder)]
    for number, opened in enumerate(same):
        kgshard.export(opened, "numpy", tmp_path / f"export-{number}")
        kgshard.merge_shards(opened, tmp_path / f"merged-{number}")
        assert kgshard.open_run(opened).info.id == run.info.id
        assert kgshard.evaluate(opened)["protocol"]["triples"] == 2
        assert np.load(tmp_path / f"export-{number}" / "entities.npy").shape == (9, 4)
    dataset = kgshard.ingest(tmp_path / "a" / "source", tmp_path / "data")
    assert kgshard.ingest(dataset, tmp_path / "again").num_entities == 9
    new = kgshard.train(dataset, out=tmp_path / "new", model="distmult", dim=4, epochs=1, quiet=True)
    assert new.dataset.num_entities == 9
    newer = kgshard.train(
        dataset, out=new, model="distmult", dim=4, epochs=1, seed=1, quiet=True, overwrite=True
    )
    assert newer.folder == new.folder
    assert newer.info.id != new.info.id
