"""Files damaged on purpose, what reading them may come to, and what Python was made to do meanwhile."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kgshard.errors import DataError

_EVENTS = {"pickle.find_class", "import", "exec", "os.system", "subprocess.Popen", "marshal.loads"}
_watching: list[list[str]] = []
"""Where audit events go; empty while nobody watches (an audit hook cannot be removed)."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in _EVENTS:
        _watching[-1].append(f"{event} {arguments[:2]}")


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Give a list that fills with what audit hooks see inside `with`: lookups, imports, execution."""
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def written(folder: Path, content: bytes) -> Path:
    """Write a file of this content, over the one before."""
    path = folder / "file.bin"
    path.write_bytes(content)
    return path


def mutated(content: bytes, random_bits: random.Random) -> bytes:
    """Change a few bytes, cut, repeat or swap a stretch."""
    changed = bytearray(content)
    kind = random_bits.randrange(5)
    start = random_bits.randrange(len(changed))
    stop = min(len(changed), start + random_bits.randrange(1, 64))
    if kind == 0:
        del changed[start:stop]
    elif kind == 1:
        changed[start:start] = changed[start:stop]
    elif kind == 2:
        del changed[start:]
    else:
        for _ in range(random_bits.randrange(1, 9)):
            values = (0, 1, 0x7F, 0x80, 0xFF, random_bits.randrange(256))
            changed[random_bits.randrange(len(changed))] = random_bits.choice(values)
    return bytes(changed)


def outcome(read: Callable[[Path], object], path: Path) -> str:
    """Read a damaged file: a result or one line, and soon."""
    started = time.perf_counter()
    message = ""
    try:
        read(path)
    except DataError as error:
        message = str(error)
    assert time.perf_counter() - started < 1
    assert "\n" not in message
    return "refused" if message else "read"
