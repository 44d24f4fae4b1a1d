"""All ranks get what was sent to them, or all ranks stop with the same words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_functions import (
    DTYPES,
    FAULTS,
    WORDS,
    calls_in_another_order,
    exchange_matrices,
    exchanges_in_another_order,
    fetch_with_a_row_missing,
    gather_words,
    meet_fault,
    push_with_a_row_missing,
    split_matrices,
    stumble,
    sum_of_any_size,
    sum_with_a_fault,
)
from worlds import GlooPool, ThreadExchange, ThreadWorld

from kgshard.errors import DataError, ExchangeMismatchError
from kgshard.exchange import Exchange, SingleExchange


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_500_random_splits_bring_every_row_to_its_receiver(world_size: int) -> None:
    matrices = split_matrices(world_size, 500, seed=0)
    assert any(not m.any(axis=0).all() for m in matrices)
    assert any(not m.any(axis=1).all() for m in matrices)
    assert any(not m.any() for m in matrices)
    outcomes = ThreadWorld(world_size).run(exchange_matrices, matrices, 3, torch.float32)
    assert outcomes == [[True] * 500] * world_size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 4])
def test_every_dtype_and_width_arrives_as_it_was_sent(dtype: torch.dtype, width: int) -> None:
    matrices = split_matrices(3, 20, seed=1)
    assert ThreadWorld(3).run(exchange_matrices, matrices, width, dtype) == [[True] * 20] * 3


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo_brings_every_row_to_its_receiver(gloo_pool: GlooPool, tmp_path: Path, world_size: int) -> None:
    matrices = split_matrices(world_size, 60, seed=2)
    outcomes = gloo_pool.run(world_size, tmp_path, exchange_matrices, matrices, 3, torch.float32)
    assert outcomes == [[True] * 60] * world_size


@pytest.mark.processes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gloo_carries_every_dtype(gloo_pool: GlooPool, tmp_path: Path, dtype: torch.dtype) -> None:
    matrices = split_matrices(2, 10, seed=3)
    assert gloo_pool.run(2, tmp_path, exchange_matrices, matrices, 2, dtype) == [[True] * 10] * 2


def test_a_transport_that_mixes_up_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the checks above see rows that went to the wrong rank."""
    move = ThreadExchange._move
    monkeypatch.setattr(ThreadExchange, "_move", lambda self, *sent: move(self, *sent).flip(0))
    outcomes = ThreadWorld(3).run(exchange_matrices, split_matrices(3, 20, seed=4), 2, torch.float32)
    assert not all(map(all, outcomes))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_stops_every_rank_with_the_same_words(name: str) -> None:
    fault, words = FAULTS[name]
    assert ThreadWorld(3).run(meet_fault, fault) == [f"exchange mismatch {words}"] * 3


def test_ranks_that_agree_are_not_stopped() -> None:
    assert ThreadWorld(3).run(meet_fault, None) == ["agreed"] * 3


@pytest.mark.processes
@pytest.mark.parametrize("name", ["sends nothing", "sends too much", "float64", "wider rows"])
def test_gloo_ranks_stop_before_memory_is_read_that_nobody_wrote(
    gloo_pool: GlooPool, tmp_path: Path, name: str
) -> None:
    fault, words = FAULTS[name]
    assert gloo_pool.run(2, tmp_path, meet_fault, fault) == [f"exchange mismatch {words}"] * 2


@pytest.mark.parametrize("confused", [0, 1, 2])
def test_calls_in_another_order_stop_every_rank(confused: int) -> None:
    words = set(ThreadWorld(3).run(calls_in_another_order, confused))
    assert len(words) == 1
    assert "announced dtype" in words.pop()


@pytest.mark.parametrize("confused", [0, 1])
def test_ranks_that_turn_to_different_exchanges_are_stopped(confused: int) -> None:
    words = set(ThreadWorld(2).run(exchanges_in_another_order, confused))
    assert len(words) == 1
    assert "exchange mismatch rank 1→0: announced call" in words.pop()


@pytest.mark.parametrize("forgetful", [0, 1, 2])
def test_a_mismatch_in_a_push_leaves_every_table_untouched(forgetful: int) -> None:
    expected = f"exchange mismatch rank {forgetful}→0: announced 1, expected 2"
    assert ThreadWorld(3).run(push_with_a_row_missing, forgetful) == [(expected, True)] * 3


