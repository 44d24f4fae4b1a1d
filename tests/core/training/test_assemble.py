"""From settings to what is trained: where rows lie, how they begin, who updates them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from training_functions import Job, assembled, first_tables, random_job
from worlds import ThreadWorld

import kgshard.training.assemble
from kgshard.exchange import Exchange, SingleExchange
from kgshard.models import SCORING
from kgshard.optim import OPTIMIZERS
from kgshard.partition import RowPartition
from kgshard.table import ShardedTable, held_rows
from kgshard.training.batches import QuestionSampler, TripleSampler
from kgshard.training.full_losses import FullBinaryCrossEntropy, FullSoftmax
from kgshard.training.losses import BinaryCrossEntropy, Margin, SelfAdversarial, Softmax


@pytest.mark.parametrize("settings", [{}, {"shard_relations": "always"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("model", ["complex", "mure", "conve", "tucker"])
def test_values_begin_the_same_on_any_world(model: str, settings: dict[str, Any]) -> None:
    job = random_job(5, 10, model=model, dim=12, **settings)
    [alone] = ThreadWorld(1).run(first_tables, job)
    for tables in ThreadWorld(3).run(first_tables, job):
        assert np.array_equal(tables.flat(), alone.flat())
    assert not np.array_equal(alone.flat(), ThreadWorld(1).run(first_tables, job.but(seed=9))[0].flat())


@pytest.mark.parametrize("model", SCORING)
def test_the_spread_of_rows_is_scaled_and_their_center_is_not(model: str) -> None:
    """Twice as far from the center: x' - c = 2 (x - c), for every value."""
    job = random_job(5, 10, model=model, dim=12 if model == "conve" else 8)
    one, two, four = (
        ThreadWorld(1).run(first_tables, job.but(init_scale=scale))[0] for scale in (1.0, 2.0, 4.0)
    )
    for rows in ("entities", "relations"):
        near, far, farther = (getattr(tables, rows) for tables in (one, two, four))
        np.testing.assert_allclose(farther - far, 2 * (far - near), rtol=1e-4, atol=1e-6)
    for name, values in one.shared.items():
        assert np.array_equal(two.shared[name], values)


# --- where relations lie


def relation_rows_of(exchange: Exchange, job: Job) -> tuple[bool, int]:
    """Return whether relations are sharded, and how many rows are held here."""
    relations = assembled(exchange, job)[1].parameters.relations
    return isinstance(relations, ShardedTable), len(held_rows(relations))


def test_relations_lie_on_every_rank_or_are_cut() -> None:
    job = random_job(5, 10, num_relations=4)
    assert ThreadWorld(3).run(relation_rows_of, job) == [(False, 8)] * 3
    assert ThreadWorld(3).run(relation_rows_of, job.but(shard_relations="never")) == [(False, 8)] * 3
    partition = RowPartition(8, 3)
    expected = [(True, len(partition.rows_of(rank))) for rank in range(3)]
    assert ThreadWorld(3).run(relation_rows_of, job.but(shard_relations="always")) == expected


def test_only_large_relation_tables_are_cut_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows of eight float32 numbers are 256 bytes. Predicting relations needs them everywhere."""
    job = random_job(5, 10, num_relations=4, dim=8, model="complex")
    for limit, cut in ((256, False), (255, True)):
        monkeypatch.setattr(kgshard.config, "LARGE_BYTES", limit)
        assert job.config.shards_relations(job.link_model) == cut
    assert not job.but(dtype="bfloat16").config.shards_relations(job.link_model)
    assert not job.but(relation_prediction=0.1).config.shards_relations(job.link_model)
    assert not job.but(shard_relations="never").config.shards_relations(job.link_model)


# --- what settings choose


@pytest.mark.parametrize(
    ("settings", "sampler", "loss"),
    [
        ({}, TripleSampler, Softmax),
        ({"loss": "margin"}, TripleSampler, Margin),
        ({"loss": "self-adversarial"}, TripleSampler, SelfAdversarial),
        ({"loss": "bce"}, TripleSampler, BinaryCrossEntropy),
        ({"train_type": "1vsall"}, TripleSampler, FullSoftmax),
        ({"train_type": "1vsall", "loss": "bce"}, TripleSampler, FullBinaryCrossEntropy),
        ({"train_type": "kvsall"}, QuestionSampler, FullSoftmax),
        ({"train_type": "kvsall", "loss": "bce"}, QuestionSampler, FullBinaryCrossEntropy),
    ],
)
def test_a_kind_of_training_has_its_sampler_and_its_loss(
    settings: dict[str, Any], sampler: type, loss: type
) -> None:
    cutter, trainer = assembled(SingleExchange(), random_job(5, 10, **settings))
    assert type(cutter) is sampler
    assert type(trainer.objective.loss) is loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_has_an_optimizer_of_its_own_with_the_rows_it_holds(name: str, dtype: str) -> None:
    """Global rows and purposes tell their random bits apart. Shared parameters stay float32."""
    job = random_job(5, 10, model="tucker", optimizer=name, dtype=dtype, shard_relations="always")
    expected = getattr(torch, dtype)
    for rank, found in enumerate(ThreadWorld(3).run(describe_optimizers, job)):
        entities, relations, core = found
        assert entities == (name, expected, RowPartition(10, 3).rows_of(rank).start, "entity")
        assert relations == (name, expected, RowPartition(6, 3).rows_of(rank).start, "relation")
        assert core == (name, torch.float32, 0, "core")


def describe_optimizers(exchange: Exchange, job: Job) -> list[tuple[str, torch.dtype, int, str]]:
    trainer = assembled(exchange, job)[1]
    optimizers = trainer.optimizers
    parameters = [trainer.parameters.entities.weight, held_rows(trainer.parameters.relations)]
    parameters += trainer.parameters.shared.values()
    every = [optimizers.entities, optimizers.relations, *optimizers.shared.values()]
    names = {kind: name for name, kind in OPTIMIZERS.items()}
    assert all(one.weight is weight for one, weight in zip(every, parameters, strict=True))
    assert all(one.weight.dtype == one.state_dtype for one in every)
    return [(names[type(one)], one.state_dtype, one.first_row, one.table) for one in every]
