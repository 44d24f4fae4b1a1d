"""Pickles and torch's files as data: nothing in them is ever imported, called or executed.

A pickle is a program for a small stack machine. Here the machine runs with its hands tied: a global is its
name (`Symbol`), a call is a record of what would have been called (`Object`). A few calls are data in
disguise (a tensor, an ordered dict, a numpy scalar), and become that data.

torch.save writes a zip archive of stored, uncompressed members, or (before 1.6) pickles and numbers one
after another:

    ROOT/data.pkl  ROOT/byteorder  ROOT/data/0  ROOT/data/1 ...
    magic number, protocol, system, the pickle, storage keys, then for each key: int64 count, its numbers

Tensors become numpy arrays that look into the file, mapped into memory: strided and shared storages as
they were, bfloat16 widened to float32 (a copy, since numpy has no such type), tensors of types that numpy
lacks left as Objects.

Files are hostile until shown otherwise. Every length is checked against the file, the machine stops after
MAX_STEPS, a pickle may have MAX_PICKLE_BYTES, nothing recurses, and whatever is wrong is one DataError.
"""

from __future__ import annotations

import mmap
import pickletools
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kgshard.errors import DataError

MAX_STEPS = 30_000_000
"""Opcodes of one pickle: enough for a dict of ten million labels and their ids."""
MAX_PICKLE_BYTES = 1 << 28
MAX_PARTS = 100_000
"""Modules and tensors of one torch.nn.Module."""
_MAX_PATH = 1000
"""Letters in the name of a tensor."""
_MAX_COPIES = 16
"""How many times the file's size may be copied, where calls make copies of what is in it."""
_MAX_KEY_PARTS = 100
"""Values within one key of a dict, or element of a set: hashing walks them all, by recursion."""
_MAX_EXPANDED = 1 << 20
"""Numbers in a tensor that repeats its storage by strides of 0, where the storage has fewer."""
_MAX_AXES = 32

Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that the pickle wanted imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


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


def read_pickle(path: Path) -> object:
    """Return the content of a pickle as dicts, lists, tuples, sets, strings, numbers, Symbols and Objects.

    Dicts of any kind (ordered, defaulting, counting) are plain dicts in their order.

    Raises:
        DataError: There is no such file, or it is no pickle, or goes beyond the limits above.
    """
    with _mapped(path) as mapped:
        return _Machine(_Source(mapped, 0, len(mapped))).run()


def read_torch(path: Path) -> object:
    """Return what torch.save wrote, as `read_pickle` would, with tensors as numpy arrays.

    Arrays are read-only and look into the file; memory does not grow with them, save for bfloat16.

    Raises:
        DataError: There is no such file, or torch did not write it so, or it goes beyond the limits above.
    """
    with _mapped(path) as mapped:
        if mapped[:4] == b"PK\x03\x04":
            return _read_archive(mapped)
        if mapped[257:262] == b"ustar":
            raise _Malformed("a tar archive of torch before 0.2; save it again with a newer torch")
        return _read_legacy(mapped)


def module_tensors(module: object) -> dict[str, Numbers]:
    """Return the state dict of a pickled torch.nn.Module: its parameters and persistent buffers, by path.

    Raises:
        ValueError: It is no module, or has more than MAX_PARTS modules and tensors.
    """
    found: dict[str, Numbers] = {}
    waiting: list[tuple[str, object]] = [("", module)]
    num_parts = 0
    while waiting:
        prefix, part = waiting.pop()
        values, children = _module_parts(part, prefix)
        num_parts += 1 + len(values) + len(children)
        if num_parts > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} modules and tensors")
        for name, value in values.items():
            path = _joined(prefix, name)
            if isinstance(value, np.ndarray):
                found[path] = value
            elif value is not None:
                raise ValueError(f"{path} is no tensor that numpy can hold")
        named = [
            (f"{_joined(prefix, name)}.", child) for name, child in children.items() if child is not None
        ]
        waiting += reversed(named)
    return found


