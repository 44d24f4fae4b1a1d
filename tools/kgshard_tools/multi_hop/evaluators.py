"""How true a tree is for rows of the table, from the leaves up.

For a hop from a variable ?y the truth is the best over all y, so it takes the best `beam` of them (or all).
Beside the degree that these give there go bounds on what all y would give: a t-norm is never above either of
its sides, so an entity that was left out cannot lift an answer above its own degree.

Degrees of a block come with bounds on their rounding; those of rows that matter are computed pair by pair.
So what is found does not depend on blocks.

Shape letters: B entities of a beam, n rows of a block, K rows picked, m pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from kgshard.known import Ids
from kgshard_tools.multi_hop.blocks import PART, Block, Links
from kgshard_tools.multi_hop.truth import FALSE, Degrees, TNorm, lowered, raised

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Truth:
    """How true something is for n rows, in bounds."""

    low: Degrees
    """float64[n]: with `high` it holds the degree that the beams give."""
    high: Degrees
    least: Degrees
    """float64[n]: with `most` it holds the degree that all entities would give; the very array `low` where
    nobody was left out, as `most` is `high`."""
    most: Degrees

    def mapped(self, below: Callable[[Degrees], Degrees], above: Callable[[Degrees], Degrees]) -> Truth:
        """Return what one function makes of the lower bounds, and another of the upper ones."""
        low, high = below(self.low), above(self.high)
        least = low if self.least is self.low else below(self.least)
        most = high if self.most is self.high else above(self.most)
        return Truth(low, high, least, most)

    @property
    def is_open(self) -> npt.NDArray[np.bool_]:
        """bool[n]: whether an entity that was left out may matter."""
        is_open: npt.NDArray[np.bool_] = (self.most != self.high) | (self.least != self.low)
        return is_open


def _combined(parts: Sequence[Truth], combine: Callable[[Degrees, Degrees], Degrees]) -> Truth:
    """Combine truths by what rises in both its arguments."""
    low, high = reduce(combine, [part.low for part in parts]), reduce(combine, [part.high for part in parts])
    least, most = low, high
    if any(part.least is not part.low for part in parts):
        least = reduce(combine, [part.least for part in parts])
    if any(part.most is not part.high for part in parts):
        most = reduce(combine, [part.most for part in parts])
    return _widened(Truth(low, high, least, most))


def _widened(truth: Truth) -> Truth:
    """Return bounds that allow for the rounding of t-norms."""
    return truth.mapped(lowered, raised)


_CONTENDERS = 1 << 20
"""Pairs of a row and an entity of the beam that are compared exactly at a time."""


class Evaluator(ABC):
    """A node whose beams, if any, are chosen."""

    @abstractmethod
    def truth(self, block: Block, floor: float = FALSE) -> Truth:
        """Return how true it is for the rows of a block. What is below `floor` may come out too low."""

    @abstractmethod
    def exact(self, rows: Ids, floor: float = FALSE) -> Degrees:
        """Return float64[K]: the degrees that the beams give, whatever else is computed."""

    @property
    def below(self) -> Sequence[Evaluator]:
        """The evaluators of the nodes right below."""
        return ()


class Leaf(Evaluator):
    """Rows linked to an entity."""

    def __init__(self, links: Links) -> None:
        self.links = links

    def truth(self, block: Block, floor: float = FALSE) -> Truth:
        low, high = self.links.bounds(slice(0, 1), block)
        return Truth(low[0], high[0], low[0], high[0])

    def exact(self, rows: Ids, floor: float = FALSE) -> Degrees:
        return self.links.degrees(np.zeros(len(rows), np.int64), rows)


class Conjunction(Evaluator):
    def __init__(self, parts: Sequence[Evaluator], norm: TNorm) -> None:
        self.parts = parts
        self._norm = norm

    def truth(self, block: Block, floor: float = FALSE) -> Truth:
        # What is below the floor in one part is below it in all.
        return _combined([part.truth(block, floor) for part in self.parts], self._norm.both)

    def exact(self, rows: Ids, floor: float = FALSE) -> Degrees:
        return reduce(self._norm.both, [part.exact(rows, floor) for part in self.parts])

    @property
    def below(self) -> Sequence[Evaluator]:
        return self.parts


class Disjunction(Evaluator):
    def __init__(self, parts: Sequence[Evaluator], norm: TNorm) -> None:
        self.parts = parts
        self._norm = norm

    def truth(self, block: Block, floor: float = FALSE) -> Truth:
        return _combined([part.truth(block) for part in self.parts], self._norm.either)

    def exact(self, rows: Ids, floor: float = FALSE) -> Degrees:
        return reduce(self._norm.either, [part.exact(rows) for part in self.parts])

    @property
    def below(self) -> Sequence[Evaluator]:
        return self.parts


class Negation(Evaluator):
    def __init__(self, part: Evaluator) -> None:
        self.part = part

    def truth(self, block: Block, floor: float = FALSE) -> Truth:
        part = self.part.truth(block)
        low, high = -part.high, -part.low
        least = low if part.most is part.high else -part.most
        most = high if part.least is part.low else -part.least
        return Truth(low, high, least, most)

    def exact(self, rows: Ids, floor: float = FALSE) -> Degrees:
        return -self.part.exact(rows)

    @property
    def below(self) -> Sequence[Evaluator]:
        return (self.part,)


@dataclass(frozen=True, slots=True)
class Beam:
    """The entities that a hop goes from, the truest first, and those that it leaves out."""

    ids: Ids
    """int64[B]."""
    truth: Truth
    """Of these, [B]."""
    outside: float
    """No entity that was left out is truer."""
    is_whole: bool
    """Whether nobody was left out that could matter."""


class Step(Evaluator):
    """Rows linked to an entity of a beam."""

    def __init__(self, source: Evaluator, beam: Beam, links: Links, norm: TNorm, *, negated: bool) -> None:
        self.source = source
        self.beam = beam
        self.links = links
        self.negated = negated
        self._norm = norm
        # How true an entity at a place or behind it can be.
        self._ceilings = np.maximum.accumulate(beam.truth.most[::-1])[::-1]

    def truth(self, block: Block, floor: float = FALSE) -> Truth:
        ways = self.beam.truth
        low, high = np.full(len(block), FALSE), np.full(len(block), FALSE)
        least = low if ways.least is ways.low else low.copy()
        most = high if ways.most is ways.high else high.copy()
        for part in self._parts(floor):
            lower, upper = self._bounds(part, block)
            self._lift(low, ways.low[part], lower)
            self._lift(high, ways.high[part], upper)
            if least is not low:
                self._lift(least, ways.least[part], lower)
            if most is not high:
                self._lift(most, ways.most[part], upper)
        found = _widened(Truth(low, high, least, most))
        if self.beam.is_whole:
            return found
        return Truth(found.low, found.high, found.least, np.maximum(found.most, self.beam.outside))

    def exact(self, rows: Ids, floor: float = FALSE) -> Degrees:
        return self._settle(rows, floor)[0]

    def witnesses(self, rows: Ids) -> Ids:
        """Return int64[K]: the entity that makes each row true, or NOBODY; ties by lower row."""
        return self._settle(rows, FALSE)[1]

    @property
    def below(self) -> Sequence[Evaluator]:
        return (self.source,)

    def places(self, ids: Ids) -> Ids:
        """Return int64[m]: the places of entities in the beam, which holds them."""
        order = np.argsort(self.beam.ids)
        return order[np.searchsorted(self.beam.ids[order], ids)]

    def link_degrees(self, places: Ids, rows: Ids) -> Degrees:
        """Return float64[m]: how true the links of entities of the beam, by places, to rows are."""
        degrees = self.links.degrees(places, rows)
        return -degrees if self.negated else degrees

    def _parts(self, floor: float) -> list[slice]:
        """Return the places, in parts, of all entities that are not below the floor."""
        count = int(np.searchsorted(-self._ceilings, -floor, side="right"))
        return [slice(start, min(start + PART, count)) for start in range(0, count, PART)]

    def _bounds(self, part: slice, block: Block) -> tuple[Degrees, Degrees]:
        low, high = self.links.bounds(part, block)
        return (-high, -low) if self.negated else (low, high)

    def _lift(self, best: Degrees, ways: Degrees, links: Degrees) -> None:
        np.maximum(best, self._norm.best(ways, links), out=best)

    def _settle(self, rows: Ids, floor: float) -> tuple[Degrees, Ids]:
        """Return the exact degrees of rows, and their witnesses."""
        # Where links tie, the whole beam may contend for each row.
        size = max(1, _CONTENDERS // max(1, len(self.beam.ids)))
        starts = range(0, max(1, len(rows)), size)
        degrees, witnesses = zip(
            *(self._settle_some(rows[start : start + size], floor) for start in starts), strict=True
        )
        return np.concatenate(degrees), np.concatenate(witnesses)

    def _settle_some(self, rows: Ids, floor: float) -> tuple[Degrees, Ids]:
        block = Block(self.links.tables, rows)
        low = self.truth(block, floor).low
        places, asked = self._contenders(block, low, floor)
        ways = self._exact_ways(places, floor)
        degrees = self._norm.both(ways, self.link_degrees(places, rows[asked]))
        order = np.lexsort((self.beam.ids[places], -degrees, asked))
        found, first = np.unique(asked[order], return_index=True)
        chosen = order[first]
        best: Degrees = np.full(len(rows), FALSE)
        witnesses: Ids = np.full(len(rows), NOBODY, np.int64)
        best[found], witnesses[found] = degrees[chosen], self.beam.ids[places[chosen]]
        return best, witnesses

    def _contenders(self, block: Block, low: Degrees, floor: float) -> tuple[Ids, Ids]:
        """Return the places of the beam that may be the best for rows, and the rows' places in the block."""
        places: list[Ids] = [np.empty(0, np.int64)]
        asked: list[Ids] = [np.empty(0, np.int64)]
        for part in self._parts(floor):
            _, upper = self._bounds(part, block)
            reach = raised(self._norm.both(self.beam.truth.high[part, None], upper))
            here, there = np.nonzero((reach >= low) & (reach > FALSE))
            places.append(here + part.start)
            asked.append(there)
        return np.concatenate(places), np.concatenate(asked)

    def _exact_ways(self, places: Ids, floor: float) -> Degrees:
        """Return float64[m]: how true the source is for entities of the beam, by their places."""
        truth = self.beam.truth
        unique, inverse = np.unique(places, return_inverse=True)
        ways = truth.low[unique]
        vague = np.flatnonzero(truth.high[unique] != ways)
        if len(vague):
            ways[vague] = self.source.exact(self.beam.ids[unique[vague]], floor)
        return ways[inverse]
