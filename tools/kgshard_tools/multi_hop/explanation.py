"""What makes an answer true: the best entity for each variable, and how true each link is by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kgshard.known import Ids
from kgshard_tools.multi_hop.evaluators import (
    NOBODY,
    Conjunction,
    Disjunction,
    Evaluator,
    Leaf,
    Negation,
    Step,
)
from kgshard_tools.multi_hop.graph import Graph
from kgshard_tools.multi_hop.names import DatasetNames
from kgshard_tools.multi_hop.results import LinkUsed, NamedEntity
from kgshard_tools.multi_hop.trees import Hop, Node, children
from kgshard_tools.multi_hop.truth import Degrees, probabilities


@dataclass(slots=True)
class Explanation:
    """Of one answer, filled from the answer to the leaves."""

    variables: dict[str, NamedEntity] = field(default_factory=dict)
    links: list[LinkUsed] = field(default_factory=list)


class Explainer:
    """Follows answers back to the entities that a query names."""

    def __init__(self, names: DatasetNames, graph: Graph) -> None:
        self._names = names
        self._graph = graph

    def explain(self, node: Node, evaluator: Evaluator, rows: Ids) -> list[Explanation]:
        """Return what makes a tree true for each of some rows int64[K]."""
        found = [Explanation() for _ in rows]
        self._follow(node, evaluator, rows, found, negated=False)
        return found

    def _follow(
        self, node: Node, evaluator: Evaluator, rows: Ids, found: list[Explanation], *, negated: bool
    ) -> None:
        match evaluator:
            case Leaf():
                assert isinstance(node, Hop)
                assert isinstance(node.source, int)
                sources = np.full(len(rows), node.source)
                self._tell(node, sources, rows, evaluator.exact(rows), found, negated=negated)
            case Step():
                self._follow_step(node, evaluator, rows, found, negated=negated)
            case Conjunction(parts=parts) | Disjunction(parts=parts):
                for child, part in zip(children(node), parts, strict=True):
                    self._follow(child, part, rows, found, negated=negated)
            case Negation(part=part):
                self._follow(children(node)[0], part, rows, found, negated=not negated)

    def _follow_step(
        self, node: Node, step: Step, rows: Ids, found: list[Explanation], *, negated: bool
    ) -> None:
        assert isinstance(node, Hop)
        assert not isinstance(node.source, int)
        witnesses = step.witnesses(rows)
        kept = np.flatnonzero(witnesses != NOBODY)
        told, rows, witnesses = [found[place] for place in kept.tolist()], rows[kept], witnesses[kept]
        self._follow(node.source, step.source, witnesses, told, negated=negated)
        for explanation, witness in zip(told, witnesses.tolist(), strict=True):
            explanation.variables[node.variable] = self._names.named(witness)
        degrees = step.links.degrees(step.places(witnesses), rows)
        self._tell(node, witnesses, rows, degrees, told, negated=negated != node.negated)

    def _tell(
        self,
        hop: Hop,
        sources: Ids,
        rows: Ids,
        degrees: Degrees,
        found: list[Explanation],
        *,
        negated: bool,
    ) -> None:
        """Add a link between each source and its row."""
        heads, tails = (sources, rows) if hop.side == "tail" else (rows, sources)
        splits = self._graph.split_of(hop.relation, heads, tails)
        relation, scores = self._names.relation_label(hop.relation), probabilities(degrees).tolist()
        for explanation, head, tail, score, split in zip(
            found, heads.tolist(), tails.tolist(), scores, splits, strict=True
        ):
            ends = self._names.entity_label(head), self._names.entity_label(tail)
            explanation.links.append(LinkUsed(ends[0], relation, ends[1], score, negated, split))
