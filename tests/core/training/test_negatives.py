"""Negatives stand for all candidates: drawn as they should be, weighted without bias, and by step, not rank.

The oracle of every distribution is a Python loop over train.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rank_functions import Ints

from kgshard.models.link import SIDES, LinkModel
from kgshard.partition import RowPartition
from kgshard.training.negatives import SOURCES, Negatives, NegativeSampler, find_hits

NUM_ENTITIES, NUM_RELATIONS, COUNT = 12, 3, 6
Floats = npt.NDArray[np.float64]


def graph(number: int = 20, *, seed: int = 0) -> Ints:
    """Return distinct triples in which low entities occur more often than high ones."""
    source = np.random.default_rng(seed)
    found: set[tuple[int, ...]] = set()
    while len(found) < number:
        h, t = (source.random(2) ** 2 * NUM_ENTITIES).astype(int).tolist()
        found.add((h, int(source.integers(NUM_RELATIONS)), t))
    return np.array(sorted(found), np.int64)


def sampler(triples: Ints, **how: Any) -> NegativeSampler:
    model = LinkModel("distmult", 4, num_entities=NUM_ENTITIES, num_relations=NUM_RELATIONS, reciprocal=True)
    return NegativeSampler(model, triples, **{"count": COUNT, **how})


def draw(triples: Ints, batch: Ints, mine: range | None = None, step: int = 0, **how: Any) -> list[Negatives]:
    return sampler(triples, **how).draw(step, batch, mine if mine is not None else range(len(batch)), "cpu")


def asked_by(group: Negatives, batch: Ints, mine: range) -> list[tuple[str, int, int, int]]:
    """Return (side, given, relation, answer) of a group's questions: heads of `mine` first, then tails."""
    own = [(int(h), int(r), int(t)) for h, r, t in batch[mine.start : mine.stop]]
    all_mine = [("head", t, r, h) for h, r, t in own] + [("tail", h, r, t) for h, r, t in own]
    if group.questions is None:
        return all_mine
    return [all_mine[position] for position in group.questions.tolist()]


def answers_of(triples: Ints, side: str, given: int, relation: int) -> set[int]:
    """Return what train answers, by a loop."""
    ends = [(h, t) if side == "tail" else (t, h) for h, r, t in triples.tolist() if r == relation]
    return {answer for anchor, answer in ends if anchor == given}


def pool(triples: Ints, side: str, relation: int) -> set[int]:
    """Return a relation's range (tails) or domain (heads) in train, by a loop."""
    return {t if side == "tail" else h for h, r, t in triples.tolist() if r == relation}


def pairs(group: Negatives) -> list[tuple[int, int]]:
    return sorted(zip(*(part.tolist() for part in group.excluded), strict=True))


def log_weights(group: Negatives) -> Floats:
    return np.broadcast_to(np.asarray(group.log_weights, np.float64), len(group.ids))


# --- what they are drawn from


def chances(triples: Ints, batch: Ints, source: str, side: str) -> Floats:
    """Return float64[N]: how likely each entity should be, one draw at a time."""
    if source == "uniform":
        return np.full(NUM_ENTITIES, 1 / NUM_ENTITIES)
    if source == "degree":
        degrees = Counter(triples[:, [0, 2]].ravel().tolist())
        weights = np.array([degrees[entity] ** 0.75 for entity in range(NUM_ENTITIES)])
        return np.asarray(weights / weights.sum())
    found = np.zeros(NUM_ENTITIES)
    for _, relation, _ in batch.tolist():  # A triple of the chunk at random, then its relation's pool.
        members = pool(triples, side, relation)
        for entity in members:
            found[entity] += 1 / len(batch) / len(members)
    return found


def drawn_often(triples: Ints, batch: Ints, source: str, steps: int = 400) -> dict[str, list[Negatives]]:
    """Return the groups of many steps, by the side they are for; untyped ones are for both."""
    draws = sampler(triples, source=source, count=16)
    groups = [draws.draw(step, batch, range(len(batch)), "cpu") for step in range(steps)]
    if source != "typed":
        return {"both": [group for [group] in groups]}
    return {side: [step[index] for step in groups] for index, side in enumerate(SIDES)}


@pytest.mark.parametrize("source", SOURCES)
def test_entities_are_drawn_as_often_as_the_source_says(source: str) -> None:
    triples = graph()
    batch = triples[[0, 3, 3, 9, 17]]
    for side, groups in drawn_often(triples, batch, source).items():
        expected = chances(triples, batch, source, side)
        counts = np.bincount(torch.cat([group.ids for group in groups]).numpy(), minlength=NUM_ENTITIES)
        possible = expected > 0
        assert not counts[~possible].any()
        wanted = expected[possible] * counts.sum()
        # Chi-square with at most 11 degrees of freedom is above 43 once in 100,000 seeds.
        assert float(((counts[possible] - wanted) ** 2 / wanted).sum()) < 43


