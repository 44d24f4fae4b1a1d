"""RowWiseShardedEmbedding is nn.Embedding whose rows live elsewhere."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_functions import (
    Floats,
    Ints,
    default_group_embedding,
    embed,
    embed_on_ranks_that_drift,
    initial_rows,
    train_embedding,
)
from torch import nn
from worlds import GlooPool, ThreadWorld

import kgshard
import kgshard.table
from kgshard import RowWiseShardedEmbedding
from kgshard.models.scoring import Init
from kgshard.partition import RowPartition
from kgshard.routing import Route, plan_route


def alone(num_rows: int = 5, dim: int = 3, dtype: torch.dtype = torch.float32) -> RowWiseShardedEmbedding:
    """Return a module in a world of one."""
    return RowWiseShardedEmbedding(num_rows, dim, 0, 1, torch.device("cpu"), dtype)


def test_the_signature_is_the_references() -> None:
    parameters = inspect.signature(RowWiseShardedEmbedding).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [
        "num_embeddings",
        "embedding_dim",
        "rank",
        "world_size",
        "device",
        "weight_dtype",
    ]
    assert [p.default for p in positional if p.default is not p.empty] == [torch.bfloat16]
    assert list(inspect.signature(RowWiseShardedEmbedding.forward).parameters) == ["self", "entity_ids"]
    assert issubclass(RowWiseShardedEmbedding, nn.Module)


def attributes(exchange: Any) -> dict[str, Any]:
    module = RowWiseShardedEmbedding(
        7, 4, exchange.rank, exchange.world_size, torch.device("cpu"), exchange=exchange
    )
    names = ["num_embeddings", "embedding_dim", "rank", "world_size", "device", "shard_size"]
    names += ["start_row", "end_row", "local_rows"]
    return {name: getattr(module, name) for name in names} | {"weight": tuple(module.weight.shape)}


@pytest.mark.parametrize("world_size", [1, 2, 4, 9])
def test_the_attributes_are_the_references(world_size: int) -> None:
    for rank, seen in enumerate(ThreadWorld(world_size).run(attributes)):
        rows = RowPartition(7, world_size).rows_of(rank)
        assert seen == {
            "num_embeddings": 7,
            "embedding_dim": 4,
            "rank": rank,
            "world_size": world_size,
            "device": torch.device("cpu"),
            "shard_size": len(rows),
            "start_row": rows.start,
            "end_row": rows.stop,
            "local_rows": len(rows),
            "weight": (len(rows), 4),
        }


def test_rows_are_bfloat16_unless_asked_otherwise() -> None:
    assert RowWiseShardedEmbedding(5, 3, 0, 1, "cpu").weight.dtype == torch.bfloat16
    assert alone(dtype=torch.float64).weight.dtype == torch.float64


def whole_numbers(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).integers(-9, 10, size=shape).astype(np.float64)


def assert_like_nn_embedding(
    run: Callable[..., list[dict[str, Any]]],
    num_rows: int,
    ids: list[Ints],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that ids[rank] on every rank give the rows and gradients that nn.Embedding gives."""
    whole = whole_numbers(0, num_rows, 3)
    gradients = [whole_numbers(rank + 1, *asked.shape, 3) for rank, asked in enumerate(ids)]
    outcomes = run(embed, whole, ids, gradients, dtype)

    dense = nn.Embedding(num_rows, 3, _weight=torch.tensor(whole))
    for asked, gradient, outcome in zip(ids, gradients, outcomes, strict=True):
        rows = dense(torch.from_numpy(asked))
        rows.backward(torch.from_numpy(gradient))
        assert np.array_equal(outcome["rows"], rows.detach().numpy())
        assert outcome["row_dtype"] == dtype
    assert dense.weight.grad is not None
    truth, asked_rows = dense.weight.grad.numpy(), {int(row) for asked in ids for row in asked.flat}
    for outcome in outcomes:
        owns = outcome["owns"]
        assert np.array_equal(outcome["gradient"], truth[owns.start : owns.stop])
        assert outcome["touched"] == sorted(row - owns.start for row in asked_rows if row in owns)