def _joined(prefix: str, name: object) -> str:
    if not isinstance(name, str) or len(prefix) + len(name) > _MAX_PATH:
        raise ValueError(f"a name that is no text, or more than {_MAX_PATH} letters with those before it")
    return prefix + name


def _module_parts(part: object, prefix: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return what a module's own names mean, tensors or None, and the modules in it."""
    state = part.state if isinstance(part, Object) else None
    match state:
        case {"_parameters": dict() as own, "_buffers": dict() as buffers, "_modules": dict() as children}:
            passing = cast("dict[str, object]", state).get("_non_persistent_buffers_set")
            left_out = passing if isinstance(passing, set) else set()
            return {
                **own,
                **{name: value for name, value in buffers.items() if name not in left_out},
            }, children
    raise ValueError(f"{prefix.removesuffix('.') or 'what is pickled'} is no torch.nn.Module")


class _Malformed(ValueError):
    """A file is not what it should be; becomes a DataError with the file's name."""


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, and name it in whatever is found wrong with it."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: empty") from error
    try:
        yield mapped
    except _Malformed as error:
        raise DataError(f"{path}: {error}") from error
    except (ValueError, OverflowError, struct.error) as error:
        # What numpy, struct and pickletools raise for bytes that make no sense.
        raise DataError(f"{path}: damaged: {' '.join(str(error).split())}") from error


# --- The stack machine ---------------------------------------------------------------------------------


class _Source:
    """A stretch of the mapped file that pickletools reads; never copies more than is there."""

    def __init__(self, mapped: mmap.mmap, start: int, end: int) -> None:
        self._mapped = mapped
        self.file_size = len(mapped)
        self._end = min(end, start + MAX_PICKLE_BYTES)
        self._is_cut = self._end < end
        self.position = start

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._end - self.position:
            self._raise_end()
        self.position += size
        return self._mapped[self.position - size : self.position]

    def readline(self) -> bytes:
        end = self._mapped.find(b"\n", self.position, self._end)
        if end < 0:
            self._raise_end()
        return self.read(end + 1 - self.position)

    def _raise_end(self) -> None:
        if self._is_cut:
            raise _Malformed(f"a pickle of more than {MAX_PICKLE_BYTES >> 20} MiB")
        raise _Malformed(f"a pickle that ends early, or no pickle (byte {self.position})")


