"""What index.json says, and which index answers for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kgshard.errors import RunError
from kgshard.files import check_seal, file_sha256, read_json
from kgshard.records import IndexFile, IndexInfo
from kgshard.runs import is_file_name
from kgshard_tools.index.contents import Contents, identity
from kgshard_tools.stored import Stored

SIDECAR = "index.json"
FOLDER = "index"


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index that answers for a checkpoint; the SHA-256 of its files was checked."""

    folder: Path
    contents: Contents
    info: IndexInfo


def read_sidecar(folder: Path) -> IndexFile:
    """Return what index.json of a folder says; nothing where there is none.

    Raises:
        RunError: It is damaged.
    """
    path = folder / SIDECAR
    if not path.is_file():
        return IndexFile()
    try:
        check_seal(path)
        found = read_json(path, IndexFile)
        for info in found.indexes.values():
            for part in info.parts:
                if not is_file_name(part.file):
                    raise ValueError(f"{part.file!r} is no name of a file in this folder")
        return found
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}; remove it and run kgshard index again") from error


def find_index(stored: Stored, contents: Contents) -> FoundIndex | None:
    """Return the index of some contents that answers for `stored`, or None where none was built.

    Raises:
        RunError: There is one, but of another checkpoint or vocabulary, or a file of it was changed.
    """
    folder = stored.run.folder / FOLDER
    info = read_sidecar(folder).indexes.get(contents.name)
    if info is None:
        return None
    if info.step != stored.checkpoint.step and stored.checkpoint.folder != stored.run.checkpoint.folder:
        return None  # Somebody asks another checkpoint than the one that indexes are built of.
    first = folder / info.parts[0].file if info.parts else folder
    for key, value in identity(stored, contents).items():
        if getattr(info, key) != value:
            raise RunError(
                f"{first}: {key} is {getattr(info, key)}, but the checkpoint's is {value}; "
                "run kgshard index again"
            )
    for part in info.parts:
        path = folder / part.file
        if not path.is_file() or path.stat().st_size != part.bytes or file_sha256(path) != part.sha256:
            raise RunError(f"{path}: is not the file that {SIDECAR} describes; run kgshard index again")
    return FoundIndex(folder, contents, info)
