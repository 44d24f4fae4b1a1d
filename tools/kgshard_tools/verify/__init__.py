"""Are the files of a run, a dataset, an index, an overlay or a model what was written?

Ends at the first that is not.

Where a record has a file's length and SHA-256 (manifest.json, index.json, overlay.json, `files` of data.json
and config.json), it must have them; every record that ends with a seal must match it. Of other files the
header must fit the length, and the rows must be as many as the record says. "Deep" reads every value too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kgshard.errors import RunError, ShardError
from kgshard.files import AnyPath
from kgshard.records import IndexInfo, IndexPart, ListedFile
from kgshard.runs import (
    BEST_FILE,
    CHECKPOINT_NAME,
    LATEST_FILE,
    MANIFEST_FILE,
    RUN_FILE,
    Run,
    open_checkpoint,
    open_run,
)
from kgshard.shards import read_header
from kgshard_tools.artefacts import (
    WEIGHT_MAP_FILE,
    Artefact,
    Kind,
    WeightMap,
    check_names,
    read_indexes,
    read_record,
    recognise,
    run_above,
)
from kgshard_tools.headers import read_index_header
from kgshard_tools.index import SIDECAR
from kgshard_tools.labels import LABELS_FILE
from kgshard_tools.overlay import OVERLAY_FILE, overlay_files, read_overlay_info
from kgshard_tools.terminal import shown
from kgshard_tools.verify.data import dataset_files
from kgshard_tools.verify.hashes import Checks, Way, check_hash, check_record
from kgshard_tools.verify.models import model_files
from kgshard_tools.verify.values import (
    check_checkpoint_values,
    check_file,
    check_index_values,
    check_lone_index,
    names_of,
)


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file that is as it should be."""

    path: str
    bytes: int
    by: Way
    """How that is known."""
    about: str = ""
    """What it is, where a file alone was read to its end."""

    def line(self) -> str:
        notes = {"structure": "; no hash: its structure only", "presence": "; no hash: it is there"}
        about = f"; {self.about}" if self.about else ""
        return shown(f"ok  {self.path}  ({self.bytes:,} bytes{notes.get(self.by, '')}{about})")


@dataclass(frozen=True)
class Verified:
    """Files that are all as they should be."""

    path: str
    deep: bool
    files: list[CheckedFile] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def last_line(self) -> str:
        return f"{len(self.files)} files ok"

    def lines(self) -> list[str]:
        return [*(file.line() for file in self.files), self.last_line()]


def verify(path: AnyPath, *, deep: bool = False) -> Verified:
    """Check everything at `path`; see `verify_files`."""
    began = time.monotonic()
    files = list(verify_files(path, deep=deep))
    return Verified(str(Path(path)), deep, files, time.monotonic() - began)


def verify_files(path: AnyPath, *, deep: bool = False) -> Iterator[CheckedFile]:
    """Yield every file of what lies at `path` after it was found right.

    Args:
        path: A run (all its checkpoints, its dataset, its indexes), one of these alone, an overlay, a merged
            model, an export, or a single file.
        deep: Read every value too: rows are finite, ids in range, labels those of the vocabulary's hash. A
            FAISS file alone is read and searched by a process with limits.

    Raises:
        ShardError, DataError: Naming the first file that is not right; with its rank, where it is a shard.
        RunError: Nothing that kgshard knows, or something that it does not open.
    """
    found = recognise(path)
    if found.kind == "faiss" and deep:
        about = check_lone_index(found.path)
        yield CheckedFile(str(found.path), found.path.stat().st_size, "structure", about)
        return
    for file, by in _CHECKS.get(found.kind, _check_file)(found, deep):
        yield CheckedFile(str(file), file.stat().st_size, by)


def _check_run(found: Artefact, deep: bool) -> Checks:
    record = check_record(found.path / RUN_FILE)
    run = open_run(found.path)
    yield record
    yield from dataset_files(found.path / "data", deep=deep)
    if run.info.vocabulary_sha256 != run.dataset.vocabulary_sha256:
        raise RunError(f"{run.folder / RUN_FILE}: vocabulary_sha256 is not that of data/; files were mixed")
    for folder in sorted((found.path / "checkpoints").glob("step-*")):
        if CHECKPOINT_NAME.fullmatch(folder.name):
            yield from _checkpoint_files(folder, run, deep)
    for pointer in (LATEST_FILE, BEST_FILE):
        if (found.path / pointer).exists():
            run.open_checkpoint(pointer.lower())  # raises where it names none
            yield found.path / pointer, "structure"
    if (found.path / "index" / SIDECAR).exists():
        yield from _check_index(Artefact("index", found.path / "index"), deep)


