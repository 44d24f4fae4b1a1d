"""A sharded table is a table: fetch is indexing, push is index_add, at any world size.

The same assertion, `assert_like_one_table`, must fail for every wrong route.
"""

from __future__ import annotations

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
    TableUse,
    fetch_two_tables,
    replicate_rows,
    swapped_rows,
    use_table,
)
from worlds import GlooPool, ThreadWorld

import kgshard.table
from kgshard.exchange import SingleExchange
from kgshard.partition import RowPartition
from kgshard.routing import Route, RowGradient, plan_route, sum_by_row
from kgshard.table import ShardedTable

Run = Callable[..., list[Any]]
"""Runs a function on every rank of a world."""


def whole_numbers(seed: int, *shape: int) -> Floats:
    """Return float64 whole numbers: their sums are exact in any order."""
    return np.random.default_rng(seed).integers(-99, 100, size=shape).astype(np.float64)


def assert_like_one_table(run: Run, num_rows: int, ids: list[Ints], *, dim: int = 2, seed: int = 0) -> None:
    """Assert that ranks that ask for ids[rank] see what numpy's indexing and add.at say."""
    whole = whole_numbers(seed, num_rows, dim)
    gradients = [whole_numbers(seed + 1 + rank, len(asked), dim) for rank, asked in enumerate(ids)]
    uses: list[TableUse] = run(use_table, whole, ids, gradients)

    for use, asked in zip(uses, ids, strict=True):
        assert np.array_equal(use.fetched, whole[asked])
    truth = np.zeros((num_rows, dim))
    for asked, gradient in zip(ids, gradients, strict=True):
        np.add.at(truth, asked, gradient)
    partition = RowPartition(num_rows, len(ids))
    everything_asked = sorted({int(row) for asked in ids for row in asked})
    for rank, use in enumerate(uses):
        rows = partition.rows_of(rank)
        assert np.array_equal(use.summed[rows.start : rows.stop], truth[rows.start : rows.stop])
        assert use.touched.tolist() == [row for row in everything_asked if row in rows]


@st.composite
def worlds_of_ids(draw: st.DrawFn) -> tuple[int, list[Ints]]:
    """Draw a table's height and what each of 1 to 5 ranks asks for, maybe nothing."""
    world_size, num_rows = draw(st.integers(1, 5)), draw(st.integers(0, 13))
    row = st.integers(0, max(0, num_rows - 1))
    asked = st.lists(row, max_size=12 if num_rows else 0)
    return num_rows, [np.array(draw(asked), np.int64) for _ in range(world_size)]


@settings(deadline=None, max_examples=120)
@given(worlds_of_ids(), st.integers(1, 4), st.integers(0, 1000))
def test_any_world_is_like_one_table(world: tuple[int, list[Ints]], dim: int, seed: int) -> None:
    num_rows, ids = world
    assert_like_one_table(ThreadWorld(len(ids)).run, num_rows, ids, dim=dim, seed=seed)


def some_ids(num_rows: int, world_size: int, *, seed: int = 5) -> list[Ints]:
    """Return random ids with repeats for each rank; the last rank asks for nothing."""
    source = np.random.default_rng(seed)
    ids = [source.integers(0, num_rows, size=10) for _ in range(world_size)]
    return [*ids[:-1], np.empty(0, np.int64)] if world_size > 1 else ids


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_ranks_without_rows_and_ranks_that_ask_for_nothing(num_rows: int, world_size: int) -> None:
    assert_like_one_table(ThreadWorld(world_size).run, num_rows, some_ids(num_rows, world_size))


def test_a_world_in_which_nobody_asks() -> None:
    assert_like_one_table(ThreadWorld(3).run, 4, [np.empty(0, np.int64)] * 3)


@pytest.mark.processes
@pytest.mark.parametrize("num_rows", [2, 30])
def test_gloo_ranks_are_like_one_table(gloo_pool: GlooPool, tmp_path: Path, num_rows: int) -> None:
    def run(*call: Any) -> list[Any]:
        return gloo_pool.run(3, tmp_path, *call)

    assert_like_one_table(run, num_rows, some_ids(num_rows, 3))


def rotated_owners(ids: torch.Tensor, partition: RowPartition) -> Route:
    route = plan_route(ids, partition)
    return Route(route.unique_ids, route.inverse, [*route.counts[1:], route.counts[0]])


