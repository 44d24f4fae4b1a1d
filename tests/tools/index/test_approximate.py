"""Approximate indexes: recall is measured, answers are the model's, and nothing is missing or made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from graphs import Triple, make_run
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.index import Contents, build, kinds, tuning
from kgshard_tools.index.build import build_index
from kgshard_tools.index.kinds import KINDS
from kgshard_tools.questions import Question, Wanted
from kgshard_tools.search import Exclusions, search
from kgshard_tools.stored import Stored
from skewed import skewed_rows

from kgshard.errors import ConfigError, RunError
from kgshard.models import SCORING
from kgshard.models.link import SIDES
from kgshard.runs import Run
from kgshard.start import locked

NUM_ENTITIES, DIM = 3000, 16
APPROXIMATE = [name for name, kind in KINDS.items() if not kind.is_exact and not kind.is_raw]
MODELS = ["complex", "transe", "transe-l1", "rotate-moduli", "transh", "mure"]
TARGET = 0.9


def suits(model: str, type: str) -> bool:
    return bool(KINDS[type].searched_by(SCORING[model].metric))


def links() -> list[Triple]:
    """Return a graph of 4 relations; e0 has 1,000 tails of r0."""
    draw = np.random.default_rng(1)
    ends = draw.integers(0, NUM_ENTITIES, (6000, 2)).tolist()
    ring = [(f"e{i}", f"r{i % 4}", f"e{(i + 1) % NUM_ENTITIES}") for i in range(NUM_ENTITIES)]
    hub = [("e0", "r0", f"e{i}") for i in range(1, 1001)]
    return ring + hub + [(f"e{h}", f"r{i % 4}", f"e{t}") for i, (h, t) in enumerate(ends)]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    runs: dict[str, Run] = {}

    def run(model: str) -> Run:
        if model not in runs:
            rows = skewed_rows(NUM_ENTITIES, DIM)
            folder = tmp_path_factory.mktemp(model)
            runs[model] = make_run(folder, links(), entities=rows, dim=DIM, model=model, world_size=3)
        return runs[model]

    return run


def entry(run: Run, name: str = "links") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / "index" / "index.json").read_text())["indexes"][name]
    return found


def some_questions(
    model: TrainedModel, count: int = 200, end: int = 0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return given ends and relations of triples of the graph."""
    graph = links()
    chosen = [graph[i] for i in np.random.default_rng(7).integers(0, len(graph), count).tolist()]
    anchors = model.entities.ids_of(triple[end] for triple in chosen)
    return anchors, model.relations.ids_of(triple[1] for triple in chosen)


@pytest.mark.parametrize(
    ("model", "type"),
    [(model, type) for model in ("complex", "transe") for type in APPROXIMATE if suits(model, type)],
)
def test_the_recall_that_is_told_is_that_of_other_questions_too(
    run_of: Callable[[str], Run], model: str, type: str
) -> None:
    """An independent count: the ids of an exact search, on questions that nobody tuned with."""
    run = run_of(model)
    build_index(run.folder, "links", type=type, recall=TARGET, num_queries=200)
    info, asked = entry(run), load(run.folder)
    assert info["exact"] is False
    assert min(info["recall"]["measured"].values()) >= TARGET
    for side in SIDES:
        anchors, relations = some_questions(asked, end=0 if side == "tail" else 2)
        truth = asked.links.best(side, anchors, relations, 10, source=asked.links.source(side, exact=True))
        found = asked.links.best(side, anchors, relations, 10)
        same = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(truth.ids, found.ids, strict=True)])
        assert same >= info["recall"]["measured"][f"{side}, known shown"] - 0.05