@st.composite
def worlds_of_shapes(draw: st.DrawFn) -> tuple[int, list[Ints]]:
    """Draw a table's height and an id array of any shape for each of 1 to 4 ranks."""
    num_rows = draw(st.integers(1, 9))
    ids = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        ids.append(np.random.default_rng(draw(st.integers(0, 99))).integers(0, num_rows, size=shape))
    return num_rows, [np.asarray(asked) for asked in ids]


@settings(deadline=None, max_examples=60)
@given(worlds_of_shapes())
def test_rows_and_gradients_are_those_of_nn_embedding(world: tuple[int, list[Ints]]) -> None:
    num_rows, ids = world
    assert_like_nn_embedding(ThreadWorld(len(ids)).run, num_rows, ids)


SHAPES = [np.array([[4, 0, 4], [1, 1, 2]]), np.array([], np.int64), np.array(3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_float_dtype_is_like_nn_embedding(dtype: torch.dtype) -> None:
    assert_like_nn_embedding(ThreadWorld(3).run, 5, SHAPES, dtype)


@pytest.mark.parametrize("num_rows", [5, 40])
def test_int32_ids_are_ids_too(num_rows: int) -> None:
    assert_like_nn_embedding(ThreadWorld(3).run, num_rows, [ids.astype(np.int32) for ids in SHAPES])


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gloo_ranks_are_like_nn_embedding(gloo_pool: GlooPool, tmp_path: Path, dtype: torch.dtype) -> None:
    def run(*call: Any) -> list[Any]:
        return gloo_pool.run(3, tmp_path, *call)

    assert_like_nn_embedding(run, 5, SHAPES, dtype)


def rotated_owners(ids: torch.Tensor, partition: RowPartition) -> Route:
    route = plan_route(ids, partition)
    return Route(route.unique_ids, route.inverse.flip(0), route.counts)


def test_a_wrong_route_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the assertion above fails when rows come back in another order."""
    monkeypatch.setattr(kgshard.table, "plan_route", rotated_owners)
    with pytest.raises(AssertionError):
        assert_like_nn_embedding(ThreadWorld(3).run, 5, SHAPES)


@pytest.mark.processes
def test_gloo_ranks_find_the_process_group_themselves(gloo_pool: GlooPool, tmp_path: Path) -> None:
    outcomes = gloo_pool.run(2, tmp_path, default_group_embedding)
    assert outcomes == [{"rows": True, "gradient": True}] * 2


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_torchs_sparse_adam_trains_it_as_it_trains_nn_embedding(world_size: int) -> None:
    """7 ranks for 5 rows: some own nothing. All ranks' ids together are what nn.Embedding sees."""
    source, whole = np.random.default_rng(8), whole_numbers(3, 5, 2)
    ids = [[source.integers(0, 5, size=4) for _ in range(world_size)] for _ in range(6)]
    dense = nn.Embedding(5, 2, sparse=True, _weight=torch.tensor(whole))
    optimizer = torch.optim.SparseAdam(dense.parameters(), lr=0.1)
    for step in ids:
        optimizer.zero_grad()
        (dense(torch.from_numpy(np.concatenate(step))) - 1).square().sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]
    truth = dense.weight.detach().numpy()
    assert not np.allclose(truth, whole, atol=0.3)
    for rows in ThreadWorld(world_size).run(train_embedding, whole, ids, 0.1):
        np.testing.assert_allclose(rows, truth, rtol=0, atol=1e-9)


def test_two_lookups_add_up() -> None:
    module = alone(dtype=torch.float64)
    (module(torch.tensor([1, 1])).sum() + 10 * module(torch.tensor([[3, 1]])).sum()).backward()
    gradient = module.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].tolist() == [0, 12, 0, 10, 0]


