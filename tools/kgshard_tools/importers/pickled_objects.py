"""What names and calls in a pickle become, and what may be a key: the words that its readers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeAlias

_MAX_KEY_PARTS = 100
"""Values within one key of a dict, or element of a set: hashing walks them all, by recursion."""
_MAX_COMPOSITE_KEYS = 4096
"""Keys of several parts in one dict or set."""


class MalformedError(ValueError):
    """A file is not what it should be; `pickles.mapped` makes it a DataError with the file's name."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that the pickle wanted imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


Scalar: TypeAlias = str | int | float | None


@dataclass(slots=True, eq=False, repr=False)
class Object:
    """What the pickle wanted made by a call. Nothing was called."""

    symbol: object
    """What was to be called: a Symbol, unless the pickle is a strange one."""
    args: tuple[object, ...]
    """Its arguments; keyword arguments, if there were any, come last, as a dict."""
    state: object = None
    """What its `__setstate__` or `__dict__` was to get."""
    items: list[object] = field(default_factory=list)
    """What was to be appended, added, or (as pairs) set."""

    def __repr__(self) -> str:
        return f"<Object {self.symbol}>" if isinstance(self.symbol, Symbol) else "<Object>"


Understanding: TypeAlias = Callable[[Symbol, tuple[object, ...]], object]
"""From a call's name and arguments to the data it is in disguise, or to an Object where it is none."""


def under_names(
    modules: Iterable[str], names: Iterable[str], understanding: Understanding
) -> dict[Symbol, Understanding]:
    """Return one understanding under each name of each module."""
    names = list(names)
    return {Symbol(module, name): understanding for module in modules for name in names}


def scalar(value: object) -> Scalar:
    """Return a value that is safe to compare, hash and show; a made-up one may take for ever to.

    Raises:
        MalformedError: It is something else; says what.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    raise MalformedError(f"a {type(value).__name__}, expected text or a number")


def checked_key(key: object, num_held: int = 0) -> object:
    """Return a key that can be hashed: shallow, of values that never change, with no numbers over 64 bits.

    Args:
        key: What is to be a key.
        num_held: How many keys there are beside it. Those of several parts can be made to have one hash.

    Raises:
        MalformedError: It is none, or has too many parts, or is one too many of several parts.
    """
    if key is None or type(key) in (str, bytes, float):
        return key
    if isinstance(key, tuple | frozenset) and num_held > _MAX_COMPOSITE_KEYS:
        raise MalformedError("a pickle with too many keys of several parts")
    waiting = [key]
    for _ in range(_MAX_KEY_PARTS):
        if not waiting:
            return key
        part = waiting.pop()
        if isinstance(part, tuple | frozenset) and len(part) <= _MAX_KEY_PARTS:
            waiting += part
        elif isinstance(part, int) and not -(1 << 64) < part < 1 << 64:
            # Of larger ones a file can make as many as it likes with one hash.
            raise MalformedError("a pickle with a key of more than 64 bits")
        elif not isinstance(part, str | bytes | int | float | None | Symbol | Object | PurePath):
            raise MalformedError(f"a pickle with a {type(part).__name__} for a key")
    raise MalformedError("a pickle with a key of too many parts")


def checked_set(values: Iterable[object]) -> set[object]:
    """Return the set of values, each a `checked_key`."""
    return {checked_key(value, index) for index, value in enumerate(values)}