class _Machine:
    """Runs one pickle. Every opcode makes at most one object, and there are at most MAX_STEPS."""

    def __init__(self, source: _Source, load_persistent: Callable[[object], object] | None = None) -> None:
        self._source = source
        self._load_persistent = load_persistent
        self._stack: list[object] = []
        self._below: list[list[object]] = []
        """The stacks below each mark."""
        self._memo: dict[int, object] = {}
        self._copies_left = _MAX_COPIES * source.file_size + (1 << 20)
        """Bytes that calls may still copy."""

    def run(self) -> object:
        operations = pickletools.genops(cast("IO[bytes]", self._source))
        for step, (opcode, argument, _) in enumerate(operations):
            if step >= MAX_STEPS:
                raise _Malformed(f"a pickle of more than {MAX_STEPS} steps")
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name] if argument is None else argument)
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, argument)
            else:
                raise _Malformed(f"pickle opcode {opcode.name}, which plain data has no use for")
        return self._pop()

    def _pop(self) -> object:
        if not self._stack:
            raise _Malformed(f"a pickle that takes from an empty stack (byte {self._source.position})")
        return self._stack.pop()

    def _top(self) -> object:
        if not self._stack:
            raise _Malformed(f"a pickle that takes from an empty stack (byte {self._source.position})")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[object]:
        if not self._below:
            raise _Malformed(f"a pickle that lacks a mark (byte {self._source.position})")
        above, self._stack = self._stack, self._below.pop()
        return above

    def mark(self, argument: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop(self, argument: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def pop_mark(self, argument: Any) -> None:
        self._pop_to_mark()

    def duplicate(self, argument: Any) -> None:
        self._stack.append(self._top())

    def put(self, argument: Any) -> None:
        self._memo[len(self._memo) if argument is None else argument] = self._top()

    def get(self, argument: Any) -> None:
        if argument not in self._memo:
            raise _Malformed(f"a pickle that recalls what it never stored (byte {self._source.position})")
        self._stack.append(self._memo[argument])

    def make_list(self, argument: Any) -> None:
        values = self._pop_to_mark()
        self._stack.append(values)

    def make_tuple(self, argument: Any) -> None:
        values = tuple(self._pop_to_mark())
        self._stack.append(values)

    def make_dict(self, argument: Any) -> None:
        made: dict[object, object] = {}
        _set_items(made, self._pop_to_mark())
        self._stack.append(made)

    def make_frozenset(self, argument: Any) -> None:
        values = _set_of(self._pop_to_mark())
        self._stack.append(frozenset(values))

    def make_empty_list(self, argument: Any) -> None:
        self._stack.append([])

    def make_empty_dict(self, argument: Any) -> None:
        self._stack.append({})

    def make_empty_set(self, argument: Any) -> None:
        self._stack.append(set())

    def append(self, argument: Any) -> None:
        value = self._pop()
        _append(self._top(), [value])

    def appends(self, argument: Any) -> None:
        values = self._pop_to_mark()
        _append(self._top(), values)

    def set_item(self, argument: Any) -> None:
        value, key = self._pop(), self._pop()
        _set_items(self._top(), [key, value])

    def set_items(self, argument: Any) -> None:
        values = self._pop_to_mark()
        _set_items(self._top(), values)

    def name_global(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(Symbol(module, name))

    def name_global_from_stack(self, argument: Any) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise _Malformed(f"a pickle with a global whose name is no text (byte {self._source.position})")
        self._stack.append(Symbol(module, name))

    def _count_copies(self, num_copied: int) -> None:
        self._copies_left -= num_copied
        if self._copies_left < 0:
            raise _Malformed(f"a pickle that copies more than {_MAX_COPIES} times its file")

    def call(self, argument: Any) -> None:
        arguments, function = _tuple(self._pop()), self._pop()
        self._count_copies(_total_size(arguments))
        made = _call(function, arguments)
        if isinstance(made, np.ndarray) and made.flags.writeable:  # What looks into the file is not.
            self._count_copies(made.nbytes)
        self._stack.append(made)

    def make_object(self, argument: Any) -> None:
        arguments, kind = self._pop(), self._pop()
        self._stack.append(Object(kind, _tuple(arguments)))

    def make_object_with_keywords(self, argument: Any) -> None:
        keywords, arguments, kind = self._pop(), _tuple(self._pop()), self._pop()
        self._count_copies(8 * len(arguments))
        self._stack.append(Object(kind, (*arguments, keywords)))

    def make_instance(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        arguments = tuple(self._pop_to_mark())
        self._stack.append(Object(Symbol(module, name), arguments))

    def make_instance_from_stack(self, argument: Any) -> None:
        kind, *arguments = self._pop_to_mark() or [None]
        self._stack.append(Object(kind, tuple(arguments)))

    def build(self, argument: Any) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, np.ndarray):
            self._count_copies(_total_size(_tuple(state)))
        _set_state(target, state)

    def load_persistent(self, argument: Any) -> None:
        key = self._pop() if argument is None else argument
        if self._load_persistent is None:
            raise _Malformed("a pickle that refers to data outside of it")
        self._stack.append(self._load_persistent(key))

    def skip(self, argument: Any) -> None:
        """Do nothing: the protocol's number and the sizes of frames change nothing here."""


_ARGUMENTS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
)
_CONSTANTS: dict[str, object] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
    **dict.fromkeys(_ARGUMENTS),
}
"""Opcodes that push a value: this one, or else their argument."""


def _make_tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def make(machine: _Machine, argument: Any) -> None:
        values = [machine._pop() for _ in range(count)]
        machine._stack.append(tuple(reversed(values)))

    return make


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(["PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"], _Machine.put),
    **dict.fromkeys(["GET", "BINGET", "LONG_BINGET"], _Machine.get),
    **dict.fromkeys(["PERSID", "BINPERSID"], _Machine.load_persistent),
    **dict.fromkeys(["PROTO", "FRAME", "STOP"], _Machine.skip),
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "EMPTY_LIST": _Machine.make_empty_list,
    "EMPTY_DICT": _Machine.make_empty_dict,
    "EMPTY_SET": _Machine.make_empty_set,
    "LIST": _Machine.make_list,
    "DICT": _Machine.make_dict,
    "FROZENSET": _Machine.make_frozenset,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": _make_tuple_of(1),
    "TUPLE2": _make_tuple_of(2),
    "TUPLE3": _make_tuple_of(3),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "ADDITEMS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name_global,
    "STACK_GLOBAL": _Machine.name_global_from_stack,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
    "NEWOBJ": _Machine.make_object,
    "NEWOBJ_EX": _Machine.make_object_with_keywords,
    "INST": _Machine.make_instance,
    "OBJ": _Machine.make_instance_from_stack,
}


