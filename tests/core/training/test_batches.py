"""Work is conserved: every question once an epoch with all its answers, and equal steps on every rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from rank_functions import Ints

from kgshard.models.link import LinkModel
from kgshard.training.batches import Batch, Cut, QuestionSampler, Sampler, TripleSampler, num_batches
from kgshard.training.negatives import NegativeSampler

NUM_ENTITIES, NUM_RELATIONS = 30, 4
WORLDS = [1, 2, 3, 4]
BATCH_SIZES = [1, 7, 10**6]
KINDS = ["negative-sampling", "1vsall", "kvsall"]
Question = tuple[int, int]
"""A given entity and a row of the relation table."""


def some_triples(number: int, *, seed: int = 0) -> Ints:
    """Return distinct triples, as train holds them."""
    source = np.random.default_rng(seed)
    shape = (NUM_ENTITIES, NUM_RELATIONS, NUM_ENTITIES)
    chosen = source.choice(np.prod(shape), number, replace=False)
    return np.stack(np.unravel_index(chosen, shape), axis=1).astype(np.int64)


def few_questions(number: int) -> Ints:
    """Return distinct triples of five entities: most questions have several answers."""
    chosen = np.random.default_rng(1).choice(5 * 2 * 5, number, replace=False)
    return np.stack(np.unravel_index(chosen, (5, 2, 5)), axis=1).astype(np.int64)


def model(reciprocal: bool = True) -> LinkModel:
    return LinkModel(
        name="distmult",
        dim=4,
        num_entities=NUM_ENTITIES,
        num_relations=NUM_RELATIONS,
        reciprocal=reciprocal,
    )


def sampler(kind: str, triples: Ints, cut: Cut, *, reciprocal: bool = True) -> Sampler:
    shape = model(reciprocal)
    if kind == "kvsall":
        return QuestionSampler(shape, triples, cut)
    negatives = NegativeSampler(shape, triples, count=5) if kind == "negative-sampling" else None
    return TripleSampler(shape, triples, cut, negatives)


def batches(kind: str, triples: Ints, *, epoch: int = 0, reciprocal: bool = True, **cut: int) -> list[Batch]:
    how = Cut(**{"batch_size": 7, **cut})  # type: ignore[arg-type]
    return list(sampler(kind, triples, how, reciprocal=reciprocal).epoch(epoch))


def of_every_rank(
    kind: str, triples: Ints, world_size: int, *, epoch: int = 0, reciprocal: bool = True, batch_size: int = 7
) -> list[list[Batch]]:
    """Return the batches of each rank."""
    cut = {"batch_size": batch_size, "world_size": world_size}
    return [
        batches(kind, triples, epoch=epoch, reciprocal=reciprocal, rank=rank, **cut)
        for rank in range(world_size)
    ]


def questions(batch: Batch) -> list[Question]:
    mine = batch.mine
    return list(zip(mine.anchors.tolist(), mine.relation_rows.tolist(), strict=True))


def with_answers(ranks: list[list[Batch]]) -> Counter[tuple[int, ...]]:
    """Count (given, relation row, answer) of the questions that all ranks together ask."""
    return Counter(
        (*question, answer)
        for rank in ranks
        for batch in rank
        for question, answer in zip(questions(batch), batch.mine.answers.tolist(), strict=True)
    )


def asked_of(triples: Ints, reciprocal: bool = True) -> Counter[tuple[int, ...]]:
    """Count what triples ask, by hand: (h, r, ?) as it is, (?, r, t) of the inverse relation or of r."""
    inverse = NUM_RELATIONS if reciprocal else 0
    tails = [(h, r, t) for h, r, t in triples.tolist()]
    return Counter(tails + [(t, r + inverse, h) for h, r, t in triples.tolist()])


# --- triples


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("number", [1, 2, 5, 64])
def test_both_ends_of_every_triple_are_asked_for_once_an_epoch(
    world_size: int, batch_size: int, number: int
) -> None:
    triples = some_triples(number)
    for kind in ("negative-sampling", "1vsall"):
        for epoch in range(2):
            ranks = of_every_rank(kind, triples, world_size, batch_size=batch_size, epoch=epoch)
            assert with_answers(ranks) == asked_of(triples)
            assert sum(batch.num_triples for batch in ranks[0]) == number


@pytest.mark.parametrize("reciprocal", [True, False])
def test_heads_are_asked_for_by_inverse_relations_or_by_the_relation_itself(reciprocal: bool) -> None:
    triples = some_triples(20)
    assert with_answers([batches("1vsall", triples, reciprocal=reciprocal)]) == asked_of(triples, reciprocal)


@pytest.mark.parametrize("world_size", WORLDS)
def test_of_one_ranks_questions_the_first_ask_for_heads(world_size: int) -> None:
    triples = some_triples(23)
    heads = {(t, r + NUM_RELATIONS, h) for h, r, t in triples.tolist()}
    for rank in of_every_rank("negative-sampling", triples, world_size):
        for batch in rank:
            asked = [(*q, a) for q, a in zip(questions(batch), batch.mine.answers.tolist(), strict=True)]
            assert batch.mine.num_heads == len(asked) / 2
            assert [question in heads for question in asked] == [
                position < batch.mine.num_heads for position in range(len(asked))
            ]


def test_a_lost_last_batch_is_noticed() -> None:
    """Negative control: the count sees what drop_last would do, and a triple seen twice."""
    triples = some_triples(10)
    ranks = of_every_rank("1vsall", triples, world_size=2)
    assert with_answers([rank[:-1] for rank in ranks]) != asked_of(triples)
    assert with_answers([*ranks, ranks[0][:1]]) != asked_of(triples)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parts_of_a_batch_joined_are_the_batch_of_one_rank(world_size: int) -> None:
    triples = some_triples(23)
    for alone, *parts in zip(
        batches("1vsall", triples), *of_every_rank("1vsall", triples, world_size), strict=True
    ):
        heads: list[Question] = []
        tails: list[Question] = []
        for part in parts:
            heads += questions(part)[: part.mine.num_heads]
            tails += questions(part)[part.mine.num_heads :]
        assert heads + tails == questions(alone)
        sizes = [part.mine.num_heads for part in parts]
        assert max(sizes) - min(sizes) <= 1


# --- questions with all their answers


def labelled(batch: Batch, first: int) -> list[set[int]]:
    """Return the answers of each of this rank's questions, which stand from `first` on among all."""
    assert batch.labels is not None
    found: list[set[int]] = [set() for _ in batch.mine.anchors]
    labels = zip(batch.labels.questions.tolist(), batch.labels.answers.tolist(), strict=True)
    for question, answer in labels:
        if first <= question < first + len(found):
            assert answer not in found[question - first], "a label occurs twice"
            found[question - first].add(answer)
    return found


