"""Scores against all entities of a sharded table are those of the whole table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharded_models import (
    NUM_RELATIONS,
    DistanceStranger,
    DropoutStranger,
    EarlyStumbler,
    Ints,
    LateStumbler,
    NarrowStranger,
    RestlessStranger,
    SoftmaxStranger,
    Stranger,
    attributes_after_scoring,
    dropped_scores,
    k_vs_all_gradients,
    refusal_of_all,
    scores_of_all,
    sharded,
)
from torch import nn
from worlds import GlooPool, ThreadWorld

import kgshard.sharded_model.k_vs_all
from kgshard.errors import ConfigError, RankFailureError
from kgshard.sharded_model.lifecycle import create_fsdp_sharded_model_class


def queries(world_size: int, num_entities: int) -> list[Ints]:
    """Return int64[B, 2] heads and relations for each rank: 3 for the first, 2, 1, and then none."""
    source = np.random.default_rng(2)
    return [
        np.stack([source.integers(0, num_entities, size), source.integers(0, NUM_RELATIONS, size)], axis=1)
        for size in (max(0, 3 - rank) for rank in range(world_size))
    ]


def whole_scores(model: Stranger, pairs: Ints) -> torch.Tensor:
    return model.forward_k_vs_all(torch.from_numpy(pairs))


@pytest.mark.parametrize("model_class", [Stranger, DistanceStranger])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_entities", [2, 7])
@pytest.mark.parametrize(("block_rows", "training"), [(1, False), (3, False), (100, False), (1, True)])
def test_scores_are_those_of_the_whole_table(
    model_class: type[Stranger],
    world_size: int,
    num_entities: int,
    block_rows: int,
    training: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two entities on three ranks or more: some have no rows; and some have no queries."""
    monkeypatch.setattr(kgshard.sharded_model.k_vs_all, "_BLOCK_ROWS", block_rows)
    model, pairs = model_class(num_entities), queries(world_size, num_entities)

    def run(exchange: Any) -> torch.Tensor:
        return scores_of_all(exchange, model, pairs, training=training)

    for scores, mine in zip(ThreadWorld(world_size).run(run), pairs, strict=True):
        assert scores.shape == (len(mine), num_entities)
        torch.testing.assert_close(scores, whole_scores(model, mine).detach())


