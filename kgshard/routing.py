"""Who must be asked for which rows: pure index arithmetic, no communication.

Shape letters: I requested ids, U distinct ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kgshard.partition import RowPartition


@dataclass(frozen=True, slots=True)
class Route:
    """How one rank's ids map to requests, one request list for each owner."""

    unique_ids: Tensor
    """int64[U] global ids, ascending, so each owner's ids are one contiguous run."""
    inverse: Tensor
    """int64[I]: the requested ids are unique_ids[inverse]."""
    counts: list[int]
    """How many of unique_ids each rank owns; world_size entries that sum to U."""


def plan_route(ids: Tensor, partition: RowPartition) -> Route:
    """Group `ids` by owner, asking for every distinct id once.

    Args:
        ids: int64[I] global ids, in any order, repeats allowed. I may be 0.
        partition: Which rank owns which rows.

    Raises:
        IndexError: An id is outside [0, partition.num_rows).

    Example:
        >>> route = plan_route(torch.tensor([7, 2, 7, 0]), RowPartition(num_rows=8, world_size=2))
        >>> route.unique_ids.tolist(), route.inverse.tolist(), route.counts
        ([0, 2, 7], [2, 1, 2, 0], [2, 1])
    """
    check_ids(ids, partition.num_rows)
    unique_ids, inverse = torch.unique(ids, return_inverse=True)
    boundaries = torch.tensor(partition.boundaries(), dtype=unique_ids.dtype, device=ids.device)
    edges: list[int] = torch.searchsorted(unique_ids, boundaries).tolist()
    return Route(unique_ids, inverse, [stop - start for start, stop in pairwise(edges)])


def check_ids(ids: Tensor, num_rows: int) -> None:
    """Raise IndexError where one of int64[I] ids is outside [0, num_rows)."""
    if len(ids):
        smallest, largest = (int(bound) for bound in ids.aminmax())
        if smallest < 0 or largest >= num_rows:
            wrong = smallest if smallest < 0 else largest
            raise IndexError(f"id {wrong} is outside a table of {num_rows} rows")


@dataclass(frozen=True, slots=True)
class RowGradient:
    """Gradients of some rows of a table."""

    rows: Tensor
    """int64[U] rows, ascending, distinct."""
    values: Tensor
    """float[U, dim]."""


def sum_by_row(rows: Tensor, values: Tensor) -> RowGradient:
    """Add up the values of equal rows.

    Args:
        rows: int64[I], repeats allowed.
        values: float[I, dim].
    """
    unique_rows, inverse = torch.unique(rows, return_inverse=True)
    if len(unique_rows) == len(rows):
        order = torch.empty_like(inverse)
        order[inverse] = torch.arange(len(rows), device=rows.device)
        return RowGradient(unique_rows, values[order])
    summed = values.new_zeros(len(unique_rows), values.shape[1])
    return RowGradient(unique_rows, summed.index_add_(0, inverse, values))
