"""Which questions triples ask, and who is no candidate for an answer. No torch here.

Triples that ask the same, (h, r, ?) or (?, r, t), share one question and one list of known answers. Pairs of
questions and answers are made for a few questions and a few entities at a time: one hub may have as many
known answers as there are entities.

Shape letters: Q triples, U distinct questions, A known answers of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kgshard.data.dataset import Triples
from kgshard.known import Ids, KnownLinks, anchors_of, in_ranges, targets_of
from kgshard.models.link import Side


def question_order(side: Side, triples: Triples) -> Ids:
    """Return int64[Q]: positions that put triples [Q, 3] which ask the same beside each other."""
    return np.lexsort((triples[:, 1], anchors_of(side, triples)))


@dataclass(frozen=True, slots=True)
class Questions:
    """The distinct questions that triples in `question_order` ask."""

    anchors: Ids
    """int64[U] given entities."""
    relations: Ids
    """int64[U]."""
    asked: Ids
    """int64[Q], never falling: triple i asks question asked[i]."""
    targets: Ids
    """int64[Q] true answers."""

    @staticmethod
    def of(side: Side, triples: Triples) -> Questions:
        """Take triples [Q, 3], of which those that ask the same are neighbours."""
        anchors, relations = anchors_of(side, triples).astype(np.int64), triples[:, 1].astype(np.int64)
        is_new = np.ones(len(triples), bool)
        is_new[1:] = (anchors[1:] != anchors[:-1]) | (relations[1:] != relations[:-1])
        targets = targets_of(side, triples).astype(np.int64)
        return Questions(anchors[is_new], relations[is_new], np.cumsum(is_new) - 1, targets)


class Excluded:
    """What true answers are not compared with: known answers, and themselves."""

    num_candidates: Ids
    """int64[Q]: entities that compete for a triple's place, its own answer counted."""

    def __init__(self, known: KnownLinks | None, questions: Questions, *, num_entities: int) -> None:
        """Look known answers up; None knows nothing."""
        self._questions = questions
        self._num_entities = num_entities
        self._keys: Ids = np.empty(0, np.int64)  # int64[A]: question * num_entities + answer, ascending
        if known is not None:
            question, answers = known.answers(questions.anchors, questions.relations)
            keys = question * num_entities + answers
            keys.sort()  # np.unique hashes first, which takes several times as long.
            self._keys = keys[np.diff(keys, prepend=-1) > 0]
        starts, stops = self._ranges(questions.asked, 0, num_entities)
        true_keys = questions.asked * num_entities + questions.targets
        is_known = np.searchsorted(self._keys, true_keys, "right") > np.searchsorted(self._keys, true_keys)
        self.num_candidates = num_entities - (stops - starts) + is_known

    def _ranges(self, asked: Ids, first: int, stop: int) -> tuple[Ids, Ids]:
        """Return where, among the keys, known answers in [first, stop) begin and end."""
        keys = asked * self._num_entities
        return np.searchsorted(self._keys, keys + first), np.searchsorted(self._keys, keys + stop)

    def pairs(self, part: slice, entities: range) -> tuple[Ids, Ids]:
        """Return the pairs that are not compared, each once or twice.

        Args:
            part: Some of the triples.
            entities: Consecutive entities.

        Returns:
            int64[M] triple, counted from the first of the part, and int64[M] entity.
        """
        starts, stops = self._ranges(self._questions.asked[part], entities.start, entities.stop)
        triples, places = in_ranges(starts, stops)
        answers = self._keys[places] % self._num_entities
        targets = self._questions.targets[part]
        mine = ((targets >= entities.start) & (targets < entities.stop)).nonzero()[0]
        return np.concatenate([triples, mine]), np.concatenate([answers, targets[mine]])
