"""Queries of a file or of stdin, a JSON value a line, and their answers as NDJSON.

    "?x: (Austria, borders, ?x)"       a query as text
    ["Austria", ["borders"]]           as nested lists
    {"query": ...}                     either

An answer is {"query": {...}, "results": [...]}, in the order of the queries; what could not be answered is
{"query": ..., "error": "...", "line": n}. Lines are answered as they come.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from kgshard.errors import ConfigError, DataError, UsageError
from kgshard.files import replacing
from kgshard_tools.batches.streams import codec_of, file_chunks, line_groups, stdin_chunks
from kgshard_tools.multi_hop.asking import MultiHop, Query
from kgshard_tools.written import Written

OnError = Literal["stop", "skip"]
STDIN = "-"


@dataclass(slots=True)
class Tally:
    """How a batch went, so far."""

    queries: int = 0
    answers: int = 0
    failed: int = 0
    first_error: str = ""

    def lines(self) -> list[str]:
        """Say how many queries have no answer, if any, and why the first has none."""
        if not self.failed:
            return []
        return [f"{self.failed:,} of {self.queries:,} queries failed; the first: {self.first_error}"]


def read_query(text: str) -> Query:
    """Return an argument as a query: text, or nested lists in JSON.

    Raises:
        ConfigError: It looks like JSON and is none.
    """
    if not text.lstrip().startswith("["):
        return text
    try:
        return msgspec.json.decode(text, type=list[object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"query: no list in JSON: {error}") from error


def read_lines(source: str) -> Iterator[tuple[int, str, bytes]]:
    """Yield the lines of a file, or of stdin ("-"), that are not blank: number, place, bytes.

    Raises:
        DataError: It cannot be read.
    """
    path = Path(source)
    chunks = stdin_chunks() if source == STDIN else file_chunks(path, codec_of(path))
    name = "stdin" if source == STDIN else source
    number = 0
    for lines in line_groups(chunks):
        for line in lines:
            number += 1
            if line:
                yield number, f"{name}:{number}", line


def _read_value(line: bytes) -> Query:
    """Return the query of a line. Raises ValueError, which says what is wrong with it."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a query in JSON: {error}") from error
    if isinstance(value, dict):
        if list(value) != ["query"]:
            raise ValueError(f"expected the field query alone, found {', '.join(map(repr, value))}")
        value = value["query"]
    if not isinstance(value, str | list):
        raise ValueError(f"a query is text or a list, not {type(value).__name__}")
    return value


class QueryBatch:
    """Lines of queries, answered one after the other."""

    def __init__(
        self, model: MultiHop, lines: Iterable[tuple[int, str, bytes]], *, on_error: OnError = "stop"
    ) -> None:
        """Nothing is read before `answers` is iterated.

        Args:
            model: What is asked.
            lines: As `read_lines` yields them.
            on_error: "stop" at the first query that cannot be answered, or "skip" it.
        """
        self.tally = Tally()
        self._model = model
        self._lines = lines
        self._on_error = on_error

    def answers(self) -> Iterator[bytes]:
        """Yield an answer a line.

        Raises:
            DataError: A query cannot be answered, and "stop" was chosen; or "skip" was, and none could be.
        """
        for number, where, line in self._lines:
            self.tally.queries += 1
            value: dict[str, object]
            try:
                query = _read_value(line)
                found = self._model.ask(query)
                self.tally.answers += len(found)
                value = found.to_dict()
            except (ValueError, UsageError) as error:
                value = self._failed(line, number, where, str(error))
            yield msgspec.json.encode(value) + b"\n"
        if self.tally.failed and self.tally.failed == self.tally.queries:
            raise DataError(f"no query could be answered; the first: {self.tally.first_error}")

    def _failed(self, line: bytes, number: int, where: str, error: str) -> dict[str, object]:
        if self._on_error == "stop":
            raise DataError(f"{where}: {error}")
        self.tally.failed += 1
        self.tally.first_error = self.tally.first_error or f"{where}: {error}"
        return {"query": line.decode(errors="replace"), "error": error, "line": number}


@dataclass(frozen=True)
class QueriesWritten(Written):
    """A file of answers; `rows` are answers."""

    queries: int = 0
    failed: int = 0
    """Queries that could not be answered."""

    def lines(self) -> list[str]:
        return [
            *self.files,
            f"{self.queries:,} queries, {self.rows:,} answers, {self.bytes:,} bytes in {self.seconds:.2f} s",
            *self.notes,
        ]


def write_answers(batch: QueryBatch, out: Path) -> QueriesWritten:
    """Write the answers to a batch as NDJSON, whole or not at all.

    Raises:
        ConfigError: The file's name says something else than NDJSON, or it is a folder.
        DataError: See `QueryBatch.answers`.
    """
    if out.suffix.lower() not in (".ndjson", ".jsonl"):
        raise ConfigError(f"--out {out}: answers are written as .ndjson or .jsonl")
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder")
    began = time.monotonic()
    with replacing(out) as temporary, temporary.open("wb") as file:
        file.writelines(batch.answers())
    tally = batch.tally
    return QueriesWritten(
        [str(out)],
        tally.answers,
        out.stat().st_size,
        time.monotonic() - began,
        tally.lines(),
        queries=tally.queries,
        failed=tally.failed,
    )
