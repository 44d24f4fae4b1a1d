"""Evaluators of trees, with their beams, from the leaves up."""

from __future__ import annotations

import numpy as np

from kgshard.known import Ids
from kgshard_tools.multi_hop.blocks import Block, Links, Tables
from kgshard_tools.multi_hop.evaluators import (
    Beam,
    Conjunction,
    Disjunction,
    Evaluator,
    Leaf,
    Negation,
    Step,
    Truth,
)
from kgshard_tools.multi_hop.facts import Facts
from kgshard_tools.multi_hop.picking import pick
from kgshard_tools.multi_hop.scales import Scale
from kgshard_tools.multi_hop.trees import All, Any, Hop, Node, Not
from kgshard_tools.multi_hop.truth import FALSE, TNorm


class Builder:
    """Chooses beams from the leaves up."""

    def __init__(
        self, tables: Tables, norm: TNorm, scale: Scale, facts: Facts, beam: int | None, floor: float = FALSE
    ) -> None:
        """Prepare to build.

        Args:
            tables: What is searched.
            norm: The conjunction.
            scale: From scores to degrees.
            facts: What is true whatever the scores.
            beam: How many entities a hop goes from; None: all.
            floor: With all: what makes the tree no truer than this need not be known.
        """
        self._tables = tables
        self._norm = norm
        self._scale = scale
        self._facts = facts
        self._beam = beam
        self._floor = floor

    def build(self, node: Node) -> Evaluator:
        """Return the evaluator of a tree."""
        return self._build(node, self._floor)

    def _build(self, node: Node, floor: float) -> Evaluator:
        match node:
            case Hop(source=int() as entity):
                return Leaf(self._links(node, np.array([entity], np.int64)))
            case Hop(source=source):
                assert not isinstance(source, int)
                return self._step(node, self._build(source, floor), floor)
            case All(parts):
                return Conjunction([self._build(part, floor) for part in parts], self._norm)
            case Any(parts):
                return Disjunction([self._build(part, FALSE) for part in parts], self._norm)
            case Not(part):
                return Negation(self._build(part, FALSE))

    def _links(self, hop: Hop, anchors: Ids) -> Links:
        return Links(self._tables, hop.relation, hop.side, anchors, self._scale, self._facts)

    def _step(self, hop: Hop, source: Evaluator, floor: float) -> Step:
        is_whole = self._beam is None or self._beam >= self._tables.num_rows
        beam = self._all(source, floor) if is_whole else self._best(source)
        return Step(source, beam, self._links(hop, beam.ids), self._norm, negated=hop.negated)

    def _best(self, source: Evaluator) -> Beam:
        """Return the best entities of a source, exactly."""
        assert self._beam is not None
        picked = pick(source, self._tables, self._beam)
        truth = source.truth(Block(self._tables, picked.ids))
        degrees = picked.degrees
        least = most = degrees
        if truth.least is not truth.low:
            least = np.where(truth.least == truth.low, degrees, truth.least)
        if truth.most is not truth.high:
            most = np.where(truth.most == truth.high, degrees, truth.most)
        return Beam(picked.ids, Truth(degrees, degrees, least, most), picked.outside, picked.outside <= FALSE)

    def _all(self, source: Evaluator, floor: float) -> Beam:
        """Return all entities that are not below the floor, in bounds."""
        ids, lows, highs = [np.empty(0, np.int64)], [np.empty(0)], [np.empty(0)]
        for block in self._tables.blocks():
            truth = source.truth(block, floor)
            kept = truth.high >= floor
            ids.append(block.ids[kept])
            lows.append(truth.low[kept])
            highs.append(truth.high[kept])
        low, high = np.concatenate(lows), np.concatenate(highs)
        order = np.argsort(-high, kind="stable")
        low, high = low[order], high[order]
        return Beam(np.concatenate(ids)[order], Truth(low, high, low, high), FALSE, True)
