"""Parquet files whose vectors are the bytes of the shards.

A Parquet library turns a vector column into values and levels one by one, which takes three to four
times as long as to write them. Here the levels of a page are one pattern repeated, for every vector has
the same length, and its values are copied from file to file. All columns are required; pages are plain, as
little-endian values lie in memory; labels and degrees are compressed with zstd, vectors are not: floats
lose a fifth of their size at best.

    "PAR1" | row groups: a chunk for each column, of pages: header, levels, values | footer | length | "PAR1"

https://parquet.apache.org/docs/file-format/; headers and footer are Thrift's compact protocol.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kgshard.shards import ITEM_BYTES
from kgshard_tools.export.spread import spread
from kgshard_tools.export.tables import Rows

_MAGIC = b"PAR1"
_GROUP_ROWS = 1 << 16
_PAGE_BYTES = 1 << 22
_ZSTD = pa.Codec("zstd")

# Numbers of the format's enumerations.
_INT64, _FLOAT, _BYTE_ARRAY, _FIXED = 2, 4, 6, 7
_REQUIRED, _REPEATED = 0, 2
_PLAIN, _RLE = 0, 3
_UNCOMPRESSED, _ZSTD_CODEC = 0, 6
_UTF8, _LIST = 0, 3
_LOGICAL_STRING, _LOGICAL_LIST, _LOGICAL_FLOAT16 = 1, 3, 15

_ARROW_TYPES = {"F32": pa.float32(), "F16": pa.float16()}
_VECTOR_TYPES = {"F32": _FLOAT, "F16": _FIXED}


def write_parquet(rows: Rows, file: BinaryIO, metadata: Mapping[str, str]) -> None:
    """Fill an open file with the columns id, label, degree and vector; row i is label i.

    Args:
        rows: float32 or float16 vectors, and their labels.
        file: Empty.
        metadata: Text to text, kept in the schema.
    """
    file.write(_MAGIC)
    groups = []
    with ThreadPoolExecutor(1) as encoder:
        # While the kernel copies vectors, a thread encodes what stands beside those of the next group.
        columns = _columns(rows)
        waiting = encoder.submit(next, columns, None)
        while (group := waiting.result()) is not None:
            waiting = encoder.submit(next, columns, None)
            ids, encoded = group
            chunks = [*(_write_column(each, file) for each in encoded), _write_vectors(rows.part(ids), file)]
            groups.append((len(ids), chunks))
    footer = _footer(rows, groups, metadata)
    file.write(footer + len(footer).to_bytes(4, "little") + _MAGIC)


_Page = tuple[int, bytes]
"""How many values, and their plain bytes."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A column of a row group, once it is written."""

    path: tuple[str, ...]
    type: int
    codec: int
    num_values: int
    offset: int
    stored_bytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A column of a row group, ready to be written."""

    name: str
    type: int
    pages: list[tuple[int, int, bytes]]
    """How many values, how many plain bytes, and their compressed bytes."""


def _columns(rows: Rows) -> Iterator[tuple[range, list[_Encoded]]]:
    """Yield the rows of each group, and its columns but the vectors."""
    start = 0
    for columns in rows.columns(["label", "degree"], _GROUP_ROWS):
        ids = range(start, start + len(columns))
        numbers = np.arange(ids.start, ids.stop, dtype="<i8")
        # (to_numpy would import pandas wherever it is installed, which takes longer than a row group.)
        degrees = np.from_dlpack(columns.column("degree")).astype("<i8")
        yield (
            ids,
            [
                _encoded("id", _INT64, [(len(ids), numbers.tobytes())]),
                _encoded("label", _BYTE_ARRAY, _text_pages(columns.column("label"))),
                _encoded("degree", _INT64, [(len(ids), degrees.tobytes())]),
            ],
        )
        start = ids.stop


def _encoded(name: str, type: int, pages: Iterable[_Page]) -> _Encoded:
    compressed = [(count, len(plain), _ZSTD.compress(plain, asbytes=True)) for count, plain in pages]
    return _Encoded(name, type, compressed)


def _text_pages(labels: pa.Array) -> Iterator[_Page]:
    """Yield labels as pages, which end where they are large enough: a page has at most 2^31 bytes."""
    sizes = np.from_dlpack(pc.binary_length(labels)).astype(np.int64) + 4
    pages = (np.cumsum(sizes) - sizes) // _PAGE_BYTES
    starts = np.flatnonzero(np.diff(pages, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(labels)], strict=True):
        # Each text comes behind its length, 4 bytes little-endian.
        plain, places = spread(labels.slice(start, stop - start), before=4)
        lengths = (sizes[start:stop] - 4).astype("<u4")
        plain[places[:, None] + np.arange(4)] = lengths.view(np.uint8).reshape(-1, 4)
        yield stop - start, plain.tobytes()


def _write_column(column: _Encoded, file: BinaryIO) -> _Chunk:
    offset, num_values, plain_bytes = file.tell(), 0, 0
    for count, plain, stored in column.pages:
        header = _page_header(count, plain, len(stored))
        file.write(header + stored)
        num_values += count
        plain_bytes += len(header) + plain
    stored_bytes = file.tell() - offset
    return _Chunk((column.name,), column.type, _ZSTD_CODEC, num_values, offset, stored_bytes, plain_bytes)


def _write_vectors(rows: Rows, file: BinaryIO) -> _Chunk:
    row_bytes = rows.dim * ITEM_BYTES[rows.dtype]
    page_rows = max(1, _PAGE_BYTES // row_bytes)
    offset = file.tell()
    for start in range(0, len(rows), page_rows):
        page = rows.part(range(start, min(start + page_rows, len(rows))))
        levels = _levels(len(page), page.dim)
        size = len(levels) + len(page) * row_bytes
        file.write(_page_header(len(page) * page.dim, size, size) + levels)
        page.write(file)
    size = file.tell() - offset
    path = ("vector", "list", "element")
    return _Chunk(path, _VECTOR_TYPES[rows.dtype], _UNCOMPRESSED, len(rows) * rows.dim, offset, size, size)


def _levels(num_rows: int, dim: int) -> bytes:
    """Return the levels of a page of vectors, as runs of equal ones.

    Repetition: 0 where a vector begins, 1 in it. Definition: always 1, for nothing is missing.
    """
    vector = _run(1, 0) + (_run(dim - 1, 1) if dim > 1 else b"")
    return _sized(vector * num_rows) + _sized(_run(num_rows * dim, 1))


def _run(length: int, level: int) -> bytes:
    return _varint(length << 1) + bytes([level])


def _sized(levels: bytes) -> bytes:
    return len(levels).to_bytes(4, "little") + levels


def _page_header(num_values: int, plain_bytes: int, stored_bytes: int) -> bytes:
    data_page = {1: _i32(num_values), 2: _i32(_PLAIN), 3: _i32(_RLE), 4: _i32(_RLE)}
    fields = {1: _i32(0), 2: _i32(plain_bytes), 3: _i32(stored_bytes), 5: _struct(data_page)}
    return _struct(fields)[1]


def _footer(rows: Rows, groups: Sequence[tuple[int, list[_Chunk]]], metadata: Mapping[str, str]) -> bytes:
    arrow = _arrow_schema(rows, metadata).serialize().to_pybytes()
    texts = {**metadata, "ARROW:schema": base64.b64encode(arrow).decode()}
    fields = {
        1: _i32(2),
        2: _list([_struct(element) for element in _schema(rows)]),
        3: _i64(len(rows)),
        4: _list([_struct(_group(count, chunks)) for count, chunks in groups]),
        5: _list([_struct({1: _binary(key), 2: _binary(text)}) for key, text in texts.items()]),
        6: _binary("kgshard"),
    }
    return _struct(fields)[1]


def _arrow_schema(rows: Rows, metadata: Mapping[str, str]) -> pa.Schema:
    """Return the schema as Arrow knows it: vectors of one length, which Parquet cannot say."""
    element = pa.field("element", _ARROW_TYPES[rows.dtype], nullable=False)
    types = {
        "id": pa.int64(),
        "label": pa.string(),
        "degree": pa.int64(),
        "vector": pa.list_(element, rows.dim),
    }
    fields = [pa.field(name, type, nullable=False) for name, type in types.items()]
    return pa.schema(fields, metadata=dict(metadata))


def _schema(rows: Rows) -> list[_Fields]:
    """Return Parquet's schema: a tree, parents before children."""
    string, vectors, half = (
        _struct({kind: _struct({})}) for kind in (_LOGICAL_STRING, _LOGICAL_LIST, _LOGICAL_FLOAT16)
    )
    required = _i32(_REQUIRED)
    element: _Fields = {1: _i32(_VECTOR_TYPES[rows.dtype]), 3: required, 4: _binary("element")}
    if rows.dtype == "F16":
        element = {1: element[1], 2: _i32(2), 3: required, 4: element[4], 10: half}
    return [
        {4: _binary("schema"), 5: _i32(4)},
        {1: _i32(_INT64), 3: required, 4: _binary("id")},
        {1: _i32(_BYTE_ARRAY), 3: required, 4: _binary("label"), 6: _i32(_UTF8), 10: string},
        {1: _i32(_INT64), 3: required, 4: _binary("degree")},
        {3: required, 4: _binary("vector"), 5: _i32(1), 6: _i32(_LIST), 10: vectors},
        {3: _i32(_REPEATED), 4: _binary("list"), 5: _i32(1)},
        element,
    ]


