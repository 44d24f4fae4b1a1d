"""Answers to a batch as files and streams.

    .ndjson .jsonl   {"query": {...}, "results": [...]} a line, in the order of the questions
    .json            a list of these
    .tsv             a header; an answer a line: query, the question's columns, those of Answer, error
    .parquet         the same columns

`query` is the line (the row, the place) of the question, from 1. A question that could not be answered is
{"query": {...}, "error": "...", "line": n}, or one row with an error and no rank; a question without answers
has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.errors import ConfigError
from kgshard_tools.batches.reading import Entry
from kgshard_tools.results import Answer, Answers

_GROUP_ROWS = 1 << 16
_TYPES = {
    "int": pa.int64(),
    "float": pa.float64(),
    "float | None": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.string(),
    "str | None": pa.string(),
}
"""Columns of flat answers, by the types of Answer's fields."""
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one question."""

    entry: Entry
    answers: Answers | None
    """None: it could not be answered."""
    error: str = ""
    """Why not."""


Block = Sequence[Outcome]
Writer = Callable[[Iterable[Block], BinaryIO, Sequence[str]], None]
"""Fills an open file with the outcomes of questions about some columns."""


def choose_writer(path: Path) -> Writer:
    """Return what writes the format that a file's name says.

    Raises:
        ConfigError: It says none.
    """
    try:
        return WRITERS[path.suffix.lower()]
    except KeyError:
        raise ConfigError(
            f"--out {path}: the name does not tell the format (known: {', '.join(WRITERS)})"
        ) from None


def ndjson_blocks(blocks: Iterable[Block]) -> Iterator[bytes]:
    """Yield an object a line, block by block."""
    for block in blocks:
        yield b"".join(part for outcome in block for part in (_encoded(outcome), b"\n"))


def write_ndjson(blocks: Iterable[Block], file: BinaryIO, columns: Sequence[str] = ()) -> None:
    """Write an object a line."""
    file.writelines(ndjson_blocks(blocks))


def write_json(blocks: Iterable[Block], file: BinaryIO, columns: Sequence[str] = ()) -> None:
    """Write a list, an object a line."""
    before = b"[\n"
    for block in blocks:
        for outcome in block:
            file.write(before + _encoded(outcome))
            before = b",\n"
    file.write(b"[]\n" if before == b"[\n" else b"\n]\n")


def _encoded(outcome: Outcome) -> bytes:
    if outcome.answers is not None:
        return _ENCODER.encode(outcome.answers)
    entry = outcome.entry
    return _ENCODER.encode({"query": entry.given, "error": outcome.error, "line": entry.number})


def write_tsv(blocks: Iterable[Block], file: BinaryIO, columns: Sequence[str]) -> None:
    """Write a header and an answer a line. Scores read back to the same float64.

    Raises:
        ConfigError: A label holds what separates columns or lines.
    """
    names = _schema(columns).names
    file.write("\t".join(names).encode() + b"\n")
    for block in blocks:
        values = _flat(block, columns)
        lines = zip(*(map(_text, values[name]) for name in names), strict=True)
        file.write("".join("\t".join(line) + "\n" for line in lines).encode())


def _text(value: str | float | bool | None) -> str:
    if isinstance(value, str):
        if "\t" in value or "\n" in value or "\r" in value:
            raise ConfigError(f".tsv cannot say {value!r}: write .ndjson, .json or .parquet")
        return value
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_parquet(blocks: Iterable[Block], file: BinaryIO, columns: Sequence[str]) -> None:
    """Write a row an answer, in groups of about 65,536."""
    schema = _schema(columns)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for tables in _grouped(pa.table(_flat(block, columns), schema) for block in blocks):
            writer.write(pa.concat_tables(tables))


def _grouped(tables: Iterable[pa.Table]) -> Iterator[list[pa.Table]]:
    """Yield tables together, as soon as they have rows for a group."""
    waiting, num_rows = [], 0
    for table in tables:
        waiting.append(table)
        num_rows += len(table)
        if num_rows >= _GROUP_ROWS:
            yield waiting
            waiting, num_rows = [], 0
    if waiting:
        yield waiting


def _schema(columns: Sequence[str]) -> pa.Schema:
    """Return the columns of flat answers to questions about some columns."""
    return pa.schema(
        [
            ("query", pa.int64()),
            *((column, pa.string()) for column in columns),
            *([("asked", pa.string())] if len(columns) > 1 else []),
            *((field.name, _TYPES[str(field.type)]) for field in fields(Answer)),
            ("error", pa.string()),
        ]
    )


def _flat(block: Block, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns of a block, a row for each answer and for each question without."""
    flat: dict[str, list[Any]] = {name: [] for name in _schema(columns).names}
    asked = [*columns, "asked"] if len(columns) > 1 else columns
    for outcome in block:
        results = outcome.answers.results if outcome.answers is not None else []
        query = outcome.answers.query if outcome.answers is not None else outcome.entry.given
        count = len(results) if outcome.answers is not None else 1
        flat["query"] += [outcome.entry.number] * count
        for name in asked:
            flat[name] += [query.get(name)] * count
        flat["error"] += [outcome.error or None] * count
        for field in fields(Answer):
            flat[field.name] += [getattr(answer, field.name) for answer in results] or [None] * count
    return flat


WRITERS: dict[str, Writer] = {
    ".ndjson": write_ndjson,
    ".jsonl": write_ndjson,
    ".json": write_json,
    ".tsv": write_tsv,
    ".parquet": write_parquet,
}
"""What writes the format of a suffix."""
