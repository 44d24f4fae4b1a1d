"""What a command that writes files reports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kgshard.files import file_sha256


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
    python: list[str] = field(default_factory=list)
    """Lines of Python that load what was written, run where it lies."""
    peak_memory: int = field(default_factory=lambda: peak_memory())
    """Bytes: the largest resident set of this process so far, libraries included."""

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / 1e6 / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Say in words what was written."""
        size = f"{self.rows:,} entities, {self.bytes:,} bytes in {self.seconds:.2f} s"
        speed = f"{self.megabytes_per_second:,.0f} MB/s, {self.peak_memory / 1e6:,.0f} MB of memory at most"
        where = os.path.commonpath([os.path.dirname(name) or "." for name in self.files])
        return [
            *self.files,
            f"{size} ({speed})",
            *self.notes,
            *([f"to load it, in {where}:"] if self.python else []),
            *(f"  >>> {line}" for line in self.python),
        ]


def peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes.

    From /proc, for what getrusage says of a child begins with what its parent had.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def describe_folder(
    out: Path, place: Path, rows: int, began: float, notes: Sequence[str] = (), python: Sequence[str] = ()
) -> Written:
    """Say what a folder holds that was just written.

    Args:
        out: The folder as the caller names it.
        place: The same, resolved before it was replaced: "." is gone by now.
        rows: Entities.
        began: `time.monotonic()` before the work.
        notes: What the reader should know.
        python: How to load it.
    """
    paths = sorted(_files_below(place))
    size = sum(path.stat().st_size for path in paths)
    files = [str(out / path.relative_to(place)) for path in paths]
    return Written(files, rows, size, time.monotonic() - began, list(notes), list(python))


def list_files(folder: Path, *, hashes: bool) -> dict[str, dict[str, Any]]:
    """Return what config.json says of the files below a folder that was just filled.

    Args:
        folder: Where they are; config.json is not there yet.
        hashes: Whether to read every byte again for its SHA-256.

    Returns:
        By relative path the "bytes", and with `hashes` the "sha256".
    """
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            **({"sha256": file_sha256(path)} if hashes else {}),
        }
        for path in sorted(_files_below(folder))
    }


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if not path.is_dir())
