"""Which entities a tree holds for by the triples that are written down, link by link.

The literature calls these answers easy; those that only valid and test bring about are its hard ones.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt

from kgshard.data.dataset import SPLITS, Dataset
from kgshard.known import Ids
from kgshard.models.link import Side
from kgshard_tools.multi_hop.trees import All, Any, Hop, Node, Not

Holds = npt.NDArray[np.bool_]
"""bool[num_entities]."""
_KEPT_PAIRS = 1 << 22


class Graph:
    """The triples of a dataset, walked relation by relation."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._pairs: dict[tuple[str, int], npt.NDArray[np.int64]] = {}

    def known(self, node: Node) -> list[Holds]:
        """Return for whom a tree holds by train alone, by train and valid, and by all triples."""
        return [self.holds(node, SPLITS[: count + 1]) for count in range(len(SPLITS))]

    def holds(self, node: Node, splits: tuple[str, ...] = SPLITS) -> Holds:
        """Return for whom a tree holds by the triples of some splits; what they lack counts as false."""
        match node:
            case Hop():
                return self._linked(node, splits)
            case All(parts):
                return reduce(np.logical_and, [self.holds(part, splits) for part in parts])
            case Any(parts):
                return reduce(np.logical_or, [self.holds(part, splits) for part in parts])
            case Not(part):
                return ~self.holds(part, splits)

    def split_of(self, relation: int, heads: Ids, tails: Ids) -> list[str | None]:
        """Return the first split that holds each triple of a relation, if one does."""
        asked = heads * self._dataset.num_entities + tails
        found: list[str | None] = [None] * len(asked)
        for split in reversed(SPLITS):
            pairs = self._pairs_of(split, relation)
            held = np.isin(asked, pairs[:, 0] * self._dataset.num_entities + pairs[:, 1])
            for place in np.flatnonzero(held).tolist():
                found[place] = split
        return found

    def _linked(self, hop: Hop, splits: tuple[str, ...]) -> Holds:
        sources, num_entities = self._sources(hop, splits), self._dataset.num_entities
        far, near = self.ends(hop.relation, hop.side, splits)
        is_linked = sources[far]
        if not hop.negated:
            reached = np.zeros(num_entities, bool)
            reached[near[is_linked]] = True
            return reached
        links = np.unique(near[is_linked] * num_entities + far[is_linked]) // num_entities
        # Some source lacks the link, unless all have it.
        lacking: Holds = np.bincount(links, minlength=num_entities) < sources.sum()
        return lacking

    def _sources(self, hop: Hop, splits: tuple[str, ...]) -> Holds:
        if not isinstance(hop.source, int):
            return self.holds(hop.source, splits)
        sources = np.zeros(self._dataset.num_entities, bool)
        sources[hop.source] = True
        return sources

    def ends(self, relation: int, side: Side, splits: tuple[str, ...]) -> tuple[Ids, Ids]:
        """Return the far and the near ends int64[m] of a relation's triples; `side` is near."""
        pairs = np.concatenate([self._pairs_of(split, relation) for split in splits])
        return (pairs[:, 0], pairs[:, 1]) if side == "tail" else (pairs[:, 1], pairs[:, 0])

    def _pairs_of(self, split: str, relation: int) -> npt.NDArray[np.int64]:
        """Return int64[m, 2]: the heads and tails of a relation's triples in a split."""
        key = split, relation
        if key not in self._pairs:
            if sum(map(len, self._pairs.values())) > _KEPT_PAIRS:
                self._pairs.clear()
            triples = self._dataset.triples(split)
            own = triples[np.flatnonzero(triples[:, 1] == relation)]
            self._pairs[key] = own[:, [0, 2]].astype(np.int64)
        return self._pairs[key]