def _tuple(arguments: object) -> tuple[object, ...]:
    if not isinstance(arguments, tuple):
        raise _Malformed("a pickle with a call whose arguments are no tuple")
    return arguments


def _total_size(values: tuple[object, ...]) -> int:
    """Return the bytes that a copy of each value takes, members being references of 8."""
    texts = sum(len(value) for value in values if isinstance(value, str | bytes | bytearray))
    members = sum(len(value) for value in values if isinstance(value, list | tuple | dict | set | frozenset))
    return texts + 8 * members


def _append(target: object, values: list[object]) -> None:
    if isinstance(target, list):
        target += values
    elif isinstance(target, set):
        target |= _set_of(values)
    elif isinstance(target, Object):
        target.items += values
    else:
        raise _Malformed(f"a pickle that appends to a {type(target).__name__}")


def _set_items(target: object, values: list[object]) -> None:
    if len(values) % 2:
        raise _Malformed("a pickle with a key that has no value")
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(target, dict):
        for key, value in pairs:
            target[_key(key)] = value
    elif isinstance(target, Object):
        target.items += pairs
    else:
        raise _Malformed(f"a pickle that sets items of a {type(target).__name__}")


def _set_of(values: Iterable[object]) -> set[object]:
    return {_key(value) for value in values}


def _key(key: object) -> object:
    """Return a key that is safe to hash: shallow, and of values that a file cannot make collide."""
    if key is None or type(key) in (str, bytes, float):
        return key
    waiting = [key]
    for _ in range(_MAX_KEY_PARTS):
        if not waiting:
            return key
        part = waiting.pop()
        if isinstance(part, tuple | frozenset) and len(part) <= _MAX_KEY_PARTS:
            waiting += part
        elif isinstance(part, int) and not -(1 << 64) < part < 1 << 64:
            raise _Malformed("a pickle with a key of more than 64 bits")
        elif not isinstance(part, str | bytes | int | float | complex | None | Symbol | Object | PurePath):
            raise _Malformed(f"a pickle with a {type(part).__name__} for a key")
    raise _Malformed("a pickle with a key of too many parts")


def _set_state(target: object, state: object) -> None:
    if isinstance(target, Object):
        target.state = state
    elif isinstance(target, np.ndarray):
        _fill_array(target, _tuple(state))
    elif not isinstance(
        target, dict
    ):  # Attributes of an ordered dict, as state dicts have, say nothing here.
        raise _Malformed(f"a pickle that sets the state of a {type(target).__name__}")


# --- Calls that are data in disguise -------------------------------------------------------------------


