"""Pickles as data: nothing in them is ever imported, called or executed.

A pickle is a program for a small stack machine. Here the machine runs with its hands tied: a global is its
name (`Symbol`), a call is a record of what would have been called (`Object`). A few calls are data in
disguise (an ordered dict, a numpy array, a tensor), and become that data (`pickled_values`).

Files are hostile until shown otherwise. Every length is checked against the file, the machine stops after
MAX_STEPS, a pickle may have MAX_PICKLE_BYTES, nothing recurses, and whatever is wrong is one DataError.
"""

from __future__ import annotations

import mmap
import pickletools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from kgshard.errors import DataError
from kgshard_tools.importers.pickled_arrays import fill_array
from kgshard_tools.importers.pickled_objects import MalformedError, Object, Symbol, checked_key, checked_set
from kgshard_tools.importers.pickled_values import understood

MAX_STEPS = 30_000_000
"""Opcodes of one pickle: enough for a dict of ten million labels and their ids."""
MAX_PICKLE_BYTES = 1 << 28
_MAX_COPIES = 16
"""How many times the file's size may be copied, where calls make copies of what is in it."""


def read_pickle(path: Path) -> object:
    """Return the content of a pickle as dicts, lists, tuples, sets, strings, numbers, Symbols and Objects.

    Dicts of any kind (ordered, defaulting, counting) are plain dicts in their order.

    Raises:
        DataError: There is no such file, or it is no pickle, or goes beyond the limits above.
    """
    with mapped(path) as file:
        return Machine(Source(file, 0, len(file))).run()


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, and name it in whatever is found wrong with it.

    Arrays may look into it afterwards: it stays mapped as long as any does.
    """
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: empty") from error
    try:
        yield content
    except MalformedError as error:
        raise DataError(f"{path}: {error}") from error
    except (ValueError, OverflowError, struct.error) as error:
        # What numpy, struct and pickletools raise for bytes that make no sense.
        raise DataError(f"{path}: damaged: {' '.join(str(error).split())}") from error


class Source:
    """A stretch of the mapped file that pickletools reads; never copies more than is there."""

    def __init__(self, file: mmap.mmap, start: int, end: int) -> None:
        self._file = file
        self.file_size = len(file)
        self._end = min(end, start + MAX_PICKLE_BYTES)
        self._is_cut = self._end < end
        self.position = start

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._end - self.position:
            self._raise_end()
        self.position += size
        return self._file[self.position - size : self.position]

    def readline(self) -> bytes:
        end = self._file.find(b"\n", self.position, self._end)
        if end < 0:
            self._raise_end()
        return self.read(end + 1 - self.position)

    def _raise_end(self) -> None:
        if self._is_cut:
            raise MalformedError(f"a pickle of more than {MAX_PICKLE_BYTES >> 20} MiB")
        raise MalformedError(f"a pickle that ends early, or no pickle (byte {self.position})")


class Machine:
    """Runs one pickle. Every opcode makes at most one object, and there are at most MAX_STEPS.

    Args:
        source: Where the pickle starts; afterwards its position is where the pickle ended.
        load_persistent: From a persistent id to the data outside of the pickle that it means.
    """

    def __init__(self, source: Source, load_persistent: Callable[[object], object] | None = None) -> None:
        self._source = source
        self._load_persistent = load_persistent
        self._stack: list[object] = []
        self._below: list[list[object]] = []
        """The stacks below each mark."""
        self._memo: dict[int, object] = {}
        self._copies_left = _MAX_COPIES * source.file_size + (1 << 20)
        """Bytes that calls may still copy."""

    def run(self) -> object:
        """Return what the pickle holds.

        Raises:
            MalformedError, ValueError, OverflowError, struct.error: It is none, or beyond the limits.
        """
        operations = pickletools.genops(cast("IO[bytes]", self._source))
        for step, (opcode, argument, _) in enumerate(operations):
            if step >= MAX_STEPS:
                raise MalformedError(f"a pickle of more than {MAX_STEPS} steps")
            if opcode.name in _WITH_ARGUMENT:
                _WITH_ARGUMENT[opcode.name](self, argument)
            elif opcode.name in _WITHOUT_ARGUMENT:
                _WITHOUT_ARGUMENT[opcode.name](self)
            else:
                raise MalformedError(f"pickle opcode {opcode.name}, which plain data has no use for")
        return self._pop()

    def push(self, value: object) -> None:
        self._stack.append(value)

    def _top(self) -> object:
        if not self._stack:
            raise MalformedError(f"a pickle that takes from an empty stack (byte {self._source.position})")
        return self._stack[-1]

    def _pop(self) -> object:
        value = self._top()
        del self._stack[-1]
        return value

    def _pop_to_mark(self) -> list[object]:
        if not self._below:
            raise MalformedError(f"a pickle that lacks a mark (byte {self._source.position})")
        above, self._stack = self._stack, self._below.pop()
        return above

    def _count_copies(self, num_bytes: int) -> None:
        self._copies_left -= num_bytes
        if self._copies_left < 0:
            raise MalformedError(f"a pickle that copies more than {_MAX_COPIES} times its file")

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def pop_mark(self) -> None:
        self._pop_to_mark()

    def duplicate(self) -> None:
        self.push(self._top())

    def memoize(self) -> None:
        self.put(len(self._memo))

    def put(self, number: int) -> None:
        self._memo[number] = self._top()

    def get(self, number: int) -> None:
        if number not in self._memo:
            raise MalformedError(f"a pickle that recalls what it never stored (byte {self._source.position})")
        self.push(self._memo[number])

    def make_list(self) -> None:
        self.push(self._pop_to_mark())

    def make_tuple(self) -> None:
        self.push(tuple(self._pop_to_mark()))

    def make_tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def make_dict(self) -> None:
        made: dict[object, object] = {}
        _set_items(made, self._pop_to_mark())
        self.push(made)

    def make_frozenset(self) -> None:
        self.push(frozenset(checked_set(self._pop_to_mark())))

    def append(self) -> None:
        value = self._pop()
        _append(self._top(), [value])

    def appends(self) -> None:
        values = self._pop_to_mark()
        _append(self._top(), values)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        _set_items(self._top(), [key, value])

    def set_items(self) -> None:
        values = self._pop_to_mark()
        _set_items(self._top(), values)

    def name_global(self, names: str) -> None:
        self.push(_symbol(names))

    def name_global_from_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise MalformedError(
                f"a pickle with a global whose name is no text (byte {self._source.position})"
            )
        self.push(Symbol(module, name))

    def call(self) -> None:
        arguments, function = _tuple(self._pop()), self._pop()
        self._count_copies(_total_size(arguments))
        made = understood(function, arguments)
        if isinstance(made, np.ndarray) and made.flags.writeable:  # What looks into the file is not.
            self._count_copies(made.nbytes)
        self.push(made)

    def make_object(self) -> None:
        arguments, kind = _tuple(self._pop()), self._pop()
        self.push(Object(kind, arguments))

    def make_object_with_keywords(self) -> None:
        keywords, arguments, kind = self._pop(), _tuple(self._pop()), self._pop()
        self._count_copies(_total_size((arguments,)))
        self.push(Object(kind, (*arguments, keywords)))

    def make_instance(self, names: str) -> None:
        self.push(Object(_symbol(names), tuple(self._pop_to_mark())))

    def make_instance_from_stack(self) -> None:
        kind, *arguments = self._pop_to_mark() or [None]
        self.push(Object(kind, tuple(arguments)))

    def build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Object):
            target.state = state
        elif isinstance(target, np.ndarray):
            values = _tuple(state)
            self._count_copies(_total_size(values))
            fill_array(target, values)
        elif not isinstance(target, dict):
            # Attributes of an ordered dict, as state dicts have, say nothing here.
            raise MalformedError(f"a pickle that sets the state of a {type(target).__name__}")

    def load_persistent(self, key: object) -> None:
        if self._load_persistent is None:
            raise MalformedError("a pickle that refers to data outside of it")
        self.push(self._load_persistent(key))

    def load_persistent_from_stack(self) -> None:
        self.load_persistent(self._pop())


_WITH_ARGUMENT: dict[str, Callable[[Machine, Any], None]] = {
    **dict.fromkeys(["INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"], Machine.push),
    **dict.fromkeys(["FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING"], Machine.push),
    **dict.fromkeys(["BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"], Machine.push),
    **dict.fromkeys(["UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"], Machine.push),
    **dict.fromkeys(["PUT", "BINPUT", "LONG_BINPUT"], Machine.put),
    **dict.fromkeys(["GET", "BINGET", "LONG_BINGET"], Machine.get),
    "PERSID": Machine.load_persistent,
    "GLOBAL": Machine.name_global,
    "INST": Machine.make_instance,
    # The protocol's number and the sizes of frames change nothing here.
    **dict.fromkeys(["PROTO", "FRAME"], lambda machine, number: None),
}
_WITHOUT_ARGUMENT: dict[str, Callable[[Machine], None]] = {
    "NONE": lambda machine: machine.push(None),
    "NEWTRUE": lambda machine: machine.push(True),
    "NEWFALSE": lambda machine: machine.push(False),
    "EMPTY_TUPLE": lambda machine: machine.push(()),
    "EMPTY_LIST": lambda machine: machine.push([]),
    "EMPTY_DICT": lambda machine: machine.push({}),
    "EMPTY_SET": lambda machine: machine.push(set()),
    "TUPLE1": lambda machine: machine.make_tuple_of(1),
    "TUPLE2": lambda machine: machine.make_tuple_of(2),
    "TUPLE3": lambda machine: machine.make_tuple_of(3),
    "TUPLE": Machine.make_tuple,
    "LIST": Machine.make_list,
    "DICT": Machine.make_dict,
    "FROZENSET": Machine.make_frozenset,
    "MARK": Machine.mark,
    "POP": Machine.pop,
    "POP_MARK": Machine.pop_mark,
    "DUP": Machine.duplicate,
    "MEMOIZE": Machine.memoize,
    "APPEND": Machine.append,
    "APPENDS": Machine.appends,
    "ADDITEMS": Machine.appends,
    "SETITEM": Machine.set_item,
    "SETITEMS": Machine.set_items,
    "STACK_GLOBAL": Machine.name_global_from_stack,
    "REDUCE": Machine.call,
    "BUILD": Machine.build,
    "NEWOBJ": Machine.make_object,
    "NEWOBJ_EX": Machine.make_object_with_keywords,
    "OBJ": Machine.make_instance_from_stack,
    "BINPERSID": Machine.load_persistent_from_stack,
    "STOP": lambda machine: None,
}


def _symbol(names: str) -> Symbol:
    """Return what `GLOBAL` and `INST` name; pickletools puts a space between their two lines."""
    module, _, name = names.partition(" ")
    return Symbol(module, name)


def _tuple(arguments: object) -> tuple[object, ...]:
    if not isinstance(arguments, tuple):
        raise MalformedError("a pickle with a call whose arguments are no tuple")
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
        target |= {checked_key(value, len(target) + index) for index, value in enumerate(values)}
    elif isinstance(target, Object):
        target.items += values
    else:
        raise MalformedError(f"a pickle that appends to a {type(target).__name__}")


def _set_items(target: object, values: list[object]) -> None:
    if len(values) % 2:
        raise MalformedError("a pickle with a key that has no value")
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(target, dict):
        for key, value in pairs:
            target[checked_key(key, len(target))] = value
    elif isinstance(target, Object):
        target.items += pairs
    else:
        raise MalformedError(f"a pickle that sets items of a {type(target).__name__}")