@pytest.mark.parametrize("short", [0, 1, 2])
def test_an_answer_with_a_row_missing_stops_every_rank(monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    expected = f"exchange mismatch rank {short}→0: announced 1, expected 2"
    assert ThreadWorld(3).run(fetch_with_a_row_missing, short, monkeypatch) == [expected] * 3


def test_a_single_rank_checks_counts_too() -> None:
    exchange = SingleExchange()
    chunk = torch.ones(3, 2)
    assert exchange.all_to_all([chunk], expected=[3])[0] is chunk
    with pytest.raises(ExchangeMismatchError, match="exchange mismatch rank 0→0: announced 3, expected 1"):
        exchange.all_to_all([chunk], expected=[1])


def test_every_rank_gathers_the_bytes_of_all() -> None:
    assert ThreadWorld(3).run(gather_words, WORDS) == [WORDS] * 3
    assert SingleExchange().gather_bytes(b"alone") == [b"alone"]
    assert SingleExchange().gather_bytes(b"") == [b""]


@pytest.mark.processes
def test_gloo_gathers_the_bytes_of_all(gloo_pool: GlooPool, tmp_path: Path) -> None:
    assert gloo_pool.run(3, tmp_path, gather_words, WORDS) == [WORDS] * 3


def failures_of(who: int | None, world_size: int) -> list[tuple[str, str]]:
    error = DataError("train.tsv:2: 2 columns")
    return ThreadWorld(world_size).run(stumble, who, error)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_failure_of_one_rank_reaches_all_and_names_it(who: int) -> None:
    expected = [("RankFailureError", f"rank {who}: DataError: train.tsv:2: 2 columns")] * 3
    expected[who] = ("DataError", "train.tsv:2: 2 columns")
    assert failures_of(who, 3) == expected


def test_no_failure_stops_nobody() -> None:
    assert failures_of(None, 3) == [("nothing", "")] * 3


def test_a_failure_without_words_still_reaches_all() -> None:
    outcomes = ThreadWorld(2).run(stumble, 1, OSError())
    assert outcomes == [("RankFailureError", "rank 1: OSError: "), ("OSError", "")]


@pytest.mark.processes
def test_a_failure_reaches_gloo_ranks(gloo_pool: GlooPool, tmp_path: Path) -> None:
    outcomes = gloo_pool.run(3, tmp_path, stumble, 2, OSError(28, "No space left on device"))
    assert outcomes == [("RankFailureError", "rank 2: OSError: [Errno 28] No space left on device")] * 2 + [
        ("OSError", "[Errno 28] No space left on device")
    ]


def sum_over_ranks(exchange: Exchange) -> list[float]:
    return exchange.all_reduce(torch.tensor([1.0, float(exchange.rank)])).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce_sums_over_ranks(world_size: int) -> None:
    total = [float(world_size), float(sum(range(world_size)))]
    assert ThreadWorld(world_size).run(sum_over_ranks) == [total] * world_size


@pytest.mark.parametrize("fault", ["size", "dtype", "call"])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_ranks_that_do_not_sum_the_same_are_all_stopped(who: int, fault: str) -> None:
    words = ThreadWorld(3).run(sum_with_a_fault, who, fault)
    assert len(set(words)) == 1
    assert words[0].startswith("exchange mismatch rank ")


def test_ranks_that_sum_the_same_are_not_stopped() -> None:
    assert ThreadWorld(3).run(sum_with_a_fault, None, "size") == ["agreed"] * 3


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["size", "dtype", "call"])
def test_gloo_ranks_that_do_not_sum_the_same_are_all_stopped(
    gloo_pool: GlooPool, tmp_path: Path, fault: str
) -> None:
    words = gloo_pool.run(2, tmp_path, sum_with_a_fault, 1, fault)
    assert words == [words[0]] * 2
    assert words[0].startswith("exchange mismatch rank 1→0: announced ")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("small_bytes", [0, 1 << 23])
def test_gloo_sums_tensors_of_any_size(
    gloo_pool: GlooPool, tmp_path: Path, world_size: int, small_bytes: int
) -> None:
    """Small and large ones go different ways."""
    source = np.random.default_rng(5)
    values = [source.integers(-99, 100, size=(5, 4)).astype(np.float64) for _ in range(world_size)]
    for total, by_all_reduce in gloo_pool.run(world_size, tmp_path, sum_of_any_size, values, small_bytes):
        np.testing.assert_array_equal(total, np.sum(values, axis=0))
        assert by_all_reduce == (small_bytes == 0)
