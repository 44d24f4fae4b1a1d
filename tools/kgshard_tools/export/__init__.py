"""Tables for other programs. A new format is one file and one line here.

A writer fills a folder that appears only when it is complete. Row i is label i, always.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kgshard.errors import ConfigError, RunError
from kgshard.files import replacing_directory, write_json
from kgshard_tools.export.numpy import write_numpy
from kgshard_tools.stored import CONFIG_FILE, Stored, is_empty_or_absent, is_ours, open_stored
from kgshard_tools.written import Written, total_bytes

WRITERS: dict[str, Callable[[Stored, Path], list[str]]] = {"numpy": write_numpy}
"""Format name to a function that fills a folder and returns what its reader should know."""


def export(source: str | Path, format: str, out: str | Path | None = None) -> Written:
    """Write a run's tables and labels in another program's format, straight from the shards.

    Args:
        source: A run, or one of its checkpoint folders.
        format: A name in WRITERS.
        out: The folder to write; by default RUN/export-FORMAT. An earlier export there is replaced.

    Raises:
        ConfigError: The format is unknown.
        RunError: `source` is no run, or `out` is a folder of something else.
    """
    began = time.monotonic()
    if format not in WRITERS:
        raise ConfigError(f"--format: unknown value {format!r} (known: {', '.join(WRITERS)})")
    stored = open_stored(source)
    out = Path(out) if out is not None else stored.run.folder / f"export-{format}"
    _check_replaceable(out, format)
    with replacing_directory(out) as temporary:
        notes = WRITERS[format](stored, temporary)
        write_json(
            temporary / CONFIG_FILE, {**stored.config(), "export_format": format, "row_is_label": True}
        )
    files = [str(path) for path in sorted(out.iterdir())]
    return Written(files, stored.model.num_entities, total_bytes(out), time.monotonic() - began, notes)


def _check_replaceable(out: Path, format: str) -> None:
    if not is_empty_or_absent(out) and not is_ours(out, "export_format", format):
        raise RunError(f"{out}: exists and is not an export to {format}; choose another folder")
