"""An overlay on disk: opened, and found to belong to a run.

Shape letters: n entities of the overlay, t triples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.errors import NonFiniteError, RunError, ShardError
from kgshard.files import AnyPath, check_seal, file_sha256, is_record, read_json
from kgshard.records import OverlayInfo
from kgshard.shards import ENTITIES, Floats, Piece, StoredTable, find_non_finite, read_header
from kgshard.vocabulary import Vocabulary
from kgshard_tools.headers import read_array_header
from kgshard_tools.overlay.extended import ExtendedTable, ExtendedVocabulary
from kgshard_tools.stored import Stored

OVERLAY_FILE = "overlay.json"
ENTITIES_FILE, VECTORS_FILE, TRIPLES_FILE = "entities.parquet", "vectors.safetensors", "triples.npy"
DATA_FILES = (ENTITIES_FILE, VECTORS_FILE, TRIPLES_FILE)
"""Those that overlay.json has the hashes of."""
OVERLAY_NAMES = (OVERLAY_FILE, *DATA_FILES)

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Overlay:
    """An overlay that belongs to a run, opened for reading. Vectors are memory-mapped."""

    folder: Path
    info: OverlayInfo
    labels: list[str]
    """Label i is that of id info.first_id + i."""
    degrees: Ids
    """int64[n]: triples that each was fitted to."""
    table: StoredTable
    """float32[n, dim]."""
    triples: Ids
    """int64[t, 3], distinct, ascending: what they were fitted to."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def vectors(self) -> Floats:
        """float32[n, dim]."""
        return self.table.read(range(len(self)))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {label: self.info.first_id + place for place, label in enumerate(self.labels)}

    def find(self, label: str) -> int | None:
        """Return the id of an entity of the overlay, or None where it has none of this label."""
        return self._places.get(label)

    def is_new(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Return bool[...]: which ids are of the overlay, so that what is said of them is approximate."""
        return np.asarray(ids) >= self.info.first_id

    def extend_vocabulary(self, entities: Vocabulary) -> ExtendedVocabulary:
        """Return the run's labels, and behind them the overlay's."""
        return ExtendedVocabulary(entities, self.labels, self.degrees)

    def extend_table(self, table: StoredTable) -> ExtendedTable:
        """Return the run's entity rows, and behind them the overlay's."""
        return ExtendedTable(table, self.table)

    @staticmethod
    def open(path: AnyPath, stored: Stored) -> Overlay:
        """Open the overlay of a run; every byte is compared with its hash.

        Raises:
            RunError: It is no overlay, or of another run or checkpoint.
            ShardError: It is damaged.
        """
        return open_overlay(path, stored)


def open_overlay(path: AnyPath, stored: Stored) -> Overlay:
    """Open the overlay of a run; see `Overlay.open`."""
    folder = Path(path)
    if not (folder / OVERLAY_FILE).is_file():
        what = f"not an overlay (no {OVERLAY_FILE})" if folder.is_dir() else "no such overlay folder"
        raise RunError(f"{folder}: {what}")
    check_seal(folder / OVERLAY_FILE)
    info = read_overlay_info(folder)
    _check_belongs(folder, info, stored)
    for _ in overlay_files(folder, info):
        pass
    labels, degrees = _read_entities(folder / ENTITIES_FILE, info, stored.dataset.entities)
    return Overlay(
        folder,
        info,
        labels,
        degrees,
        _open_vectors(folder / VECTORS_FILE, info),
        _read_triples(folder / TRIPLES_FILE, info, stored.model.num_relations),
    )


def read_overlay_info(folder: Path) -> OverlayInfo:
    """Return what overlay.json says.

    Raises:
        ShardError: It is missing or damaged.
    """
    record = folder / OVERLAY_FILE
    try:
        return read_json(record, OverlayInfo)
    except (OSError, ValueError) as error:
        raise ShardError(f"{record}: {error}", file=str(record)) from error


def _check_belongs(folder: Path, info: OverlayInfo, stored: Stored) -> None:
    """Raise RunError where an overlay was fitted to another checkpoint."""
    run = stored.run.folder
    if (info.run_id, info.vocabulary_sha256) != (stored.run.info.id, stored.dataset.vocabulary_sha256):
        raise RunError(f"{folder}: was folded into another run than {run}; fold in again")
    if info.step != stored.checkpoint.step:
        raise RunError(
            f"{folder}: was folded into step {info.step} of {run}, whose rows are now of step"
            f" {stored.checkpoint.step}; fold in again"
        )
    wanted = (stored.model.name, stored.model.dim, stored.model.num_entities)
    if (info.model, info.dim, info.first_id) != wanted:
        raise ShardError(
            f"{folder / OVERLAY_FILE}: says model {info.model}, dim {info.dim}, first id {info.first_id};"
            f" the run has {wanted[0]}, {wanted[1]}, {wanted[2]}"
        )


def overlay_files(folder: Path, info: OverlayInfo) -> Iterator[Path]:
    """Yield every file but overlay.json after its length and SHA-256 were found right.

    Raises:
        ShardError: One is missing or not what was written.
    """
    if set(info.files) != set(DATA_FILES):
        raise ShardError(f"{folder / OVERLAY_FILE}: names the files {', '.join(sorted(info.files))}")
    for name, expected in info.files.items():
        path = folder / name
        if not path.is_file():
            wrong = "no ordinary file" if path.exists() else "missing"
        elif path.stat().st_size != expected.bytes:
            wrong = f"{path.stat().st_size} bytes, expected {expected.bytes}"
        elif file_sha256(path) != expected.sha256:
            wrong = f"SHA-256 differs from {OVERLAY_FILE}"
        else:
            yield path
            continue
        raise ShardError(f"{path}: {wrong}", file=str(path))


def _read_entities(path: Path, info: OverlayInfo, entities: Vocabulary) -> tuple[list[str], Ids]:
    """Return the labels and degrees of an overlay's entities.

    Raises:
        ShardError: The file holds something else, or a label of the run.
    """
    try:
        table = pq.read_table(path, columns=["id", "label", "degree"])
        ids, degrees = (table[name].to_numpy() for name in ("id", "degree"))
        labels: list[str] = table["label"].cast(pa.large_string()).to_pylist()
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ShardError(f"{path}: not the entities of an overlay: {reason}", file=str(path)) from error
    wanted = np.arange(info.first_id, info.first_id + info.num_entities)
    if not np.array_equal(ids, wanted) or len(set(labels)) != len(labels) or None in labels:
        raise ShardError(
            f"{path}: ids or labels are not those of {info.num_entities} entities", file=str(path)
        )
    for label in labels:
        if entities.find(label) is not None:
            raise ShardError(f"{path}: {label!r} is an entity of the run already", file=str(path))
    return labels, degrees.astype(np.int64)


def _open_vectors(path: Path, info: OverlayInfo) -> StoredTable:
    tensors, _ = read_header(path)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if found != {ENTITIES: ("F32", (info.num_entities, info.dim))}:
        raise ShardError(f"{path}: holds {found}", file=str(path))
    table = StoredTable(ENTITIES, [Piece(path, range(info.num_entities), tensors[ENTITIES])])
    bad = find_non_finite(table)
    if bad is not None:
        raise NonFiniteError(f"{path}: row {bad} is not finite")
    return table


def _read_triples(path: Path, info: OverlayInfo, num_relations: int) -> Ids:
    """Return the triples that rows were fitted to.

    Raises:
        ShardError: The file holds something else, or ids that are none.
    """
    header = read_array_header(path)
    shape = (info.counts.get("triples", 0), 3)
    if (header.dtype, header.shape, header.fortran_order) != ("<i8", shape, False):
        raise ShardError(
            f"{path}: holds {header.dtype} {list(header.shape)}, expected <i8 {list(shape)}", file=str(path)
        )
    triples = np.fromfile(path, "<i8", offset=header.offset).reshape(shape)
    num_entities = info.first_id + info.num_entities
    limits = np.array([num_entities, num_relations, num_entities])
    is_about_new = (triples[:, 0] >= info.first_id) | (triples[:, 2] >= info.first_id)
    if not ((triples >= 0) & (triples < limits)).all() or not is_about_new.all():
        raise ShardError(f"{path}: holds ids that are not those of this overlay", file=str(path))
    return triples


def is_overlay(folder: Path) -> bool:
    """Whether `folder` holds an overlay: an overlay.json that says so."""
    return is_record(folder / OVERLAY_FILE, OverlayInfo)