def _call(function: object, arguments: tuple[object, ...]) -> object:
    if isinstance(function, Symbol):
        understood = _UNDERSTOOD.get((function.module, function.name))
        if understood is not None:
            return understood(function, arguments)
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
            values = _set_of(given)
            return frozenset(values) if function.name == "frozenset" else values
    return Object(function, arguments)


def _complex(function: Symbol, arguments: tuple[object, ...]) -> object:
    match arguments:
        case (float() as real, float() as imaginary):
            return complex(real, imaginary)
    return Object(function, arguments)


def _plain_dict(function: Symbol, arguments: tuple[object, ...]) -> object:
    made: dict[object, object] = {}
    match arguments:
        case (dict() as counts,):
            return dict(counts)
        case (list() as pairs,):
            for pair in pairs:
                if not (isinstance(pair, list | tuple) and len(pair) == 2):
                    return Object(function, arguments)
                made[_key(pair[0])] = pair[1]
    return made


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


def _reconstructed(function: Symbol, arguments: tuple[object, ...]) -> object:
    """Return an empty array, which a BUILD fills in place."""
    if arguments[:1] == (Symbol("numpy", "ndarray"),):
        return np.empty(0, np.int8)
    return Object(function, arguments)


def _fill_array(array: Numbers, state: tuple[object, ...]) -> None:
    match state:
        case (int(), shape, Object() as described, bool() | int() as is_fortran, bytes() | list() as values):
            dtype, count = _dtype(described), _product(_sizes(shape))
            fits = isinstance(values, list) if dtype.hasobject else isinstance(values, bytes)
            if array.size or not fits or len(values) != count * (1 if dtype.hasobject else dtype.itemsize):
                raise _Malformed("a pickled numpy array that does not fit its shape")
            # Only sets what was checked: shape, dtype, order and bytes.
            array.__setstate__(cast(Any, (1, shape, dtype, bool(is_fortran), values)))
        case _:
            raise _Malformed("a pickled numpy array of an unknown form")


def _array_of_buffer(function: Symbol, arguments: tuple[object, ...]) -> object:
    match arguments:
        case (bytes() | bytearray() as values, Object() as described, shape, "C" | "F" as order):
            sizes, dtype = _sizes(shape), _dtype(described)
            if dtype.hasobject or len(values) != _product(sizes) * dtype.itemsize:
                raise _Malformed("a pickled numpy array that does not fit its shape")
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
            if re.fullmatch(r"[biufcSU]\d{1,6}|O8", name, re.ASCII):
                return _named_dtype(name).newbyteorder(cast(Any, order))
    raise _Malformed("a pickled numpy array of a dtype that is neither numbers nor text")


def _named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError as error:
        raise _Malformed(f"a pickled numpy array of dtype {name}") from error


def _sizes(shape: object) -> tuple[int, ...]:
    if not (isinstance(shape, tuple) and len(shape) <= _MAX_AXES):
        raise _Malformed("an array whose shape is no tuple, or has too many axes")
    sizes = [size for size in shape if isinstance(size, int) and 0 <= size < 1 << 62]
    if len(sizes) < len(shape):
        raise _Malformed("an array whose shape is not of sizes")
    return tuple(sizes)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


# --- Tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """What tensors look into."""

    content: Numbers
    """uint8[bytes]."""
    dtype: str
    """A key of _DTYPES."""


_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in ("float64", "float32", "float16")},
    **{name: np.dtype(name).newbyteorder("<") for name in ("int64", "int32", "int16", "int8")},
    **{name: np.dtype(name).newbyteorder("<") for name in ("uint64", "uint32", "uint16", "uint8")},
    **{name: np.dtype(name).newbyteorder("<") for name in ("complex128", "complex64", "bool")},
    "bfloat16": np.dtype("<u2"),
}
"""By torch's names, which are numpy's; bfloat16 as the integers that its bits are."""
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "UntypedStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}


