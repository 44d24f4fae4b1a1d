"""Known answers equal those of a set of tuples, also where keys do not fit 32 bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard.known import KnownLinks, anchors_of, known_answers, targets_of
from kgshard.models.link import SIDES, Side

NUM_ENTITIES, NUM_RELATIONS = 6, 3
links = st.lists(
    st.tuples(
        st.integers(0, NUM_ENTITIES - 1), st.integers(0, NUM_RELATIONS - 1), st.integers(0, NUM_ENTITIES - 1)
    ),
    max_size=40,
)


def as_triples(rows: list[tuple[int, int, int]], dtype: npt.DTypeLike = np.int32) -> npt.NDArray[Any]:
    return np.array(rows, dtype).reshape(-1, 3)


def answers_by_scan(rows: list[tuple[int, int, int]], side: Side, anchor: int, relation: int) -> list[int]:
    given_end, asked_end = (0, 2) if side == "tail" else (2, 0)
    return [row[asked_end] for row in rows if row[1] == relation and row[given_end] == anchor]


@settings(deadline=None)
@given(rows=links, side=st.sampled_from(SIDES), dtype=st.sampled_from([np.int32, np.int64]))
def test_answers_to_every_question_equal_a_scan(
    rows: list[tuple[int, int, int]], side: Side, dtype: npt.DTypeLike
) -> None:
    known = KnownLinks(as_triples(rows, dtype), side, num_relations=NUM_RELATIONS)
    asked = [(a, r) for a in range(NUM_ENTITIES) for r in range(NUM_RELATIONS)]
    anchors, relations = (np.array(column, dtype) for column in zip(*asked, strict=True))
    questions, answers = known.answers(anchors, relations)
    assert questions.dtype == answers.dtype == np.int64
    assert questions.tolist() == sorted(questions.tolist())
    for number, (anchor, relation) in enumerate(asked):
        found = Counter(answers[questions == number].tolist())
        expected = answers_by_scan(rows, side, anchor, relation)
        assert found == Counter(expected)
        distinct = known_answers(as_triples(rows, dtype), side, anchor=anchor, relation=relation)
        assert distinct.tolist() == sorted(set(expected))


def test_the_same_question_twice_is_answered_twice() -> None:
    known = KnownLinks(as_triples([(0, 1, 5), (0, 1, 2)]), "tail", num_relations=2)
    questions, answers = known.answers(np.array([0, 3, 0]), np.array([1, 1, 1]))
    assert questions.tolist() == [0, 0, 2, 2]
    assert sorted(answers[:2].tolist()) == sorted(answers[2:].tolist()) == [2, 5]


def test_no_questions_have_no_answers() -> None:
    known = KnownLinks(as_triples([(0, 0, 1)]), "tail", num_relations=1)
    questions, answers = known.answers(np.empty(0, np.int32), np.empty(0, np.int32))
    assert len(questions) == len(answers) == 0


@pytest.mark.parametrize("side", SIDES)
def test_keys_do_not_wrap_at_32_bits(side: Side) -> None:
    """100,000 entities x 50,000 relations: in int32 unrelated questions would share a key (B53)."""
    num_entities, num_relations = 100_001, 50_000
    random = np.random.default_rng(1)
    triples = np.stack(
        [
            random.integers(0, num_entities, 20_000),
            random.integers(0, num_relations, 20_000),
            random.integers(0, num_entities, 20_000),
        ],
        axis=1,
    ).astype(np.int32)
    triples[0] = (100_000, 7, 100_000)
    # 100000 * 50000 + 7 in int32 is 705032711: the key of this other question.
    wrapped = (705_032_711 // num_relations, 705_032_711 % num_relations)
    triples[1] = (wrapped[0], wrapped[1], 3)
    triples[2] = (3, wrapped[1], wrapped[0])
    known = KnownLinks(triples, side, num_relations=num_relations)
    rows = [tuple(row) for row in triples.tolist()]
    given_end, asked_end = (0, 2) if side == "tail" else (2, 0)
    expected: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        expected.setdefault((row[given_end], row[1]), []).append(row[asked_end])
    questions, answers = known.answers(anchors_of(side, triples), triples[:, 1])
    found = np.split(answers, np.cumsum(np.bincount(questions, minlength=len(triples)))[:-1])
    for row, mine in zip(rows, found, strict=True):
        assert sorted(mine.tolist()) == sorted(expected[row[given_end], row[1]])


def test_ends_of_a_triple() -> None:
    triples = as_triples([(1, 0, 2)])
    assert anchors_of("tail", triples).tolist() == targets_of("head", triples).tolist() == [1]
    assert anchors_of("head", triples).tolist() == targets_of("tail", triples).tolist() == [2]
