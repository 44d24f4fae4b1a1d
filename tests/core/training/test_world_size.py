"""The number of ranks is invisible: the same losses and the same tables, whatever is trained and how.

What one update must be is in test_trainer.py; here it is that many of them agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_functions import swapped_rows
from torch import Tensor
from training_functions import Job, Trained, random_job, train
from worlds import GlooPool, ThreadWorld

import kgshard.table
import kgshard.training.trainer
from kgshard.config import TrainConfig
from kgshard.models import SCORING
from kgshard.optim import OPTIMIZERS
from kgshard.partition import RowPartition
from kgshard.routing import Route, RowGradient, plan_route, sum_by_row
from kgshard.training.negatives import SOURCES

SPOILT = "complex"
"""The case that negative controls spoil."""
FIGURES = {
    "distmult": random_job(model="distmult"),
    "complex": random_job(model="complex"),
    "transe": random_job(model="transe"),
}
"""50 steps on worlds of 2, 3 and 4."""
EDGES = {
    "fewer entities than ranks": random_job(9, 3, model="complex", corruption="both-sides"),
    "one relation": random_job(num_relations=1, model="rotate", corruption="both-sides"),
    "a last batch smaller than the world": random_job(17, model="complex"),
}
"""50 steps on four ranks."""


def short(number: int = 75, num_entities: int = 40, **settings: Any) -> Job:
    return random_job(number, num_entities, num_steps=10, **settings)


MODELS: dict[str, dict[str, Any]] = {
    "conve": {"dim": 12},
    # Under softmax a query's own constant has no gradient but rounding's, which Adagrad makes a full step.
    "mure": {"loss": "bce"},
}
"""What models need to be compared."""
VARIATIONS = {
    **{f"model {model}": short(model=model, **MODELS.get(model, {})) for model in SCORING},
    "heads by their own query": short(model="rotate", corruption="both-sides"),
    "sides that differ": short(model="mure", corruption="both-sides", loss="bce", chunk_size=5),
    **{
        f"{train_type}, {loss}": short(train_type=train_type, loss=loss, model=model)
        for train_type, model in (("1vsall", "complex"), ("kvsall", "transe"))
        for loss in ("softmax", "bce")
    },
    "kvsall, both sides, smoothed": short(train_type="kvsall", corruption="both-sides", label_smoothing=0.1),
    "1vsall, shared parameters": short(train_type="1vsall", model="tucker", relation_prediction=0.2),
    "kvsall, an image": short(train_type="kvsall", model="conve", dim=12, loss="bce"),
    "self-adversarial": short(loss="self-adversarial", model="rotate", margin=2.0),
    "margin": short(loss="margin", model="transe"),
    "bce": short(loss="bce", label_smoothing=0.1),
    **{f"negatives from {source}": short(negatives_from=source, chunk_size=5) for source in SOURCES},
    "queries go to negatives' rows": short(move="queries", negatives_from="degree", filter_negatives=True),
    "filtered negatives": short(num_entities=12, filter_negatives=True, negatives=20),
    "regularised": short(n3=0.05, l2=0.01, l3=0.01),
    "regularised, kvsall": short(n3=0.05, train_type="kvsall", corruption="both-sides"),
    "relation prediction": short(relation_prediction=0.3, corruption="both-sides"),
    "dropout": short(dropout=0.3, corruption="both-sides"),
    "dropout, kvsall": short(dropout=0.3, train_type="kvsall"),
    "clipped": short(clip_norm=0.01, model="keci"),
    "rows of limited length": short(max_norm=0.5),
    "accumulated": short(accumulate=3, batch_size=8, model="tucker"),
    "accumulated and clipped": short(accumulate=2, batch_size=8, train_type="1vsall", clip_norm=0.01),
    "relations on their ranks": short(shard_relations="always", model="conve", dim=12),
    "relations on their ranks, accumulated and clipped": short(
        shard_relations="always", train_type="kvsall", accumulate=2, clip_norm=0.01, max_norm=0.5
    ),
    "warm-up and decay": short(warmup=5, decay="cosine", final_lr=0.1),
    **{f"optimizer {name}": short(optimizer=name, model="keci", init_scale=50.0) for name in OPTIMIZERS},
    "one entity": short(2, 1, model="distmult"),
    "batches smaller than the world": short(9, model="rotate", batch_size=2),
    "one triple": short(1, model="transe"),
    "one negative": short(negatives=1, model="distmult"),
}
"""10 steps on three ranks."""
CASES = FIGURES | EDGES | VARIATIONS
COMPARED = [
    *((name, world_size) for name in FIGURES for world_size in (2, 3, 4)),
    *((name, 4) for name in EDGES),
    *((name, 3) for name in VARIATIONS),
]


@cache
def on_one_rank(name: str) -> Trained:
    result: Trained = ThreadWorld(1).run(train, CASES[name])[0]
    return result


def assert_same_training(worlds: list[Trained], truth: Trained) -> None:
    """Assert that every rank's losses and tables are those of one rank."""
    for trained in worlds:
        np.testing.assert_allclose(trained.losses, truth.losses, rtol=1e-5)
        np.testing.assert_allclose(trained.tables.flat(), truth.tables.flat(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "world_size"), COMPARED)
