"""The number of ranks is invisible: the same losses and the same tables, and both are what the papers say.

`assert_same_training` compares worlds; `test_one_step_...` compares a world with formulas written here in
float64 on whole tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_functions import Floats, Ints, Job, Trained, one_step, step_from_nan, swapped_rows, train
from torch import Tensor
from worlds import GlooPool, ThreadWorld

import kgshard.table
from kgshard.models import SCORING
from kgshard.partition import RowPartition
from kgshard.routing import Route, RowGradient, plan_route, sum_by_row


def triples(number: int, num_entities: int, num_relations: int, *, seed: int = 0) -> Ints:
    source = np.random.default_rng(seed)
    heads, tails = source.integers(0, num_entities, (2, number))
    return np.stack([heads, source.integers(0, num_relations, number), tails], axis=1)


def job(model: str, num_entities: int = 40, num_relations: int = 3, number: int = 75) -> Job:
    """Return 50 steps on a random graph. 75 triples in batches of 16: the last batch of an epoch has 11."""
    return Job(model, triples(number, num_entities, num_relations), num_entities, num_relations)


CASES = {
    **{
        f"{model}, {corruption}": job(model).but(corruption=corruption)
        for model in ("distmult", "complex", "transe", "rotate")
        for corruption in ("reciprocal", "both-sides")
    },
    "n3": job("complex").but(n3=0.05),
    "transe-l1": job("transe-l1").but(optimizer="adagrad-rowwise"),
    "adam": job("distmult").but(optimizer="adam", lr=0.01),
    "fewer entities than ranks": job("complex", num_entities=3),
    "one entity": job("distmult", num_entities=1, number=5),
    "a last batch smaller than the world": job("complex", number=17),
    "batches smaller than the world": job("rotate", number=9).but(batch_size=2),
    "one relation": job("complex", num_relations=1).but(corruption="both-sides"),
    "one triple": job("transe", number=1),
    "one negative": job("distmult").but(num_negatives=1),
}


@cache
def on_one_rank(name: str) -> Trained:
    result: Trained = ThreadWorld(1).run(train, CASES[name])[0]
    return result


def assert_same_training(worlds: list[Trained], truth: Trained) -> None:
    """Assert that every rank's losses and the tables are those of one rank."""
    for trained in worlds:
        np.testing.assert_allclose(trained.losses, truth.losses, rtol=1e-5)
        np.testing.assert_allclose(trained.entities, truth.entities, rtol=0, atol=1e-4)
        np.testing.assert_allclose(trained.relations, truth.relations, rtol=0, atol=1e-4)


# Variations of what others cover on every world are compared on one, to save seconds.
ON_THREE_RANKS_ONLY = ("transe-l1", "adam", "one entity", "one triple", "one negative")
COMPARED = [
    (name, world_size)
    for name in CASES
    for world_size in ((3,) if name in ON_THREE_RANKS_ONLY else (2, 3, 4))
]


@pytest.mark.parametrize(("name", "world_size"), COMPARED)
def test_any_world_trains_as_one_rank_does(name: str, world_size: int) -> None:
    truth = on_one_rank(name)
    assert len(truth.losses) == 50
    assert_same_training(ThreadWorld(world_size).run(train, CASES[name]), truth)


@pytest.mark.parametrize("name", CASES)
def test_every_case_really_trains(name: str) -> None:
    """Parity of a training that does nothing would say nothing."""
    one, none = on_one_rank(name), ThreadWorld(1).run(train, CASES[name].but(num_steps=0))[0]
    assert all(math.isfinite(loss) for loss in one.losses)
    if CASES[name].num_entities > 1:
        assert np.abs(one.entities - none.entities).max() > 0.05
        assert np.abs(one.relations - none.relations).max() > 0.05


def test_every_model_is_compared() -> None:
    assert {case.model for case in CASES.values()} == set(SCORING)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo_ranks_train_as_one_rank_does(gloo_pool: GlooPool, tmp_path: Path, world_size: int) -> None:
    name = "a last batch smaller than the world"
    assert_same_training(gloo_pool.run(world_size, tmp_path, train, CASES[name]), on_one_rank(name))


def rotated_owners(ids: Tensor, partition: RowPartition) -> Route:
    route = plan_route(ids, partition)
    return Route(route.unique_ids, route.inverse, [*route.counts[1:], route.counts[0]])


def two_rows_swapped(ids: Tensor, partition: RowPartition) -> Route:
    """Ids 4 and 5, which one rank owns, change places in the request."""
    route = plan_route(ids, partition)
    swapped = route.unique_ids.clone()
    both = int((swapped == 4).any() and (swapped == 5).any())
    swapped[route.unique_ids == 4] += both
    swapped[route.unique_ids == 5] -= both
    return Route(swapped, route.inverse, route.counts)


