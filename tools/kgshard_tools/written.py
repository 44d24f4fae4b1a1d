"""What a command that writes files reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Written:
    """Files, and what is in them."""

    files: list[str]
    rows: int
    """Entities."""
    bytes: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    """What the reader of the files should know."""

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / 1e6 / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Say in words what was written."""
        size = f"{self.rows:,} entities, {self.bytes:,} bytes in {self.seconds:.2f} s"
        return [*self.files, f"{size} ({self.megabytes_per_second:,.0f} MB/s)", *self.notes]


def describe_folder(out: Path, place: Path, rows: int, began: float, notes: Sequence[str] = ()) -> Written:
    """Say what a folder holds that was just written.

    Args:
        out: The folder as the caller names it.
        place: The same, resolved before it was replaced: "." is gone by now.
        rows: Entities.
        began: `time.monotonic()` before the work.
        notes: What the reader should know.
    """
    paths = sorted(place.iterdir())
    size = sum(path.stat().st_size for path in paths)
    return Written(
        [str(out / path.name) for path in paths], rows, size, time.monotonic() - began, list(notes)
    )
