"""Triples from text, byte for byte, in blocks of bounded memory.

A source is UTF-8 text with one `head TAB relation TAB tail` a line, plain or compressed (`.gz`, `.zst`).
Nothing is quoted, trimmed, commented out or taken for a missing value: every byte between two
separators is the label. The separators are TAB and LF, and one CR directly before an LF.

Work is done on whole blocks of lines, never on single ones. Only the search for a faulty line, once a block
is known to hold one, makes Python objects of lines.

Shape letters: B bytes, L lines, T triples (lines that are not blank), S separators.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kgshard.errors import DataError

TAB, LF, CR = b"\t\n\r"
BYTE_ORDER_MARK = "\ufeff".encode()
COLUMNS = ("head", "relation", "tail")

Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TripleBlock:
    """The triples of some consecutive lines; triple i is (heads[i], relations[i], tails[i])."""

    heads: pa.LargeStringArray
    """large_string[T], like relations and tails: no nulls, no empty labels."""
    relations: pa.LargeStringArray
    tails: pa.LargeStringArray
    num_lines: int
    """Lines this block was read from; num_lines = T + num_blank."""
    num_blank: int
    """How many of these lines were empty, or only a CR."""


def read_triples(path: Path, *, block_bytes: int = 1 << 24) -> Iterator[TripleBlock]:
    r"""Yield the triples of one file, in file order.

    A line ends with LF or CR LF; a CR anywhere else is data, as are U+2028, U+0085, FF, FS and NUL. The
    last line may lack its LF. One UTF-8 byte order mark is dropped at the start of the file and kept
    elsewhere. Blank lines are counted and skipped. An empty file yields nothing.

    An empty label is an error: it is nearly always a column that got lost on the way here, and as an
    entity it would tie all lines with the same loss together.

    Args:
        path: Read as gzip (all members) or Zstandard (all frames) if it ends in `.gz` or `.zst`.
        block_bytes: Text read at a time. Peak memory is a few times this, or a few times the longest
            line where that is longer.

    Raises:
        DataError: A line has not three columns, an empty label, or bytes that are not UTF-8; the first
            such line is named, and no block that holds it is yielded. Or the file is missing, truncated
            or corrupt; blocks before the damage may have been yielded by then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "train.tsv")
        ...     _ = path.write_bytes(b'"Ann"\tknows\tNA\r\n\nNA\tknows\tBob\n')
        ...     [block] = read_triples(path)
        >>> block.heads.to_pylist(), block.tails.to_pylist(), block.num_lines, block.num_blank
        (['"Ann"', 'NA'], ['NA', 'Bob'], 3, 1)
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be >= 1, got {block_bytes}")
    return _parse_blocks(path, block_bytes)


def _parse_blocks(path: Path, block_bytes: int) -> Iterator[TripleBlock]:
    num_lines = 0
    for text in _whole_lines(_chunks(path, block_bytes)):
        block = _parse(text)
        if block is None:
            _raise_first_fault(path, text, num_lines + 1)
        num_lines += block.num_lines
        yield block


class _ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _chunks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, at most `block_bytes` at a time."""
    try:
        with path.open("rb") as file, _decompressed(file, path.suffix.lower()) as stream:
            while chunk := stream.read(block_bytes):
                yield chunk
    except (EOFError, OSError, zlib.error) as error:
        # What the operating system refuses has an errno and its text; what a decoder refuses has none.
        problem = getattr(error, "strerror", None) or f"truncated or corrupt: {error}"
        raise DataError(f"{path}: {problem}") from error


def _decompressed(file: io.BufferedReader, suffix: str) -> AbstractContextManager[_ByteStream]:
    # Both decoders take no bytes at all for the end of a complete stream.
    if suffix in (".gz", ".zst") and not file.peek(1):
        raise EOFError("0 bytes")
    if suffix == ".gz":
        return gzip.open(file)
    if suffix == ".zst":
        stream: AbstractContextManager[_ByteStream] = pa.CompressedInputStream(file, "zstd")
        return stream
    return file


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Cut a byte stream at line ends, and drop its byte order mark. No block is empty."""
    mark = BYTE_ORDER_MARK
    pending: list[bytes] = []  # joined only at a line end, so a line of many chunks costs linear time
    for chunk in chunks:
        end = chunk.rfind(LF) + 1
        if end:
            yield b"".join([*pending, memoryview(chunk)[:end]]).removeprefix(mark)
            mark = b""
            pending = []
        if end < len(chunk):
            pending.append(chunk[end:])
    if last_line := b"".join(pending).removeprefix(mark):
        yield last_line