@pytest.mark.parametrize("num_lookups", [1, 2])
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_the_gradient_is_coalesced(num_lookups: int, num_backwards: int) -> None:
    """So `weight.grad.indices()` and `.values()` can be read as they are."""
    module = alone()
    for _ in range(num_backwards):
        sum(module(torch.tensor([3, 1, 3])).sum() for _ in range(num_lookups)).backward()
    gradient = module.weight.grad
    assert gradient is not None
    assert gradient.is_coalesced()
    assert gradient.indices().tolist() == [[1, 3]]
    assert gradient.values()[:, 0].tolist() == [num_lookups * num_backwards * n for n in (1, 2)]


@pytest.mark.parametrize(
    "move",
    [lambda m: m.double(), lambda m: m.to(torch.float64), lambda m: nn.Sequential(m).double()[0]],
    ids=["double", "to", "inside another module"],
)
def test_module_moves_reach_rows_and_gradients(move: Callable[[Any], Any]) -> None:
    module = alone()
    before = module(torch.arange(5)).detach()
    module = move(module)
    rows = module(torch.arange(5))
    assert rows.dtype == torch.float64
    assert torch.equal(rows, before.double())
    rows.sum().backward()
    assert module.weight.grad.dtype == torch.float64
    with torch.no_grad():
        module.weight += 1
    assert torch.equal(module(torch.arange(5)), before.double() + 1)
    assert torch.equal(module.table.replicate(torch.arange(5)), before.double() + 1)


def test_a_state_dict_brings_the_rows_back() -> None:
    source, target = alone(), RowWiseShardedEmbedding(5, 3, 0, 1, "cpu", torch.float32, seed=1)
    assert not torch.equal(source.weight, target.weight)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(target(torch.arange(5)), source(torch.arange(5)))


def test_lookup_is_forward_without_autograd() -> None:
    module, ids = alone(), torch.tensor([4, 0, 4])
    lookup = module.lookup(ids)
    assert not lookup.rows.requires_grad
    assert torch.equal(lookup.rows[lookup.inverse], module(ids).detach())


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    module = alone()
    with torch.no_grad():
        assert not module(torch.arange(2)).requires_grad
    module.weight.requires_grad_(False)
    assert not module(torch.arange(2)).requires_grad


@pytest.mark.parametrize("wrong", [-1, 5])
def test_ids_outside_the_table_are_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"id {wrong} is outside a table of 5 rows"):
        alone()(torch.tensor([[0], [wrong]]))


def test_a_rank_that_is_not_the_groups_is_refused() -> None:
    assert ThreadWorld(2).run(embed_on_ranks_that_drift) == [
        f"rank {rank + 1} of 2 does not fit the process group: this is rank {rank} of 2" for rank in range(2)
    ]
    with pytest.raises(ValueError, match="rank 0 of 4 does not fit the process group: this is rank 0 of 1"):
        RowWiseShardedEmbedding(5, 3, 0, 4, "cpu")


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_a_fresh_table_is_the_same_at_any_world_size(world_size: int) -> None:
    expected = ThreadWorld(1).run(initial_rows, 5, 8, 4)[0]
    assert len({tuple(row) for row in expected.tolist()}) == 5
    for rows in ThreadWorld(world_size).run(initial_rows, 5, 8, 4):
        assert torch.equal(rows, expected)


def test_rows_start_with_the_asked_distribution() -> None:
    weight = RowWiseShardedEmbedding(
        4000, 25, 0, 1, "cpu", torch.float32, init=Init("uniform", 0.5)
    ).weight.detach()
    assert float(weight.abs().max()) <= 0.5
    assert float(weight.std()) == pytest.approx(0.5 / 3**0.5, rel=0.02)
    assert float(alone(4000, 25).weight.detach().std()) == pytest.approx(1 / 5, rel=0.02)


def test_it_says_what_it_is() -> None:
    assert repr(alone()) == "RowWiseShardedEmbedding(5, 3, rows 0..5 on rank 0 of 1)"
    assert kgshard.RowWiseShardedEmbedding is RowWiseShardedEmbedding


@pytest.mark.parametrize("dim", [0, -1])
def test_rows_of_no_floats_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"embedding_dim must be >= 1, got {dim}"):
        alone(5, dim)
