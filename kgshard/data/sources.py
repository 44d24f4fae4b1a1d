"""Where triples come from: a folder with one file a split, or a graph that ships with kgshard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kgshard.data.dataset import SPLITS, is_dataset
from kgshard.errors import DataError

_GRAPHS = Path(__file__).parent / "graphs"
_SUFFIXES = tuple(f"{kind}{compression}" for kind in (".tsv", ".txt") for compression in ("", ".gz", ".zst"))


@dataclass(frozen=True, slots=True)
class Source:
    """Text files to prepare, one for each split that exists."""

    name: str
    files: dict[str, Path]
    """Split name to file; "train" is always there."""


def bundled_graphs() -> list[str]:
    """Return the names of the graphs that ship with kgshard."""
    return sorted(folder.name for folder in _GRAPHS.iterdir() if (folder / "train.tsv").is_file())


def find_source(data: str | Path) -> Source | Path:
    """Return the files that `data` names, or the folder of a dataset that is prepared already.

    Args:
        data: A prepared dataset, a folder with train, valid and test files (.tsv or .txt, also .gz or
            .zst), or the name of a bundled graph. What exists on disk comes first.

    Raises:
        DataError: It is none of these.
    """
    folder = Path(data)
    if folder.is_dir():
        return folder if is_dataset(folder) else Source(folder.name, _split_files(folder))
    if folder.exists():
        raise DataError(f"{data}: is a file; expected a folder with train, valid and test files")
    if str(data) in bundled_graphs():
        return Source(str(data), _split_files(_GRAPHS / str(data)))
    raise DataError(
        f"{data}: no such folder, and no bundled graph of that name ({', '.join(bundled_graphs())})"
    )


def _split_files(folder: Path) -> dict[str, Path]:
    found = {split: _split_file(folder, split) for split in SPLITS}
    files = {split: path for split, path in found.items() if path is not None}
    if "train" not in files:
        raise DataError(f"{folder}: no train file (looked for train{', train'.join(_SUFFIXES)})")
    return files


def _split_file(folder: Path, split: str) -> Path | None:
    matches = [path for suffix in _SUFFIXES if (path := folder / f"{split}{suffix}").is_file()]
    if len(matches) > 1:
        names = ", ".join(path.name for path in matches)
        raise DataError(f"{folder}: several {split} files ({names}); keep one")
    return matches[0] if matches else None
