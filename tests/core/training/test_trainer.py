"""What one update does: its loss and gradients are those of the whole tables, and every setting counts.

The truth is tests/support/plain_training.py: float64, one question at a time, plain autograd.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from plain_training import Values, plain_step, relative_errors
from rank_functions import Floats
from training_functions import (
    Job,
    Recorded,
    Tables,
    Trained,
    first_tables,
    one_step_from,
    queries_by_place,
    random_job,
    random_tables,
    record_gradients,
    step_from_nan,
    train,
)
from worlds import ThreadWorld

from kgshard.config import DEFAULTS, TrainConfig
from kgshard.errors import NonFiniteError
from kgshard.exchange import Exchange
from kgshard.models import SCORING, find_scoring
from kgshard.models.metric import DOT
from kgshard.training.assemble import build_sampler

EXACT = 1e-6
WORLDS = [1, 3, 7]
"""Of seven ranks two have none of the five triples, and some no row."""


def small(**settings: Any) -> Job:
    """Return one step on five triples, so that negatives hit answers by accident."""
    return random_job(5, 9, 2, num_steps=1, seed=1, **settings)


def errors_of(job: Job, world_size: int) -> dict[str, float]:
    """Return the largest relative error of the loss and of each gradient, over ranks."""
    tables = random_tables(job, scale=0.5)
    truth = plain_step(job, tables)
    found = [relative_errors(part, truth) for part in recorded(job, tables, world_size)]
    return {name: max(errors[name] for errors in found) for name in found[0]}


def recorded(job: Job, tables: Tables, world_size: int) -> list[Recorded]:
    return ThreadWorld(world_size).run(record_gradients, job, tables)


# --- every loss, every source of negatives, everything that is added

SAMPLED: dict[str, dict[str, Any]] = {
    "softmax": {},
    "both sides": {"corruption": "both-sides"},
    "self-adversarial": {"loss": "self-adversarial", "margin": 3.0, "adversarial_temperature": 0.5},
    "self-adversarial, typed": {"loss": "self-adversarial", "negatives_from": "typed", "negatives": 30},
    "margin": {"loss": "margin", "margin": 2.0, "model": "transe"},
    "bce, smoothed": {"loss": "bce", "label_smoothing": 0.1},
    "bce, by degree": {"loss": "bce", "negatives_from": "degree"},
    "by degree": {"negatives_from": "degree"},
    "typed": {"negatives_from": "typed"},
    "typed, in chunks": {"negatives_from": "typed", "chunk_size": 2},
    "in chunks": {"chunk_size": 2},
    "filtered": {"filter_negatives": True, "negatives": 40},
    "n3": {"n3": 0.1},
    "n3, both sides": {"n3": 0.1, "model": "cp", "corruption": "both-sides"},
    "l2 and l3": {"l2": 0.1, "l3": 0.2},
    "relation prediction": {"relation_prediction": 0.5},
    "relation prediction, both sides": {"relation_prediction": 0.5, "corruption": "both-sides"},
    "shared parameters and all": {"model": "tucker", "relation_prediction": 0.5, "n3": 0.1, "chunk_size": 2},
    "relations on their ranks": {"shard_relations": "always", "n3": 0.1},
    "bfloat16": {"dtype": "bfloat16", "model": "transe"},
    "sides that differ, in chunks": {"model": "mure", "corruption": "both-sides", "chunk_size": 2},
    "sides that differ, typed": {"model": "protate", "corruption": "both-sides", "negatives_from": "typed"},
}
FULL: dict[str, dict[str, Any]] = {
    "1vsall, n3": {"train_type": "1vsall", "n3": 0.1},
    "1vsall, relation prediction": {"train_type": "1vsall", "relation_prediction": 0.5, "l3": 0.1},
    "kvsall, n3, l2 and l3": {"train_type": "kvsall", "n3": 0.1, "l2": 0.1, "l3": 0.1},
    "kvsall, two roles, both ways": {"train_type": "kvsall", "model": "cp", "n3": 0.1},
    "kvsall, a relation left free": {"train_type": "kvsall", "model": "quate", "n3": 0.1},
    "kvsall, bfloat16": {"train_type": "kvsall", "dtype": "bfloat16", "shard_relations": "always"},
    "kvsall, relations on their ranks": {"train_type": "kvsall", "shard_relations": "always"},
    "kvsall, heads by their own query": {"train_type": "kvsall", "corruption": "both-sides", "n3": 0.1},
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", [*SAMPLED, *FULL])
def test_an_update_is_that_of_the_whole_tables(name: str, world_size: int) -> None:
    job, tables, truth = truth_of(name)
    for found in recorded(job, tables, world_size):
        errors = relative_errors(found, truth)
        assert max(errors.values()) < EXACT, errors


@cache
def truth_of(name: str) -> tuple[Job, Tables, tuple[float, Tables]]:
    """Return a case of the above, from which tables, and its true loss and gradient."""
    job = small(**(SAMPLED | FULL)[name])
    tables = random_tables(job, scale=0.5)
    if job.config.dtype == "bfloat16":
        tables = Tables(as_bfloat16(tables.entities), as_bfloat16(tables.relations), tables.shared)
    return job, tables, plain_step(job, tables)


def as_bfloat16(values: Floats) -> Floats:
    return torch.from_numpy(values).bfloat16().double().numpy()


def fitting_dim(model: str) -> int:
    """ConvE's images need more than octonions do."""
    return 12 if model == "conve" else 8


