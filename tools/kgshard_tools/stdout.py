"""Writing to a stdout whose reader may leave."""

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
