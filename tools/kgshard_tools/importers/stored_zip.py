"""Where the members of a zip archive lie, for archives that store them as they are, as torch.save does.

zipfile would read them into memory; torch's numbers are to stay in the file, which is mapped. Of the format
just this much is read, little-endian:

    PK34 local header, name, extra field, the member's bytes      one after another
    PK12 directory entry, name, extra field, comment              one for each member
    PK66, PK67, PK56 ends of the directory                        the first two where 32 bits are too few
"""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise

from kgshard_tools.importers.pickled_objects import MalformedError

_END = struct.Struct("<4s8x2L2x")
"""Signature, bytes and start of the directory."""
_END64 = struct.Struct("<4s36x2Q")
"""The same."""
_LOCATOR64 = struct.Struct("<4s4xQ4x")
"""Signature, where the _END64 lies."""
_ENTRY = struct.Struct("<4s4x2H8x2L3H8xL")
"""Signature, flags, method, packed and full bytes, bytes of name, extra and comment, the local header."""
_LOCAL = struct.Struct("<4s22x2H")
"""Signature, bytes of name and extra."""
_MAX_DIRECTORY_BYTES = 1 << 24


def stored_members(file: mmap.mmap) -> dict[str, range]:
    """Return where the bytes of each member lie; none compressed, none overlapping.

    Raises:
        MalformedError, ValueError, struct.error: It is no such archive, or was cut short or damaged.
    """
    directory = _directory(file)
    members: dict[str, range] = {}
    taken = [directory]
    at = directory.start
    while at < directory.stop:
        signature, flags, method, packed, size, *lengths, local = _ENTRY.unpack_from(file, at)
        named = at + _ENTRY.size
        extra_at = named + lengths[0]
        at = named + sum(lengths)
        if signature != b"PK\x01\x02" or at > directory.stop:
            raise MalformedError("a zip archive with a damaged directory")
        name = file[named:extra_at].decode()
        extra = file[extra_at : extra_at + lengths[1]]
        size, packed, local = _long_fields(extra, [size, packed, local])
        if method or flags & 1 or packed != size:
            raise MalformedError(f"member {name!r} is compressed or encrypted, which torch.save does neither")
        if name in members:
            raise MalformedError(f"two members {name!r}")
        members[name] = _place(file, name, local, size)
        taken.append(range(local, members[name].stop))
    _check_apart(taken)
    return members


def _directory(file: mmap.mmap) -> range:
    """Return where the directory lies."""
    end = file.rfind(b"PK\x05\x06", max(0, len(file) - (1 << 16) - _END.size))
    if end < 0 or end + _END.size > len(file):
        raise MalformedError("a zip archive that was cut short")
    _, size, start = _END.unpack_from(file, end)
    before = end - _LOCATOR64.size
    if before >= 0 and file[before : before + 4] == b"PK\x06\x07":
        _, end = _LOCATOR64.unpack_from(file, before)
        if end + _END64.size > before or file[end : end + 4] != b"PK\x06\x06":
            raise MalformedError("a zip archive with a damaged directory")
        _, size, start = _END64.unpack_from(file, end)
    if start + size > end:
        raise MalformedError("a zip archive with a damaged directory")
    if size > _MAX_DIRECTORY_BYTES:
        raise MalformedError(f"a zip archive with a directory of more than {_MAX_DIRECTORY_BYTES >> 20} MiB")
    return range(start, start + size)


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


def _place(file: mmap.mmap, name: str, local: int, size: int) -> range:
    if local + _LOCAL.size > len(file):
        raise MalformedError(f"member {name!r} lies beyond the file")
    signature, name_size, extra_size = _LOCAL.unpack_from(file, local)
    named = local + _LOCAL.size
    start = named + name_size + extra_size
    if signature != b"PK\x03\x04" or file[named : named + name_size] != name.encode():
        raise MalformedError(f"member {name!r} is not where the directory says")
    if start + size > len(file):
        raise MalformedError(f"member {name!r} lies beyond the file")
    return range(start, start + size)


def _check_apart(taken: list[range]) -> None:
    for first, second in pairwise(sorted(taken, key=lambda place: place.start)):
        if first.stop > second.start:
            raise MalformedError("a zip archive with members that overlap")