@pytest.mark.parametrize("wrong_route", [rotated_owners, two_rows_swapped])
def test_a_wrong_route_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong_route: Callable[..., Route]) -> None:
    """Negative control: the same assertion fails when rows go astray on two ranks."""
    name = "complex, reciprocal"
    truth = on_one_rank(name)
    monkeypatch.setattr(kgshard.table, "plan_route", wrong_route)
    with pytest.raises((AssertionError, IndexError)):
        assert_same_training(ThreadWorld(2).run(train, CASES[name]), truth)


def wrong_sum(rows: Tensor, values: Tensor) -> RowGradient:
    return swapped_rows(sum_by_row(rows, values))


def test_gradients_gone_astray_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same assertion fails when two rows' gradients are swapped."""
    name = "complex, reciprocal"
    truth = on_one_rank(name)
    monkeypatch.setattr(kgshard.table, "sum_by_row", wrong_sum)
    with pytest.raises(AssertionError):
        assert_same_training(ThreadWorld(2).run(train, CASES[name]), truth)


@pytest.mark.parametrize("changed", [{"seed": 4}, {"lr": 0.1001}, {"n3": 1e-3}, {"batch_size": 17}])
def test_another_training_is_noticed(changed: dict[str, float]) -> None:
    """Negative control: the tolerances are narrow enough to see a small change of settings."""
    name = "complex, reciprocal"
    with pytest.raises(AssertionError):
        assert_same_training(ThreadWorld(1).run(train, CASES[name].but(**changed)), on_one_rank(name))


# --- one step, from the papers


def complex_numbers(row: Tensor) -> Tensor:
    middle = row.shape[-1] // 2
    return torch.complex(row[..., :middle], row[..., middle:])


def distmult(h: Tensor, r: Tensor, t: Tensor) -> Tensor:
    return (h * r * t).sum()


def complex_(h: Tensor, r: Tensor, t: Tensor) -> Tensor:
    h, r, t = complex_numbers(h), complex_numbers(r), complex_numbers(t)
    return (h * r * t.conj()).sum().real


def transe(h: Tensor, r: Tensor, t: Tensor) -> Tensor:
    return -((h + r - t) ** 2).sum().sqrt()


def transe_l1(h: Tensor, r: Tensor, t: Tensor) -> Tensor:
    return -(h + r - t).abs().sum()


def rotate(h: Tensor, r: Tensor, t: Tensor) -> Tensor:
    turned = complex_numbers(h) * torch.polar(torch.ones_like(r), r)
    return -torch.view_as_real(turned - complex_numbers(t)).square().sum().sqrt()


PAPER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "distmult": distmult,
    "complex": complex_,
    "transe": transe,
    "transe-l1": transe_l1,
    "rotate": rotate,
}


def cubes(model: str, row: Tensor) -> Tensor:
    """Lacroix et al. (2018): cubes of the moduli where coordinates are complex factors."""
    sizes = complex_numbers(row).abs() if model == "complex" else row.abs()
    return (sizes**3).sum()


def paper_loss(asked: Job, entities: Tensor, relations: Tensor, negatives: Ints) -> Tensor:
    """Mean over 2 B queries of -log softmax, one query and one candidate at a time."""
    score, num_negatives = PAPER[asked.model], len(negatives)
    weight = asked.num_entities / num_negatives  # each negative stands for so many candidates
    total = torch.zeros((), dtype=torch.float64)
    for h, r, t in asked.triples.tolist():
        for side in ("head", "tail"):
            reverse = side == "head" and asked.corruption == "reciprocal"
            row = relations[r + asked.num_relations if reverse else r]
            given, answer = (t, h) if side == "head" else (h, t)

            def of(candidate: int, row: Tensor = row, given: int = given, side: str = side) -> Tensor:
                ends = (entities[given], entities[candidate])
                if side == "head" and asked.corruption == "both-sides":
                    ends = ends[::-1]
                return score(ends[0], row, ends[1])

            true = of(answer).exp()
            others = [weight * of(int(k)).exp() for k in negatives if k != answer]
            total = total - (true / (true + sum(others))).log()
            parts = (entities[given], row, entities[answer])
            total = total + asked.n3 * sum(cubes(asked.model, part) for part in parts)
    return total / (2 * len(asked.triples))


