"""Who is no candidate: against sets of tuples."""

from __future__ import annotations

import numpy as np
import pytest

from kgshard.known import KnownLinks
from kgshard.models.link import SIDES, Side
from kgshard.ranking.excluded import Excluded, Questions, question_order

NUM_ENTITIES, NUM_RELATIONS = 12, 3


def draw(seed: int, size: int) -> np.ndarray:
    """Return int32[size, 3] triples, with repeats."""
    random = np.random.default_rng(seed)
    limits = [NUM_ENTITIES, NUM_RELATIONS, NUM_ENTITIES]
    return random.integers(0, limits, (size, 3)).astype(np.int32)


def question_of(side: Side, triple: list[int]) -> tuple[int, int]:
    return (triple[0], triple[1]) if side == "tail" else (triple[2], triple[1])


def answer_of(side: Side, triple: list[int]) -> int:
    return triple[2] if side == "tail" else triple[0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(8))
def test_pairs_and_candidates_are_those_of_sets(side: Side, seed: int) -> None:
    triples, known = draw(seed, 20), draw(seed + 100, 80)  # 80 of 432, some twice, few of them ranked
    triples = triples[question_order(side, triples)]
    questions = Questions.of(side, triples)
    excluded = Excluded(
        KnownLinks(known, side, num_relations=NUM_RELATIONS), questions, num_entities=NUM_ENTITIES
    )
    everyone = set(range(NUM_ENTITIES))
    for part, entities in (
        (slice(0, 20), range(12)),
        (slice(3, 11), range(4, 9)),
        (slice(5, 6), range(11, 12)),
    ):
        rows, answers = excluded.pairs(part, entities)
        found = set(zip((rows + part.start).tolist(), answers.tolist(), strict=True))
        expected = set()
        for row, triple in list(enumerate(triples.tolist()))[part]:
            asked = question_of(side, triple)
            answered = {
                answer_of(side, other) for other in known.tolist() if question_of(side, other) == asked
            }
            no_candidates = answered | {answer_of(side, triple)}
            expected |= {(row, entity) for entity in no_candidates if entity in entities}
            assert excluded.num_candidates[row] == len(everyone - no_candidates) + 1
        assert found == expected


def test_nothing_known_excludes_the_true_answers_alone() -> None:
    triples = draw(1, 9)
    triples = triples[question_order("tail", triples)]
    excluded = Excluded(None, Questions.of("tail", triples), num_entities=NUM_ENTITIES)
    rows, answers = excluded.pairs(slice(0, 9), range(NUM_ENTITIES))
    assert rows.tolist() == list(range(9))
    assert answers.tolist() == triples[:, 2].tolist()
    assert excluded.num_candidates.tolist() == [NUM_ENTITIES] * 9


@pytest.mark.parametrize("side", SIDES)
def test_equal_questions_are_asked_once(side: Side) -> None:
    triples = draw(2, 200)
    ordered = triples[question_order(side, triples)]
    questions = Questions.of(side, ordered)
    distinct = list(zip(questions.anchors.tolist(), questions.relations.tolist(), strict=True))
    assert len(set(distinct)) == len(distinct) < 40  # of 36 there are
    for row, triple in enumerate(ordered.tolist()):
        assert distinct[questions.asked[row]] == question_of(side, triple)
        assert questions.targets[row] == answer_of(side, triple)
    assert (np.diff(questions.asked) >= 0).all()
