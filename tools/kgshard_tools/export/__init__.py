"""Tables for other programs. A new format is one file and one line here.

A writer fills a folder that appears only when it is complete. Row i is label i, always.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kgshard.errors import ConfigError
from kgshard.files import AnyPath, check_replaceable, replacing_directory, write_json
from kgshard_tools.export.numpy import NAMES as numpy_names
from kgshard_tools.export.numpy import write_numpy
from kgshard_tools.stored import CONFIG_FILE, Stored, is_ours, open_stored
from kgshard_tools.written import Written, describe_folder


@dataclass(frozen=True, slots=True)
class Writer:
    """One format."""

    fill: Callable[[Stored, Path], list[str]]
    """Fills a folder; returns what its reader should know."""
    names: tuple[str, ...]
    """Patterns of all names it writes there."""


WRITERS: dict[str, Writer] = {"numpy": Writer(write_numpy, numpy_names)}
"""Every format by the name that `--format` takes."""


def export(source: AnyPath, format: str, out: AnyPath | None = None) -> Written:
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
    writer = WRITERS[format]
    ours = is_ours(out, "export_format", format)
    check_replaceable(out, ours=ours, names=(CONFIG_FILE, *writer.names), what=f"an export to {format}")
    place = Path(os.path.realpath(out))
    with replacing_directory(place) as temporary:
        notes = writer.fill(stored, temporary)
        write_json(
            temporary / CONFIG_FILE, {**stored.config(), "export_format": format, "row_is_label": True}
        )
    return describe_folder(out, place, stored.model.num_entities, began, notes)