def _parse(text: bytes) -> TripleBlock | None:
    """Split lines into columns, or return None if any line is at fault.

    Args:
        text: One or more lines; only the last may lack its LF.
    """
    if not _is_utf8(text):
        return None
    terminated = text[-1] == LF
    buffer = np.frombuffer(text if terminated else text + b"\n", np.uint8)
    # TAB is 9 and LF is 10, and smaller bytes wrap around: one comparison finds both.
    separators = np.flatnonzero(buffer - np.uint8(TAB) < 2)
    line_seps = np.flatnonzero(buffer[separators] == LF)  # int64[L]: separators[line_seps] end the lines
    starts, ends, filled = _line_bounds(buffer, separators[line_seps], terminated=terminated)
    num_tabs = np.diff(line_seps, prepend=-1) - 1
    if (num_tabs[filled] != 2).any():
        return None
    seconds = separators[line_seps[filled] - 1]
    firsts = separators[line_seps[filled] - 2]
    bounds = np.stack([starts[filled], firsts, firsts + 1, seconds, seconds + 1, ends[filled]], axis=1)
    if (bounds[:, 0::2] == bounds[:, 1::2]).any():
        return None
    heads, relations, tails = _take_columns(buffer, bounds)
    num_blank = len(filled) - len(bounds)
    return TripleBlock(heads, relations, tails, num_lines=len(filled), num_blank=num_blank)


def _line_bounds(
    buffer: Bytes, line_ends: Positions, *, terminated: bool
) -> tuple[Positions, Positions, npt.NDArray[np.bool_]]:
    """Return where the text of each line starts and ends, and whether there is any.

    Args:
        buffer: uint8[B], whole lines.
        line_ends: int64[L], where the LFs are.
        terminated: False if the last LF is not in the file: then a CR before it is data.

    Returns:
        int64[L], int64[L] and bool[L].
    """
    starts = np.concatenate([[0], line_ends[:-1] + 1])
    # Before an empty first line comes index -1, which is the final LF and so not a CR.
    ends = line_ends - (buffer[line_ends - 1] == CR)
    filled = ends > starts
    if not terminated:
        ends[-1] = line_ends[-1]
    return starts, ends, filled


def _is_utf8(text: bytes) -> bool:
    # Arrow's check is nine times as fast as bytes.decode and makes no string. Separators are ASCII, so
    # the whole is UTF-8 just where every label is.
    offsets = np.array([0, len(text)], np.int64)
    whole = pa.LargeStringArray.from_buffers(1, pa.py_buffer(offsets), pa.py_buffer(text))
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _take_columns(buffer: Bytes, bounds: Positions) -> list[pa.LargeStringArray]:
    """Copy each column out of the buffer.

    Arrow wants a string to start where the one before it ends. So labels and the gaps between them are
    laid over the buffer in turn: of every six elements, numbers 0, 2 and 4 are the labels of one triple.

    Args:
        buffer: uint8[B], whole lines.
        bounds: int64[T, 6], start and end of head, relation and tail; ascending when flattened.

    Returns:
        large_string[T] for each of COLUMNS.
    """
    if len(bounds) == 0:
        return [pa.array([], pa.large_string())] * len(COLUMNS)
    pieces = pa.LargeStringArray.from_buffers(bounds.size - 1, pa.py_buffer(bounds), pa.py_buffer(buffer))
    return [pieces.take(pa.array(np.arange(label, bounds.size, 6))) for label in (0, 2, 4)]


def _raise_first_fault(path: Path, text: bytes, first_line: int) -> NoReturn:
    """Raise for the first faulty line of `text`, whose first line is line `first_line` of the file."""
    for line, ended in enumerate(io.BytesIO(text), first_line):
        if problem := _fault(ended):
            raise DataError(f"{path}:{line}: {problem}")
    raise AssertionError(f"{path}: no faulty line among those from {first_line} on")


def _fault(ended: bytes) -> str | None:
    """Say what is wrong with one line, its line end included."""
    if ended.rstrip(b"\n") in (b"", b"\r"):
        return None
    labels = (ended.removesuffix(b"\n").removesuffix(b"\r") if ended[-1] == LF else ended).split(b"\t")
    if len(labels) != len(COLUMNS):
        return f"{len(labels)} columns, expected {len(COLUMNS)}"
    if b"" in labels:
        return f"empty {COLUMNS[labels.index(b'')]} label"
    try:
        ended.decode()
    except UnicodeDecodeError as error:
        return f"expected UTF-8, found byte 0x{ended[error.start]:02x}"
    return None
