"""What a single file says of itself: arrays, Parquet, FAISS, torch. Only headers are read, nothing is run.

Neither numpy nor faiss parses a header here: numpy takes it for Python, and faiss has crashed on hostile
files. What is no plain array or index is named and left alone. (Safetensors: kgshard.shards.)
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.errors import ShardError

FileKind = Literal["safetensors", "npy", "parquet", "faiss", "torch", "pickle"]

_ARRAY_HEADER = re.compile(
    rb"\{'descr': '([<>|][biufc][0-9]{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19}, )*[0-9]{0,19},?)\), \} *\n"
)
_FAISS_HEADER = struct.Struct("<4siqqqBi")
_FAISS_METRICS = {0: "inner product", 1: "L2", 2: "L1", 3: "Linf"}
_FAISS_TYPES = {
    "IxFI": "flat",
    "IxF2": "flat",
    "IxFl": "flat",
    "IxSQ": "scalar quantizer",
    "IxPq": "product quantizer",
    "IPfs": "product quantizer, fast scan",
    "Ixrq": "RaBitQ",
    "IxHe": "LSH",
    "IxPT": "behind a transform",
    "IxMp": "with ids",
    "IxM2": "with ids",
    "IwFl": "IVF, flat",
    "IwPQ": "IVF, product quantizer",
    "IwSq": "IVF, scalar quantizer",
    "IwPf": "IVF, product quantizer, fast scan",
    "Iwrq": "IVF, RaBitQ",
    "IHNf": "HNSW, flat",
    "IHNs": "HNSW, scalar quantizer",
    "IHNp": "HNSW, product quantizer",
    "IHN2": "HNSW, two levels",
    "INSf": "NSG, flat",
    "INSs": "NSG, scalar quantizer",
}
_ZIP, _PICKLE = b"PK\x03\x04", re.compile(rb"\x80[\x02-\x05]")
_LOOKED_AT = 1 << 16


def file_kind(path: Path) -> FileKind | None:
    """Return what kind of file `path` is by its first bytes, or by its name where they say nothing."""
    start = _start(path, 16)
    marks: dict[FileKind, bool] = {
        "npy": start.startswith(b"\x93NUMPY") or path.suffix == ".npy",
        "parquet": start.startswith(b"PAR1") or path.suffix == ".parquet",
        "faiss": start[:4].decode("latin-1") in _FAISS_TYPES or path.suffix == ".faiss",
        "torch": start.startswith(_ZIP) and _is_torch_archive(path),
        "pickle": bool(_PICKLE.match(start)),
        "safetensors": start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8,
    }
    if path.suffix == ".safetensors":  # Whatever is in it: its reader says best what is wrong.
        return "safetensors"
    return next((kind for kind, found in marks.items() if found), None)


def _start(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)


def _is_torch_archive(path: Path) -> bool:
    """Whether a zip archive holds a data.pkl, as those of torch.save do."""
    with path.open("rb") as file:
        start = file.read(_LOOKED_AT)
        file.seek(max(0, path.stat().st_size - _LOOKED_AT))
        return b"data.pkl" in start + file.read(_LOOKED_AT)


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An .npy file."""

    dtype: str
    """As numpy spells it: "<f4"."""
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int
    """Where the values begin."""


def read_array_header(path: Path) -> ArrayInfo:
    """Return what an .npy file holds; its length must be that.

    Raises:
        ShardError: It is damaged, or holds something else than one plain array of numbers.
    """
    start = _start(path, _LOOKED_AT)
    if len(start) < 12 or start[:6] != b"\x93NUMPY" or start[6] not in (1, 2):
        raise ShardError(f"{path}: not an .npy file", file=str(path))
    begin = 10 if start[6] == 1 else 12
    offset = begin + int.from_bytes(start[8:begin], "little")
    found = _ARRAY_HEADER.fullmatch(start[begin:offset])
    if found is None or offset > len(start):
        words = "its header is damaged, or it holds objects or records, which kgshard does not read"
        raise ShardError(f"{path}: not an .npy file of numbers: {words}", file=str(path))
    dtype = found[1].decode()
    shape = tuple(int(number) for number in found[3].split(b",") if number.strip())
    info = ArrayInfo(dtype, shape, found[2] == b"True", offset)
    check_length(path, offset + int(dtype[2:]) * math.prod(shape))
    return info


def check_length(path: Path, expected: int) -> None:
    """Raise ShardError where a file is shorter or longer than its header says."""
    size = path.stat().st_size
    if size != expected:
        raise ShardError(f"{path}: {size} bytes, but its header says {expected}", file=str(path))


@dataclass(frozen=True, slots=True)
class ParquetInfo:
    """A Parquet file."""

    rows: int
    columns: dict[str, str]
    """Name to type."""


def read_parquet_header(path: Path) -> ParquetInfo:
    """Return the columns of a Parquet file and its number of rows.

    Raises:
        ShardError: It is none.
    """
    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (OSError, UnicodeError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0][:300]
        raise ShardError(f"{path}: not a Parquet file: {reason}", file=str(path)) from error
    return ParquetInfo(metadata.num_rows, {field.name: str(field.type) for field in schema})


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """A FAISS index file."""

    type: str
    """In words."""
    metric: str
    dim: int
    rows: int
    offset: int | None
    """Where the vectors begin, float32 [rows, dim], of a flat index, also of one with ids."""
    ids: int | None = None
    """Where int64 [rows] begin that say which row each vector is, of a flat index with ids."""


def read_index_header(path: Path) -> IndexHeader:
    """Return what a FAISS index file says of itself, without faiss; a flat one must be as long as it says.

    Raises:
        ShardError: It is none, or of a type not known here.
    """
    start = _start(path, 2 * _FAISS_HEADER.size + 8)
    kind, dim, rows, metric, after = _read_index_start(path, start)
    found = IndexHeader(kind, _FAISS_METRICS.get(metric, f"metric {metric}"), dim, rows, None)
    if kind == "flat":
        offset = after + 8  # the number of floats
        check_length(path, offset + 4 * dim * rows)
        return replace(found, offset=offset)
    if kind == "with ids" and _FAISS_TYPES.get(start[after : after + 4].decode("latin-1")) == "flat":
        _, inner_dim, inner_rows, _, inner_after = _read_index_start(path, start[after:])
        offset = after + inner_after + 8
        ids = offset + 4 * dim * rows + 8  # the number of ids
        check_length(path, ids + 8 * rows)
        if (inner_dim, inner_rows) != (dim, rows):
            raise ShardError(f"{path}: not a FAISS index: it holds another of another size", file=str(path))
        return replace(found, type="flat, with ids", offset=offset, ids=ids)
    return found


def _read_index_start(path: Path, start: bytes) -> tuple[str, int, int, int, int]:
    """Return the type, floats, vectors and metric that an index begins with, and the bytes that took."""
    mark = start[:4].decode("latin-1")
    if len(start) < _FAISS_HEADER.size or mark not in _FAISS_TYPES:
        raise ShardError(f"{path}: not a FAISS index of a type known here", file=str(path))
    _, dim, rows, _, _, trained, metric = _FAISS_HEADER.unpack(start[: _FAISS_HEADER.size])
    if dim < 1 or rows < 0 or trained > 1 or not 0 <= metric < 100:
        raise ShardError(f"{path}: not a FAISS index: {rows} vectors of {dim} floats", file=str(path))
    return _FAISS_TYPES[mark], dim, rows, metric, _FAISS_HEADER.size + 4 * (metric > 1)
