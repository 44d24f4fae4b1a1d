"""Safetensors files by byte range: headers, whole tables spread over shards, blocks in and out.

A shard is an ordinary safetensors file. Every shard of a table holds the same tensor name and says in
its metadata where its rows begin, the way PyTorch's distributed checkpoints do:

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO":
              '{"entity_embedding.weight": {"saved_offsets": [row_start, 0]}}'},
              "entity_embedding.weight": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [0, n]}}
    data      rows in C order, little-endian

so torch's HuggingFaceStorageReader and consolidate_safetensors_files read a folder of them. The header
is parsed here, and strictly, because merge and export move byte ranges, which the safetensors package
does not offer. No torch in this module.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from kgshard.errors import ShardError

ENTITIES = "entity_embedding.weight"
RELATIONS = "relation_embedding.weight"
_MAX_HEADER_BYTES = 1 << 22
_MAX_HEADER_VALUES = 200_000
"""So that a hostile header costs less than 64 MiB and a second. Those of models are far smaller."""
_MAX_AXES = 64
_MAX_REASON = 300
_MAX_MAPPED = 16
"""Pieces of a table that are mapped at once: each holds a file descriptor."""
_BLOCK_ROWS, _BLOCK_VALUES = 1 << 14, 1 << 21
_PRIVATE: Literal["c"] = "c"
"""Copy on write: torch takes no read-only memory, and nothing done to a mapped row reaches the file."""

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
TABLE_DTYPES = {"F32": ("<f4", "float32"), "BF16": ("<u2", "bfloat16"), "F16": ("<f2", "float16")}
"""dtypes that tables may have: how numpy maps the bytes, and torch's name."""

STORED_DTYPES = {**TABLE_DTYPES, "I32": ("<i4", "int32")}
"""The same of everything with a row for each row of a table, optimizer state included."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file."""

    dtype: str
    """As safetensors spells it: F32, BF16, ..."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Stricter than the safetensors package: the header must begin with "{", no key may occur twice, the
    tensors must cover the data without gap or overlap, and the header is no longer than 4 MiB.

    Raises:
        ShardError: The file is missing or breaks one of these rules.
    """
    try:
        size = _size(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"header length {length} in a file of {size} bytes")
            raw = file.read(length)
        if not raw.startswith(b"{"):
            raise ValueError("the header does not begin with '{'")
        if sum(map(raw.count, (b"{", b"[", b","))) > _MAX_HEADER_VALUES:
            raise ValueError(f"the header holds more than {_MAX_HEADER_VALUES:,} values")
        header = json.loads(raw.decode(), object_pairs_hook=_distinct_keys)
        metadata = _metadata(header.pop("__metadata__", {}))
        return _tensors(header, data_start=8 + length, file_size=size), metadata
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)[:_MAX_REASON]
        raise ShardError(f"{path}: not a safetensors file: {reason}", file=str(path)) from error


def _size(path: Path) -> int:
    """Return a file's length. What is no ordinary file is refused before it is opened: a pipe would wait."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("no ordinary file")
    return status.st_size


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in the header")
    return value


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("__metadata__ must map text to text")
    return value


def _tensors(header: dict[str, Any], *, data_start: int, file_size: int) -> dict[str, TensorInfo]:
    tensors = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        if entry["dtype"] not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r} has the unknown dtype {entry['dtype']!r}")
        if not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, stop)):
            raise ValueError(f"tensor {name!r}: shape and offsets must be integers from 0 to 2^63 - 1")
        if len(shape) > _MAX_AXES:
            raise ValueError(f"tensor {name!r} has {len(shape)} axes")
        if not name.isprintable() or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"tensor {name!r} has a name that no table has")
        tensors[name] = TensorInfo(entry["dtype"], shape, data_start + start)
        if start != position or stop - start != tensors[name].num_bytes:
            raise ValueError(f"tensor {name!r} does not fill bytes {position}..{stop} of the data")
        position = stop
    if data_start + position != file_size:
        raise ValueError(f"data ends at byte {data_start + position}, the file at {file_size}")
    return tensors


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: dict[str, str]) -> bytes:
    """Return the start of a safetensors file whose data follow in the order given.

    Args:
        tensors: Name to dtype and shape.
        metadata: Text to text.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape) in tensors.items():
        stop = position + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Data start on 8 bytes, so that they can be mapped as numbers.
    return len(text).to_bytes(8, "little") + text


