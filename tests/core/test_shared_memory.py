"""Ranks of one machine exchange rows through memory, with the same checks, or find that they cannot."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from local_functions import (
    lose_a_peer,
    on_other_machines,
    shares_memory,
    sum_in_rank_order,
    wait_patiently,
    with_small_outboxes,
)
from rank_functions import (
    DTYPES,
    FAULTS,
    WORDS,
    Ints,
    exchange_matrices,
    gather_words,
    meet_fault,
    split_matrices,
)
from worlds import GlooPool

from kgshard import shared_memory

pytestmark = pytest.mark.processes


@pytest.fixture
def pool(gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch) -> GlooPool:
    """Warm processes whose ranks share memory."""
    monkeypatch.setattr(gloo_pool, "transport", "auto")
    return gloo_pool


def all_right(matrices: list[Ints], world_size: int) -> list[tuple[bool, list[bool]]]:
    return [(True, [True] * len(matrices))] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_500_random_splits_bring_every_row_to_its_receiver(
    pool: GlooPool, tmp_path: Path, world_size: int
) -> None:
    matrices = split_matrices(world_size, 500, seed=5)
    outcomes = pool.run(world_size, tmp_path, shares_memory, exchange_matrices, matrices, 3, torch.float32)
    assert outcomes == all_right(matrices, world_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 4])
def test_every_dtype_and_width_arrives_as_it_was_sent(
    pool: GlooPool, tmp_path: Path, dtype: torch.dtype, width: int
) -> None:
    matrices = split_matrices(3, 20, seed=6)
    outcomes = pool.run(3, tmp_path, shares_memory, exchange_matrices, matrices, width, dtype)
    assert outcomes == all_right(matrices, 3)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_stops_every_rank_with_the_same_words(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    fault, words = FAULTS[name]
    refused = f"exchange mismatch {words}"
    assert pool.run(3, tmp_path, shares_memory, meet_fault, fault) == [(True, refused)] * 3


def test_every_rank_gathers_the_bytes_of_all(pool: GlooPool, tmp_path: Path) -> None:
    assert pool.run(3, tmp_path, shares_memory, gather_words, WORDS) == [(True, WORDS)] * 3


def test_sums_are_added_in_rank_order_and_equal_to_the_bit(pool: GlooPool, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 50)) * 10.0 ** np.arange(-25, 25)
    expected = np.zeros(50, np.float32)
    for row in values.astype(np.float32):
        expected = expected + row
    outcomes = pool.run(3, tmp_path, sum_in_rank_order, values.tolist())
    assert outcomes == [expected.tolist()] * 3


def test_payloads_larger_than_an_outbox_go_another_way(pool: GlooPool, tmp_path: Path) -> None:
    matrices = [np.array(rows) for rows in ([[1, 1], [1, 1]], [[0, 9], [0, 0]], [[2, 0], [3, 1]])]
    # 24 bytes a rank, 108 on one of them, 48 at most; then sums of 4 bytes and of 256.
    outcomes = pool.run(2, tmp_path, with_small_outboxes, 64, matrices)
    assert outcomes == [([True] * 3, 2, 3.0 + 64 * 3.0)] * 2


@pytest.mark.parametrize("what", ["another machine", "no sockets on one rank", "one rank cannot call"])
def test_ranks_that_cannot_share_memory_find_so_together(pool: GlooPool, tmp_path: Path, what: str) -> None:
    matrices = split_matrices(2, 10, seed=7)
    outcomes = pool.run(2, tmp_path, on_other_machines, matrices, what)
    assert outcomes == [(False, [True] * 10)] * 2


def test_a_rank_that_ends_is_named(pool: GlooPool, tmp_path: Path) -> None:
    first, _, last = pool.run(3, tmp_path, lose_a_peer, "ends")
    assert (first, last) == ("rank 0: lost a peer, rank 1", "rank 2: lost a peer, rank 1")


def test_a_rank_that_does_not_answer_is_named(pool: GlooPool, tmp_path: Path) -> None:
    first, _ = pool.run(2, tmp_path, lose_a_peer, "sleeps")
    assert first == "rank 0: lost a peer, rank 1, which did not answer in time"


def test_patience_holds_for_the_whole_of_a_call(pool: GlooPool, tmp_path: Path) -> None:
    assert pool.run(2, tmp_path, wait_patiently) == [[b"0", b"1"]] * 2


def test_a_stranger_who_calls_is_sent_away() -> None:
    with shared_memory._listening(2) as listener:
        card = shared_memory._Card("here", "token", listener.getsockname()[1:].decode())

        def call() -> None:
            for token in ("another", "", "token"):
                said = shared_memory._Card("here", token, card.address)
                callers.append(shared_memory._call(said, 0))

        callers: list[socket.socket] = []
        thread = threading.Thread(target=call)
        thread.start()
        answered = list(shared_memory._answered(listener, card, 1))
        thread.join()
    assert [rank for rank, _ in answered] == [0]
    assert [caller.recv(1) for caller in callers[:2]] == [b"", b""]
    for connection in (*callers, answered[0][1]):
        connection.close()