def test_any_world_trains_as_one_rank_does(name: str, world_size: int) -> None:
    truth = on_one_rank(name)
    assert len(truth.losses) == (10 if name in VARIATIONS else 50)
    assert_same_training(ThreadWorld(world_size).run(train, CASES[name]), truth)


@pytest.mark.parametrize("name", CASES)
def test_every_case_really_trains(name: str) -> None:
    """Parity of a training that does nothing would say nothing."""
    one, none = on_one_rank(name), ThreadWorld(1).run(train, replace(CASES[name], num_steps=0))[0]
    assert all(math.isfinite(loss) for loss in one.losses)
    if CASES[name].num_entities > 1:
        assert np.abs(one.tables.entities - none.tables.entities).max() > 0.02
        assert np.abs(one.tables.relations - none.tables.relations).max() > 0.02
    for shared, values in one.tables.shared.items():
        assert np.abs(values - none.tables.shared[shared]).max() > 1e-3


def test_everything_that_can_be_chosen_is_compared() -> None:
    configs = [job.config for job in CASES.values()]
    assert {config.model for config in configs} == set(SCORING)
    assert {config.optimizer for config in configs} == set(OPTIMIZERS)
    assert {config.negatives_from for config in configs} == set(SOURCES)
    default = TrainConfig()
    for name in ("relation_prediction", "dropout", "clip_norm", "max_norm", "accumulate", "chunk_size"):
        assert any(getattr(config, name) != getattr(default, name) for config in configs), name


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("a last batch smaller than the world", 3),
        ("accumulated and clipped", 2),
        ("1vsall, shared parameters", 2),
        ("dropout, kvsall", 3),
        ("relations on their ranks, accumulated and clipped", 2),
    ],
)
def test_gloo_ranks_train_as_one_rank_does(
    gloo_pool: GlooPool, tmp_path: Path, name: str, world_size: int
) -> None:
    assert_same_training(gloo_pool.run(world_size, tmp_path, train, CASES[name]), on_one_rank(name))


# --- negative controls


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
    """The same assertion fails when rows go astray on two ranks."""
    truth = on_one_rank(SPOILT)
    monkeypatch.setattr(kgshard.table, "plan_route", wrong_route)
    with pytest.raises((AssertionError, IndexError)):
        assert_same_training(ThreadWorld(2).run(train, CASES[SPOILT]), truth)


def wrong_sum(rows: Tensor, values: Tensor) -> RowGradient:
    return swapped_rows(sum_by_row(rows, values))


@pytest.mark.parametrize(
    ("module", "name"), [(kgshard.table, "complex"), (kgshard.training.trainer, "accumulated")]
)
def test_gradients_gone_astray_are_noticed(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """The same assertion fails when two rows' gradients are swapped, on the way or when they are added up."""
    truth = on_one_rank(name)
    monkeypatch.setattr(module, "sum_by_row", wrong_sum)
    with pytest.raises(AssertionError):
        assert_same_training(ThreadWorld(2).run(train, CASES[name]), truth)


@pytest.mark.parametrize("changed", [{"seed": 4}, {"lr": 0.1001}, {"n3": 1e-3}, {"batch_size": 17}])
def test_another_training_is_noticed(changed: dict[str, float]) -> None:
    """The tolerances are narrow enough to see a small change of settings."""
    with pytest.raises(AssertionError):
        assert_same_training(ThreadWorld(1).run(train, CASES[SPOILT].but(**changed)), on_one_rank(SPOILT))