def asked_with_all_answers(ranks: list[list[Batch]]) -> list[tuple[bool, Question, set[int]]]:
    """Return whether a question asks for a head, the question, and its answers; over all ranks and steps."""
    found = []
    for number, rank in enumerate(ranks):
        for batch in rank:
            assert batch.labels is not None
            answers = labelled(batch, sum(batch.labels.counts[:number]))
            for position, question in enumerate(questions(batch)):
                found.append((position < batch.mine.num_heads, question, answers[position]))
    return found


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("reciprocal", [True, False])
def test_every_distinct_question_is_asked_once_an_epoch_with_exactly_its_answers(
    world_size: int, batch_size: int, reciprocal: bool
) -> None:
    triples = few_questions(31)
    found = asked_with_all_answers(
        of_every_rank("kvsall", triples, world_size, batch_size=batch_size, reciprocal=reciprocal)
    )
    heads: dict[Question, set[int]] = {}
    tails: dict[Question, set[int]] = {}
    inverse = NUM_RELATIONS if reciprocal else 0
    for h, r, t in triples.tolist():
        tails.setdefault((h, r), set()).add(t)
        heads.setdefault((t, r + inverse), set()).add(h)
    assert {question: answers for is_head, question, answers in found if is_head} == heads
    assert {question: answers for is_head, question, answers in found if not is_head} == tails
    assert len(found) == len(heads) + len(tails) < 2 * len(triples)  # A control: some share an answer list.


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_labels_of_single_triples_are_their_answers(world_size: int, batch_size: int) -> None:
    ranks = of_every_rank("1vsall", some_triples(10), world_size, batch_size=batch_size)
    for number, rank in enumerate(ranks):
        for batch in rank:
            assert batch.labels is not None
            assert batch.mine.answers.tolist() == [
                answer for [answer] in labelled(batch, sum(batch.labels.counts[:number]))
            ]


