"""Where triples come from: a folder with one file a split, or a graph that ships with kgshard."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kgshard.data.dataset import SPLITS, is_dataset
from kgshard.errors import DataError
from kgshard.files import AnyPath

_GRAPHS = Path(__file__).parent / "graphs"
_SUFFIXES = tuple(f"{kind}{compression}" for kind in (".tsv", ".txt") for compression in ("", ".gz", ".zst"))


@dataclass(frozen=True, slots=True)
class Source:
    """Text files to prepare, one for each split that exists."""

    name: str
    files: dict[str, Path]
    """Split name to file; "train" is always there."""
    not_read: list[str] = field(default_factory=list)
    """Names of other files beside them, which hold no split."""


def bundled_graphs() -> list[str]:
    """Return the names of the graphs that ship with kgshard."""
    return sorted(folder.name for folder in _GRAPHS.iterdir() if (folder / "train.tsv").is_file())


def find_source(data: AnyPath) -> Source | Path:
    """Return the files that `data` names, or the folder of a dataset that is prepared already.

    Args:
        data: A prepared dataset, a folder with train, valid and test files (.tsv or .txt, also .gz or
            .zst), or the name of a bundled graph. What exists on disk comes first.

    Raises:
        DataError: It is none of these.
    """
    folder = Path(data)
    if folder.is_dir():
        return folder if is_dataset(folder) else _source(folder, folder.name)
    if folder.exists():
        raise DataError(f"{data}: is a file; expected a folder with train, valid and test files")
    if str(data) in bundled_graphs():
        return _source(_GRAPHS / str(data), str(data))
    known = ", ".join(bundled_graphs())
    raise DataError(f"{data}: no such folder, and no bundled graph of that name ({known})")


def _source(folder: Path, name: str) -> Source:
    found = {split: _split_file(folder, split) for split in SPLITS}
    files = {split: path for split, path in found.items() if path is not None}
    if "train" not in files:
        raise DataError(f"{folder}: {_why_not(folder)}")
    bundled = folder.parent == _GRAPHS
    read = {path.name for path in files.values()}
    others = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in read)
    return Source(name, files, [] if bundled else others)


def _why_not(folder: Path) -> str:
    if (folder / "run.json").is_file():
        return f"is a run; the dataset it was trained on is {folder / 'data'}"
    hidden = f"; it hides the bundled graph {folder.name}" if folder.name in bundled_graphs() else ""
    return f"no train file (looked for train{', train'.join(_SUFFIXES)}){hidden}"


def _split_file(folder: Path, split: str) -> Path | None:
    try:
        matches = [path for suffix in _SUFFIXES if (path := folder / f"{split}{suffix}").is_file()]
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error
    if len(matches) > 1:
        names = ", ".join(path.name for path in matches)
        raise DataError(f"{folder}: several {split} files ({names}); keep one")
    return matches[0] if matches else None
