"""Calls that make arrays: numpy's own arrays and scalars, and torch's tensors as views of their storages.

Whatever a pickle says of an array (shape, strides, dtype, bytes) is checked before numpy sees it.
bfloat16 is widened to float32, since numpy has no such type; tensors of other types that numpy lacks stay
Objects.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kgshard_tools.importers.pickled_objects import (
    MalformedError,
    Object,
    Symbol,
    Understanding,
    under_names,
)

_MAX_EXPANDED = 1 << 20
"""Numbers in a tensor that repeats its storage by strides of 0, where the storage has fewer."""
_MAX_AXES = 32

Numbers: TypeAlias = npt.NDArray[Any]

_NUMPY_NAMES = [
    *("float64", "float32", "float16", "complex128", "complex64", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
]
TENSOR_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NUMPY_NAMES},
    "bfloat16": np.dtype("<u2"),
}
"""By torch's names, which are numpy's; bfloat16 as the integers that its bits are."""


# --- numpy ---------------------------------------------------------------------------------------------


def _reconstructed(function: Symbol, arguments: tuple[object, ...]) -> object:
    """Return an empty array, for `fill_array` to fill."""
    if arguments[:1] == (Symbol("numpy", "ndarray"),):
        return np.empty(0, np.int8)
    return Object(function, arguments)


def fill_array(array: Numbers, state: tuple[object, ...]) -> None:
    """Give an empty array, in place, the shape, dtype and numbers that numpy pickled as its state.

    Raises:
        MalformedError: It is no such state, or its parts do not fit, or the array has numbers already.
    """
    match state:
        case (int(), shape, Object() as described, bool() | int() as is_fortran, bytes() | list() as values):
            dtype, count = _dtype(described), math.prod(_sizes(shape))
            fits = isinstance(values, list) if dtype.hasobject else isinstance(values, bytes)
            if array.size or not fits or len(values) != count * (1 if dtype.hasobject else dtype.itemsize):
                raise MalformedError("a pickled numpy array that does not fit its shape")
            # Only sets what was checked: shape, dtype, order and bytes.
            array.__setstate__(cast(Any, (1, shape, dtype, bool(is_fortran), values)))
        case _:
            raise MalformedError("a pickled numpy array of an unknown form")


def _array_of_buffer(function: Symbol, arguments: tuple[object, ...]) -> object:
    match arguments:
        case (bytes() | bytearray() as values, Object() as described, shape, "C" | "F" as order):
            sizes, dtype = _sizes(shape), _dtype(described)
            if dtype.hasobject or len(values) != math.prod(sizes) * dtype.itemsize:
                raise MalformedError("a pickled numpy array that does not fit its shape")
            return np.frombuffer(values, dtype).reshape(sizes, order=order)
    return Object(function, arguments)


def _scalar(function: Symbol, arguments: tuple[object, ...]) -> object:
    match arguments:
        case (Object() as described, bytes() as value):
            dtype = _dtype(described)
            if not dtype.hasobject and len(value) == dtype.itemsize > 0:
                return np.frombuffer(value, dtype)[0].item()
    return Object(function, arguments)


def _dtype(described: Object) -> np.dtype[Any]:
    """Return a dtype of numbers or text, or object, from numpy's pickled description of it."""
    match described.symbol, described.args, described.state:
        case (Symbol("numpy", "dtype"), (str() as name, *_), (int(), "<" | ">" | "|" | "=" as order, *_)):
            if re.fullmatch(r"[biufcSU][1-9]\d{0,5}|O8", name, re.ASCII):
                return _named_dtype(name).newbyteorder(cast(Any, order))
    raise MalformedError("a pickled numpy array of a dtype that is neither numbers nor text")


def _named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError as error:
        raise MalformedError(f"a pickled numpy array of dtype {name}") from error


def _sizes(shape: object) -> tuple[int, ...]:
    """Return a shape, or strides, that a pickle gave, none of them negative."""
    if not (isinstance(shape, tuple) and len(shape) <= _MAX_AXES):
        raise MalformedError("an array whose shape is no tuple, or has too many axes")
    if not all(isinstance(size, int) and 0 <= size < 1 << 62 for size in shape):
        raise MalformedError("an array whose shape is not of sizes")
    return shape


# --- torch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """What tensors look into."""

    content: Numbers
    """uint8[bytes]."""
    dtype: str
    """A key of TENSOR_DTYPES."""


def _tensor(function: Symbol, arguments: tuple[object, ...]) -> object:
    """Return the array of torch._utils._rebuild_tensor, _v2 and _v3."""
    match arguments:
        case (Storage() as storage, int() as offset, sizes, strides, *rest):
            dtype = storage.dtype
            if function.name == "_rebuild_tensor_v3":
                dtype = rest[2].name if len(rest) > 2 and isinstance(rest[2], Symbol) else ""
            if dtype in TENSOR_DTYPES:
                view = _strided(storage.content, TENSOR_DTYPES[dtype], offset, _sizes(sizes), _sizes(strides))
                return _widened(view) if dtype == "bfloat16" else view
    return Object(function, arguments)


def _strided(
    content: Numbers, dtype: np.dtype[Any], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> Numbers:
    """Return a view of a storage's bytes; offset and strides count numbers, not bytes."""
    if len(sizes) != len(strides):
        raise MalformedError("a tensor with more sizes than strides, or fewer")
    held, count = len(content) // dtype.itemsize, math.prod(sizes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if offset < 0 or (count and last >= held) or count > max(held, _MAX_EXPANDED):
        raise MalformedError("a tensor that reaches beyond its storage")
    if not count:
        return np.empty(sizes, dtype)
    steps = tuple(stride * dtype.itemsize for stride in strides)
    return np.ndarray(sizes, dtype, content, offset * dtype.itemsize, steps)


def _widened(bits: Numbers) -> Numbers:
    """Return the float32 values of bfloat16 numbers, which are the upper halves of float32 numbers."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _parameter(function: Symbol, arguments: tuple[object, ...]) -> object:
    return arguments[0] if arguments else Object(function, arguments)


def _tensor_of_a_type(function: Symbol, arguments: tuple[object, ...]) -> object:
    """Return the array of a tensor with attributes of its own, which are left out."""
    match arguments:
        case (Symbol() as rebuild, _, tuple() as inner, *_) if rebuild in _REBUILDS:
            return _REBUILDS[rebuild](rebuild, inner)
    return Object(function, arguments)


_REBUILDS: dict[Symbol, Understanding] = {
    **under_names(["torch._utils"], ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"], _tensor),
    **under_names(["torch._utils"], ["_rebuild_parameter", "_rebuild_parameter_with_state"], _parameter),
}
ARRAY_CALLS: dict[Symbol, Understanding] = {
    **under_names(["numpy.core.multiarray", "numpy._core.multiarray"], ["_reconstruct"], _reconstructed),
    **under_names(["numpy.core.multiarray", "numpy._core.multiarray"], ["scalar"], _scalar),
    **under_names(["numpy.core.numeric", "numpy._core.numeric"], ["_frombuffer"], _array_of_buffer),
    **under_names(["torch._tensor"], ["_rebuild_from_type_v2"], _tensor_of_a_type),
    **_REBUILDS,
}
"""What each call that makes an array is understood as."""