@pytest.mark.parametrize("model", MODELS)
def test_answers_carry_the_scores_of_the_model_and_say_that_some_may_be_missing(
    run_of: Callable[[str], Run], model: str
) -> None:
    run = run_of(model)
    build_index(run.folder, "links", type="ivf", recall=TARGET, num_queries=100)
    asked = load(run.folder)
    for answers in (asked.predict_tails("e5", "r1", 20), asked.predict_heads("r2", "e7", 20)):
        side = answers.query["asked"]
        given = answers.query["head" if side == "tail" else "tail"]
        triples = [
            (given, answers.query["relation"], each.label)
            if side == "tail"
            else (each.label, answers.query["relation"], given)
            for each in answers
        ]
        scores = [each.score for each in answers]
        assert scores == asked.score(triples, side=side).tolist()
        assert scores == sorted(scores, reverse=True)
        assert len({each.id for each in answers}) == 20
        assert answers.query["exact"] is False
        assert answers.query["index"] == "ivf"
        assert min(answers.query["recall@10"].values()) >= TARGET
    everything = asked.predict_tails("e5", "r1", 20, exact=True)
    assert everything.query["exact"] is True
    (run.folder / "index" / "index.json").unlink()
    assert load(run.folder).predict_tails("e5", "r1", 20) == everything


@pytest.mark.parametrize("type", ["ivf", "hnsw"])
def test_known_answers_are_left_out_however_many_there_are(run_of: Callable[[str], Run], type: str) -> None:
    """e0 has 1,000 known tails, far more than are fetched; also in a batch with questions that have few."""
    run = run_of("complex")
    build_index(run.folder, "links", type=type, recall=TARGET, num_queries=100)
    asked = load(run.folder)
    answers = asked.predict_tails("e0", "r0", 50)
    known = {tail for head, relation, tail in links() if (head, relation) == ("e0", "r0")}
    assert answers.query["num_known"] == len(known) >= 1000
    assert len(answers) == 50
    assert not known & set(answers.labels)
    shown = asked.predict_tails("e0", "r0", 50, known=True)
    assert {each.label for each in shown if each.known} == known & set(shown.labels) != set()


@pytest.mark.parametrize("type", [name for name in APPROXIMATE if suits("complex", name)])
def test_k_beyond_what_is_looked_through_returns_k(run_of: Callable[[str], Run], type: str) -> None:
    """The least that is looked through holds fewer than k answers, or fewer that are not known."""
    run = run_of("complex")
    build_index(run.folder, "links", type=type, recall=0.01, num_queries=50)
    asked = load(run.folder)
    for head, k in (("e3", 500), ("e3", 2000), ("e0", 600)):
        answers = asked.predict_tails(head, "r0", k)
        assert len({each.id for each in answers}) == k
        assert min(each.id for each in answers) >= 0
    everything = asked.predict_tails("e3", "r0", NUM_ENTITIES + 5, known=True)
    assert sorted(each.id for each in everything) == list(range(NUM_ENTITIES))


@pytest.mark.parametrize("type", ["ivf", "hnsw"])
def test_recall_holds_where_the_nearest_are_known(tmp_path: Path, type: str) -> None:
    """Trained models put known answers first; what is asked for lies behind them, in other lists."""
    draw = np.random.default_rng(3)
    rows = skewed_rows(NUM_ENTITIES, DIM)
    relation = draw.standard_normal((8, DIM)).astype(np.float32) * 0.1
    num_known = [0, 30, 300, 700]
    triples = [(f"e{i}", "r0", f"e{(i + 1) % NUM_ENTITIES}") for i in range(NUM_ENTITIES)]
    probe = make_run(
        tmp_path / "probe", triples, entities=rows, relations=relation[:2], dim=DIM, model="transe"
    )
    ranked = load(probe.folder)
    for i in range(100):
        near = ranked.predict_tails(f"e{i}", "r0", num_known[i % 4] + 1, known=True)
        triples += [(f"e{i}", "r0", label) for label in near.labels[: num_known[i % 4]]]
    run = make_run(tmp_path / "run", triples, entities=rows, relations=relation[:2], dim=DIM, model="transe")
    build_index(run.folder, "links", type=type, recall=0.95, num_queries=200)
    asked = load(run.folder)
    for group in range(4):
        same = []
        for i in range(group, 100, 4):
            found, truth = (asked.predict_tails(f"e{i}", "r0", exact=exact) for exact in (False, True))
            same.append(len(set(found.labels) & set(truth.labels)) / 10)
        assert np.mean(same) >= 0.85, num_known[group]


