"""What a person sees while files are written: how many bytes are done, and MB/s."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kgshard_tools.rows import Advance, no_progress


@contextmanager
def byte_progress(*, quiet: bool) -> Iterator[Advance]:
    """Yield what to tell about bytes done; a line shows them where stderr is a terminal."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield no_progress
        return
    import rich.console
    from rich import progress

    columns = (progress.SpinnerColumn(), progress.FileSizeColumn(), progress.TransferSpeedColumn())
    console = rich.console.Console(stderr=True)
    with progress.Progress(*columns, progress.TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda num_bytes: bar.advance(task, num_bytes)