def sharding_metadata(row_starts: Mapping[str, int]) -> dict[str, str]:
    """Return the metadata by which PyTorch's distributed checkpoints place a shard in its tables.

    Args:
        row_starts: By each tensor's name, the row of its table that its first row is.
    """
    placed = {name: {"saved_offsets": [row_start, 0]} for name, row_start in row_starts.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(placed)}


def saved_row_start(metadata: dict[str, str], name: str) -> int | None:
    """Return the first row that `sharding_metadata` wrote down, or None where there is none."""
    try:
        offsets = json.loads(metadata["DCP_SHARDING_INFO"])[name]["saved_offsets"]
        return int(offsets[0])
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, RecursionError):
        return None


def write_blocks(file: BinaryIO, blocks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write blocks one after the other; return the bytes written and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        file.write(block)
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def widen(stored: npt.NDArray[Any], dtype: str) -> Floats:
    """Return stored values as float32, exactly (bfloat16 lies in memory as its 16 bits)."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _aligned(stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return rows that lie where the processor likes them; numpy would copy others value by value."""
    if stored.flags.aligned:
        return stored
    copied = np.empty(stored.shape, stored.dtype)
    copied.view(np.uint8)[:] = np.asarray(stored).view(np.uint8)
    return copied


def narrow(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """Return float32 values as they are stored: rounded to nearest, ties to even; bfloat16 as its 16 bits."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):  # Beyond float16 is infinity, which is for the caller to see.
            return values.astype(TABLE_DTYPES[dtype][0], copy=False)
    bits = np.ascontiguousarray(values, "<f4").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # Rounding must not turn NaN into infinity.
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")


def read_tensors(path: Path) -> dict[str, Floats]:
    """Return all tensors of a small safetensors file, widened to float32, by name.

    Raises:
        ShardError: It is no safetensors file, or holds something else than tables of floats.
    """
    tensors, _ = read_header(path)
    values = {}
    for name, info in tensors.items():
        if info.dtype not in TABLE_DTYPES:
            known = ", ".join(TABLE_DTYPES)
            raise ShardError(f"{path}: {name} is {info.dtype}, expected one of {known}", file=str(path))
        stored = np.fromfile(path, TABLE_DTYPES[info.dtype][0], math.prod(info.shape), offset=info.offset)
        values[name] = np.array(widen(stored.reshape(info.shape), info.dtype))
    return values


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a table, in one file."""

    path: Path
    rows: range
    """The global rows it holds."""
    info: TensorInfo
    rank: int | None = None
    """Who wrote it, for messages."""


class StoredTable:
    """A table on disk, whole or in shards, read by row without loading it.

    Rows are memory-mapped; what a caller gets is float32.
    """

    def __init__(self, name: str, pieces: Sequence[Piece]) -> None:
        """Put pieces together.

        Args:
            name: The tensor's name, for messages.
            pieces: In row order, covering rows 0..n without gap or overlap.

        Raises:
            ShardError: They do not, or their dtypes or widths differ.
        """
        self.name = name
        self.pieces = list(pieces)
        self.dtype = pieces[0].info.dtype
        self.dim = pieces[0].info.shape[1]
        if self.dtype not in STORED_DTYPES:
            raise ShardError(f"{pieces[0].path}: {name} is {self.dtype} (known: {', '.join(STORED_DTYPES)})")
        self._stops = np.array([piece.rows.stop for piece in pieces], np.int64)
        self._mapped: dict[int, npt.NDArray[Any]] = {}
        self._check()

    def _check(self) -> None:
        position = 0
        for piece in self.pieces:
            expected = (len(piece.rows), self.dim)
            if piece.rows.start != position:
                raise _misfit(piece, f"begins at row {piece.rows.start}, expected {position}")
            if piece.info.shape != expected or piece.info.dtype != self.dtype:
                found = f"{piece.info.dtype} {list(piece.info.shape)}"
                raise _misfit(piece, f"{self.name} is {found}, expected {self.dtype} {list(expected)}")
            position = piece.rows.stop
        self.num_rows = position

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.dim

    def _stored(self, index: int) -> npt.NDArray[Any]:
        mapped = self._mapped.get(index)
        if mapped is None:
            info = self.pieces[index].info
            kind = np.dtype(STORED_DTYPES[info.dtype][0])
            if not math.prod(info.shape):
                return np.empty(info.shape, kind)
            while len(self._mapped) >= _MAX_MAPPED:
                self._mapped.pop(next(iter(self._mapped)), None)
            mapped = np.memmap(self.pieces[index].path, kind, _PRIVATE, info.offset, info.shape)
            self._mapped[index] = mapped
        return mapped

    def release(self) -> None:
        """Let go of what is mapped, and of the memory that its pages take; reading maps it again.

        Rows that somebody still holds stay as they are.
        """
        self._mapped.clear()

    def read(self, rows: range) -> Floats:
        """Return float32[len(rows), dim]: consecutive rows.

        Raises:
            IndexError: They leave the table.
        """
        if len(rows) and not (rows.start >= 0 and rows.stop <= self.num_rows):
            raise IndexError(f"rows {rows.start}..{rows.stop} leave a table of {self.num_rows} rows")
        overlaps = list(self._overlaps(rows))
        if len(overlaps) == 1:
            [(index, here)] = overlaps
            return self._read_piece(index, here)
        values = np.empty((len(rows), self.dim), np.float32)
        position = 0
        for index, here in overlaps:
            stop = position + len(here)
            values[position:stop] = self._read_piece(index, here)
            position = stop
        return values

    def _read_piece(self, index: int, rows: range) -> Floats:
        """Return some of a piece's own rows, widened."""
        return widen(_aligned(self._stored(index)[rows.start : rows.stop]), self.dtype)

    def blocks(self, rows: range | None = None, *, size: int | None = None) -> Iterator[tuple[range, Floats]]:
        """Yield the rows in order, in blocks of at most `size`, by default 8 MiB of float32.

        No more than a block stays in memory, however many were read.
        """
        rows = rows if rows is not None else range(self.num_rows)
        size = size or max(1, min(_BLOCK_ROWS, _BLOCK_VALUES // max(1, self.dim)))
        for start in range(rows.start, rows.stop, size):
            block = range(start, min(start + size, rows.stop))
            yield block, self.read(block)
            self.release()

    def byte_ranges(self, rows: range | None = None) -> Iterator[tuple[Path, int, int]]:
        """Yield (file, offset, length) of the rows as they are stored, in row order."""
        rows = rows if rows is not None else range(self.num_rows)
        row_bytes = ITEM_BYTES[self.dtype] * self.dim
        for index, here in self._overlaps(rows):
            piece = self.pieces[index]
            yield piece.path, piece.info.offset + here.start * row_bytes, len(here) * row_bytes

    def _overlaps(self, rows: range) -> Iterator[tuple[int, range]]:
        """Yield the pieces that hold some of `rows`: each one's index, and its own rows among them."""
        first = int(np.searchsorted(self._stops, rows.start, side="right"))
        for index in range(first, len(self.pieces)):
            here = self.pieces[index].rows
            if here.start >= rows.stop:
                return
            start, stop = max(rows.start, here.start), min(rows.stop, here.stop)
            if start < stop:
                yield index, range(start - here.start, stop - here.start)

    def gather(self, ids: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Floats:
        """Return float32[I, dim]: the rows of `ids`, in their order.

        Raises:
            IndexError: An id is outside the table.
        """
        wanted = np.asarray(ids, np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.num_rows):
            wrong = wanted[(wanted < 0) | (wanted >= self.num_rows)][0]
            raise IndexError(f"row {wrong} is outside a table of {self.num_rows} rows")
        gathered = np.empty((len(wanted), self.dim), np.float32)
        owners = np.searchsorted(self._stops, wanted, side="right")
        for index in np.unique(owners).tolist():
            here = owners == index
            local = wanted[here] - self.pieces[index].rows.start
            gathered[here] = widen(self._stored(index)[local], self.dtype)
        return gathered


def _misfit(piece: Piece, words: str) -> ShardError:
    whose = f" (rank {piece.rank})" if piece.rank is not None else ""
    return ShardError(f"{piece.path}: {words}{whose}", file=str(piece.path), rank=piece.rank)


def first_non_finite(values: npt.NDArray[np.floating[Any]]) -> int | None:
    """Return the first row of [N, D] that holds NaN or infinity, or None."""
    finite = np.isfinite(values).all(axis=1)
    return None if finite.all() else int(np.argmin(finite))


def find_non_finite(table: StoredTable, rows: range | None = None) -> int | None:
    """Return the first row of a stored table that holds NaN or infinity, or None."""
    for block, values in table.blocks(rows):
        found = first_non_finite(values)
        if found is not None:
            return block.start + found
    return None