def assert_gradients(run: Callable[..., list[dict[str, torch.Tensor]]], world_size: int, size: int) -> None:
    """Assert that the ranks' gradients are those of the whole table under all ranks' queries."""
    model, pairs = DistanceStranger(size), queries(world_size, size)
    source = np.random.default_rng(3)
    weights = [source.normal(size=(len(mine), size)) for mine in pairs]
    outcomes = run(k_vs_all_gradients, model, pairs, weights)
    scores = whole_scores(model, np.concatenate(pairs))
    (scores * torch.from_numpy(np.concatenate(weights)).float()).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for outcome in outcomes[:1] if "entity" in name else outcomes:
            torch.testing.assert_close(outcome[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_entities", [2, 7])
def test_gradients_are_those_of_the_whole_table(world_size: int, num_entities: int) -> None:
    assert_gradients(ThreadWorld(world_size).run, world_size, num_entities)


@pytest.mark.processes
def test_gloo_ranks_score_and_learn_alike(gloo_pool: GlooPool, tmp_path: Path) -> None:
    def run(*call: Any) -> list[Any]:
        return gloo_pool.run(3, tmp_path, *call)

    assert_gradients(run, 3, 7)
    model, pairs = Stranger(2), queries(3, 2)
    for scores, mine in zip(run(scores_of_all, model, pairs), pairs, strict=True):
        torch.testing.assert_close(scores, whole_scores(model, mine).detach())


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_model_is_left_as_it_was(world_size: int) -> None:
    for outcome in ThreadWorld(world_size).run(
        attributes_after_scoring, DistanceStranger(), queries(1, 7)[0]
    ):
        assert outcome == (7, True, True)


@pytest.mark.processes
def test_a_querys_dropout_is_the_same_at_every_owner(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """With a table of equal rows, a query's score is the same for all entities exactly if its dropout is."""
    model, pairs = DropoutStranger(), queries(1, 7)[0]
    with torch.no_grad():
        model.entity_embeddings.weight.fill_(0.5)
    outcomes = gloo_pool.run(3, tmp_path, dropped_scores, model, pairs)
    for scores, _ in outcomes:
        assert torch.equal(scores, scores[:, :1].expand(-1, 7))
    kept = {tuple(scores[:, 0].tolist()) for scores, _ in outcomes}
    assert len(kept) == 3, "three batches, dropped apart"
    assert len({tuple(draws.tolist()) for _, draws in outcomes}) == 3, "ranks go on with their own seeds"


# --- refusals


REFUSALS = {
    SoftmaxStranger: "FSDPSoftmaxStranger.forward_k_vs_all cannot be scored in shards: an entity's score"
    " depends on other entities' rows",
    NarrowStranger: "FSDPNarrowStranger.forward_k_vs_all cannot be scored in shards: for 2 rows of"
    " entity_embeddings.weight it must return shape ({0}, 2), got ({0}, 1)",
    RestlessStranger: "forward_k_vs_all looks up other ids when it is shown other rows of the table",
}


@pytest.mark.parametrize("model_class", REFUSALS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_methods_that_do_not_score_rows_alone_are_refused(
    model_class: type[Stranger], world_size: int
) -> None:
    """In a world of one too, so that a script that works there works on more ranks."""
    wrong = model_class()
    for kind, words in ThreadWorld(world_size).run(refusal_of_all, wrong, queries(1, 7)[0]):
        assert kind == "ConfigError"
        assert words.startswith(REFUSALS[model_class].format(6 // 2 * world_size))


class BiasedStranger(Stranger):
    """Adds a number of each entity, by its place in the table; all start equal."""

    def __init__(self, num_entities: int = 7, dim: int = 4) -> None:
        super().__init__(num_entities, dim)
        self.bias = nn.Embedding(num_entities, 1)
        nn.init.constant_(self.bias.weight, self.start)

    start = 0.0

    def forward_k_vs_all(self, pairs: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(self.entity_embeddings.weight))
        return super().forward_k_vs_all(pairs) + self.bias(places).T


class LiftedStranger(BiasedStranger):
    """Starts all of them elsewhere."""

    start = 3.0


@pytest.mark.parametrize("model_class", [BiasedStranger, LiftedStranger])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_bias_of_each_entity_is_refused_though_all_start_equal(
    model_class: type[Stranger], dtype: torch.dtype, world_size: int
) -> None:
    pairs = queries(1, 7)[0]
    for kind, words in ThreadWorld(world_size).run(refusal_of_all, model_class().to(dtype), pairs):
        assert kind == "ConfigError"
        assert "an entity's score depends on other entities' rows or on its place in the table" in words


@pytest.mark.parametrize("world_size", [1, 2])
def test_trying_a_method_out_leaves_every_parameter_as_it_was(world_size: int) -> None:
    for model_class in (Stranger, BiasedStranger):
        model = model_class()

        def unchanged(exchange: Any, model: Any = model) -> bool:
            variant = sharded(exchange, model)
            before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in variant.named_parameters()}
            with contextlib.suppress(ConfigError):
                variant.forward_k_vs_all(torch.tensor([[0, 1]]))
            return all(
                p is before[name][0] and p.data_ptr() == before[name][1] and torch.equal(p, before[name][2])
                for name, p in variant.named_parameters()
            )

        assert all(ThreadWorld(world_size).run(unchanged))


class LazyStranger(Stranger):
    """Has a layer whose size its first input tells."""

    def __init__(self, num_entities: int = 7, dim: int = 4) -> None:
        super().__init__(num_entities, dim)
        self.out: nn.Module = nn.LazyLinear(dim)


def test_a_lazy_layer_gets_its_size_from_the_first_call() -> None:
    model: Any = create_fsdp_sharded_model_class(LazyStranger)()
    model.setup_fsdp_training("cpu", 0.1)
    assert model.forward_k_vs_all(torch.tensor([[0, 1]])).shape == (1, 7)


def test_one_ranks_failure_stops_all() -> None:
    """Five rows on two ranks: only the second has two of them."""
    failure = ("ArithmeticError", "two rows are too few")
    late = ThreadWorld(2).run(refusal_of_all, LateStumbler(5), queries(1, 5)[0])
    assert late == [("RankFailureError", ": ".join(["rank 1", *failure])), failure]
    early = ThreadWorld(2).run(refusal_of_all, EarlyStumbler(5), queries(1, 5)[0])
    assert early[1] == failure
    assert early[0][0] == "ExchangeMismatchError"


@pytest.mark.processes
@pytest.mark.parametrize("model_class", [EarlyStumbler, LateStumbler])
def test_one_gloo_ranks_failure_stops_all(
    gloo_pool: GlooPool, tmp_path: Path, model_class: type[Stranger]
) -> None:
    outcomes = gloo_pool.run(2, tmp_path, refusal_of_all, model_class(5), queries(1, 5)[0])
    assert outcomes[1] == ("ArithmeticError", "two rows are too few")
    assert outcomes[0][0] in ("RankFailureError", "ExchangeMismatchError")


class NoKvsAll(nn.Module):
    """Scores triples only."""

    def __init__(self) -> None:
        super().__init__()
        self.entity_embeddings = nn.Embedding(3, 2)


def test_a_model_without_the_method_says_so() -> None:
    model = create_fsdp_sharded_model_class(NoKvsAll)()
    for _ in range(2):
        with pytest.raises(ValueError, match="FSDPNoKvsAll: the model has no forward_k_vs_all of its own"):
            model.forward_k_vs_all(torch.zeros(1, 2))
        if not hasattr(model.entity_embeddings, "table"):
            model.setup_fsdp_training("cpu", 0.1)


def refused_arguments(exchange: Any, call: Callable[[Any], Any]) -> str:
    try:
        call(sharded(exchange, Stranger()))
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.forward_k_vs_all([[0, 1]]),
        lambda model: model.forward_k_vs_all(torch.tensor(0)),
        lambda model: model.forward_k_vs_all(torch.zeros(1, 2, requires_grad=True)),
        lambda model: model.forward_k_vs_all(torch.zeros(1, 2), torch.ones(4, 1)),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_queries_are_tensors_of_ids(call: Callable[[Any], Any], world_size: int) -> None:
    words = "forward_k_vs_all on a sharded table takes tensors of ids, one row for each query"
    assert ThreadWorld(world_size).run(refused_arguments, call) == [words] * world_size


def test_tensors_of_other_lengths_on_one_rank_stop_all() -> None:
    def call(exchange: Any) -> str:
        pairs = torch.zeros(1, 2, dtype=torch.int64)
        try:
            sharded(exchange, Stranger()).forward_k_vs_all(pairs, torch.ones(1 + exchange.rank, 1))
        except (ConfigError, RankFailureError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    own = "ConfigError: forward_k_vs_all on a sharded table takes tensors of ids, one row for each query"
    assert ThreadWorld(2).run(call) == [f"RankFailureError: rank 1: {own}", own]
