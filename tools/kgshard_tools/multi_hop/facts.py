"""Links that the triples state: true, whatever the model makes of them (Bai et al., 2023, QTO).

They are not all equally true, so that answers they lead to do not tie: their log odds are those of the model,
lifted above those of any link that is not stated.

Shape letters: B anchors, n rows of a block, m pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kgshard.known import Ids, in_ranges
from kgshard.models.link import Side
from kgshard_tools.multi_hop.graph import Graph
from kgshard_tools.multi_hop.truth import TRUE, Degrees

_LIFT = 100.0
"""Log odds of a stated link above the model's."""
_HIGHEST = float(np.nextafter(_LIFT / 2, 0))
"""No link that is not stated is truer where others are, however sure the model is."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The triples of some splits, or of none."""

    graph: Graph
    splits: tuple[str, ...]

    def of(self, relation: int, side: Side, anchors: Ids) -> StatedLinks:
        """Return the links of anchors int64[B], all different, to rows at `side` of a relation."""
        if not self.splits:
            nobody = np.empty(0, np.int64)
            return StatedLinks(anchors, nobody, nobody, highest=TRUE)
        return StatedLinks(anchors, *self.graph.ends(relation, side, self.splits))


class StatedLinks:
    """Which of B anchors the triples link to which rows."""

    def __init__(self, anchors: Ids, far: Ids, near: Ids, *, highest: float = _HIGHEST) -> None:
        """Take the ends int64[T] of all triples of a relation; anchors are at the far end.

        No other link is truer than `highest`.
        """
        self._highest = highest
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
        """Lift, in place, degrees [b, n] of links between a part of the anchors and rows, and cap others."""
        starts, stops = (np.searchsorted(self._rows, rows, end) for end in ("left", "right"))
        columns, stated = in_ranges(starts, stops)
        places = self._places[stated]
        is_here = (places >= part.start) & (places < part.stop)
        here = places[is_here] - part.start, columns[is_here]
        for each in degrees:
            self._set(each, here)

    def lift_pairs(self, degrees: Degrees, places: Ids, rows: Ids) -> None:
        """Lift, in place, the degrees [m] of pairs of an anchor, by its place, and a row, and cap others."""
        self._set(degrees, np.isin(self._key(rows, places), self._keys))

    def _set(self, degrees: Degrees, stated: Any) -> None:
        """Lift what an index picks, and cap the rest."""
        lifted = _LIFT + np.maximum(degrees[stated], -_LIFT / 2)
        np.minimum(degrees, self._highest, out=degrees)
        degrees[stated] = lifted

    def _key(self, rows: Ids, places: Ids) -> Ids:
        return rows * self._num_anchors + places
