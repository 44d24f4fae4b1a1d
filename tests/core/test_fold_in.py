"""Rows for new entities: against the loss written out in numpy, and what a user may count on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from brute_force import random_graph
from graphs import make_run
from papers import PAPER

import kgshard.folding.objective
import kgshard.folding.sampling
from kgshard.config import TrainConfig
from kgshard.errors import NonFiniteError
from kgshard.folding import FoldedRows, FrozenModel, components, fold_in
from kgshard.folding.objective import Objective
from kgshard.runs import Run

Array = npt.NDArray[Any]
NUM_ENTITIES, NUM_RELATIONS, DIM = 14, 3, 6
GRAPH = random_graph(3, NUM_ENTITIES, NUM_RELATIONS)
NEW = NUM_ENTITIES
TRIPLES = np.array([[NEW, 0, 3], [NEW, 1, 5], [2, 2, NEW], [7, 0, NEW], [NEW, 0, 4]])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tables are tiny: on busy cores two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def frozen_model(folder: Path, *, entities: Array | None = None, **settings: Any) -> FrozenModel:
    """Make a run of random rows about half as long as usual, so that losses are no steps."""
    width = settings.get("dim", DIM)
    rows = np.random.default_rng(1).standard_normal((NUM_ENTITIES, width)) * 0.7 + 0.1
    run = make_run(
        folder,
        *GRAPH.values(),
        entities=rows if entities is None else entities,
        seed=2,
        **({"dim": DIM} | settings),
    )
    return frozen_run(run)


def frozen_run(run: Run) -> FrozenModel:
    return FrozenModel(
        model=run.model,
        entities=run.checkpoint.entities,
        relations=run.checkpoint.relations,
        shared=run.checkpoint.shared,
        train=run.dataset.triples("train"),
        config=TrainConfig.from_dict(run.info.config),
        row_name=run.dataset.entities.row_name,
    )


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


class Written:
    """The loss of one new entity, question by question and entity by entity, from papers' formulas."""

    def __init__(self, frozen: FrozenModel, triples: Array) -> None:
        self.frozen, self.config, self.triples = frozen, frozen.config, triples
        self.entities = frozen.entities.read(range(NUM_ENTITIES)).astype(np.float64)
        self.relations = frozen.relations.read(range(frozen.relations.num_rows)).astype(np.float64)
        self.paper = PAPER[frozen.model.name]
        asked = [self.questions(triples), self.questions(np.asarray(frozen.train))]
        self.own, self.train = asked
        self.train_scores = [
            np.array([self.score(side, self.entities[a], r, row) for row in self.entities])
            for side, a, r, _ in self.train
        ]

    @staticmethod
    def questions(triples: Array) -> list[tuple[str, int, int, int]]:
        return [("tail", h, r, t) for h, r, t in triples.tolist()] + [
            ("head", t, r, h) for h, r, t in triples.tolist()
        ]

    def score(self, side: str, anchor: Array, relation: int, answer: Array) -> float:
        if side == "tail":
            return self.paper(anchor, self.relations[relation], answer, {})
        if self.frozen.model.reciprocal:
            return self.paper(anchor, self.relations[relation + NUM_RELATIONS], answer, {})
        return self.paper(answer, self.relations[relation], anchor, {})

    def answers_of(self, question: tuple[str, int, int, int]) -> set[int]:
        every = self.own + self.train
        return {answer for side, a, r, answer in every if (side, a, r) == question[:3]}

    def loss(self, positive: float, scores: Array, num_answers: int) -> float:
        """Return the loss of one question; `scores` are those of the entities that are wrong."""
        config, one_vs_all = self.config, self.config.train_type != "negative-sampling"
        if config.loss == "softmax":
            value = float(np.logaddexp.reduce([positive, *scores]) - positive)
            return value / num_answers if config.train_type == "kvsall" else value
        if config.loss == "bce":
            wrong = softplus(scores).sum()
            share = 1 / num_answers if config.train_type == "kvsall" else 1.0
            return float(softplus(-positive) + (wrong * share if one_vs_all else wrong / NUM_ENTITIES))
        if config.loss == "margin":
            return float(np.maximum(0, config.margin - positive + scores).sum() / NUM_ENTITIES)
        plausible = np.exp(config.adversarial_temperature * scores)
        others = (plausible / plausible.sum() * softplus(config.margin + scores)).sum()
        return float(softplus(-config.margin - positive) + others)

    def data(self, row: Array) -> float:
        """Return the mean loss of the entity's own questions."""
        rows = np.concatenate([self.entities, row[None]])
        losses = []
        for question in self.own:
            side, anchor, relation, answer = question
            known = self.answers_of(question)
            filtered = self.config.train_type == "kvsall" and self.config.loss == "bce"
            wrong = [e for e in range(NUM_ENTITIES) if e not in (known if filtered else {answer})]
            positive = self.score(side, rows[anchor], relation, rows[answer])
            scores = np.array([self.score(side, rows[anchor], relation, rows[e]) for e in wrong])
            losses.append(self.loss(positive, scores, len(known)))
        return float(np.mean(losses))

    def rivalry(self, row: Array) -> float:
        """Return what train's questions lose by one more candidate, up to terms without a slope."""
        total = 0.0
        for (side, anchor, relation, answer), scores in zip(self.train, self.train_scores, strict=True):
            mine = self.score(side, self.entities[anchor], relation, row)
            known = self.answers_of((side, anchor, relation, answer))
            share = 1 / len(known) if self.config.train_type == "kvsall" else 1.0
            if self.config.loss == "softmax":
                total += share * (np.logaddexp.reduce([*scores, mine]) - np.logaddexp.reduce(scores))
            elif self.config.loss == "bce":
                if self.config.train_type != "kvsall":
                    every = 1 if self.config.train_type == "1vsall" else NUM_ENTITIES
                    total += float(softplus(np.array(mine))) / every
                elif NEW not in known:
                    total += share * float(softplus(np.array(mine)))
            elif self.config.loss == "margin":
                total += max(0.0, self.config.margin - scores[answer] + mine) / NUM_ENTITIES
            else:
                others = np.delete(scores, answer)
                plausible = np.exp(self.config.adversarial_temperature * np.append(others, mine))
                weight = plausible[-1] / plausible.sum()
                total += weight * float(softplus(np.array(self.config.margin + mine)))
        return total

    def penalty(self, row: Array) -> float:
        config, times = self.config, len(self.own)
        if config.n3 and self.frozen.model.name == "cp":
            as_head, as_tail = row.reshape(2, -1)
            times_head, times_tail = (2 * (self.triples[:, end] == NEW).sum() for end in (0, 2))
            cubes = times_head * (abs(as_head) ** 3).sum() + times_tail * (abs(as_tail) ** 3).sum()
            return float(config.n3 * cubes)
        if config.n3:
            real, imaginary = row.reshape(2, -1)
            return float(config.n3 * times * ((real**2 + imaginary**2) ** 1.5).sum())
        if config.l2:
            return float(config.l2 * times * (row**2).sum())
        mean, deviation = self.entities.mean(axis=0), self.entities.std(axis=0)
        return float((((row - mean) / deviation) ** 2).sum() / 2)

    def everything(self, row: Array) -> float:
        return self.data(row) * len(self.own) + self.rivalry(row) + self.penalty(row)

    def descent(self, row: Array) -> float:
        """Return how much the best step down the slope would gain."""
        here, slope = self.everything(row), np.zeros(len(row))
        for place in range(len(row)):
            step = np.zeros(len(row))
            step[place] = 1e-4
            slope[place] = (self.everything(row + step) - self.everything(row - step)) / 2e-4
        return max(
            here - self.everything(row - length * slope / np.linalg.norm(slope))
            for length in (0.01, 0.03, 0.1, 0.3)
        )


