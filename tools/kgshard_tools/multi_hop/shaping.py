"""From formulas to trees: each variable but the one that is asked for hangs from one link."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kgshard.errors import ConfigError
from kgshard.models.link import Side
from kgshard_tools.multi_hop.language import And, Formula, Link, Negation, Or, Term, Variable
from kgshard_tools.multi_hop.trees import Hop, Node, all_of, any_of, opposite


class Names(Protocol):
    """What tells entities and relations by their labels."""

    def entity(self, name: str) -> int:
        """Return a row. Raises UnknownEntityError."""

    def relation(self, name: str) -> int:
        """Return a row. Raises UnknownRelationError."""


def tree(formula: Formula, variable: str, names: Names) -> Node:
    """Turn a formula about one free variable into a tree.

    Raises:
        ConfigError: It is not tree-shaped, or a variable is tied to nothing; says which.
        UnknownNameError: A label is of no entity or relation.
    """
    if variable not in _variables(formula):
        raise ConfigError(f"query: ?{variable} is asked for but does not occur")
    return _tree(formula, variable, names)


def _variables(formula: Formula) -> frozenset[str]:
    match formula:
        case Link(head, _, tail):
            return frozenset(term.name for term in (head, tail) if isinstance(term, Variable))
        case Negation(part):
            return _variables(part)
        case And(parts) | Or(parts):
            return _variables_of(parts)


def _variables_of(parts: Iterable[Formula]) -> frozenset[str]:
    return frozenset(name for part in parts for name in _variables(part))


def _tree(formula: Formula, variable: str, names: Names) -> Node:
    match formula:
        case Link():
            return _leaf(formula, variable, names)
        case Negation(part):
            return opposite(_tree(part, variable, names))
        case Or(parts):
            _check_or(parts, variable)
            return any_of([_tree(part, variable, names) for part in parts])
        case And():
            groups = _groups(_conjuncts(formula), variable)
            return all_of([_group_tree(group, variable, names) for group in groups])


def _leaf(link: Link, variable: str, names: Names) -> Node:
    side, other = _far_end(link, variable)
    if isinstance(other, Variable):
        raise ConfigError(f"query: ?{other.name} is tied to no entity")
    return Hop(names.relation(link.relation), side, names.entity(other))


def _far_end(link: Link, variable: str) -> tuple[Side, Term]:
    """Return which end of a link a variable is at, and the other end."""
    at_head, at_tail = (end == Variable(variable) for end in (link.head, link.tail))
    if at_head and at_tail:
        raise ConfigError(f"query: ?{variable} is linked to itself in {link}")
    return ("head", link.tail) if at_head else ("tail", link.head)


def _check_or(parts: tuple[Formula, ...], variable: str) -> None:
    seen: set[str] = set()
    for part in parts:
        own = _variables(part)
        if variable not in own:
            raise ConfigError(f"query: ?{variable} is missing from one side of |")
        shared = sorted((own & seen) - {variable})
        if shared:
            raise ConfigError(f"query: ?{shared[0]} is on both sides of |; give it two names")
        seen |= own


def _conjuncts(formula: Formula) -> list[Formula]:
    """Return the parts of a conjunction, those of conjunctions in it too."""
    if isinstance(formula, And):
        return [inner for part in formula.parts for inner in _conjuncts(part)]
    if isinstance(formula, Negation) and isinstance(formula.part, Negation):
        return _conjuncts(formula.part.part)
    return [formula]


def _groups(parts: list[Formula], variable: str) -> list[list[Formula]]:
    """Return the parts in groups that share variables other than `variable`."""
    groups: list[tuple[set[str], list[Formula]]] = []
    for part in parts:
        own = set(_variables(part)) - {variable}
        touched = [group for group in groups if group[0] & own]
        merged = (own.union(*(group[0] for group in touched)), [p for group in touched for p in group[1]])
        place = groups.index(touched[0]) if touched else len(groups)
        groups = [group for group in groups if group not in touched]
        groups.insert(place, (merged[0], [*merged[1], part]))
    return [group for _, group in groups]


def _group_tree(parts: list[Formula], variable: str, names: Names) -> Node:
    """Turn parts that share variables into the node for one more variable, which all but one lack."""
    near = [part for part in parts if variable in _variables(part)]
    if not near:
        loose = sorted(_variables_of(parts))
        what = f"?{loose[0]} has no link to" if loose else f"{parts[0]} does not say anything about"
        raise ConfigError(f"query: {what} ?{variable}")
    if len(parts) == 1:
        return _tree(parts[0], variable, names)
    link, rest = near[0], [part for part in parts if part is not near[0]]
    if len(near) > 1:
        raise ConfigError(
            f"query: ?{_shared(near[0], parts, variable)} is tied to ?{variable} in more than one way; "
            "a query with a cycle cannot be answered"
        )
    negated = isinstance(link, Negation)
    if isinstance(link, Negation):
        link = link.part
    if not isinstance(link, Link):
        raise ConfigError(
            f"query: ?{_shared(link, rest, variable)} is used inside and outside of a part with | or !; "
            f"one link alone may tie it to ?{variable}"
        )
    side, other = _far_end(link, variable)
    assert isinstance(other, Variable), "else it would be a group of its own"
    source = _tree(And(tuple(rest)), other.name, names)
    return Hop(names.relation(link.relation), side, source, other.name, negated)


def _shared(part: Formula, others: list[Formula], variable: str) -> str:
    """Return a variable but `variable` that a part has in common with others."""
    elsewhere = _variables_of(other for other in others if other is not part)
    return min((_variables(part) & elsewhere) - {variable}, default=variable)