BOTH_WAYS = [
    (model, corruption)
    for model in SCORING
    for corruption in ("reciprocal", "both-sides")
    if corruption == "reciprocal" or find_scoring(model).has_head_queries
]


@pytest.mark.parametrize(("model", "corruption"), BOTH_WAYS)
def test_an_update_of_every_model_is_that_of_the_whole_tables(model: str, corruption: str) -> None:
    n3 = {"n3": 0.1} if find_scoring(model).metric is DOT else {}
    errors = errors_of(small(model=model, dim=fitting_dim(model), corruption=corruption, **n3), 3)
    assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize(
    "changed",
    [
        {"n3": 0.0},
        {"relation_prediction": 0.0},
        {"chunk_size": 3},
        {"model": "distmult"},
        {"corruption": "both-sides"},
        {"seed": 4},
        {"loss": "bce"},
    ],
)
def test_every_term_of_an_update_counts(changed: dict[str, Any]) -> None:
    """Negative control: the comparison sees each term go."""
    job = small(model="complex", n3=0.1, relation_prediction=0.5, chunk_size=2, dim=8)
    tables = random_tables(job, scale=0.5)
    [found] = recorded(job, tables, 1)
    other = job.but(**changed)
    shape = random_tables(other, scale=0.5).relations.shape
    resized = Tables(tables.entities, np.resize(tables.relations, shape), tables.shared)
    loss, _ = plain_step(other, resized)
    assert abs(found.losses[0] - loss) > 1e-3


