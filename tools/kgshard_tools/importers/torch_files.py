"""Files of torch.save as data, their tensors as numpy arrays; nothing in them is ever executed.

torch.save writes a zip archive of stored, uncompressed members, or (before 1.6) pickles and numbers one
after another:

    ROOT/data.pkl  ROOT/byteorder  ROOT/data/0  ROOT/data/1 ...
    magic number, protocol, system, the pickle, storage keys, then for each key: int64 count, its numbers

The pickle is read as any other (`pickles`); its persistent ids mean storages. Arrays look into the file,
mapped into memory: strided and shared storages as they were, bfloat16 widened to float32 (a copy).
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import cast

import numpy as np

from kgshard_tools.importers.pickled_arrays import TENSOR_DTYPES, Numbers, Storage
from kgshard_tools.importers.pickled_objects import MalformedError, Object, Symbol
from kgshard_tools.importers.pickles import Machine, Source, mapped
from kgshard_tools.importers.stored_zip import stored_members

MAX_PARTS = 100_000
"""Modules and tensors of one torch.nn.Module."""
_MAX_PATH = 1000
"""Letters in the name of a tensor."""
_BIG_ENDIAN = "numbers of a big-endian machine; save it again on a little-endian one"

_STORAGE_DTYPES = {
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
"""Keys of TENSOR_DTYPES by torch's classes of storages."""


def read_torch(path: Path) -> object:
    """Return what torch.save wrote, as `read_pickle` would, with tensors as numpy arrays.

    Arrays are read-only and look into the file; memory does not grow with them, save for bfloat16. Tensors
    of types that numpy lacks stay Objects.

    Raises:
        DataError: There is no such file, or torch did not write it so, or it goes beyond the limits of
            `pickles`.
    """
    with mapped(path) as file:
        if file[:4] == b"PK\x03\x04":
            return _read_archive(file)
        if file[257:262] == b"ustar":
            raise MalformedError("a tar archive of torch before 0.2; save it again with a newer torch")
        return _read_legacy(file)


def _storage_key(key: object) -> tuple[str, str, int]:
    """Return name, dtype and bytes of the storage that a persistent id means."""
    match key:
        case ("storage", Symbol(module, kind), str() as name, _, int() as count, *view):
            if module.split(".")[0] != "torch" or kind not in _STORAGE_DTYPES:
                raise MalformedError(f"a storage of type {f'{module}.{kind}'!r:.100}, which numpy lacks")
            if any(part is not None for part in view) or count < 0:
                raise MalformedError(
                    f"storage {name!r:.100} is a view of another, as only torch before 0.4 wrote"
                )
            dtype = _STORAGE_DTYPES[kind]
            return name, dtype, count * TENSOR_DTYPES[dtype].itemsize
    raise MalformedError("a reference to something that is no storage")


def _content(file: mmap.mmap, start: int, num_bytes: int) -> Numbers:
    return np.frombuffer(file, np.uint8, num_bytes, start) if num_bytes else np.empty(0, np.uint8)


# --- Zip archives --------------------------------------------------------------------------------------


def _read_archive(file: mmap.mmap) -> object:
    members = stored_members(file)
    root = _root(members)
    if f"{root}constants.pkl" in members:
        raise MalformedError("a TorchScript archive, which holds code; save the state dict instead")
    order = members.get(f"{root}byteorder")
    if order is not None and file[order.start : order.stop] != b"little":
        raise MalformedError(_BIG_ENDIAN)
    contents: dict[str, Numbers] = {}

    def load(key: object) -> Storage:
        name, dtype, num_bytes = _storage_key(key)
        if name not in contents:
            place = members.get(f"{root}data/{name}", range(0))
            if len(place) < num_bytes:
                raise MalformedError(f"storage {name!r:.100} is missing or short")
            contents[name] = _content(file, place.start, num_bytes)
        return Storage(contents[name], dtype)

    pickled = members[f"{root}data.pkl"]
    return Machine(Source(file, pickled.start, pickled.stop), load).run()


def _root(members: dict[str, range]) -> str:
    """Return the folder of the archive that holds the one pickle, with its slash."""
    roots = [name.removesuffix("data.pkl") for name in members if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(roots) != 1:
        raise MalformedError("a zip archive, but not one of torch.save")
    return roots[0]


# --- Files before 1.6 ----------------------------------------------------------------------------------

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT = struct.Struct("<q")


def _read_legacy(file: mmap.mmap) -> object:
    source = Source(file, 0, len(file))
    if Machine(source).run() != _MAGIC:
        raise MalformedError("neither a zip archive nor a file that begins with torch's magic number")
    if Machine(source).run() != _PROTOCOL:
        raise MalformedError(f"a protocol other than torch's {_PROTOCOL}")
    system = Machine(source).run()
    if not (isinstance(system, dict) and system.get("little_endian") is True):
        raise MalformedError(_BIG_ENDIAN)
    start = source.position
    # Where the numbers lie is known only once the pickle and the keys behind it are read: read it twice.
    contents = _legacy_contents(file, source, _legacy_sizes(source))

    def load(key: object) -> object:
        if _is_class(key):
            return cast("tuple[object, ...]", key)[1]
        name, dtype, _ = _storage_key(key)
        return Storage(contents[name], dtype)

    return Machine(Source(file, start, len(file)), load).run()


def _is_class(key: object) -> bool:
    """Whether a persistent id is a module's class, which torch wrote with its source code."""
    return isinstance(key, tuple) and len(key) > 1 and key[0] == "module"


def _legacy_sizes(source: Source) -> dict[str, tuple[int, int]]:
    """Return numbers and bytes of each storage that the pickle at `source` refers to."""
    sizes: dict[str, tuple[int, int]] = {}

    def note(key: object) -> object:
        if not _is_class(key):
            name, dtype, num_bytes = _storage_key(key)
            count = num_bytes // TENSOR_DTYPES[dtype].itemsize
            if sizes.setdefault(name, (count, num_bytes))[1] != num_bytes:
                raise MalformedError(f"storage {name!r:.100} has two sizes")
        return key

    Machine(source, note).run()
    return sizes


def _legacy_contents(
    file: mmap.mmap, source: Source, sizes: dict[str, tuple[int, int]]
) -> dict[str, Numbers]:
    """Return the bytes of each storage; its numbers follow their count, in the order of the keys.

    Args:
        file: The file.
        source: Where the keys are pickled; the first count follows.
        sizes: Numbers and bytes of each storage.
    """
    keys = Machine(source).run()
    names = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
    if not isinstance(keys, list) or len(keys) != len(sizes) or set(names) != set(sizes):
        raise MalformedError("a list of storages other than its tensors have")
    contents: dict[str, Numbers] = {}
    at = source.position
    for name in names:
        count, num_bytes = sizes[name]
        start = at + _COUNT.size
        at = start + num_bytes
        if at > len(file) or _COUNT.unpack_from(file, start - _COUNT.size) != (count,):
            raise MalformedError(f"storage {name!r:.100} is short, or of another size than its tensors say")
        contents[name] = _content(file, start, num_bytes)
    return contents


# --- Modules -------------------------------------------------------------------------------------------


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
            kept = {name: value for name, value in buffers.items() if name not in left_out}
            return {**own, **kept}, children
    raise ValueError(f"{prefix.removesuffix('.') or 'what is pickled'} is no torch.nn.Module")