CASES: dict[str, dict[str, Any]] = {
    "complex, reciprocal": {"model": "complex"},
    "complex, n3": {"model": "complex", "n3": 0.05},
    "complex, both sides": {"model": "complex", "corruption": "both-sides"},
    "cp, n3, where roles differ": {"model": "cp", "n3": 0.1, "corruption": "both-sides"},
    "distmult, l2": {"model": "distmult", "l2": 0.1},
    "transe": {"model": "transe", "corruption": "both-sides"},
    "mure, where sides differ": {"model": "mure", "corruption": "both-sides"},
    "transh": {"model": "transh"},
    "kvsall": {"model": "distmult", "train_type": "kvsall"},
    "kvsall, bce": {"model": "distmult", "train_type": "kvsall", "loss": "bce"},
    "1vsall, bce": {"model": "distmult", "train_type": "1vsall", "loss": "bce"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_minimises_the_loss_that_the_run_was_trained_with(tmp_path: Path, case: str) -> None:
    frozen = frozen_model(tmp_path, **CASES[case])
    written = Written(frozen, TRIPLES)
    start, found = (fold_in(frozen, TRIPLES, 1, steps=steps) for steps in (0, 400))
    np.testing.assert_allclose(start.loss_before, written.data(start.rows[0]), rtol=1e-4)
    np.testing.assert_allclose(found.loss_after, written.data(found.rows[0]), rtol=1e-4)
    began = written.everything(start.rows[0])
    assert found.converged.all()
    assert written.everything(found.rows[0]) < began
    assert written.descent(found.rows[0]) < 0.001 * began


@pytest.mark.parametrize("loss", ["bce", "margin", "self-adversarial"])
def test_losses_of_sampled_negatives_are_those_of_training(tmp_path: Path, loss: str) -> None:
    frozen = frozen_model(tmp_path, model="distmult", loss=loss)
    written = Written(frozen, TRIPLES)
    start, found = (fold_in(frozen, TRIPLES, 1, steps=steps) for steps in (0, 300))
    for each in (start, found):
        np.testing.assert_allclose(each.loss_after, written.data(each.rows[0]), rtol=1e-4)
    if loss == "self-adversarial":  # Its weights are no part of its slope, so it is no minimum of anything.
        assert found.loss_after < start.loss_after
    else:
        assert written.descent(found.rows[0]) < 0.004 * written.everything(start.rows[0])


RIVALRY = CASES | {
    loss: {"model": "distmult", "loss": loss, "margin": 0.5, "adversarial_temperature": 0.7}
    for loss in ("self-adversarial",)
}
RIVALRY |= {loss: {"model": "distmult", "loss": loss} for loss in ("bce", "margin")}


@pytest.mark.parametrize("case", RIVALRY)
def test_rivalry_and_regulariser_cost_what_they_cost_in_training(tmp_path: Path, case: str) -> None:
    frozen = frozen_model(tmp_path, **RIVALRY[case])
    answered = np.asarray(frozen.train)[:3] * [1, 1, 0] + [0, 0, NEW]  # Also answers what train asks.
    triples = np.unique(np.concatenate([TRIPLES, answered]), axis=0)
    written = Written(frozen, triples)
    objective = Objective(frozen, triples, 0, None)
    questions = objective.questions_of(triples, np.array([0]))
    for scale in (0.3, 1.0, 3.0):
        row = np.random.default_rng(8).standard_normal(DIM).astype(np.float32) * np.float32(scale)
        wide, rows = row.astype(np.float64), torch.from_numpy(row)[None]
        assert float(objective.rivalry(questions, rows)) == pytest.approx(written.rivalry(wide), rel=1e-4)
        assert float(objective.penalty(questions, rows)) == pytest.approx(written.penalty(wide), rel=1e-4)


def folded(frozen: FrozenModel, triples: Array, num_new: int, **how: Any) -> FoldedRows:
    return fold_in(frozen, np.array(triples), num_new, **how)


def test_entities_that_no_triple_connects_do_not_influence_each_other(tmp_path: Path) -> None:
    frozen = frozen_model(tmp_path, model="complex", n3=0.01)
    both = np.concatenate([TRIPLES, [[NEW + 1, 2, 6], [1, 1, NEW + 1]]])
    alone, together = folded(frozen, TRIPLES, 1), folded(frozen, both, 2)
    np.testing.assert_allclose(together.rows[:1], alone.rows, rtol=1e-3, atol=1e-4)
    assert together.steps[0] == alone.steps[0]
    tied = folded(frozen, np.concatenate([both, [[NEW, 1, NEW + 1]]]), 2)
    assert np.abs(tied.rows - together.rows).max() > 0.05


def test_entities_known_only_by_each_other_and_one_of_the_run_are_found_together(tmp_path: Path) -> None:
    frozen = frozen_model(tmp_path, model="distmult", n3=0.01)
    chain = [[3, 0, NEW], [NEW, 1, NEW + 1], [NEW + 1, 2, NEW + 2]]
    found = folded(frozen, np.array(chain), 3)
    assert (found.loss_after < found.loss_before).all()
    assert np.isfinite(found.rows).all()
    assert len(set(found.steps.tolist())) == 1


def test_components_are_those_of_a_walk() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        triples = np.stack(
            [draw.integers(-5, 20, 14), draw.integers(0, 3, 14), draw.integers(-5, 20, 14)], axis=1
        )
        wanted = list(range(20))
        for _ in range(20):
            for head, _, tail in triples.tolist():
                if head >= 0 and tail >= 0:
                    wanted[head] = wanted[tail] = min(wanted[head], wanted[tail])
        assert components(triples, 20).tolist() == wanted


def test_the_same_seed_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kgshard.folding.objective, "RIVAL_FLOATS", 0)
    monkeypatch.setattr(kgshard.folding.sampling, "FEWEST", 8)
    frozen = frozen_model(tmp_path, model="complex")
    first, second, other = (folded(frozen, TRIPLES, 1, seed=seed) for seed in (4, 4, 5))
    assert first.num_rivals == 8
    assert first.rows.tobytes() == second.rows.tobytes()
    assert first.rows.tobytes() != other.rows.tobytes()


def test_blocks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = frozen_model(tmp_path, model="transe", corruption="both-sides")
    both = np.concatenate([TRIPLES, [[NEW + 1, 2, 6], [1, 1, NEW + 1]]])
    whole = folded(frozen, both, 2)
    monkeypatch.setattr(kgshard.folding.objective, "SCORES", 2 * NUM_ENTITIES)
    np.testing.assert_allclose(folded(frozen, both, 2).rows, whole.rows, rtol=1e-3, atol=1e-4)


MODELS = ["complex", "distmult", "transe", "rotate", "protate", "conve", "quate", "simple", "cp", "tucker"]


@pytest.mark.parametrize("model", MODELS)
def test_one_triple_makes_no_row_longer_than_is_usual(tmp_path: Path, model: str) -> None:
    frozen = frozen_model(tmp_path, model=model, dim=16)
    lengths = np.linalg.norm(frozen.entities.read(range(NUM_ENTITIES)), axis=1)
    for triple in ([NEW, 0, 3], [3, 0, NEW]):
        found = folded(frozen, np.array([triple]), 1, steps=1000)
        assert 0 < np.linalg.norm(found.rows[0]) < 1.2 * lengths.max()
        assert found.regulariser == "prior"
        assert found.typical_norm == pytest.approx(np.sort(lengths)[(NUM_ENTITIES - 1) // 2], rel=1e-6)


def test_rows_stay_within_the_longest_of_the_run(tmp_path: Path) -> None:
    frozen = frozen_model(tmp_path, model="distmult", max_norm=0.8)
    found = folded(frozen, TRIPLES, 1)
    assert found.regulariser == "max_norm"
    assert np.linalg.norm(found.rows[0]) <= 0.8 * (1 + 1e-6)


def lattice(size: int) -> tuple[list[tuple[str, str, str]], dict[str, tuple[int, int]]]:
    """Return a grid of points, linked to the right and upwards."""
    points = {f"p{x},{y}": (x, y) for x in range(size) for y in range(size)}
    steps = {"right": (1, 0), "up": (0, 1)}
    triples = [
        (f"p{x},{y}", name, f"p{x + dx},{y + dy}")
        for x, y in points.values()
        for name, (dx, dy) in steps.items()
        if f"p{x + dx},{y + dy}" in points
    ]
    return triples, points


@pytest.mark.parametrize("corruption", ["reciprocal", "both-sides"])
def test_a_point_missing_from_a_lattice_is_put_where_it_belongs(tmp_path: Path, corruption: str) -> None:
    triples, points = lattice(7)
    rest = [triple for triple in triples if "p3,3" not in triple]
    run = make_run(
        tmp_path, rest, model="transe", dim=2, corruption=corruption, entities=np.zeros((48, 2)), seed=0
    )
    names, scale = run.dataset, 4.0
    vectors = np.array([points[label] for label in names.entities], float) * scale
    moves = np.array([{"right": (1, 0), "up": (0, 1)}[label] for label in names.relations], float) * scale
    (tmp_path / "again").mkdir()
    run = make_run(
        tmp_path / "again",
        rest,
        model="transe",
        dim=2,
        corruption=corruption,
        entities=vectors,
        relations=np.concatenate([moves, -moves]) if corruption == "reciprocal" else moves,
    )
    ids = {label: row for row, label in enumerate(run.dataset.entities)} | {"p3,3": 48}
    relation_ids = {label: row for row, label in enumerate(run.dataset.relations)}
    own = np.array([[ids[h], relation_ids[r], ids[t]] for h, r, t in triples if "p3,3" in (h, t)])
    found = fold_in(frozen_run(run), own, 1)
    assert np.linalg.norm(found.rows[0] - np.array([3, 3]) * scale) < 0.15 * scale
    assert found.loss_after[0] < found.loss_before[0] + 1e-6


Spoil = Callable[[Array, Array], None]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda entities, relations: entities.__setitem__((3, 1), np.nan),
            r"entity 3 \('e.*'\) is not finite",
        ),
        (lambda entities, relations: relations.__setitem__((1, 0), np.inf), "relation row 1 is not finite"),
    ],
)
def test_what_is_not_finite_is_named(tmp_path: Path, spoil: Spoil, words: str) -> None:
    draw = np.random.default_rng(0)
    entities, relations = draw.standard_normal((NUM_ENTITIES, DIM)), draw.standard_normal((6, DIM))
    spoil(entities, relations)
    run = make_run(
        tmp_path, *GRAPH.values(), entities=entities, relations=relations, model="distmult", dim=DIM
    )
    with pytest.raises(NonFiniteError, match=words):
        fold_in(frozen_run(run), TRIPLES, 1)


def test_a_run_without_train_triples_still_folds_in(tmp_path: Path) -> None:
    frozen = dataclasses.replace(frozen_model(tmp_path, model="complex"), train=np.empty((0, 3), np.int32))
    found = folded(frozen, TRIPLES, 1)
    assert found.num_train_questions == 0
    assert found.loss_after[0] < found.loss_before[0]


def test_a_new_entity_keeps_out_of_questions_that_it_does_not_answer(tmp_path: Path) -> None:
    """Without its rivalry the row would grow until it answered everything like what it answers."""
    frozen = frozen_model(tmp_path, model="distmult")
    without = dataclasses.replace(frozen, train=frozen.train[:0])
    written = Written(frozen, TRIPLES)
    kind, selfish = (folded(each, TRIPLES, 1).rows[0] for each in (frozen, without))
    assert written.rivalry(kind) < 0.95 * written.rivalry(selfish)