# --- what all ranks agree on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("number", [1, 10, 41])
def test_every_rank_makes_the_same_number_of_steps(kind: str, world_size: int, number: int) -> None:
    for batch_size in BATCH_SIZES:
        ranks = of_every_rank(kind, few_questions(number), world_size, batch_size=batch_size)
        items = sampler(kind, few_questions(number), Cut(batch_size=batch_size)).num_items
        assert {len(rank) for rank in ranks} == {num_batches(items, batch_size)} == {-(-items // batch_size)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_global_batch_is_the_same_on_every_rank(kind: str, world_size: int) -> None:
    triples = few_questions(31)
    for alone, *parts in zip(batches(kind, triples), *of_every_rank(kind, triples, world_size), strict=True):
        assert sum(len(part.mine.anchors) for part in parts) == alone.num_questions
        for part in parts:
            for field in ("step", "update", "is_last", "num_triples", "num_questions"):
                assert getattr(part, field) == getattr(alone, field)
            assert part.num_update_questions == alone.num_update_questions
            assert torch.equal(part.relation_rows, alone.relation_rows)
            if part.labels is not None:
                assert parts[0].labels is not None
                assert part.labels.counts == [len(other.mine.anchors) for other in parts]
                assert torch.equal(part.labels.questions, parts[0].labels.questions)
                assert torch.equal(part.labels.answers, parts[0].labels.answers)


@pytest.mark.parametrize("kind", KINDS)
def test_relation_rows_are_those_that_any_rank_asks_with(kind: str) -> None:
    for parts in zip(*of_every_rank(kind, some_triples(23), 3), strict=True):
        asked_with = {row for part in parts for _, row in questions(part)}
        assert parts[0].relation_rows.tolist() == sorted(asked_with)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_question_has_the_same_place_at_any_world_size(kind: str, world_size: int) -> None:
    """What is drawn for a place (dropout) then meets the same question, whoever asks it."""
    triples = some_triples(23)
    for alone, *parts in zip(batches(kind, triples), *of_every_rank(kind, triples, world_size), strict=True):
        places = dict(zip(alone.mine.places.tolist(), questions(alone), strict=True))
        assert sorted(places) == list(range(alone.num_questions))
        found = [
            pair for part in parts for pair in zip(part.mine.places.tolist(), questions(part), strict=True)
        ]
        assert dict(found) == places
        assert len(found) == len(places)


def test_ten_triples_on_three_ranks_with_batches_of_two() -> None:
    """The sizes of B20, where three of eight ranks hung."""
    ranks = of_every_rank("negative-sampling", some_triples(10), world_size=3, batch_size=2)
    assert [[batch.mine.num_heads for batch in rank] for rank in ranks] == [[1] * 5, [1] * 5, [0] * 5]


@pytest.mark.parametrize("world_size", [1, 8])
def test_a_batch_larger_than_the_data_is_one_batch_of_all(world_size: int) -> None:
    """B31: five triples and a batch of 1024 are five triples, not no batch."""
    ranks = of_every_rank("negative-sampling", some_triples(5), world_size, batch_size=1024)
    assert [len(rank) for rank in ranks] == [1] * world_size
    assert sum(len(rank[0].mine.anchors) for rank in ranks) == 10
    assert {rank[0].num_questions for rank in ranks} == {10}


# --- steps, updates, epochs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [1, 2, 3, 100])
def test_updates_are_made_of_as_many_steps_as_asked_and_end_with_the_epoch(kind: str, together: int) -> None:
    """An update knows the questions of all its steps beforehand: gradients are averaged over them."""
    triples, update = some_triples(23), 0
    for epoch in range(2):
        found = batches(kind, triples, epoch=epoch, batch_size=5, accumulate=together)
        for start in range(0, len(found), together):
            steps = found[start : start + together]
            assert {step.update for step in steps} == {update}
            assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
            assert {step.num_update_questions for step in steps} == {sum(s.num_questions for s in steps)}
            update += 1
    cut = Cut(batch_size=5, accumulate=together)
    assert 2 * sampler(kind, triples, cut).num_updates == update


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_counted_on_over_epochs(kind: str) -> None:
    steps = [batch.step for epoch in range(3) for batch in batches(kind, some_triples(10), epoch=epoch)]
    assert steps == list(range(len(steps)))
    assert len(sampler(kind, some_triples(10), Cut(batch_size=7))) == len(steps) / 3


def test_a_batch_knows_its_size() -> None:
    found = batches("negative-sampling", some_triples(23))
    assert [batch.num_triples for batch in found] == [7, 7, 7, 2]
    assert [batch.num_questions for batch in found] == [14, 14, 14, 4]


def order(kind: str, seed: int = 0, epoch: int = 0) -> str:
    return str([questions(batch) for batch in batches(kind, some_triples(40), seed=seed, epoch=epoch)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_and_seed_shuffles_anew(kind: str) -> None:
    assert order(kind) == order(kind)
    assert len({order(kind), order(kind, epoch=1), order(kind, seed=1)}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_memory_mapped_int32_triples_become_int64_tensors(kind: str) -> None:
    triples = some_triples(10).astype(np.int32)
    triples.setflags(write=False)  # as a memory map is
    for batch in batches(kind, triples):  # type: ignore[arg-type]
        tensors = [batch.mine.anchors, batch.mine.relation_rows, batch.mine.answers, batch.relation_rows]
        tensors += [batch.labels.questions, batch.labels.answers] if batch.labels is not None else []
        assert {tensor.dtype for tensor in tensors} == {torch.int64}
        for tensor in tensors:
            tensor.add_(1)  # its own memory
    assert np.array_equal(triples, some_triples(10))


def test_answers_of_a_hub_cost_no_more_than_there_are() -> None:
    """One entity answers for all: labels of a batch are as many as answers, whoever asks."""
    hub = np.stack([np.zeros(29, np.int64), np.zeros(29, np.int64), np.arange(1, 30)], axis=1)
    found = batches("kvsall", hub, batch_size=10**6)
    assert found[0].labels is not None
    sizes = np.bincount(found[0].labels.questions.numpy())
    assert sorted(sizes.tolist()) == [1] * 29 + [29]
