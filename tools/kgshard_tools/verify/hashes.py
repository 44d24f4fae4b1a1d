"""Files against the hashes that records have of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kgshard.errors import ShardError
from kgshard.files import check_seal, file_sha256
from kgshard.records import ListedFile

Way = Literal["SHA-256", "seal", "structure", "presence"]
"""How it is known that a file is right: the last two where no hash says."""
Checks = Iterator[tuple[Path, Way]]
"""Files that are right."""


def check_record(path: Path) -> tuple[Path, Way]:
    """Compare a record with its seal, where it has one.

    Raises:
        ShardError: It was changed.
    """
    return path, "seal" if check_seal(path) else "structure"


def check_hash(path: Path, entry: ListedFile, record: str) -> None:
    """Raise ShardError where a file is missing, or has not the length (and SHA-256) that a record says."""
    wrong = None
    if not path.is_file():
        wrong = "is no ordinary file" if path.exists() else "missing"
    elif path.stat().st_size != entry.bytes:
        wrong = f"{path.stat().st_size} bytes, but {record} says {entry.bytes}"
    elif entry.sha256 is not None and file_sha256(path) != entry.sha256:
        wrong = f"SHA-256 differs from {record}"
    if wrong is not None:
        raise ShardError(f"{path}: {wrong}", file=str(path))