def test_a_build_that_fails_leaves_every_index_as_it_was(
    run_of: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are built and measured, neighbours fail: nothing comes to its name."""
    run = run_of("transe")
    build_index(run.folder, type="flat")
    before = {path.name: path.read_bytes() for path in (run.folder / "index").iterdir()}
    measured = tuning.tune

    def tune(stored: Stored, contents: Contents, *args: Any, **settings: Any) -> Any:
        if contents.name == "neighbors":
            raise ConfigError("neighbors cannot be measured")
        return measured(stored, contents, *args, **settings)

    monkeypatch.setattr(tuning, "tune", tune)
    with pytest.raises(ConfigError, match="neighbors cannot be measured"):
        build_index(run.folder, type="ivf", recall=0.5, num_queries=100)
    assert {path.name: path.read_bytes() for path in (run.folder / "index").iterdir()} == before
    assert len(load(run.folder).predict_tails("e0", "r1")) == 10


def test_an_index_with_one_question_for_a_side_is_readable(tmp_path: Path) -> None:
    triples = [("e0", "r", f"e{i}") for i in range(1, 300)]
    run = make_run(tmp_path, triples, dim=DIM, model="transe")
    build_index(run.folder, type="ivf", recall=0.5, num_queries=50)
    assert all(0 <= value <= 1 for value in entry(run)["recall"]["measured"].values())
    assert len(load(run.folder).predict_tails("e5", "r", 2)) == 2


@pytest.mark.parametrize("model", ["rotate-moduli", "complex"])
def test_auto_takes_what_is_exact_where_lists_are_slow(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "_FEW_ROWS", 100)
    monkeypatch.setattr(build, "_WORTHWHILE", 1e9)
    monkeypatch.setattr(build, "_SMALL_SHARE", 0.0)
    rows = skewed_rows(NUM_ENTITIES, DIM)
    run = make_run(tmp_path, links(), entities=rows, dim=DIM, model=model)
    truth = load(run.folder).predict_tails("e0", "r1")
    notes = "\n".join(build_index(run.folder, num_queries=50).notes)
    assert "links: ivf with this recall is hardly faster" in notes
    assert "neighbors: ivf with this recall is hardly faster" in notes
    entries = json.loads((run.folder / "index" / "index.json").read_text())["indexes"]
    assert {name: info["type"] for name, info in entries.items()} == (
        {"neighbors": "flat"} if model == "rotate-moduli" else {"links": "norm", "neighbors": "flat"}
    )
    assert load(run.folder).predict_tails("e0", "r1") == truth


@pytest.mark.parametrize("type", ["ivf", "ivfpq", "hnsw"])
def test_vectors_that_leave_float32_are_refused_in_words(tmp_path: Path, type: str) -> None:
    """FAISS would end the whole process."""
    rows = 1e20 * skewed_rows(400, DIM)
    ring = [(f"e{i}", "r", f"e{(i + 1) % 400}") for i in range(400)]
    run = make_run(tmp_path, ring, entities=rows, dim=DIM, model="transe")
    with pytest.raises(ConfigError, match="leave float32, which FAISS computes in; use --type flat"):
        build_index(run.folder, "links", type=type)
    build_index(run.folder, "links", type="flat")
    assert len(load(run.folder).predict_tails("e0", "r")) == 10


@pytest.mark.parametrize("num_rows", [2, 5, 9, 31])
def test_a_graph_of_few_nodes_is_built_flat(tmp_path: Path, num_rows: int) -> None:
    ring = [(f"e{i}", "r", f"e{(i + 1) % num_rows}") for i in range(num_rows)]
    run = make_run(tmp_path, ring, dim=4, model="transe")
    assert "--type hnsw needs 32 rows" in build_index(run.folder, type="hnsw").notes[0]
    assert len(load(run.folder).predict_tails("e0", "r", known=True)) == min(10, num_rows)


def test_two_who_build_at_once_are_told(run_of: Callable[[str], Run]) -> None:
    run = run_of("transe")
    (run.folder / "index").mkdir(exist_ok=True)
    with locked(run.folder / "index"), pytest.raises(RunError, match=r"index: is being written by pid"):
        build_index(run.folder, "links")


@pytest.mark.parametrize("corruption", ["reciprocal", "both-sides"])
@pytest.mark.parametrize("model", ["complex", "mure", "cp"])
def test_an_index_by_norm_gives_every_answer_of_a_scan(tmp_path: Path, model: str, corruption: str) -> None:
    """Exactly, however early it stops; known answers are left out, and all but a list of candidates."""
    rows = skewed_rows(NUM_ENTITIES, DIM)
    run = make_run(tmp_path, links(), entities=rows, dim=DIM, model=model, corruption=corruption)
    questions = [Question(head=f"e{i}", relation=f"r{i % 4}") for i in range(40)]
    questions += [Question(relation=f"r{i % 4}", tail=f"e{i}") for i in range(40)]
    few = Wanted(7, candidates=[f"e{i}" for i in range(0, 3000, 17)])
    truth = [load(run.folder).predict(questions, wanted) for wanted in (Wanted(25), few)]
    build_index(run.folder, "links", type="norm")
    asked = load(run.folder)
    assert {type(asked.links.source(side)).__name__ for side in SIDES} == {"NormIndex"}
    assert [asked.predict(questions, wanted) for wanted in (Wanted(25), few)] == truth


def test_the_longest_rows_tell_which_answers_are_certain(run_of: Callable[[str], Run]) -> None:
    """Where the bound says that no other row can be better, an approximate index answers exactly too."""
    run = run_of("complex")
    build_index(run.folder, "links", type="norm-top", recall=0.5, num_queries=100)
    asked = load(run.folder)
    anchors, relations = some_questions(asked)
    found = asked.links.best("tail", anchors, relations, 10)
    truth = asked.links.best("tail", anchors, relations, 10, source=asked.links.source("tail", exact=True))
    assert truth.exact.all()
    assert 0 < found.exact.sum() < len(anchors)
    np.testing.assert_array_equal(found.ids[found.exact], truth.ids[found.exact])
    certain = int(np.argmax(found.exact))
    head, relation = asked.entities[int(anchors[certain])], asked.relations[int(relations[certain])]
    answers = asked.predict_tails(head, relation, 10, known=True)
    assert answers.query["exact"] is True


def test_an_index_by_norm_is_refused_where_norms_say_nothing(run_of: Callable[[str], Run]) -> None:
    with pytest.raises(ConfigError, match="norm is for inner products, not for metric 'l2'"):
        build_index(run_of("transe").folder, "links", type="norm")
    with pytest.raises(ConfigError, match="--per-shard: norm puts the rows of the whole table in order"):
        build_index(run_of("complex").folder, "links", type="norm", per_shard=True)


def test_looking_through_every_list_is_exact(run_of: Callable[[str], Run]) -> None:
    run = run_of("complex")
    build_index(run.folder, "links", type="ivf", recall=1.0, num_queries=50)
    asked = load(run.folder)
    source: Any = asked.links.source("tail")
    anchors, relations = some_questions(asked, 60)
    queries = asked.links.queries("tail", anchors, relations)
    excluded = Exclusions(np.arange(60), anchors, num_queries=60, num_rows=NUM_ENTITIES)
    source.search = type(source.search)(source.num_lists, 1)
    found, truth = (
        search(each, queries, 10, excluded) for each in (source, asked.links.source("tail", exact=True))
    )
    np.testing.assert_array_equal(found.ids, truth.ids)
    np.testing.assert_array_equal(found.scores, truth.scores)


def test_a_graph_on_raw_inner_products_is_caught_where_it_collapses(tmp_path: Path) -> None:
    """Long vectors are everybody's neighbours: nobody links to the rest, which is asked for."""
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((NUM_ENTITIES, DIM)) / 4
    rows[:, -1], rows[:100, :-1], rows[:100, -1] = 0.5, 0.0, 40.0
    relations = draw.standard_normal((8, DIM))
    relations[:, -1] = 0.0
    run = make_run(tmp_path, links(), entities=rows, relations=relations, dim=DIM, model="distmult")
    build_index(run.folder, "neighbors")
    before = sorted(path.name for path in (run.folder / "index").iterdir())
    with pytest.raises(
        ConfigError, match=r"--recall 0.9.: links as hnsw-ip reach 0\.[0-8].*choose another --type"
    ):
        build_index(run.folder, "links", type="hnsw-ip", recall=0.95, num_queries=100)
    assert sorted(path.name for path in (run.folder / "index").iterdir()) == before
    build_index(run.folder, "links", type="ivf", recall=0.95, num_queries=100)
    assert min(entry(run)["recall"]["measured"].values()) >= 0.95


@pytest.mark.parametrize("type", ["flat", "ivf", "hnsw"])
def test_an_index_of_each_shard_answers_as_one(run_of: Callable[[str], Run], type: str) -> None:
    run = run_of("transe")
    built = build_index(
        run.folder, "links", type=type, recall=TARGET, num_queries=100, per_shard=True, with_labels=False
    )
    names = [f"links-{number:05}-of-00003.faiss" for number in (1, 2, 3)]
    assert [Path(file).name for file in built.files] == [*names, "index.json"]
    parts = entry(run)["parts"]
    assert [tuple(part["rows"]) for part in parts] == [(0, 1000), (1000, 2000), (2000, 3000)]
    asked = load(run.folder)
    answers, truth = (asked.predict_tails("e9", "r3", 10, exact=exact) for exact in (False, True))
    if type == "flat":
        assert answers == truth
    assert len(set(answers.labels) & set(truth.labels)) >= 7
    for side, recall in (entry(run)["recall"] or {"measured": {}})["measured"].items():
        assert recall >= TARGET, side


@pytest.mark.parametrize(("type", "least"), [("ivf", 78), ("ivfsq", 78), ("ivfpq", 256)])
def test_too_few_rows_for_a_type_are_indexed_flat_and_it_is_said(
    tmp_path: Path, type: str, least: int
) -> None:
    for num_rows in (50, least - 1, least):
        triples = [(f"e{i}", "r", f"e{i + 1}") for i in range(num_rows - 1)]
        run = make_run(tmp_path / str(num_rows), triples, dim=4)
        written = build_index(run.folder, type=type, recall=0.01, num_queries=10)
        is_small = num_rows < least
        said = f"--type {type} needs {least} rows, this table has {num_rows}; built flat, which is exact"
        assert (said in written.notes) == is_small
        assert entry(run)["type"] == ("flat" if is_small else type)


def test_neighbours_of_an_approximate_index_leave_the_entity_itself_out(run_of: Callable[[str], Run]) -> None:
    run = run_of("transe")
    build_index(run.folder, "neighbors", type="hnsw", recall=TARGET, num_queries=100)
    asked = load(run.folder)
    found, truth = (asked.most_similar("e4", 10, exact=exact) for exact in (False, True))
    assert "e4" not in found.labels
    assert len(set(found.labels) & set(truth.labels)) >= 7
    assert found.query["recall@10"]["neighbors"] >= TARGET
    assert all(-1 <= each.score <= 1 for each in found)


@pytest.mark.parametrize(
    ("recall", "queries"), [(0.0, 10), (1.5, 10), (-1.0, 10), (float("nan"), 10), (0.9, 0)]
)
def test_what_cannot_be_measured_is_refused(
    run_of: Callable[[str], Run], recall: float, queries: int
) -> None:
    with pytest.raises(ConfigError, match=r"--recall must be above 0|--queries must be"):
        build_index(run_of("complex").folder, recall=recall, num_queries=queries)
