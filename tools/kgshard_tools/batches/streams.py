"""Text from files and pipes, byte for byte, line by line, as it comes. Pipes are not waited for to fill."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from kgshard.errors import DataError

BYTE_ORDER_MARK = "\ufeff".encode()
_CHUNK_BYTES = 1 << 16
"""What a pipe holds. Lines that pile up while a block is answered come together."""
_CODECS = {".gz": "gzip", ".zst": "zstd"}


def codec_of(path: Path) -> str | None:
    """Return how a file is compressed, by its name."""
    return _CODECS.get(path.suffix.lower())


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def file_chunks(path: Path, codec: str | None) -> Iterator[bytes]:
    """Yield what a file holds, as it can be had; `codec`: "gzip", "zstd" or None.

    Raises:
        DataError: It cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            stream: AbstractContextManager[_Stream] = file
            if codec is not None:
                stream = pa.CompressedInputStream(file, codec)
            with stream as opened:
                yield from _chunks(opened)
    except OSError as error:
        # What the operating system refuses has text of its own; what a decoder refuses has none.
        problem = error.strerror or f"truncated or corrupt: {str(error).splitlines()[0]}"
        raise DataError(f"{path}: {problem}") from error


def stdin_chunks() -> Iterator[bytes]:
    """Yield what comes on stdin, as it comes. Raises DataError where there is no stdin."""
    if sys.stdin is None:
        raise DataError("stdin: is closed")
    try:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stream:
            yield from _chunks(stream)
    except OSError as error:
        raise DataError(f"stdin: {error.strerror or error}") from error


def _chunks(stream: _Stream) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def line_groups(chunks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines that each chunk completes, without their ends."""
    mark = BYTE_ORDER_MARK
    pending: list[bytes] = []  # joined only at a line end, so a line of many chunks costs linear time
    for chunk in chunks:
        end = chunk.rfind(b"\n")
        if end < 0:
            pending.append(chunk)
            continue
        text = b"".join([*pending, chunk[:end]]).removeprefix(mark)
        pending, mark = [chunk[end + 1 :]], b""
        yield [line.removesuffix(b"\r") for line in text.split(b"\n")]
    if last := b"".join(pending).removeprefix(mark):
        yield [last]


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text file that are not blank, numbered from 1.

    Raises:
        DataError: It cannot be read.
    """
    lines = (line for group in line_groups(file_chunks(path, codec_of(path))) for line in group)
    return ((number, line) for number, line in enumerate(lines, start=1) if line)
