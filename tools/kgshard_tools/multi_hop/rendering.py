"""Trees written out as queries, in the language that they are read in."""

from __future__ import annotations

from typing import Protocol

from kgshard_tools.multi_hop.language import Link, Term, Variable
from kgshard_tools.multi_hop.trees import All, Any, Hop, Node, Not


class Labels(Protocol):
    """What names rows."""

    def entity_label(self, row: int) -> str: ...
    def relation_label(self, row: int) -> str: ...


def render(node: Node, variable: str, labels: Labels) -> str:
    """Write a tree as a query."""
    return f"?{variable}: {_rendered(node, variable, labels)}"


def _rendered(node: Node, variable: str, labels: Labels) -> str:
    match node:
        case Hop(source=source):
            return _hop(node, variable, labels, source)
        case All(parts):
            return " & ".join(_grouped(part, variable, labels, Any) for part in parts)
        case Any(parts):
            return " | ".join(_rendered(part, variable, labels) for part in parts)
        case Not(part):
            return "!" + _grouped(part, variable, labels, All, Any, Hop)


def _hop(node: Hop, variable: str, labels: Labels, source: int | Node) -> str:
    near, relation = Variable(variable), labels.relation_label(node.relation)
    is_leaf = isinstance(source, int)
    far: Term = labels.entity_label(source) if isinstance(source, int) else Variable(node.variable)
    link = str(Link(far, relation, near) if node.side == "tail" else Link(near, relation, far))
    link = f"!{link}" if node.negated else link
    if is_leaf or isinstance(source, int):
        return link
    return f"{_grouped(source, node.variable, labels, Any)} & {link}"


def _grouped(node: Node, variable: str, labels: Labels, *kinds: type[Node]) -> str:
    """Write a node, in parentheses where it is of one of these kinds and no single link."""
    text = _rendered(node, variable, labels)
    is_link = isinstance(node, Hop) and isinstance(node.source, int)
    return f"({text})" if isinstance(node, kinds) and not is_link else text
