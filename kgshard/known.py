"""Which triples are known, asked by (entity, relation): for filtered ranking and for leaving them out.

Keys are 64-bit throughout; entity x relation overflows 32 bits on ordinary graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.data.dataset import Triples
from kgshard.models.link import Side

Ids = npt.NDArray[np.int64]


def anchors_of(side: Side, triples: Triples) -> npt.NDArray[np.integer[Any]]:
    """Return the given ends of triples [n, 3] whose `side` is asked for."""
    return triples[:, 0] if side == "tail" else triples[:, 2]


def targets_of(side: Side, triples: Triples) -> npt.NDArray[np.integer[Any]]:
    """Return the asked ends of triples [n, 3]."""
    return triples[:, 2] if side == "tail" else triples[:, 0]


class KnownLinks:
    """All known answers to questions about one side, grouped by question."""

    def __init__(self, triples: Triples, side: Side, *, num_relations: int) -> None:
        """Sort `triples` [n, 3] by (given end, relation)."""
        keys = self._keys(anchors_of(side, triples), triples[:, 1], num_relations)
        order = np.argsort(keys, kind="stable")
        self._sorted_keys = keys[order]
        self._answers = targets_of(side, triples)[order]
        self._num_relations = num_relations

    @staticmethod
    def _keys(
        anchors: npt.NDArray[np.integer[Any]], relations: npt.NDArray[np.integer[Any]], num_relations: int
    ) -> Ids:
        return anchors.astype(np.int64) * num_relations + relations

    def answers(
        self, anchors: npt.NDArray[np.integer[Any]], relations: npt.NDArray[np.integer[Any]]
    ) -> tuple[Ids, Ids]:
        """Return all known answers to Q questions as pairs.

        Args:
            anchors: int[Q] given entities.
            relations: int[Q].

        Returns:
            int64[M] which question, ascending, and int64[M] an entity that answers it.
        """
        keys = self._keys(anchors, relations, self._num_relations)
        starts, stops = (np.searchsorted(self._sorted_keys, keys, end) for end in ("left", "right"))
        questions, places = in_ranges(starts, stops)
        return questions, self._answers[places].astype(np.int64)


def in_ranges(starts: Ids, stops: Ids) -> tuple[Ids, Ids]:
    """Return all numbers of Q ranges, one after the other.

    Returns:
        int64[M] which range, ascending, and int64[M] a number in it.
    """
    counts = stops - starts
    which = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, np.repeat(starts, counts) + within


def known_answers(triples: Triples, side: Side, *, anchor: int, relation: int) -> Ids:
    """Return the distinct known answers, ascending, to one question, by one pass over triples [n, 3]."""
    asked = (triples[:, 1] == relation) & (anchors_of(side, triples) == anchor)
    return np.unique(targets_of(side, triples)[asked]).astype(np.int64)