def test_the_count_sees_another_distribution() -> None:
    """Negative control: the same statistic tells degree from uniform."""
    triples = graph()
    [group] = [torch.cat([group.ids for group in drawn_often(triples, triples, "degree")["both"]])]
    counts, wanted = np.bincount(group.numpy(), minlength=NUM_ENTITIES), len(group) / NUM_ENTITIES
    assert float(((counts - wanted) ** 2 / wanted).sum()) > 400


@pytest.mark.parametrize("source", SOURCES)
def test_each_stands_for_as_many_candidates_as_its_chance_says(source: str) -> None:
    """exp(log_weight) = 1 / (K p)."""
    triples = graph()
    batch = triples[[0, 3, 3, 9, 17]]
    for side, groups in drawn_often(triples, batch, source, steps=20).items():
        expected = chances(triples, batch, source, side)
        for group in groups:
            np.testing.assert_allclose(
                np.exp(log_weights(group)), 1 / (16 * expected[group.ids.numpy()]), rtol=1e-5
            )


def estimates(groups: list[Negatives], values: Floats, question: int, *, weighted: bool) -> Floats:
    """Return sum_k w_k f(e_k) over the allowed negatives of a question, for each draw."""
    found = []
    for group in groups:
        weights = np.exp(log_weights(group)) if weighted else np.full(16, NUM_ENTITIES / 16)
        allowed = group.allowed[question].numpy() if group.allowed is not None else True
        found.append(float((weights * values[group.ids.numpy()] * allowed).sum()))
    return np.array(found)


@pytest.mark.parametrize("source", SOURCES)
def test_weighted_sums_are_unbiased_estimates_of_sums_over_all_allowed_candidates(source: str) -> None:
    triples = graph()
    batch = triples[[0, 3, 9, 17]]
    values = np.exp(np.random.default_rng(4).standard_normal(NUM_ENTITIES))
    for side, groups in drawn_often(triples, batch, source).items():
        for question, (_, relation, _) in enumerate(batch.tolist()):
            candidates = pool(triples, side, relation) if source == "typed" else set(range(NUM_ENTITIES))
            truth = sum(values[entity] for entity in candidates)
            found = estimates(groups, values, question, weighted=True)
            standard_error = found.std() / math.sqrt(len(found))
            assert abs(found.mean() - truth) < 5 * standard_error + 1e-5 * truth


@pytest.mark.parametrize("source", ["degree", "typed"])
def test_without_weights_the_estimates_are_biased(source: str) -> None:
    """Negative control: the same test sees the weights go."""
    triples = graph()
    batch = triples[[0, 3, 9, 17]]
    values = np.linspace(0.1, 3, NUM_ENTITIES)
    side, groups = next(iter(drawn_often(triples, batch, source).items()))
    biases = []
    for question, (_, relation, _) in enumerate(batch.tolist()):
        candidates = pool(triples, side, relation) if source == "typed" else set(range(NUM_ENTITIES))
        found = estimates(groups, values, question, weighted=False)
        truth = sum(values[entity] for entity in candidates)
        biases.append(abs(found.mean() - truth) / (found.std() / math.sqrt(len(found))))
    assert max(biases) > 5


def test_entities_that_train_never_names_are_no_degree_negatives() -> None:
    triples = np.array([[0, 0, 1], [1, 0, 2]])
    drawn = {int(e) for step in range(50) for e in draw(triples, triples, step=step, source="degree")[0].ids}
    assert drawn == {0, 1, 2}


# --- types


@pytest.mark.parametrize("seed", range(5))
def test_typed_ones_are_allowed_exactly_where_the_relation_has_them(seed: int) -> None:
    triples = graph(seed=seed)
    batch = triples[np.random.default_rng(seed).integers(0, len(triples), 7)]
    groups = draw(triples, batch, source="typed", seed=seed)
    assert [group.num_heads for group in groups] == [len(batch), 0]
    for side, group in zip(SIDES, groups, strict=True):
        questions = asked_by(group, batch, range(len(batch)))
        assert {asked_side for asked_side, *_ in questions} == {side}
        assert group.allowed is not None
        assert group.allowed.tolist() == [
            [int(entity) in pool(triples, side, relation) for entity in group.ids]
            for _, _, relation, _ in questions
        ]
        assert group.allowed.any(dim=0).all(), "a negative is of use to some question at least"


@pytest.mark.parametrize("source", ["uniform", "degree"])
def test_untyped_ones_are_for_heads_and_tails_alike(source: str) -> None:
    triples = graph()
    [group] = draw(triples, triples, source=source)
    assert group.allowed is None
    assert group.questions is None
    assert group.num_heads == len(triples)


