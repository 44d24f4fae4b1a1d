"""Gradients of parameters that every rank holds are summed; see test_sharded_model for how they start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_models import Stranger, sharded, some_gradients
from torch import nn
from worlds import GlooPool, ThreadWorld

from kgshard.errors import ConfigError
from kgshard.exchange import Exchange, SingleExchange
from kgshard.sharded_model.dense import has_foreign_shards
from kgshard.sharded_model.lifecycle import create_fsdp_sharded_model_class

WHO_HAS: list[list[list[int]]] = [
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]],
    [[0], [1], [2]],
    [[], [1], [1]],
    [[], [], []],
]
"""[case][rank]: which of three parameters get a gradient there, of 1, 10 and 100."""


def assert_sums(outcomes: Sequence[list[torch.Tensor | None]], who_has: Sequence[Sequence[int]]) -> None:
    for number in range(3):
        holders = [rank for rank, having in enumerate(who_has) if number in having]
        for outcome in outcomes:
            gradient = outcome[number]
            if holders:
                assert gradient is not None
                assert gradient.unique().tolist() == [sum(10.0**rank for rank in holders)]
            else:
                assert gradient is None


@pytest.mark.parametrize("who_has", WHO_HAS, ids=str)
def test_gradients_are_summed_and_none_stays_none(who_has: list[list[int]]) -> None:
    assert_sums(ThreadWorld(3).run(some_gradients, who_has), who_has)


@pytest.mark.processes
def test_gloo_ranks_sum_gradients(gloo_pool: GlooPool, tmp_path: Path) -> None:
    assert_sums(gloo_pool.run(3, tmp_path, some_gradients, WHO_HAS[1]), WHO_HAS[1])


def counted_calls(exchange: Exchange) -> int:
    model = sharded(exchange, Stranger())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = exchange._num_calls
    model.sync_dense_gradients()
    assert model.entity_embeddings.weight.grad.unique().tolist() == [1]
    return exchange._num_calls - before


def test_one_sum_does_for_all_parameters_but_the_entity_rows() -> None:
    assert ThreadWorld(2).run(counted_calls) == [1, 1]


def test_frozen_parameters_are_left_out() -> None:
    model = sharded(SingleExchange(), Stranger())
    model.mix.requires_grad_(False)
    model.relation_embeddings.weight.grad = torch.ones(3, 4)
    model.sync_dense_gradients()
    assert model.mix.weight.grad is None
    for parameter in model.dense_parameters():
        parameter.requires_grad_(False)
    model.sync_dense_gradients()


def test_sparse_gradients_are_refused_by_name() -> None:
    model = sharded(SingleExchange(), Stranger())
    model.relation_embeddings.sparse = True
    model.relation_embeddings(torch.tensor([1])).sum().backward()
    words = "relation_embeddings.weight has a sparse gradient; make that embedding with sparse=False"
    with pytest.raises(ConfigError, match=words):
        model.sync_dense_gradients()


class ComplexStranger(Stranger):
    """Keeps a phase as complex numbers."""

    def __init__(self, num_entities: int = 7, dim: int = 4, frozen: bool = False) -> None:
        super().__init__(num_entities, dim)
        phase = torch.ones(2, dtype=torch.complex64)
        self.phase = nn.Parameter(phase, requires_grad=not frozen)


@pytest.mark.parametrize("world_size", [1, 2])
def test_complex_parameters_are_refused_at_setup_unless_frozen(world_size: int) -> None:
    def setup(exchange: Exchange, frozen: bool) -> str:
        model: Any = create_fsdp_sharded_model_class(ComplexStranger)(frozen=frozen)
        try:
            model.setup_fsdp_training("cpu", 0.1, exchange=exchange)
        except ConfigError as error:
            return str(error)
        model.sync_dense_gradients()
        return "accepted"

    words = "phase is torch.complex64, whose gradients are not summed over ranks; keep it as real numbers and"
    for outcome in ThreadWorld(world_size).run(setup, False):
        assert outcome.startswith(words)
    assert ThreadWorld(world_size).run(setup, True) == ["accepted"] * world_size


class Managed(nn.Linear):
    """Bears the mark that FSDP leaves."""

    _is_fsdp_managed_module = True


def test_what_fsdp_manages_is_left_to_it() -> None:
    model = sharded(SingleExchange(), Stranger())
    assert not has_foreign_shards(model)
    model.more = Managed(2, 2)
    assert has_foreign_shards(model)
    with pytest.raises(
        ConfigError, match="FSDPStranger: FSDP reduces the gradients of these parameters itself"
    ):
        model.sync_dense_gradients()
