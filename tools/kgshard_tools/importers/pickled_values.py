"""Calls that are data in disguise: dicts and sets of any kind, bytes, paths, sizes, and arrays.

Each is made here from arguments that are data already; what a pickle names is never looked up.
"""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath

from kgshard_tools.importers.pickled_arrays import ARRAY_CALLS
from kgshard_tools.importers.pickled_objects import (
    Object,
    Symbol,
    Understanding,
    checked_key,
    checked_set,
    under_names,
)


def understood(function: object, arguments: tuple[object, ...]) -> object:
    """Return the data that a call is in disguise, or else the Object that it would have made.

    Raises:
        MalformedError: It is such a call, with arguments that do not fit.
    """
    if isinstance(function, Symbol) and function in _CALLS:
        return _CALLS[function](function, arguments)
    return Object(function, arguments)


def _encoded(function: Symbol, arguments: tuple[object, ...]) -> object:
    """Return the bytes that Python 3 writes as text where a protocol has no bytes."""
    match arguments:
        case (str() as text, "latin1" | "latin-1"):
            return text.encode("latin-1")
        case (bytes() as value,):
            return value
        case ():
            return b""
    return Object(function, arguments)


def _byte_array(function: Symbol, arguments: tuple[object, ...]) -> object:
    value = _encoded(function, arguments)
    return bytearray(value) if isinstance(value, bytes) else value


def _plain_set(function: Symbol, arguments: tuple[object, ...]) -> object:
    match arguments or ((),):
        case (list() | tuple() | set() | frozenset() as given,):
            values = checked_set(given)
            return frozenset(values) if function.name == "frozenset" else values
    return Object(function, arguments)


def _complex(function: Symbol, arguments: tuple[object, ...]) -> object:
    match arguments:
        case (float() as real, float() as imaginary):
            return complex(real, imaginary)
    return Object(function, arguments)


def _plain_dict(function: Symbol, arguments: tuple[object, ...]) -> object:
    """Return a dict of the items given, or an empty one, whose items follow."""
    match arguments:
        case (dict() as counts,):
            return dict(counts)
        case (list() as pairs,):
            if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
                return Object(function, arguments)
            return {checked_key(key, index): value for index, (key, value) in enumerate(pairs)}
    return {}


def _path(function: Symbol, arguments: tuple[object, ...]) -> object:
    parts = [part for part in arguments if isinstance(part, str)]
    if len(parts) < len(arguments):
        return Object(function, arguments)
    return PureWindowsPath(*parts) if "Windows" in function.name else PurePosixPath(*parts)


def _size(function: Symbol, arguments: tuple[object, ...]) -> object:
    match arguments:
        case (list() | tuple() as sizes,):
            return tuple(sizes)
    return Object(function, arguments)


_BUILTINS = ["builtins", "__builtin__"]
_CALLS: dict[Symbol, Understanding] = {
    **ARRAY_CALLS,
    **under_names(["_codecs"], ["encode"], _encoded),
    **under_names(_BUILTINS, ["bytes"], _encoded),
    **under_names(_BUILTINS, ["bytearray"], _byte_array),
    **under_names(_BUILTINS, ["set", "frozenset"], _plain_set),
    **under_names(_BUILTINS, ["complex"], _complex),
    **under_names(["collections"], ["OrderedDict", "defaultdict", "Counter"], _plain_dict),
    **under_names(
        ["pathlib", "pathlib._local"],
        ["PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"],
        _path,
    ),
    **under_names(["torch"], ["Size"], _size),
}
"""What each call is understood as; all else becomes an Object."""
