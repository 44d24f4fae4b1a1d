"""Rows as lines of text. Every number reads back to the same float32, bit by bit.

A float32 has a shortest decimal that no other float32 is nearer to. Programs that read a double first and
round that to float32 come out one bit off for a few of these: 7.038531e-26 is one. Where that happens, nine
digits are written instead, which lead back both ways.

Shape letters: B rows of a block, D values of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kgshard.shards import Floats
from kgshard_tools.export.spread import spread
from kgshard_tools.export.tables import Export, Rows

_BLOCK_VALUES = 1 << 18
"""About 20 MB while they are made into text."""

Begin = Callable[[int, str, int], str]
"""What a line holds before its numbers, made of the row's position, its label and its degree in train."""


def write_lines(file: BinaryIO, rows: Rows, begin: Begin, between: str, end: str = "\n") -> None:
    """Append one line for each row: what `begin` returns, the numbers with `between` (one byte), and `end`.

    Raises:
        NonFiniteError, ConfigError: As `Rows.blocks` does.
    """
    size = rows.block_size(_BLOCK_VALUES)
    for batch, (block, values) in zip(
        rows.columns(["label", "degree"], size), rows.blocks(size), strict=True
    ):
        told = zip(block, batch["label"].to_pylist(), batch["degree"].to_pylist(), strict=True)
        starts = [begin(*row).encode() for row in told]
        numbers, ending = row_texts(values, between), end.encode()
        lines = [part for pair in zip(starts, numbers, strict=True) for part in (*pair, ending)]
        file.write(b"".join(lines))


def row_texts(values: Floats, between: str) -> list[memoryview]:
    """Return the numbers of every row as ASCII text.

    Args:
        values: float32[B, D], finite, D >= 1.
        between: One byte, which separates the numbers of a row.

    Example:
        >>> [bytes(text) for text in row_texts(np.float32([[1, -0.0], [0.1, 1e-45]]), " ")]
        [b'1 -0', b'0.1 1e-45']
    """
    line, places = spread(_exact_texts(values.ravel()), after=1)
    separators = np.append(places[1:], len(line)) - 1
    line[separators] = ord(between)
    ends = separators[values.shape[1] - 1 :: values.shape[1]].tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [line.data[start:stop] for start, stop in zip(starts, ends, strict=True)]


def _exact_texts(values: Floats) -> pa.Array:
    """Return large_string[N]: decimals that are read back to `values` by way of float32 or float64."""
    values = np.ascontiguousarray(values)
    texts = pa.array(values).cast(pa.large_string())
    doubles = texts.cast(pa.float64()).to_numpy()
    wrong = doubles.astype(np.float32).view(np.uint32) != values.view(np.uint32)
    if not wrong.any():
        return texts
    nine_digits = pa.array([f"{value:.9g}" for value in values[wrong].tolist()], pa.large_string())
    return pc.replace_with_mask(texts, pa.array(wrong), nine_digits)


def quoted(text: str) -> str:
    """Return a field of RFC 4180: in quotation marks, those inside doubled."""
    return '"' + text.replace('"', '""') + '"'


def counted(count: int, noun: str) -> str:
    """Return "1 label", "2,000 labels"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def note_shared(what: Export) -> None:
    """Say that the parameters which all rows share are in none of the files."""
    if what.shared:
        names = ", ".join(what.shared)
        what.note(f"the parameters that all rows share ({names}) are not in this format; numpy has them")
