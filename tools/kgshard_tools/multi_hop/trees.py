"""Questions as trees: what is asked for is the root, entities are the leaves.

A node stands for the entities x that make it true:

    Hop      some y of a source (an entity, or a node for ?y) is linked to x
    All      all of several nodes hold
    Any      at least one does
    Not      a node does not hold

A tree has no cycles, so that the best assignment of all variables is found from the leaves up, one
variable at a time (Arakelyan et al., 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kgshard.models.link import Side


@dataclass(frozen=True, slots=True)
class Hop:
    """x is linked to an entity, or to some y that a node holds for."""

    relation: int
    side: Side
    """Which end of the relation x is at."""
    source: int | Node
    """Where the other end comes from: an entity, or what ?y must fulfil."""
    variable: str = ""
    """The name of ?y; empty where the source is an entity."""
    negated: bool = False
    """Whether y must not be linked to x."""


@dataclass(frozen=True, slots=True)
class All:
    """Every one of two parts or more holds."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Any:
    """At least one of two parts or more holds."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """A node does not hold."""

    part: Node


Node = Hop | All | Any | Not


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes right below one."""
    match node:
        case Hop(source=source):
            return () if isinstance(source, int) else (source,)
        case All(parts=parts) | Any(parts=parts):
            return parts
        case Not(part=part):
            return (part,)


def all_of(parts: Sequence[Node]) -> Node:
    """Return what holds where all of some nodes do."""
    if len(parts) == 1:
        return parts[0]
    return All(tuple(inner for part in parts for inner in (part.parts if isinstance(part, All) else [part])))


def any_of(parts: Sequence[Node]) -> Node:
    """Return what holds where at least one of some nodes does."""
    if len(parts) == 1:
        return parts[0]
    return Any(tuple(inner for part in parts for inner in (part.parts if isinstance(part, Any) else [part])))


def opposite(node: Node) -> Node:
    """Return the negation of a node."""
    return node.part if isinstance(node, Not) else Not(node)


STRUCTURES = {
    "e1": "1p",
    "e11": "2p",
    "e111": "3p",
    "(e1&e1)": "2i",
    "(e1&e1&e1)": "3i",
    "(e1&e1)1": "ip",
    "(e1&e11)": "pi",
    "(e1|e1)": "2u",
    "(e1|e1)1": "up",
    "(!e1&e1)": "2in",
    "(!e1&e1&e1)": "3in",
    "(!e1&e1)1": "inp",
    "(!e1&e11)": "pin",
    "(!e11&e1)": "pni",
}
"""The names that Ren et al. (2020) and Ren and Leskovec (2020) gave to some shapes."""


def structure(node: Node) -> str | None:
    """Return the literature's name for the shape of a tree, if it has one."""
    return STRUCTURES.get(_shape(node))


def _shape(node: Node) -> str:
    match node:
        case Hop(source=source, negated=negated):
            below = "e" if isinstance(source, int) else _shape(source)
            return f"{below}{'~' if negated else '1'}"
        case All(parts=parts):
            return f"({'&'.join(sorted(map(_shape, parts)))})"
        case Any(parts=parts):
            return f"({'|'.join(sorted(map(_shape, parts)))})"
        case Not(part=part):
            return f"!{_shape(part)}"