def swapped_ids(ids: torch.Tensor, partition: RowPartition) -> Route:
    """Two ids of one owner change places; where they go stays right."""
    route = plan_route(ids, partition)
    unique_ids, start = route.unique_ids.clone(), 0
    for count in route.counts:
        if count > 1:
            unique_ids[[start, start + 1]] = unique_ids[[start + 1, start]]
            break
        start += count
    return Route(unique_ids, route.inverse, route.counts)


def inverse_off_by_one(ids: torch.Tensor, partition: RowPartition) -> Route:
    route = plan_route(ids, partition)
    return Route(route.unique_ids, (route.inverse + 1) % max(1, len(route.unique_ids)), route.counts)


WRONG_ROUTES = [rotated_owners, swapped_ids, inverse_off_by_one]


@pytest.mark.parametrize("wrong_route", WRONG_ROUTES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_wrong_route_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong_route: Callable[..., Route], world_size: int
) -> None:
    """Negative control: the assertion of this file fails when rows go astray."""
    monkeypatch.setattr(kgshard.table, "plan_route", wrong_route)
    with pytest.raises((AssertionError, IndexError)):
        assert_like_one_table(ThreadWorld(world_size).run, 40, some_ids(40, world_size))


def first_gradient_only(rows: torch.Tensor, values: torch.Tensor) -> RowGradient:
    summed = sum_by_row(rows, values)
    first = [rows.tolist().index(row) for row in summed.rows.tolist()]
    return RowGradient(summed.rows, values[first])


@pytest.mark.parametrize(
    "wrong_sum",
    [first_gradient_only, lambda rows, values: swapped_rows(sum_by_row(rows, values))],
    ids=["one rank's gradient only", "gradients of two rows swapped"],
)
def test_a_wrong_sum_of_gradients_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong_sum: Callable[..., RowGradient]
) -> None:
    """Negative control: the assertion of this file fails when gradients are lost or go astray."""
    monkeypatch.setattr(kgshard.table, "sum_by_row", wrong_sum)
    with pytest.raises(AssertionError):
        assert_like_one_table(ThreadWorld(3).run, 5, some_ids(5, 3))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 1000))
def test_replicate_brings_the_same_rows_to_every_rank(world_size: int, num_rows: int, seed: int) -> None:
    whole = whole_numbers(seed, num_rows, 3)
    ids = np.random.default_rng(seed).integers(0, num_rows, size=seed % 7)
    for rows in ThreadWorld(world_size).run(replicate_rows, whole, ids):
        assert np.array_equal(rows, whole[ids])


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_id_outside_the_table_is_refused(wrong: int) -> None:
    ids = [np.array([0, wrong]), np.array([1])]
    with pytest.raises(IndexError, match=f"id {wrong} is outside a table of 6 rows"):
        ThreadWorld(2).run(use_table, np.zeros((6, 2)), ids, [np.zeros((2, 2)), np.zeros((1, 2))])


def test_fetched_rows_are_a_copy() -> None:
    table = ShardedTable(torch.zeros(3, 2), RowPartition(3, 1), SingleExchange())
    table.fetch(torch.arange(3)).rows.add_(1)
    assert torch.equal(table.weight, torch.zeros(3, 2))


def test_rows_that_do_not_fit_the_partition_are_refused() -> None:
    with pytest.raises(ValueError, match="weight has 4 rows, but rank 0 owns 3"):
        ShardedTable(torch.zeros(4, 2), RowPartition(3, 1), SingleExchange())


@pytest.mark.parametrize("confused", [0, 1])
def test_ranks_that_ask_two_equal_tables_in_another_order_are_stopped(confused: int) -> None:
    words = set(ThreadWorld(2).run(fetch_two_tables, confused))
    assert len(words) == 1
    assert "exchange mismatch" in words.pop()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrong", [-1, 6, 2**40])
def test_replicate_refuses_an_id_outside_the_table_on_every_rank(world_size: int, wrong: int) -> None:
    """No rank owns such a row: the sum over ranks would be a row of zeros."""
    _, errors = ThreadWorld(world_size).run_all(replicate_rows, np.ones((6, 2)), np.array([0, wrong]))
    assert [type(error) for error in errors] == [IndexError] * world_size
    assert all(f"id {wrong} is outside a table of 6 rows" in str(error) for error in errors)