def complex_numbers(row: Floats) -> Any:
    return row[: len(row) // 2] + 1j * row[len(row) // 2 :]


def complex_score(h: Floats, r: Floats, t: Floats) -> Any:
    return np.sum(complex_numbers(h) * complex_numbers(r) * complex_numbers(t).conj()).real


PAPERS: dict[str, Any] = {
    "distmult": lambda h, r, t: np.sum(h * r * t),
    "complex": complex_score,
    "transe": lambda h, r, t: -np.linalg.norm(h + r - t),
    "rotate": lambda h, r, t: -np.linalg.norm(complex_numbers(h) * np.exp(1j * r) - complex_numbers(t)),
}


@pytest.mark.parametrize("corruption", ["reciprocal", "both-sides"])
@pytest.mark.parametrize("model", PAPERS)
def test_the_whole_tables_are_scored_as_the_papers_do(model: str, corruption: str) -> None:
    """Who is head and who is tail: (?, r, t) is (t, inverse of r, ?), or asked as it is."""
    job = small(model=model, corruption=corruption)
    tables = random_tables(job)
    values = Values.of(job, tables)
    h, r, t = 3, 1, 5
    rows, relations = tables.entities, tables.relations
    score = PAPERS[model]
    tails = [score(rows[h], relations[r], candidate) for candidate in rows]
    np.testing.assert_allclose(values.scores("tail", h, r).detach(), tails, rtol=1e-9)
    if corruption == "reciprocal":
        heads = [score(rows[t], relations[r + 2], candidate) for candidate in rows]
        np.testing.assert_allclose(values.scores("head", t, r + 2).detach(), heads, rtol=1e-9)
    else:
        heads = [score(candidate, relations[r], rows[t]) for candidate in rows]
        np.testing.assert_allclose(values.scores("head", t, r).detach(), heads, rtol=1e-9)


# --- edges


def test_negatives_that_are_all_the_answer_are_no_negatives() -> None:
    job = Job(np.array([[0, 0, 0]]), 1, 1, {"model": "distmult", "optimizer": "sgd"}, num_steps=1)
    tables = random_tables(job)
    for loss, after in ThreadWorld(2).run(one_step_from, job, tables):
        assert loss == 0.0
        assert np.array_equal(after.flat(), tables.flat())


@pytest.mark.parametrize("model", SCORING)
def test_a_table_of_equal_rows_trains_without_nan(model: str) -> None:
    """All distances are 0, where a norm has no gradient."""
    job = small(model=model, dim=fitting_dim(model), optimizer="sgd")
    drawn = random_tables(job)
    zero = Tables(drawn.entities * 0, drawn.relations * 0, drawn.shared)
    for loss, after in ThreadWorld(2).run(one_step_from, job, zero):
        assert loss == pytest.approx(math.log(9), abs=0.6)
        assert np.isfinite(after.flat()).all()


@pytest.mark.parametrize("train_type", ["negative-sampling", "1vsall", "kvsall"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_that_is_nan_stops_every_rank_before_any_update(world_size: int, train_type: str) -> None:
    job = random_job(model="distmult", train_type=train_type, batch_size=1000)
    bad_row = int(job.triples[0, 0])
    outcomes = ThreadWorld(world_size).run(step_from_nan, job, bad_row)
    users = ranks_that_score(bad_row, job, world_size)
    words = f"NonFiniteError: loss is nan at step 0 ({users}); lower --lr"
    assert outcomes == [(words, True)] * world_size


def test_a_loss_that_is_nan_names_only_the_ranks_whose_it_is() -> None:
    job = random_job(model="distmult", batch_size=1000, negatives=1)
    everywhere = "ranks 0, 1, 2"
    named = {row: ranks_that_score(row, job, 3) for row in range(job.num_entities)}
    row = next(row for row, ranks in named.items() if ranks != everywhere)
    outcomes = ThreadWorld(3).run(step_from_nan, job, row)
    assert {words for words, _ in outcomes} == {
        f"NonFiniteError: loss is nan at step 0 ({named[row]}); lower --lr"
    }


@pytest.mark.parametrize("train_type", ["negative-sampling", "1vsall"])
def test_a_gradient_that_is_infinite_stops_every_rank_even_where_the_loss_is_finite(train_type: str) -> None:
    """Of the score h r t = 1e-10 * -1e20 * 1e20 the derivative by h is beyond float32."""
    job = Job(np.array([[0, 0, 1]]), 3, 1, {"model": "distmult", "dim": 1, "train_type": train_type})
    tables = Tables(np.array([[1e-10], [1e20], [0.0]]), np.array([[-1e20], [1e-30]]), {})
    with pytest.raises(NonFiniteError, match=r"^a gradient is not finite at step 0 \(rank 0\); lower --lr$"):
        ThreadWorld(1).run(one_step_from, job, tables)


def ranks_that_score(row: int, job: Job, world_size: int) -> str:
    """Return the ranks whose questions of step 0 meet an entity, as an error names them."""
    batches = [
        next(build_sampler(exchange, job.link_model, job.triples, job.config).epoch(0))
        for exchange in ThreadWorld(world_size).run(itself)
    ]
    ranks = [
        rank
        for rank, batch in enumerate(batches)
        if batch.labels is not None
        or row in torch.cat([batch.mine.anchors, batch.mine.answers, *(part.ids for part in batch.negatives)])
    ]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def itself(exchange: Exchange) -> Exchange:
    return exchange


# --- accumulate


@pytest.mark.parametrize("train_type", ["1vsall", "kvsall"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_three_batches_of_four_are_one_of_twelve(train_type: str, world_size: int) -> None:
    """Where all entities are candidates, nothing else depends on the batch."""
    apart = random_job(12, 9, num_steps=3, batch_size=4, accumulate=3, train_type=train_type, n3=0.1)
    together = Job(apart.triples, 9, 3, apart.settings | {"batch_size": 12, "accumulate": 1}, num_steps=1)
    tables = random_tables(apart, scale=0.5)
    [truth] = recorded(together, tables, 1)
    for found in recorded(apart, tables, world_size):
        assert max(relative_errors(found, (truth.losses[0], truth.gradients)).values()) < EXACT
        assert [len(rates) for rates in found.rates] == [1] * len(found.rates)


@pytest.mark.parametrize("world_size", [1, 3])
def test_accumulated_samples_are_averaged_over_all_questions_of_the_update(world_size: int) -> None:
    job = random_job(12, 9, num_steps=3, batch_size=4, accumulate=3, model="tucker", relation_prediction=0.1)
    errors = errors_of(job, world_size)
    assert max(errors.values()) < EXACT, errors


def test_nothing_changes_before_the_last_batch_of_an_update() -> None:
    job = random_job(12, 9, batch_size=4, accumulate=3, model="tucker", optimizer="sgd")
    start, *after = (
        ThreadWorld(2).run(train, Job(job.triples, 9, 3, job.settings, num_steps=steps))[0].tables.flat()
        for steps in range(4)
    )
    assert [np.array_equal(tables, start) for tables in after] == [True, True, False]


# --- clipping


@pytest.mark.parametrize(("accumulate", "shard_relations"), [(1, "never"), (3, "never"), (1, "always")])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_too_long_over_all_parameters_and_ranks_is_scaled_down(
    world_size: int, accumulate: int, shard_relations: str
) -> None:
    """Rows of all ranks, and what every rank holds, make one vector."""
    job = random_job(
        12,
        9,
        num_steps=accumulate,
        batch_size=4,
        accumulate=accumulate,
        shard_relations=shard_relations,
        model="tucker",
        dim=4,
    )
    tables = random_tables(job)
    _, gradients = plain_step(job, tables)
    length = float(np.linalg.norm(gradients.flat()))
    for limit in (0.3 * length, 3.0 * length):
        factor = min(1.0, limit / length)
        for found in recorded(job.but(clip_norm=limit), tables, world_size):
            np.testing.assert_allclose(
                found.gradients.flat(), factor * gradients.flat(), rtol=0, atol=1e-6 * length
            )


def test_a_gradient_of_nothing_is_not_divided_by() -> None:
    job = Job(np.array([[0, 0, 0]]), 1, 1, {"model": "distmult", "clip_norm": 0.5}, num_steps=1)
    [found] = recorded(job, random_tables(job), 1)
    assert not found.gradients.flat().any()


# --- rows too long


@pytest.mark.parametrize("train_type", ["negative-sampling", "1vsall"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_touched_entity_rows_are_never_longer_than_allowed(world_size: int, train_type: str) -> None:
    """Shorter ones, rows that no question touched, and relations stay as they are."""
    job = random_job(8, 40, num_steps=1, model="distmult", optimizer="sgd", train_type=train_type)
    tables = random_tables(job)
    allowed = float(np.median(np.linalg.norm(tables.entities, axis=1)))
    free = ThreadWorld(1).run(one_step_from, job, tables)[0][1]
    touched = np.abs(recorded(job, tables, 1)[0].gradients.entities).max(axis=1) > 0
    assert touched.all() == (train_type == "1vsall")
    lengths = np.linalg.norm(free.entities, axis=1, keepdims=True)
    factors = np.where(touched[:, None], np.minimum(1, allowed / lengths), 1.0)
    assert 5 < (factors < 1).sum() < 35
    for _, found in ThreadWorld(world_size).run(one_step_from, job.but(max_norm=allowed), tables):
        np.testing.assert_allclose(found.entities, factors * free.entities, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.relations, free.relations, rtol=1e-6, atol=1e-7)


def test_bfloat16_rows_are_no_longer_than_allowed_either() -> None:
    """Rounded to the nearest, half of the shortened rows would be."""
    job = random_job(8, 40, num_steps=3, model="distmult", lr=1.0, max_norm=1.0, dtype="bfloat16")
    rows = ThreadWorld(2).run(train, job)[0].tables.entities
    lengths = np.linalg.norm(rows, axis=1)
    assert lengths.max() <= 1
    assert (lengths > 0.98).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_row_is_longer_than_allowed_even_before_any_question_touched_it(dtype: str) -> None:
    job = random_job(8, 40, model="transe", max_norm=0.5, dtype=dtype)
    rows = ThreadWorld(2).run(first_tables, job)[0].entities
    assert 0.49 < np.linalg.norm(rows, axis=1).max() <= 0.5 + 1e-6
    free = ThreadWorld(1).run(first_tables, job.but(max_norm=0.0))[0].entities
    assert np.linalg.norm(free, axis=1).max() > 0.5


# --- learning rates


def test_every_optimizer_takes_the_rate_of_the_update() -> None:
    """Warm-up by equal parts over 3 updates, then linear towards a tenth at update 8, the first not made."""
    settings: dict[str, Any] = {"lr": 0.5, "warmup": 3, "decay": "linear", "final_lr": 0.1, "accumulate": 2}
    job = random_job(32, 9, num_steps=16, batch_size=2, model="tucker", dim=4, **settings)
    expected = [0.5 * factor for factor in (1 / 3, 2 / 3, 1, 1, 0.82, 0.64, 0.46, 0.28)]
    [found] = recorded(job, random_tables(job), 1)
    assert len(found.rates) == 3
    for rates in found.rates:
        assert rates == pytest.approx(expected, rel=1e-12)


# --- dropout


def masks(job: Job, world_size: int, tables: Tables) -> list[dict[int, Floats]]:
    """Return, for each step, by which factors the coordinates of each place's query were multiplied."""
    found: list[dict[int, Floats]] = [{} for _ in range(job.num_steps)]
    whole = ThreadWorld(1).run(queries_by_place, job.but(dropout=0.0), tables)[0]
    for rank in ThreadWorld(world_size).run(queries_by_place, job, tables):
        for step, queries in enumerate(rank):
            found[step] |= {place: query / whole[step][place] for place, query in queries.items()}
    return found


def test_dropout_zeroes_a_share_of_coordinates_and_keeps_the_mean() -> None:
    job = random_job(60, 40, num_steps=3, train_type="kvsall", batch_size=30, dropout=0.3, dim=40)
    factors = [np.stack(list(step.values())) for step in masks(job, 1, random_tables(job))]
    drawn = np.concatenate(factors)
    np.testing.assert_allclose(drawn[drawn != 0], 1 / 0.7, rtol=1e-5)
    dropped, sigma = (drawn == 0).mean(), math.sqrt(0.3 * 0.7 / drawn.size)
    assert abs(dropped - 0.3) < 5 * sigma
    assert abs(drawn.mean() - 1) < 5 * sigma / 0.7
    assert not np.array_equal(factors[0], factors[1])
    assert len(np.unique(drawn, axis=0)) == len(drawn)


@pytest.mark.parametrize("train_type", ["1vsall", "kvsall"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_question_loses_the_same_coordinates_at_any_world_size(train_type: str, world_size: int) -> None:
    job = random_job(20, 9, num_steps=2, train_type=train_type, batch_size=7, dropout=0.5)
    tables = random_tables(job)
    for alone, together in zip(masks(job, 1, tables), masks(job, world_size, tables), strict=True):
        assert sorted(alone) == sorted(together)
        for place, factors in alone.items():
            np.testing.assert_allclose(together[place], factors, rtol=1e-5)


# --- bfloat16


@cache
def in_bfloat16(world_size: int, **settings: Any) -> Trained:
    job = random_job(dtype="bfloat16", optimizer="adam", lr=0.02, num_steps=15, model="complex", **settings)
    trained: Trained = ThreadWorld(world_size).run(train, job)[0]
    return trained


def test_a_seed_repeats_a_bfloat16_training_to_the_bit() -> None:
    job = random_job(dtype="bfloat16", optimizer="adam", lr=0.02, num_steps=15, model="complex")
    first, again = in_bfloat16(1), ThreadWorld(1).run(train, job)[0]
    assert np.array_equal(first.tables.flat(), again.tables.flat())
    assert np.array_equal(first.tables.flat(), as_bfloat16(first.tables.flat()))
    assert first.losses[-1] < first.losses[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_bfloat16_tables_agree_at_any_world_size(world_size: int) -> None:
    """Random bits are those of the global row. A sum in another order may now and then round elsewhere."""
    alone, together = in_bfloat16(1), in_bfloat16(world_size)
    np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-3)
    assert (together.tables.flat() == alone.tables.flat()).mean() > 0.98


def test_other_random_bits_are_noticed() -> None:
    """Negative control: as many values differ as rounding touches, where bits are those of another seed."""
    alone, nearest = in_bfloat16(1), in_bfloat16(1, rounding="nearest")
    assert (nearest.tables.flat() == alone.tables.flat()).mean() < 0.9


# --- half the bytes between ranks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rounded_rows_and_gradients_train_alike_at_any_world_size(world_size: int, dtype: str) -> None:
    """Rows that stay on a rank are rounded too; only what ranks add up for one row is rounded apart."""
    job = random_job(exchange_dtype=dtype, num_steps=10, model="complex", lr=0.02)
    alone, together = (ThreadWorld(size).run(train, job)[0] for size in (1, world_size))
    exact = ThreadWorld(1).run(train, job.but(exchange_dtype="float32"))[0]
    np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-4)
    np.testing.assert_allclose(alone.losses, exact.losses, rtol=1e-2)
    assert alone.losses != exact.losses
    assert together.losses[-1] < together.losses[0]


# --- every setting takes effect

BESIDE: dict[str, dict[str, Any]] = {
    "margin": {"loss": "margin", "init_scale": 50.0},
    "adversarial_temperature": {"loss": "self-adversarial"},
    "label_smoothing": {"loss": "bce"},
    "final_lr": {"decay": "linear"},
    "rounding": {"dtype": "bfloat16"},
    "filter_negatives": {"negatives": 100},
}
"""What a setting needs to have an effect, beside the defaults."""
OTHER_VALUES: dict[str, Any] = {
    "model": "distmult",
    "dim": 6,
    "corruption": "both-sides",
    "init_scale": 2.0,
    "batch_size": 8,
    "accumulate": 2,
    "train_type": "1vsall",
    "loss": "bce",
    "negatives": 9,
    "negatives_from": "degree",
    "chunk_size": 4,
    "filter_negatives": True,
    "margin": 2.0,
    "adversarial_temperature": 3.0,
    "label_smoothing": 0.3,
    "relation_prediction": 0.5,
    "n3": 0.1,
    "l2": 0.1,
    "l3": 0.1,
    "dropout": 0.3,
    "max_norm": 0.05,
    "optimizer": "adam",
    "lr": 0.2,
    "warmup": 3,
    "decay": "cosine",
    "final_lr": 0.5,
    "clip_norm": 1e-3,
    "dtype": "bfloat16",
    "exchange_dtype": "bfloat16",
    "rounding": "nearest",
    "seed": 4,
}
ELSEWHERE = {
    *("epochs", "steps", "eval_every", "eval_steps", "eval", "eval_sample", "patience"),  # test_training.py
    "move",  # test_moved_queries.py
    "table_storage",  # test_mapped.py
    *("shard_relations", "device", "optimizer_device", "transport"),  # They change where and how, not what.
    "save_optimizer",  # test_optimizer_state.py
}


def test_every_setting_is_changed_here_or_elsewhere() -> None:
    assert set(OTHER_VALUES) | ELSEWHERE == {field.name for field in fields(TrainConfig)} == set(DEFAULTS)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_setting_takes_effect(name: str) -> None:
    job = random_job(num_steps=6, **BESIDE.get(name, {}))
    before = ThreadWorld(1).run(train, job)[0].tables.flat()
    after = ThreadWorld(1).run(train, job.but(**{name: OTHER_VALUES[name]}))[0].tables.flat()
    assert before.shape != after.shape or np.abs(before - after).max() > 1e-4
