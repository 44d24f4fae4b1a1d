"""Which rank owns which rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgshard.errors import ConfigError
from kgshard.partition import RowPartition

partitions = st.builds(RowPartition, num_rows=st.integers(0, 200), world_size=st.integers(1, 17))


@given(partitions)
def test_every_row_has_exactly_one_owner_in_rank_order(partition: RowPartition) -> None:
    rows = [row for rank in range(partition.world_size) for row in partition.rows_of(rank)]
    assert rows == list(range(partition.num_rows))


@given(partitions)
def test_sizes_differ_by_at_most_one_and_larger_blocks_come_first(partition: RowPartition) -> None:
    sizes = [len(partition.rows_of(rank)) for rank in range(partition.world_size)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(partitions)
def test_boundaries_are_where_ranges_begin_and_end(partition: RowPartition) -> None:
    boundaries = partition.boundaries()
    ranges = [range(boundaries[rank], boundaries[rank + 1]) for rank in range(partition.world_size)]
    assert ranges == [partition.rows_of(rank) for rank in range(partition.world_size)]
    assert len(boundaries) == partition.world_size + 1


@pytest.mark.parametrize(
    ("num_rows", "world_size", "sizes"),
    [
        (6, 4, [2, 2, 1, 1]),  # torch.chunk gives three pieces (B28)
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
        (10, 4, [3, 3, 2, 2]),
        (0, 2, [0, 0]),
        (5, 1, [5]),
    ],
)
def test_every_rank_gets_a_range_even_an_empty_one(num_rows: int, world_size: int, sizes: list[int]) -> None:
    partition = RowPartition(num_rows, world_size)
    assert [len(partition.rows_of(rank)) for rank in range(world_size)] == sizes


def test_row_ids_beyond_32_bits_are_exact() -> None:
    rows = RowPartition(2**40 + 1, 3).rows_of(2)
    assert rows == range(2 * 366_503_875_926, 2**40 + 1)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} is outside a world of 4"):
        RowPartition(10, 4).rows_of(rank)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_rows must be >= 0, got -1"):
        RowPartition(-1, 2)
    with pytest.raises(ConfigError, match="world_size must be >= 1, got 0"):
        RowPartition(4, 0)
