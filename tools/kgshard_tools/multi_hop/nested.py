"""Queries as nested lists, as Query2Box, BetaE and dicee write them, with names.

    ["e", ["r1", "r2"]]                        1p 2p 3p: from an entity along relations
    [["e1", ["r1"]], ["e2", ["r2"]]]           2i 3i pi: all hold
    [["e1", ["r1"]], ["e2", ["r2"]], ["u"]]    2u: at least one holds
    [[["e1", ["r1"]], ["e2", ["r2"]]], ["r"]]  ip up: from what a part yields along relations

"n" behind a relation negates all that leads up to it; {"inverse": "r"} goes from tails to heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TypeGuard

from kgshard.errors import ConfigError, UnknownRelationError
from kgshard.models.link import Side
from kgshard_tools.multi_hop.language import MAX_DEPTH
from kgshard_tools.multi_hop.shaping import Names
from kgshard_tools.multi_hop.trees import Hop, Node, all_of, any_of, opposite

_UNION, _NEGATION, _INVERSE = "u", "n", "inverse"


def nested_tree(value: object, names: Names) -> Node:
    """Turn nested lists or tuples into a tree; variables are named y1, y2, ...

    Raises:
        ConfigError: They are not of one of the shapes above.
        UnknownNameError: A label is of no entity or relation.
    """
    return _node(value, names, (f"y{number}" for number in count(1)), 0)


def _node(value: object, names: Names, variables: Iterator[str], depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise ConfigError(f"query: more than {MAX_DEPTH} lists in each other")
    if not _is_list(value) or len(value) < 2:
        raise _refused(value)
    if len(value) == 2 and _is_relations(value[1]):
        return _path(value[0], value[1], names, variables, depth)
    is_union = _is_list(value[-1]) and list(value[-1]) == [_UNION]
    parts = value[:-1] if is_union else value
    if len(parts) < 2:
        raise _refused(value)
    nodes = [_node(part, names, variables, depth + 1) for part in parts]
    return any_of(nodes) if is_union else all_of(nodes)


def _path(
    start: object, relations: Sequence[object], names: Names, variables: Iterator[str], depth: int
) -> Node:
    """Go from an entity, or from what a part yields, along relations."""
    source: int | Node
    depth += len(relations)
    if depth > MAX_DEPTH:
        raise ConfigError(f"query: more than {MAX_DEPTH} links and lists in a row")
    source = names.entity(start) if isinstance(start, str) else _node(start, names, variables, depth)
    for step in relations:
        if step == _NEGATION:
            if isinstance(source, int):
                raise ConfigError(f"query: {_NEGATION!r} stands before any relation in {list(relations)!r}")
            _check_no_relation(_NEGATION, names)
            source = opposite(source)
        else:
            side, name = _step(step)
            variable = "" if isinstance(source, int) else next(variables)
            source = Hop(names.relation(name), side, source, variable)
    assert not isinstance(source, int), "there is a relation at least"
    return source


def _step(step: object) -> tuple[Side, str]:
    if isinstance(step, dict):
        return "head", str(step[_INVERSE])
    return "tail", str(step)


def _check_no_relation(name: str, names: Names) -> None:
    """Refuse what could mean a relation as well."""
    try:
        names.relation(name)
    except UnknownRelationError:
        return
    raise ConfigError(
        f"query: {name!r} in nested lists is a negation, and here a relation too; write the query as text"
    )


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _is_relations(value: object) -> TypeGuard[Sequence[object]]:
    return _is_list(value) and len(value) > 0 and all(map(_is_step, value))


def _is_step(value: object) -> bool:
    if isinstance(value, dict):
        return list(value) == [_INVERSE] and isinstance(value[_INVERSE], str)
    return isinstance(value, str)


def _refused(value: object) -> ConfigError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return ConfigError(
        f"query: {text} is neither an entity with relations, as [e, [r1, r2]], nor a list of two such or more"
    )