def paper_step(asked: Job, entities: Floats, relations: Floats, negatives: Ints) -> Trained:
    """One step of plain descent with learning rate 1 on whole tables."""
    rows = torch.tensor(entities, requires_grad=True)
    relation_rows = torch.tensor(relations, requires_grad=True)
    loss = paper_loss(asked, rows, relation_rows, negatives)
    loss.backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    assert relation_rows.grad is not None
    return Trained(
        [loss.item()],
        (rows - rows.grad).detach().numpy(),
        (relation_rows - relation_rows.grad).detach().numpy(),
    )


def small_job(model: str, corruption: str, n3: float) -> tuple[Job, Floats, Floats, Ints]:
    """Return five triples, whole tables, and negatives that hit answers by accident, some twice."""
    asked = Job(model, triples(5, 9, 2, seed=1), 9, 2, dim=6, corruption=corruption, n3=n3)
    source, shape = np.random.default_rng(2), asked.link_model
    entities = source.normal(size=(9, 6))
    relations = source.normal(size=(shape.num_relation_rows, shape.relation_dim))
    negatives = np.array([*asked.triples[:2, 2], asked.triples[0, 0], 8, 8, 3])
    return asked, entities, relations, negatives


@cache
def paper_step_of(model: str, corruption: str, n3: float) -> Trained:
    return paper_step(*small_job(model, corruption, n3))


def distance(one: Trained, other: Trained) -> float:
    """Return the largest difference of loss, entities or relations."""
    return max(
        abs(one.losses[0] - other.losses[0]),
        float(np.abs(one.entities - other.entities).max()),
        float(np.abs(one.relations - other.relations).max()),
    )


ONE_STEPS = [
    (model, corruption, n3)
    for model in sorted(SCORING)
    for corruption in ("reciprocal", "both-sides")
    for n3 in (0.0, 0.1)
]


@pytest.mark.parametrize(("model", "corruption", "n3"), ONE_STEPS)
@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_one_step_is_what_the_papers_say(model: str, corruption: str, n3: float, world_size: int) -> None:
    """With 7 ranks two have no triple at all."""
    small = small_job(model, corruption, n3)
    truth = paper_step_of(model, corruption, n3)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-5)):
        for trained in ThreadWorld(world_size).run(one_step, *small, dtype):
            assert distance(trained, truth) < tolerance


def test_the_loss_is_exact_in_float64() -> None:
    """The update goes through float32 optimizers; the loss does not."""
    small = small_job("complex", "both-sides", 0.1)
    loss = ThreadWorld(2).run(one_step, *small, torch.float64)[0].losses[0]
    assert loss == pytest.approx(paper_step(*small).losses[0], rel=1e-12)


def test_every_term_of_the_loss_counts() -> None:
    """Negative control: the comparison above sees each term go."""
    asked, entities, relations, negatives = small_job("complex", "reciprocal", 0.1)
    truth = paper_step(asked, entities, relations, negatives)
    for changed in (
        asked.but(n3=0.0),
        asked.but(num_entities=10),
        asked.but(model="distmult"),
        asked.but(triples=asked.triples[:4]),
    ):
        assert distance(paper_step(changed, entities, relations, negatives), truth) > 1e-3
    unmasked = np.where(np.isin(negatives, asked.triples[:, [0, 2]]), 7, negatives)
    assert distance(paper_step(asked, entities, relations, unmasked), truth) > 1e-3


def test_negatives_that_are_all_the_answer_are_no_negatives() -> None:
    asked, entities, relations, _ = small_job("distmult", "both-sides", 0.0)
    asked = asked.but(triples=np.array([[3, 0, 3]]))
    trained = ThreadWorld(2).run(one_step, asked, entities, relations, np.array([3, 3]), torch.float64)[0]
    assert trained.losses == [0.0]
    assert np.array_equal(trained.entities, entities)


@pytest.mark.parametrize("model", sorted(SCORING))
def test_a_table_of_equal_rows_trains_without_nan(model: str) -> None:
    """All distances are 0, where a norm has no gradient."""
    asked = small_job(model, "both-sides", 0.1)[0]
    entities, relations = np.zeros((9, 6)), np.zeros((2, asked.link_model.relation_dim))
    negatives = np.array([1, 2, 8])
    trained = ThreadWorld(2).run(one_step, asked, entities, relations, negatives, torch.float32)[0]
    assert trained.losses[0] == pytest.approx(math.log(10), abs=0.2)
    assert np.isfinite(trained.entities).all()
    assert np.isfinite(trained.relations).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_that_is_nan_stops_every_rank_before_any_update(world_size: int) -> None:
    asked = job("distmult")
    bad_row = int(asked.triples[0, 0])
    outcomes = ThreadWorld(world_size).run(step_from_nan, asked.but(batch_size=100), bad_row)
    assert outcomes == [("NonFiniteError: loss is nan at step 0; lower --lr", True)] * world_size