# --- who is none


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("chunk_size", [0, 3])
def test_excluded_are_exactly_the_own_answer_or_all_known_ones(
    source: str, filtered: bool, chunk_size: int
) -> None:
    triples = graph(30)
    mine, num_excluded = range(2, 9), 0
    for step in range(5):
        batch = np.random.default_rng(step).permutation(triples)[:11]
        how: dict[str, Any] = {"source": source, "filtered": filtered, "chunk_size": chunk_size}
        for group in draw(triples, batch, mine, step, **how):
            expected = []
            for position, (side, anchor, relation, answer) in enumerate(asked_by(group, batch, mine)):
                none = answers_of(triples, side, anchor, relation) if filtered else {answer}
                expected += [(position, k) for k, entity in enumerate(group.ids.tolist()) if entity in none]
            assert pairs(group) == sorted(expected)
            num_excluded += len(expected)
    assert num_excluded > 20  # A control: negatives do hit.


def test_filtering_leaves_out_more_than_the_own_answer() -> None:
    triples = np.array([[0, 0, 1], [0, 0, 2], [0, 0, 3]])
    [plain], [filtered] = (draw(triples, triples, filtered=filtered, count=200) for filtered in (False, True))
    assert len(filtered.excluded[0]) > len(plain.excluded[0]) > 0


# --- chunks and ranks


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chunk_size", [0, 1, 4, 5, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 20])
def test_a_question_has_the_same_negatives_at_any_world_size(
    source: str, chunk_size: int, world_size: int
) -> None:
    """Their ids, weights, and which of them are none."""
    triples = graph()
    batch = np.random.default_rng(2).permutation(triples)[:14]
    how: dict[str, Any] = {"source": source, "chunk_size": chunk_size, "step": 3, "filtered": True}
    alone = by_question(draw(triples, batch, **how), batch, range(14))
    assert len(alone) == 28
    together: dict[tuple[str, int], Any] = {}
    for rank in range(world_size):
        mine = RowPartition(14, world_size).rows_of(rank)
        found = by_question(draw(triples, batch, mine, **how), batch, mine)
        assert len(found) == 2 * len(mine)
        together |= found
    assert together == alone


def by_question(groups: list[Negatives], batch: Ints, mine: range) -> dict[tuple[str, int], Any]:
    """Return all that is drawn for each question, by (side, position of its triple in the batch)."""
    found: dict[tuple[str, int], Any] = {}
    for group in groups:
        num_mine = len(mine)
        positions = group.questions.tolist() if group.questions is not None else range(2 * num_mine)
        heads = [position < num_mine for position in positions]
        assert heads == sorted(heads, reverse=True)
        assert group.num_heads == sum(heads)
        for row, position in enumerate(positions):
            key = (SIDES[position // num_mine], mine.start + position % num_mine)
            assert key not in found, "a question in two groups"
            none = [k for question, k in pairs(group) if question == row]
            allowed = group.allowed[row].tolist() if group.allowed is not None else None
            found[key] = (group.ids.tolist(), log_weights(group).tolist(), none, allowed)
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_every_chunk_has_negatives_of_its_own(source: str) -> None:
    triples = graph()
    groups = draw(triples, triples, source=source, chunk_size=5, count=20)
    assert len(groups) == 4 * (2 if source == "typed" else 1)
    assert len({tuple(group.ids.tolist()) for group in groups}) == len(groups)


@pytest.mark.parametrize("source", ["uniform", "degree"])
def test_draws_are_keyed_by_seed_and_step_and_not_by_the_batch(source: str) -> None:
    triples = graph()
    ids = {
        (seed, step): tuple(draw(triples, triples, source=source, seed=seed, step=step)[0].ids.tolist())
        for seed in range(2)
        for step in range(9)
    }
    assert len(set(ids.values())) == 18
    other = draw(triples, triples[:4][::-1].copy(), source=source, seed=1, step=5)
    assert tuple(other[0].ids.tolist()) == ids[1, 5]


def test_a_rank_without_triples_brings_no_questions() -> None:
    triples = graph()
    settings: list[dict[str, Any]] = [{}, {"chunk_size": 2}, {"source": "typed"}, {"filtered": True}]
    for how in settings:
        for group in draw(triples, triples[:5], mine=range(5, 5), **how):
            assert asked_by(group, triples[:5], range(5, 5)) == []
            assert pairs(group) == []


# --- hits


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    targets=st.lists(st.integers(0, 9), max_size=12),
    negatives=st.lists(st.integers(0, 9), max_size=12),
)
def test_hits_are_all_pairs_of_equal_ids(targets: list[int], negatives: list[int]) -> None:
    wanted, ids = (torch.tensor(values, dtype=torch.int64) for values in (targets, negatives))
    found = [part.tolist() for part in find_hits(wanted, ids)]
    expected = [(q, k) for q, t in enumerate(targets) for k, n in enumerate(negatives) if t == n]
    assert sorted(zip(*found, strict=True)) == expected
