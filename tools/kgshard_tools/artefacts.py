"""What lies at a path: the kinds of folders and files that kgshard writes or reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from kgshard.data.dataset import MANIFEST as DATA_FILE
from kgshard.errors import RunError, ShardError
from kgshard.files import AnyPath, Record, read_json
from kgshard.records import DatasetInfo, IndexFile, ListedFile, Listing
from kgshard.runs import MANIFEST_FILE, RUN_FILE, Run, is_file_name, is_run, open_run
from kgshard_tools.headers import FileKind, file_kind
from kgshard_tools.index import SIDECAR
from kgshard_tools.overlay import OVERLAY_FILE
from kgshard_tools.stored import CONFIG_FILE

Kind = Literal["run", "checkpoint", "data", "index", "overlay", "model", "export", "weight map", FileKind]

WEIGHT_MAP_FILE = "model.safetensors.index.json"
_BY_RECORD: dict[str, Kind] = {
    RUN_FILE: "run",
    MANIFEST_FILE: "checkpoint",
    DATA_FILE: "data",
    SIDECAR: "index",
    OVERLAY_FILE: "overlay",
}
"""A folder's kind by the record that it holds."""
_MAX_JSON_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Artefact:
    """Something that kgshard can tell about."""

    kind: Kind
    path: Path
    """A folder, or a file where `kind` is one of files."""


class WeightMap(Struct, frozen=True):
    """model.safetensors.index.json: in which file each tensor is."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def recognise(path: AnyPath) -> Artefact:
    """Say what lies at `path`: by the record that a folder holds, by a file's first bytes.

    Raises:
        RunError: Nothing that kgshard knows.
    """
    path = Path(path)
    if path.is_dir():
        kind = _folder_kind(path)
        if kind is not None:
            return Artefact(kind, path)
        records = ", ".join([*_BY_RECORD, f"{CONFIG_FILE} of kgshard", WEIGHT_MAP_FILE])
        raise RunError(f"{path}: nothing that kgshard knows; looked for {records}")
    if not path.is_file():
        raise RunError(f"{path}: {'no ordinary file' if path.exists() else 'no such file or folder'}")
    return _recognise_file(path)


def _recognise_file(path: Path) -> Artefact:
    if path.name in (*_BY_RECORD, CONFIG_FILE):
        kind = _folder_kind(path.parent)
        if kind is not None:
            return Artefact(kind, path.parent)
    if path.name.endswith(".safetensors.index.json"):
        return Artefact("weight map", path)
    found = file_kind(path)
    if found is None:
        known = "safetensors, .npy, Parquet, FAISS, torch or pickle"
        raise RunError(f"{path}: nothing that kgshard knows; by its first bytes it is no {known} file")
    return Artefact(found, path)


def _folder_kind(folder: Path) -> Kind | None:
    for name, kind in _BY_RECORD.items():
        if (folder / name).exists():
            return kind
    if (folder / CONFIG_FILE).exists():
        config = read_config(folder)
        if config.get("model_type") == "kgshard":
            return "export" if "export_format" in config else "model"
    return "weight map" if (folder / WEIGHT_MAP_FILE).exists() else None


def read_record(path: Path, type: type[Record]) -> Record:
    """Read a JSON file as a type; see `kgshard.files.read_json`.

    Raises:
        ShardError: It is missing, no ordinary file, larger than 64 MiB, no JSON, or not of this type.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"larger than {_MAX_JSON_BYTES >> 20} MiB")
        return read_json(path, type)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ShardError(f"{path}: {reason}", file=str(path)) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return what config.json says, which other programs write too."""
    return read_record(folder / CONFIG_FILE, dict[str, Any])


def read_listing(path: Path) -> dict[str, ListedFile]:
    """Return what a record says of files beside it, by their paths from there; nothing where it is silent.

    Raises:
        ShardError: A path leads elsewhere, or a value is of another type.
    """
    files = read_record(path, Listing).files
    for name in files:
        check_names(path, name.split("/"))
    return files


def read_indexes(folder: Path) -> IndexFile:
    """Read an index folder's sidecar.

    Raises:
        ShardError: It is missing or damaged, or names a file elsewhere.
    """
    path = folder / SIDECAR
    found = read_record(path, IndexFile)
    check_names(path, [part.file for info in found.indexes.values() for part in info.parts])
    return found


def read_data_info(folder: Path) -> DatasetInfo:
    """Read a prepared dataset's record.

    Raises:
        ShardError: It is missing or damaged.
    """
    return read_record(folder / DATA_FILE, DatasetInfo)


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raise ShardError where a record at `path` names a file by anything else than a plain name."""
    for name in names:
        if not is_file_name(name):
            raise ShardError(f"{path}: {name!r} is no name of a file in this folder", file=str(path))


def run_above(folder: Path) -> Run | None:
    """Return the run that a checkpoint or index folder lies in, or None where it lies alone."""
    folder = folder.resolve()
    above = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    record = above / RUN_FILE
    return open_run(above) if record.is_file() and is_run(above) else None
