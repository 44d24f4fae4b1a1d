"""Which answers a run's triples hold already, for one question or thousands."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kgshard.data.dataset import Dataset, Triples
from kgshard.known import KnownLinks, known_answers
from kgshard.models.link import Side
from kgshard_tools.search import Exclusions, Ids

_FEW = 32
"""So many questions, whenever they come, take a pass each over the triples; for more, these are sorted."""

NEW = -1


class KnownAnswers:
    """The known answers to B questions about one side, by the split that holds them."""

    def __init__(self, splits: dict[str, Exclusions]) -> None:
        self._splits = splits

    def everywhere(self) -> Exclusions:
        """Return the answers that any split holds."""
        first, *others = self._splits.values()
        return first.joined(others)

    def splits_of(self, ids: Ids) -> npt.NDArray[np.int8]:
        """Return int8[B, F]: the first split that holds an answer [B, F], numbered as
        `KnownTriples.split_name` takes it; or NEW.
        """
        found = np.full(ids.shape, NEW, np.int8)
        for number, held in reversed(list(enumerate(self._splits.values()))):
            found[held.hold(ids)] = number
        return found


class KnownTriples:
    """All triples of a dataset: mapped and checked when first asked for, sorted when many questions come."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._sorted: dict[tuple[str, Side], KnownLinks] = {}
        self._passes: Counter[tuple[str, Side]] = Counter()

    @cached_property
    def splits(self) -> dict[str, Triples]:
        return {split: self._dataset.triples(split) for split in self._dataset.splits}

    def split_name(self, number: int) -> str | None:
        """Return which split a number stands for; None for NEW."""
        return None if number == NEW else self._dataset.splits[number]

    def answers(self, side: Side, anchors: Ids, relations: Ids) -> KnownAnswers:
        """Look up the known answers to questions: anchors int64[B], relations int64[B]."""
        num_rows, found = self._dataset.num_entities, {}
        for split in self.splits:
            asked, ids = self._pairs(split, side, anchors, relations)
            found[split] = Exclusions(asked, ids, num_queries=len(anchors), num_rows=num_rows)
        return KnownAnswers(found)

    def relations(self, head: int, tail: int) -> dict[int, str]:
        """Return the relations known between two entities, each with the first split that holds it."""
        found: dict[int, str] = {}
        for split, triples in self.splits.items():
            between = triples[(triples[:, 0] == head) & (triples[:, 2] == tail), 1]
            for relation in np.unique(between).tolist():
                found.setdefault(relation, split)
        return found

    def seen(self, side: Side, relation: int) -> Ids:
        """Return the entities, ascending, that are at this end of a relation in train."""
        train = self.splits["train"]
        return np.unique(train[train[:, 1] == relation, 0 if side == "head" else 2]).astype(np.int64)

    def _pairs(self, split: str, side: Side, anchors: Ids, relations: Ids) -> tuple[Ids, Ids]:
        triples = self.splits[split]
        self._passes[split, side] += len(anchors)
        if self._passes[split, side] > _FEW:
            return self._sorted_links(split, side).answers(anchors, relations)
        each = [
            known_answers(triples, side, anchor=anchor, relation=relation)
            for anchor, relation in zip(anchors.tolist(), relations.tolist(), strict=True)
        ]
        return np.repeat(np.arange(len(each)), [len(ids) for ids in each]), np.concatenate(each or [anchors])

    def _sorted_links(self, split: str, side: Side) -> KnownLinks:
        if (split, side) not in self._sorted:
            num_relations = self._dataset.num_relations
            self._sorted[split, side] = KnownLinks(self.splits[split], side, num_relations=num_relations)
        return self._sorted[split, side]