def _check_checkpoint(found: Artefact, deep: bool) -> Checks:
    return _checkpoint_files(found.path.resolve(), run_above(found.path), deep)


def _checkpoint_files(folder: Path, run: Run | None, deep: bool) -> Checks:
    record = check_record(folder / MANIFEST_FILE)
    checkpoint = open_checkpoint(folder) if run is None else run.open_checkpoint(folder.name)
    yield record
    for path in checkpoint.verify():
        yield path, "SHA-256"
    if deep:
        check_checkpoint_values(checkpoint, names_of(run))


def _check_data(found: Artefact, deep: bool) -> Checks:
    return dataset_files(found.path, deep=deep)


def _check_index(found: Artefact, deep: bool) -> Checks:
    record = check_record(found.path / SIDECAR)
    indexes, run = read_indexes(found.path), run_above(found.path)
    yield record
    if indexes.labels is not None:
        path = found.path / LABELS_FILE
        check_hash(path, ListedFile(indexes.labels.bytes, indexes.labels.sha256), SIDECAR)
        yield path, "SHA-256"
    for info in indexes.indexes.values():
        for part in info.parts:
            path = found.path / part.file
            check_hash(path, ListedFile(part.bytes, part.sha256), SIDECAR)
            _check_index_header(path, info, part)
            if run is not None:
                _check_belongs(path, info, run)
            if deep:
                check_index_values(path, names_of(run), part.rows[0])
            yield path, "SHA-256"


def _check_index_header(path: Path, info: IndexInfo, part: IndexPart) -> None:
    header, rows = read_index_header(path), len(range(*part.rows))
    if header.rows != rows or header.dim < info.dim or (info.exact and header.dim != info.dim):
        raise ShardError(
            f"{path}: {header.rows} x {header.dim}, but {SIDECAR} says {rows} x {info.dim}", file=str(path)
        )


def _check_belongs(path: Path, info: IndexInfo, run: Run) -> None:
    ours = {"run_id": run.info.id, "vocabulary_sha256": run.dataset.vocabulary_sha256}
    for key, value in ours.items():
        if getattr(info, key) != value:
            raise ShardError(f"{path}: {key} is not that of {run.folder}; files were mixed", file=str(path))


def _check_overlay(found: Artefact, deep: bool) -> Checks:
    yield check_record(found.path / OVERLAY_FILE)
    for path in overlay_files(found.path, read_overlay_info(found.path)):
        kind = recognise(path).kind
        check_file(kind, path, deep=deep)
        yield path, "SHA-256"


def _check_model(found: Artefact, deep: bool) -> Checks:
    return model_files(found.path, deep=deep)


def _check_weight_map(found: Artefact, deep: bool) -> Checks:
    path = found.path / WEIGHT_MAP_FILE if found.path.is_dir() else found.path
    weights = read_record(path, WeightMap).weight_map
    check_names(path, weights.values())
    yield path, "structure"
    for name in sorted(set(weights.values())):
        file = path.parent / name
        check_file("safetensors", file, deep=deep)
        absent = {tensor for tensor, where in weights.items() if where == name} - set(read_header(file)[0])
        if absent:
            raise ShardError(f"{file}: lacks {min(absent)!r}, which {path.name} says", file=str(file))
        yield file, "structure"


def _check_file(found: Artefact, deep: bool) -> Checks:
    check_file(found.kind, found.path, deep=deep)
    yield found.path, "structure"


_CHECKS: dict[Kind, Callable[[Artefact, bool], Checks]] = {
    "run": _check_run,
    "checkpoint": _check_checkpoint,
    "data": _check_data,
    "index": _check_index,
    "overlay": _check_overlay,
    "model": _check_model,
    "export": _check_model,
    "weight map": _check_weight_map,
}
