"""What a terminal may be shown, and a stdout whose reader may leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Stop writing to stdout, without complaint, when its reader has seen enough (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        # What is still buffered must go somewhere, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(text: str) -> str:
    """Return text as a terminal may show it: characters that would steer the terminal are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
