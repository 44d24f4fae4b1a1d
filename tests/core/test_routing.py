"""Ids to owners, and gradients of equal rows into one: laws over all inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kgshard.partition import RowPartition
from kgshard.routing import plan_route, sum_by_row


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], RowPartition]:
    """Draw ids, maybe none, and a partition that holds them."""
    partition = RowPartition(draw(st.integers(0, 40)), draw(st.integers(1, 7)))
    if partition.num_rows == 0:
        return [], partition
    return draw(st.lists(st.integers(0, partition.num_rows - 1), max_size=30)), partition


def owner(row: int, partition: RowPartition) -> int:
    return next(rank for rank in range(partition.world_size) if row in partition.rows_of(rank))


def ids_tensor(ids: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(ids, dtype=dtype)


@given(requests(), st.sampled_from([torch.int64, torch.int32]))
def test_the_inverse_brings_every_id_back(
    request_: tuple[list[int], RowPartition], dtype: torch.dtype
) -> None:
    ids, partition = request_
    route = plan_route(ids_tensor(ids, dtype), partition)
    assert route.unique_ids[route.inverse].tolist() == ids
    assert route.unique_ids.dtype == dtype


@given(requests())
def test_every_distinct_id_is_asked_for_once(request_: tuple[list[int], RowPartition]) -> None:
    ids, partition = request_
    assert plan_route(ids_tensor(ids), partition).unique_ids.tolist() == sorted(set(ids))


@given(requests())
def test_every_id_is_sent_to_its_owner(request_: tuple[list[int], RowPartition]) -> None:
    ids, partition = request_
    route = plan_route(ids_tensor(ids), partition)
    sent_to = np.repeat(np.arange(partition.world_size), route.counts)
    assert sent_to.tolist() == [owner(row, partition) for row in route.unique_ids.tolist()]
    assert len(route.counts) == partition.world_size


def test_no_ids_are_a_request_of_nothing() -> None:
    route = plan_route(ids_tensor([]), RowPartition(5, 3))
    assert (route.unique_ids.tolist(), route.inverse.tolist(), route.counts) == ([], [], [0, 0, 0])


@pytest.mark.parametrize("wrong", [-1, -(2**40), 8, 2**40])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ids_outside_the_table_are_refused(wrong: int, world_size: int) -> None:
    with pytest.raises(IndexError, match=f"id {wrong} is outside a table of 8 rows"):
        plan_route(ids_tensor([3, wrong, 0, 7]), RowPartition(8, world_size))


def test_a_table_of_no_rows_has_no_ids() -> None:
    with pytest.raises(IndexError, match="id 0 is outside a table of 0 rows"):
        plan_route(ids_tensor([0]), RowPartition(0, 2))


@given(
    st.lists(st.integers(0, 9), max_size=25),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_sum_by_row_equals_numpy(rows: list[int], dim: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(-50, 50, size=(len(rows), dim)).astype(np.float64)
    summed = sum_by_row(ids_tensor(rows), torch.from_numpy(values))
    truth = np.zeros((10, dim))
    np.add.at(truth, np.asarray(rows, np.int64), values)
    assert summed.rows.tolist() == sorted(set(rows))
    assert np.array_equal(summed.values.numpy(), truth[summed.rows.numpy()])


def test_sum_by_row_leaves_its_arguments_alone() -> None:
    rows, values = ids_tensor([2, 0, 2]), torch.ones(3, 2)
    sum_by_row(rows, values)
    assert rows.tolist() == [2, 0, 2]
    assert torch.equal(values, torch.ones(3, 2))
