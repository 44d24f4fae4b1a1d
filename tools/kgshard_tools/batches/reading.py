r"""Questions of a batch as they are given, some at a time.

    .tsv .txt        a question a line: head TAB relation TAB tail, the asked one empty; or an entity a line
    .ndjson .jsonl   a JSON object a line: {"head": "a", "relation": "r"}; or {"entity": "a"}, or "a"
    .json            a list of these
    .parquet         columns head, relation, tail (null is asked); or entity

Text may be compressed (.gz, .zst). Nothing in a line is quoted or trimmed, so that "?" and " a" are labels; a
line ends with LF, or CR LF; blank lines are skipped. A pipe is read as it fills: a line that arrives alone is
handed on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.errors import ConfigError, DataError
from kgshard_tools.batches.streams import codec_of, file_chunks, line_groups, stdin_chunks

STDIN = "-"
_KNOWN = ".tsv, .txt, .ndjson, .jsonl, each also .gz or .zst; .json, .parquet"

Given = dict[str, str]
"""Names by column; what is asked for is left out."""
Parse = Callable[[bytes], Given]
"""Turns a line without its end into names. Raises ValueError that says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One question as it was given."""

    number: int
    """Its line, or its place in the file, from 1."""
    where: str
    """For messages: "questions.tsv:3"; empty where an argument gave it."""
    given: Given
    error: str = ""
    """What is wrong with it, if anything."""


def read_entries(source: str, columns: Sequence[str], size: int) -> Iterator[list[Entry]]:
    """Yield the questions of a file, or of stdin, in blocks that hold `size` at most, and at least one.

    Args:
        source: A path, or "-" for NDJSON on stdin.
        columns: What a question may name, in the order of a line.
        size: Questions in a block. Less arrive where less is waiting in a pipe.

    Raises:
        ConfigError: The file's name does not tell what it is.
        DataError: It is missing, damaged, or no file of questions at all.
    """
    if source == STDIN:
        return _text_entries(stdin_chunks(), "stdin", _parse_json(columns), size, at_once=True)
    path = Path(source)
    codec = codec_of(path)
    suffix = Path(path.stem if codec else path.name).suffix.lower()
    is_pipe = path.exists() and not path.is_file() and not path.is_dir()
    if suffix in (".tsv", ".txt"):
        parse = _parse_tsv(columns)
    elif suffix in (".ndjson", ".jsonl") or (is_pipe and not suffix):
        parse = _parse_json(columns)
    elif suffix == ".json" and codec is None:
        return _json_entries(path, columns, size)
    elif suffix == ".parquet" and codec is None:
        return _parquet_entries(path, columns, size)
    else:
        raise ConfigError(f"{path}: the name does not tell what is in it (known: {_KNOWN})")
    return _text_entries(file_chunks(path, codec), str(path), parse, size, at_once=is_pipe)


def one_question(given: Given) -> Iterator[list[Entry]]:
    """Yield a question that no file gave, as a batch of one."""
    yield [Entry(1, "", given)]


def read_names(names: Iterable[str], column: str, size: int) -> Iterator[list[Entry]]:
    """Yield names as questions, `size` at most in a block; "-" stands for lines of stdin, each a name."""
    waiting: list[Entry] = []
    for number, name in enumerate(names, start=1):
        if name != STDIN:
            waiting.append(Entry(number, "", {column: name}))
        if waiting and (name == STDIN or len(waiting) == size):
            yield waiting
            waiting = []
        if name == STDIN:
            yield from _text_entries(stdin_chunks(), "stdin", _parse_tsv([column]), size, at_once=True)
    if waiting:
        yield waiting


def _text_entries(
    chunks: Iterable[bytes], name: str, parse: Parse, size: int, *, at_once: bool
) -> Iterator[list[Entry]]:
    """Yield blocks of entries; `at_once`: as they arrive, so that nobody waits for lines still to come."""
    waiting: list[Entry] = []
    first = 1
    for lines in line_groups(chunks):
        for number, line in enumerate(lines, first):
            if not line:
                continue
            waiting.append(_entry(number, f"{name}:{number}", parse, line))
            if len(waiting) == size:
                yield waiting
                waiting = []
        first += len(lines)
        if at_once and waiting:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _entry(number: int, where: str, parse: Parse, text: bytes) -> Entry:
    try:
        return Entry(number, where, parse(text))
    except ValueError as error:
        return Entry(number, where, {}, str(error))


def _parse_tsv(columns: Sequence[str]) -> Parse:
    """Return what splits a line; where only one name is given, the line is that name."""

    def parse(line: bytes) -> Given:
        names = _decoded(line).split("\t") if len(columns) > 1 else [_decoded(line)]
        if len(names) != len(columns):
            raise ValueError(
                f"{len(names)} columns, expected {len(columns)}: {', '.join(columns)}, the asked one empty"
            )
        return {column: name for column, name in zip(columns, names, strict=True) if name}

    return parse


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, found byte 0x{line[error.start]:02x}") from error


def _parse_json(columns: Sequence[str]) -> Parse:
    """Return what reads a JSON object; where only one name is given, also a JSON string."""
    type: Any = dict[str, str | None] | str if len(columns) == 1 else dict[str, str | None]
    decoder = msgspec.json.Decoder(type)

    def parse(line: bytes) -> Given:
        try:
            value = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a question in JSON: {error}") from error
        if isinstance(value, str):
            return {columns[0]: value}
        unknown = [repr(key) for key in value if key not in columns]
        if unknown:
            raise ValueError(f"unknown field {', '.join(unknown)} (known: {', '.join(columns)})")
        return {column: name for column, name in value.items() if name is not None}

    return parse


def _json_entries(path: Path, columns: Sequence[str], size: int) -> Iterator[list[Entry]]:
    try:
        values = msgspec.json.decode(b"".join(file_chunks(path, None)), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"{path}: not a list of questions: {error}") from error
    parse = _parse_json(columns)
    for start in range(0, len(values), size):
        yield [
            _entry(number, f"{path}: question {number}", parse, bytes(value))
            for number, value in enumerate(values[start : start + size], start + 1)
        ]


def _parquet_entries(path: Path, columns: Sequence[str], size: int) -> Iterator[list[Entry]]:
    try:
        with pq.ParquetFile(path) as file:
            names = _named_columns(path, file.schema_arrow, columns)
            first = 1
            for batch in file.iter_batches(size, columns=names):
                # A dictionary's text, too, and text beyond 2 GiB.
                texts = [column.cast(pa.large_string()).to_pylist() for column in batch.columns]
                yield [
                    _row_entry(number, f"{path}: row {number}", batch.schema.names, row)
                    for number, row in enumerate(zip(*texts, strict=True), first)
                ]
                first += len(batch)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"{path}: {problem}") from error


def _row_entry(number: int, where: str, names: Sequence[str], row: tuple[str | None, ...]) -> Entry:
    return Entry(
        number, where, {name: text for name, text in zip(names, row, strict=True) if text is not None}
    )


def _named_columns(path: Path, schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Return the columns of a question that a table has, once they are found to be text."""
    names = [name for name in columns if name in schema.names]
    if not names:
        raise DataError(
            f"{path}: has none of the columns {', '.join(columns)} (it has {', '.join(schema.names)})"
        )
    for name in names:
        type = schema.field(name).type
        value = type.value_type if pa.types.is_dictionary(type) else type
        is_text = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_null(value)
        if not is_text:
            raise DataError(f"{path}: column {name} is {type}, not text")
    return names