def _group(num_rows: int, chunks: Sequence[_Chunk]) -> _Fields:
    columns = [_struct({2: _i64(chunk.offset), 3: _struct(_column(chunk))}) for chunk in chunks]
    return {1: _list(columns), 2: _i64(sum(chunk.plain_bytes for chunk in chunks)), 3: _i64(num_rows)}


def _column(chunk: _Chunk) -> _Fields:
    return {
        1: _i32(chunk.type),
        2: _list([_i32(_PLAIN), _i32(_RLE)]),
        3: _list([_binary(name) for name in chunk.path]),
        4: _i32(chunk.codec),
        5: _i64(chunk.num_values),
        6: _i64(chunk.plain_bytes),
        7: _i64(chunk.stored_bytes),
        9: _i64(chunk.offset),
    }


# Thrift's compact protocol: a value is its type's number and its bytes.
_Thrift = tuple[int, bytes]
_Fields = Mapping[int, _Thrift]
"""A struct: field number to value, in ascending order."""


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _i32(number: int) -> _Thrift:
    return 5, _varint(number << 1)


def _i64(number: int) -> _Thrift:
    return 6, _varint(number << 1)


def _binary(text: str) -> _Thrift:
    raw = text.encode()
    return 8, _varint(len(raw)) + raw


def _list(values: Sequence[_Thrift]) -> _Thrift:
    type = values[0][0] if values else 12
    head = (
        bytes([len(values) << 4 | type]) if len(values) < 15 else bytes([0xF0 | type]) + _varint(len(values))
    )
    return 9, head + b"".join(raw for _, raw in values)


def _struct(fields: _Fields) -> _Thrift:
    raw, before = b"", 0
    for number, (type, value) in fields.items():
        raw += bytes([(number - before) << 4 | type]) + value
        before = number
    return 12, raw + b"\0"
