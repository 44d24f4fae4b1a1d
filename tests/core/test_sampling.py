"""Work is conserved: every triple once an epoch, equal steps on every rank, negatives without rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from rank_functions import Ints

from kgshard.sampling import Batch, epoch_batches, num_batches

NUM_ENTITIES, NUM_NEGATIVES = 30, 12
WORLDS = [1, 2, 3, 4]
BATCH_SIZES = [1, 7, 10**6]


def some_triples(number: int, *, seed: int = 0) -> Ints:
    source = np.random.default_rng(seed)
    return np.stack(
        [
            source.integers(0, NUM_ENTITIES, number),
            source.integers(0, 4, number),
            source.integers(0, NUM_ENTITIES, number),
        ],
        axis=1,
    )


def batches(
    triples: Ints, *, rank: int = 0, world_size: int = 1, batch_size: int = 7, seed: int = 0, epoch: int = 0
) -> list[Batch]:
    return list(
        epoch_batches(
            triples,
            num_entities=NUM_ENTITIES,
            batch_size=batch_size,
            num_negatives=NUM_NEGATIVES,
            seed=seed,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
        )
    )


def of_every_rank(triples: Ints, world_size: int, batch_size: int = 7, epoch: int = 0) -> list[list[Batch]]:
    return [
        batches(triples, rank=rank, world_size=world_size, batch_size=batch_size, epoch=epoch)
        for rank in range(world_size)
    ]


def multiset(ranks: list[list[Batch]]) -> Counter[tuple[int, ...]]:
    """Count the triples that all ranks together train on."""
    return Counter(tuple(row) for rank in ranks for batch in rank for row in batch.triples.tolist())


def count_of(triples: Ints) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row) for row in triples.tolist())


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("number", [1, 2, 5, 64])
def test_every_triple_is_trained_on_once_an_epoch(world_size: int, batch_size: int, number: int) -> None:
    triples = some_triples(number)
    for epoch in range(2):
        assert multiset(of_every_rank(triples, world_size, batch_size, epoch)) == count_of(triples)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("number", [1, 10, 64])
def test_every_rank_makes_the_same_number_of_steps(world_size: int, batch_size: int, number: int) -> None:
    ranks = of_every_rank(some_triples(number), world_size, batch_size)
    assert {len(rank) for rank in ranks} == {num_batches(number, batch_size)} == {-(-number // batch_size)}


def test_ten_triples_on_three_ranks_with_batches_of_two() -> None:
    """The sizes of B20, where three of eight ranks hung."""
    ranks = of_every_rank(some_triples(10), world_size=3, batch_size=2)
    assert [[len(batch.triples) for batch in rank] for rank in ranks] == [[1] * 5, [1] * 5, [0] * 5]


@pytest.mark.parametrize("world_size", [1, 8])
def test_a_batch_larger_than_the_data_is_one_batch_of_all(world_size: int) -> None:
    """B31: five triples and a batch of 1024 are five triples, not no batch."""
    ranks = of_every_rank(some_triples(5), world_size, batch_size=1024)
    assert [len(rank) for rank in ranks] == [1] * world_size
    assert sum(len(rank[0].triples) for rank in ranks) == 5
    assert {rank[0].global_size for rank in ranks} == {5}


def test_a_lost_last_batch_is_noticed() -> None:
    """Negative control: the count sees what drop_last would do, and a triple seen twice."""
    triples = some_triples(10)
    ranks = of_every_rank(triples, world_size=2)
    assert multiset([rank[:-1] for rank in ranks]) != count_of(triples)
    assert multiset([*ranks, ranks[0][:1]]) != count_of(triples)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parts_of_a_batch_joined_are_the_batch_of_one_rank(world_size: int) -> None:
    triples = some_triples(23)
    for alone, *parts in zip(batches(triples), *of_every_rank(triples, world_size), strict=True):
        assert torch.equal(torch.cat([part.triples for part in parts]), alone.triples)
        assert max(len(part.triples) for part in parts) - min(len(part.triples) for part in parts) <= 1
        for part in parts:
            assert torch.equal(part.negatives, alone.negatives)
            assert torch.equal(part.relations, alone.relations)
            assert (part.step, part.global_size) == (alone.step, alone.global_size)


def test_a_batch_knows_its_relations_and_its_size() -> None:
    for batch in batches(some_triples(23)):
        assert torch.equal(batch.relations, batch.triples[:, 1])
        assert batch.global_size == len(batch.triples)
    assert [batch.global_size for batch in batches(some_triples(23))] == [7, 7, 7, 2]


def negatives(seed: int = 0, epoch: int = 0) -> list[tuple[int, ...]]:
    return [tuple(batch.negatives.tolist()) for batch in batches(some_triples(40), seed=seed, epoch=epoch)]


def test_negatives_differ_by_step_epoch_and_seed() -> None:
    drawn = [*negatives(), *negatives(epoch=1), *negatives(seed=1)]
    assert len(set(drawn)) == len(drawn) == 18


def test_negatives_are_keyed_by_seed_and_step_alone() -> None:
    other_triples = batches(some_triples(40, seed=9), batch_size=7)
    assert [tuple(batch.negatives.tolist()) for batch in other_triples] == negatives()
    larger_batches = batches(some_triples(40), batch_size=20)
    assert [tuple(batch.negatives.tolist()) for batch in larger_batches] == negatives()[:2]


def test_negatives_are_all_entities_alike() -> None:
    drawn = np.concatenate([negatives(epoch=epoch) for epoch in range(60)]).ravel()
    counts = np.bincount(drawn, minlength=NUM_ENTITIES)
    assert len(counts) == NUM_ENTITIES
    expected = len(drawn) / NUM_ENTITIES
    # Chi-square with 29 degrees of freedom is below 70 but once in 30,000 seeds.
    assert float(((counts - expected) ** 2 / expected).sum()) < 70


def test_steps_are_counted_on_over_epochs() -> None:
    steps = [batch.step for epoch in range(3) for batch in batches(some_triples(10), epoch=epoch)]
    assert steps == list(range(6))


def order(seed: int = 0, epoch: int = 0) -> list[list[int]]:
    return torch.cat([b.triples for b in batches(some_triples(40), seed=seed, epoch=epoch)]).tolist()


def test_every_epoch_and_seed_shuffles_anew() -> None:
    assert order() == order()
    orders = [order(), order(epoch=1), order(seed=1), some_triples(40).tolist()]
    assert len({str(each) for each in orders}) == 4


def test_memory_mapped_int32_triples_become_int64_tensors() -> None:
    triples = some_triples(10).astype(np.int32)
    triples.setflags(write=False)  # as a memory map is
    for batch in batches(triples):  # type: ignore[arg-type]
        tensors = (batch.triples, batch.relations, batch.negatives)
        assert {tensor.dtype for tensor in tensors} == {torch.int64}
        assert batch.triples.shape[1] == 3
        batch.triples.add_(1)  # its own memory
    assert count_of(triples) == count_of(some_triples(10))  # type: ignore[arg-type]
