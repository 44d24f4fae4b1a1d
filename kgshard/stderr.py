"""What is said beside results: on stderr, to whoever reads there."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(line: str) -> None:
    """Write a line to stderr. Where that is closed, or its reader has gone, work goes on in silence."""
    if sys.stderr is not None:
        with suppress(BrokenPipeError):
            print(line, file=sys.stderr, flush=True)