def _tensor(function: Symbol, arguments: tuple[object, ...]) -> object:
    """Return the array of torch._utils._rebuild_tensor, _v2 and _v3."""
    match arguments:
        case (_Storage() as storage, int() as offset, sizes, strides, *rest):
            dtype = storage.dtype
            if function.name == "_rebuild_tensor_v3":
                dtype = rest[2].name if len(rest) > 2 and isinstance(rest[2], Symbol) else ""
            if dtype in _DTYPES:
                view = _strided(storage.content, _DTYPES[dtype], offset, _sizes(sizes), _sizes(strides))
                return _widened(view) if dtype == "bfloat16" else view
    return Object(function, arguments)


def _strided(
    content: Numbers, dtype: np.dtype[Any], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> Numbers:
    if len(sizes) != len(strides):
        raise _Malformed("a tensor with more sizes than strides, or fewer")
    held, count = len(content) // dtype.itemsize, _product(sizes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if offset < 0 or (count and last >= held) or count > max(held, _MAX_EXPANDED):
        raise _Malformed("a tensor that reaches beyond its storage")
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
        case (Symbol("torch._utils", name) as rebuild, _, tuple() as inner, *_) if name in _REBUILDS:
            return _REBUILDS[name](rebuild, inner)
    return Object(function, arguments)


_Understood: TypeAlias = Callable[[Symbol, tuple[object, ...]], object]
_REBUILDS: dict[str, _Understood] = {
    **dict.fromkeys(["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"], _tensor),
    **dict.fromkeys(["_rebuild_parameter", "_rebuild_parameter_with_state"], _parameter),
}


def _under(
    modules: Iterable[str], names: Mapping[str, _Understood]
) -> Iterator[tuple[tuple[str, str], _Understood]]:
    for module in modules:
        for name, understood in names.items():
            yield (module, name), understood


_NUMPY = ["numpy.core", "numpy._core"]
_UNDERSTOOD: dict[tuple[str, str], _Understood] = dict(
    [
        *_under(["_codecs"], {"encode": _encoded}),
        *_under(["builtins", "__builtin__"], {"bytes": _encoded, "bytearray": _byte_array}),
        *_under(
            ["builtins", "__builtin__"], {"set": _plain_set, "frozenset": _plain_set, "complex": _complex}
        ),
        *_under(["collections"], dict.fromkeys(["OrderedDict", "defaultdict", "Counter"], _plain_dict)),
        *_under(["pathlib", "pathlib._local"], dict.fromkeys(["PosixPath", "PurePosixPath"], _path)),
        *_under(["pathlib", "pathlib._local"], dict.fromkeys(["WindowsPath", "PureWindowsPath"], _path)),
        *_under(
            [f"{core}.multiarray" for core in _NUMPY], {"_reconstruct": _reconstructed, "scalar": _scalar}
        ),
        *_under([f"{core}.numeric" for core in _NUMPY], {"_frombuffer": _array_of_buffer}),
        *_under(["torch"], {"Size": _size}),
        *_under(["torch._utils"], _REBUILDS),
        *_under(["torch._tensor"], {"_rebuild_from_type_v2": _tensor_of_a_type}),
    ]
)
"""What each call that is understood makes, by module and name; all else becomes an Object."""


# --- torch's archives ----------------------------------------------------------------------------------


def _read_archive(mapped: mmap.mmap) -> object:
    members = _members(mapped)
    roots = [name.removesuffix("data.pkl") for name in members if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(roots) != 1:
        raise _Malformed("a zip archive, but not one of torch.save")
    [root] = roots
    if f"{root}constants.pkl" in members:
        raise _Malformed("a TorchScript archive, which holds code; save the state dict instead")
    order = members.get(f"{root}byteorder")
    if order is not None and mapped[order.start : order.stop] != b"little":
        raise _Malformed("numbers of a big-endian machine; save it again on a little-endian one")
    storages: dict[str, _Storage] = {}

    def load(key: object) -> object:
        name, dtype, num_bytes = _storage_key(key)
        if name not in storages:
            place = members.get(f"{root}data/{name}", range(0))
            if len(place) < num_bytes:
                raise _Malformed(f"storage {name!r} is missing or short")
            storages[name] = _Storage(_content(mapped, place.start, num_bytes), dtype)
        return _Storage(storages[name].content, dtype)

    pickled = members[f"{root}data.pkl"]
    return _Machine(_Source(mapped, pickled.start, pickled.stop), load).run()


def _storage_key(key: object) -> tuple[str, str, int]:
    """Return name, dtype and bytes of the storage that a persistent id means."""
    match key:
        case ("storage", Symbol(module, kind), str() as name, _, int() as count, *view):
            if module.split(".")[0] != "torch" or kind not in _STORAGES:
                raise _Malformed(f"a storage of type {module}.{kind}, which numpy lacks")
            if any(part is not None for part in view) or count < 0:
                raise _Malformed(f"storage {name!r} is a view of another, as only torch before 0.4 wrote")
            return name, _STORAGES[kind], count * _DTYPES[_STORAGES[kind]].itemsize
    raise _Malformed("a reference to something that is no storage")


def _content(mapped: mmap.mmap, start: int, num_bytes: int) -> Numbers:
    return np.frombuffer(mapped, np.uint8, num_bytes, start) if num_bytes else np.empty(0, np.uint8)


_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_DIRECTORY_BYTES = 1 << 24


def _members(mapped: mmap.mmap) -> dict[str, range]:
    """Return where the bytes of each member of a zip archive lie; only stored members, none overlapping."""
    start, stop = _directory(mapped)
    members: dict[str, range] = {}
    taken: list[range] = []
    while start < stop:
        signature, *fields = _ENTRY.unpack_from(mapped, start)
        flags, method, packed, size = fields[2], fields[3], fields[7], fields[8]
        name_size, extra_size, comment_size, local = fields[9], fields[10], fields[11], fields[15]
        named = start + _ENTRY.size
        start = named + name_size + extra_size + comment_size
        if signature != b"PK\x01\x02" or start > stop:
            raise _Malformed("a zip archive with a damaged directory")
        name = mapped[named : named + name_size].decode()
        extra = mapped[named + name_size : named + name_size + extra_size]
        size, packed, local = _long_fields(extra, [size, packed, local])
        if method or flags & 1 or packed != size:
            raise _Malformed(f"member {name!r} is compressed or encrypted, which torch.save does neither")
        if name in members:
            raise _Malformed(f"two members {name!r}")
        members[name] = _place(mapped, name, local, size)
        taken.append(range(local, members[name].stop))
    _check_apart([*taken, range(_directory(mapped)[0], stop)])
    return members


def _directory(mapped: mmap.mmap) -> tuple[int, int]:
    """Return where the directory of a zip archive starts and stops."""
    end = mapped.rfind(b"PK\x05\x06", max(0, len(mapped) - (1 << 16) - _END.size))
    if end < 0 or end + _END.size > len(mapped):
        raise _Malformed("a zip archive that was cut short")
    size, start = _END.unpack_from(mapped, end)[5:7]
    before = end - _LOCATOR64.size
    if before >= 0 and mapped[before : before + 4] == b"PK\x06\x07":
        end = _LOCATOR64.unpack_from(mapped, before)[2]
        if end + _END64.size > before or mapped[end : end + 4] != b"PK\x06\x06":
            raise _Malformed("a zip archive with a damaged directory")
        size, start = _END64.unpack_from(mapped, end)[8:10]
    if start + size > end:
        raise _Malformed("a zip archive with a damaged directory")
    if size > _MAX_DIRECTORY_BYTES:
        raise _Malformed(f"a zip archive with a directory of more than {_MAX_DIRECTORY_BYTES >> 20} MiB")
    return start, start + size


def _long_fields(extra: bytes, fields: list[int]) -> list[int]:
    """Return the fields with those that 32 bits could not hold taken from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            return [next(values, value) if value == 0xFFFFFFFF else value for value in fields]
        at += 4 + size
    return fields


def _place(mapped: mmap.mmap, name: str, local: int, size: int) -> range:
    if local + _LOCAL.size > len(mapped):
        raise _Malformed(f"member {name!r} lies beyond the file")
    signature, *fields = _LOCAL.unpack_from(mapped, local)
    named = local + _LOCAL.size
    start = named + fields[8] + fields[9]
    if signature != b"PK\x03\x04" or mapped[named : named + fields[8]] != name.encode():
        raise _Malformed(f"member {name!r} is not where the directory says")
    if start + size > len(mapped):
        raise _Malformed(f"member {name!r} lies beyond the file")
    return range(start, start + size)


def _check_apart(taken: list[range]) -> None:
    taken.sort(key=lambda place: place.start)
    for first, second in pairwise(taken):
        if first.stop > second.start:
            raise _Malformed("a zip archive with members that overlap")


# --- torch's files before 1.6 --------------------------------------------------------------------------

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT = struct.Struct("<q")


def _read_legacy(mapped: mmap.mmap) -> object:
    source = _Source(mapped, 0, len(mapped))
    if _Machine(source).run() != _MAGIC:
        raise _Malformed("neither a zip archive nor a file that begins with torch's magic number")
    if _Machine(source).run() != _PROTOCOL:
        raise _Malformed(f"a protocol other than torch's {_PROTOCOL}")
    system = _Machine(source).run()
    if not (isinstance(system, dict) and system.get("little_endian") is True):
        raise _Malformed("numbers of a big-endian machine; save it again on a little-endian one")
    start = source.position
    sizes: dict[str, tuple[int, int]] = {}

    def note(key: object) -> object:
        if _is_class(key):
            return key
        name, dtype, num_bytes = _storage_key(key)
        if sizes.setdefault(name, (num_bytes // _DTYPES[dtype].itemsize, num_bytes))[1] != num_bytes:
            raise _Malformed(f"storage {name!r} has two sizes")
        return key

    # Where the numbers lie is known only once the pickle and the keys behind it are read: read it twice.
    _Machine(source, note).run()
    contents = _legacy_contents(mapped, source, sizes)

    def load(key: object) -> object:
        if _is_class(key):
            return cast("tuple[object, ...]", key)[1]
        name, dtype, _ = _storage_key(key)
        return _Storage(contents[name], dtype)

    return _Machine(_Source(mapped, start, len(mapped)), load).run()


def _is_class(key: object) -> bool:
    """Whether a persistent id is a module's class, which torch wrote with its source code."""
    return isinstance(key, tuple) and len(key) > 1 and key[0] == "module"


def _legacy_contents(
    mapped: mmap.mmap, source: _Source, sizes: dict[str, tuple[int, int]]
) -> dict[str, Numbers]:
    """Return the bytes of each storage; its numbers follow their count, in the order of the keys.

    Args:
        mapped: The file.
        source: Where the keys are pickled; the first count follows.
        sizes: Numbers and bytes of each storage.
    """
    keys = _Machine(source).run()
    if not isinstance(keys, list) or len(keys) != len(sizes):
        raise _Malformed("a list of storages other than its tensors have")
    contents: dict[str, Numbers] = {}
    position = source.position
    for key in keys:
        if not (isinstance(key, str) and key in sizes):
            raise _Malformed("a list of storages other than its tensors have")
        count, num_bytes = sizes[key]
        position += _COUNT.size
        if position + num_bytes > len(mapped) or _COUNT.unpack_from(mapped, position - _COUNT.size) != (
            count,
        ):
            raise _Malformed(f"storage {key!r} is short, or of another size than its tensors say")
        contents[key] = _content(mapped, position, num_bytes)
        position += num_bytes
    if len(contents) < len(sizes):
        raise _Malformed("a list of storages other than its tensors have")
    return contents
