"""Scored triples as files and streams.

    .ndjson .jsonl   {"triple": {...}, "score", "scores", "rank", "candidates", "known", "split"} a line, in
                     the order of the triples, with "probability" where that was asked for
    .json            a list of these
    .tsv .parquet    a row a triple: line, head, relation, tail, score, score_head, score_tail, rank_head,
                     rank_tail, candidates_head, candidates_tail, known, split, probability, error

`line` is the line (the row, the place) of the triple, from 1. A triple that could not be scored is
{"triple": {...}, "error": "...", "line": n}, or a row with an error and no score.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.errors import ConfigError
from kgshard.files import replacing
from kgshard.models.link import SIDES
from kgshard_tools.triple_scores.scorer import PARTS, Outcome, TripleBatch
from kgshard_tools.written import Written

Block = Sequence[Outcome]
_ENCODER = msgspec.json.Encoder()
_SCHEMA = pa.schema(
    [
        ("line", pa.int64()),
        *((part, pa.string()) for part in PARTS),
        ("score", pa.float64()),
        *((f"score_{side}", pa.float64()) for side in SIDES),
        *((f"rank_{side}", pa.float64()) for side in SIDES),
        *((f"candidates_{side}", pa.int64()) for side in SIDES),
        ("known", pa.bool_()),
        ("split", pa.string()),
        ("probability", pa.float64()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class ScoresWritten(Written):
    """A file of scored triples; `rows` are triples."""

    failed: int = 0
    """Triples that could not be scored."""

    def lines(self) -> list[str]:
        speed = self.rows / max(self.seconds, 1e-9)
        return [
            *self.files,
            f"{self.rows:,} triples, {self.bytes:,} bytes in {self.seconds:.2f} s ({speed:,.0f} triples/s)",
            *self.notes,
        ]


def write_scores(batch: TripleBatch, out: Path) -> ScoresWritten:
    """Write a batch's scores, whole or not at all.

    Args:
        batch: Not yet begun.
        out: Its suffix says the format.

    Raises:
        ConfigError: The name does not tell the format, is a folder's, or the format cannot say a label.
        DataError: See `TripleBatch.outcomes`.
    """
    write = _WRITERS.get(out.suffix.lower())
    if write is None:
        raise ConfigError(f"--out {out}: the name does not tell the format (known: {', '.join(_WRITERS)})")
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder")
    began = time.monotonic()
    with replacing(out) as temporary, temporary.open("wb") as file:
        write(batch.outcomes(), file)
    size, seconds = out.stat().st_size, time.monotonic() - began
    return ScoresWritten([str(out)], batch.triples, size, seconds, batch.lines(), failed=batch.failed)


def ndjson_blocks(blocks: Iterable[Block]) -> Iterator[bytes]:
    """Yield an object a line, block by block."""
    for block in blocks:
        yield b"".join(part for outcome in block for part in (_ENCODER.encode(outcome.to_dict()), b"\n"))


def _write_ndjson(blocks: Iterable[Block], file: BinaryIO) -> None:
    file.writelines(ndjson_blocks(blocks))


def _write_json(blocks: Iterable[Block], file: BinaryIO) -> None:
    before = b"[\n"
    for block in blocks:
        for outcome in block:
            file.write(before + _ENCODER.encode(outcome.to_dict()))
            before = b",\n"
    file.write(b"[]\n" if before == b"[\n" else b"\n]\n")


def _write_tsv(blocks: Iterable[Block], file: BinaryIO) -> None:
    file.write("\t".join(_SCHEMA.names).encode() + b"\n")
    for block in blocks:
        lines = ("\t".join(map(_text, _row(outcome).values())) + "\n" for outcome in block)
        file.write("".join(lines).encode())


def _text(value: str | float | bool | None) -> str:
    """Return a cell; numbers read back to the same float64."""
    if isinstance(value, str):
        if any(separator in value for separator in "\t\n\r"):
            raise ConfigError(f".tsv cannot say {value!r}: write .ndjson, .json or .parquet")
        return value
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _write_parquet(blocks: Iterable[Block], file: BinaryIO) -> None:
    with pq.ParquetWriter(file, _SCHEMA, compression="zstd") as writer:
        for block in blocks:
            writer.write_batch(pa.RecordBatch.from_pylist([_row(outcome) for outcome in block], _SCHEMA))


def _row(outcome: Outcome) -> dict[str, Any]:
    """Return the cells of one triple, in the order of the columns."""
    row: dict[str, Any] = dict.fromkeys(_SCHEMA.names)
    row |= {"line": outcome.entry.number, **outcome.entry.given, "error": outcome.error or None}
    found = outcome.score
    if found is not None:
        row |= {"score": found.score, "known": found.known, "split": found.split}
        row["probability"] = found.probability
        for side in SIDES:
            row[f"score_{side}"], row[f"rank_{side}"] = found.scores[side], found.rank[side]
            row[f"candidates_{side}"] = found.candidates[side]
    return row


_WRITERS: dict[str, Callable[[Iterable[Block], BinaryIO], None]] = {
    ".ndjson": _write_ndjson,
    ".jsonl": _write_ndjson,
    ".json": _write_json,
    ".tsv": _write_tsv,
    ".parquet": _write_parquet,
}
