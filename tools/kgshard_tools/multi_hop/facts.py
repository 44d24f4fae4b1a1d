"""Links that the triples state: true, whatever the model makes of them (Bai et al., 2023, QTO).

They are not all equally true, so that answers they lead to do not tie: their log odds are those of the model,
lifted above those of any link that is not stated.

Shape letters: B anchors, n rows of a block, m pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kgshard.known import Ids, in_ranges
from kgshard.models.link import Side
from kgshard_tools.multi_hop.graph import Graph
from kgshard_tools.multi_hop.truth import Degrees

_LIFT = 100.0
"""Log odds of a stated link above the model's, which a softmax in float64 keeps below 37."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The triples of some splits, or of none."""

    graph: Graph
    splits: tuple[str, ...]

    def of(self, relation: int, side: Side, anchors: Ids) -> StatedLinks:
        """Return the links of anchors int64[B], all different, to rows at `side` of a relation."""
        if not self.splits:
            nobody = np.empty(0, np.int64)
            return StatedLinks(anchors, nobody, nobody)
        return StatedLinks(anchors, *self.graph.ends(relation, side, self.splits))


class StatedLinks:
    """Which of B anchors the triples link to which rows."""

    def __init__(self, anchors: Ids, far: Ids, near: Ids) -> None:
        """Take the ends int64[T] of all triples of a relation; anchors are at the far end."""
        is_asked = np.isin(far, anchors)
        order = np.argsort(anchors)
        places = order[np.searchsorted(anchors[order], far[is_asked])]
        self._num_anchors = max(1, len(anchors))
        # By row, then by place; a triple may be in two splits.
        self._keys: Ids = np.unique(self._key(near[is_asked], places))
        self._rows, self._places = np.divmod(self._keys, self._num_anchors)
        self.counts: Ids = np.bincount(self._places, minlength=len(anchors))
        """int64[B]: how many rows each anchor is linked to."""

    def lift(self, part: slice, rows: Ids, *degrees: Degrees) -> None:
        """Lift, in place, degrees [b, n] of the links between a part of the anchors and rows."""
        starts, stops = (np.searchsorted(self._rows, rows, end) for end in ("left", "right"))
        columns, stated = in_ranges(starts, stops)
        places = self._places[stated]
        is_here = (places >= part.start) & (places < part.stop)
        here = places[is_here] - part.start, columns[is_here]
        for each in degrees:
            each[here] = _lifted(each[here])

    def lift_pairs(self, degrees: Degrees, places: Ids, rows: Ids) -> None:
        """Lift, in place, the degrees [m] of pairs of an anchor, by its place, and a row."""
        is_stated = np.isin(self._key(rows, places), self._keys)
        degrees[is_stated] = _lifted(degrees[is_stated])

    def _key(self, rows: Ids, places: Ids) -> Ids:
        return rows * self._num_anchors + places


def _lifted(degrees: Degrees) -> Degrees:
    return _LIFT + np.maximum(degrees, -_LIFT / 2)
