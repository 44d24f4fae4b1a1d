"""Rows travel in half the bytes, and arrive as near as the dtype allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kgshard.exchange import SingleExchange
from kgshard.packing import pack, unpack
from kgshard.partition import RowPartition
from kgshard.table import ShardedTable

HALVES = (torch.bfloat16, torch.float16)
finite = st.floats(-(2.0**127), 2.0**127, width=32)


def travelled(
    values: list[list[float]], dtype: torch.dtype
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return unpack(pack(torch.tensor(values), dtype), dtype, torch.float32).double().numpy()


@given(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=5))
def test_bfloat16_is_off_by_at_most_a_256th_of_each_value(values: list[list[float]]) -> None:
    off = np.abs(travelled(values, torch.bfloat16) - np.array(values))
    assert (off <= np.abs(values) * 2.0**-8 + 2.0**-133).all()


@given(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=5))
def test_float16_is_off_by_at_most_a_2048th_of_the_value_or_little_of_its_row(
    values: list[list[float]],
) -> None:
    """Gradients of 1e-30 and rows of 1e30 arrive, where plain float16 makes 0 and infinity of them."""
    off = np.abs(travelled(values, torch.float16) - np.array(values))
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (off <= np.abs(values) * 2.0**-11 + largest * 2.0**-24 + 2.0**-149).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    arrived = travelled([[1.0, float("nan")], [float("inf"), 2.0], [0.0, 0.0]], dtype)
    assert np.isfinite(arrived).all(axis=1).tolist() == [False, False, True]
    assert arrived[2].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", HALVES)
def test_nothing_asked_for_is_nothing(dtype: torch.dtype) -> None:
    assert unpack(pack(torch.empty(0, 4), dtype), dtype, torch.float32).shape == (0, 4)


@pytest.mark.parametrize(("dtype", "row_bytes"), [("float32", 400), ("bfloat16", 200), ("float16", 202)])
def test_rows_and_gradients_take_as_many_bytes_as_their_dtype(
    dtype: str, row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, int] = {}
    swap = SingleExchange.swap

    def counting(self: SingleExchange, rows: torch.Tensor, *rest: object, kind: str, table: int) -> object:
        sent[kind] = rows.nbytes
        return swap(self, rows, *rest, kind=kind, table=table)  # type: ignore[arg-type]

    monkeypatch.setattr(SingleExchange, "swap", counting)
    exchange, weight = SingleExchange(), torch.randn(10, 100)
    table = ShardedTable(weight, RowPartition(10, 1), exchange, exchange_dtype=getattr(torch, dtype))
    lookup = table.fetch(torch.tensor([3, 5, 3]))
    table.push(lookup, torch.ones(2, 100))
    assert sent == {"ids": 8, "rows": 2 * row_bytes, "gradients": 2 * row_bytes}
