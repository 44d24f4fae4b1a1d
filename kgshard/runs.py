"""A run folder and its checkpoints, opened for reading. No torch here: merge, export and queries use it.

    RUN/
        run.json        format "kgshard.run/1": id, settings, model, data name and vocabulary hash, versions
        data/           the prepared dataset (kgshard.data.dataset)
        metrics.jsonl   one JSON object a line (kgshard.training.metrics_log)
        config.toml     the settings again, for `kgshard train --config`
        LATEST, BEST    names of the newest checkpoint, and of the one that did best on valid
        checkpoints/step-00012000/
            entity-00001-of-00004.safetensors ...   one shard a rank (kgshard.shards)
            relation.safetensors                    relations, once; sharded they are named as entities are
            shared.safetensors                      parameters that all rows share, if there are any
            optim-00001-of-00004.safetensors ...    optimizer state of the rows that a rank holds
            optim-relation.safetensors, optim-shared.safetensors    of what exists once
            manifest.json                           written last: the only source of order and of truth

manifest.json, format "kgshard.checkpoint/1", names for every table its dtype, shape and pieces (file,
rank, rows), and for every file its bytes and SHA-256. A checkpoint exists when its folder has been
renamed into place.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from kgshard.data.dataset import DATASET_NAMES, Dataset, open_dataset
from kgshard.errors import ConfigError, DataError, NonFiniteError, RunError, ShardError
from kgshard.files import AnyPath, check_seal, file_sha256, is_record, read_json
from kgshard.models.link import LinkModel
from kgshard.records import Listing, Manifest, PieceInfo, RunInfo
from kgshard.shards import (
    ENTITIES,
    RELATIONS,
    Floats,
    Piece,
    StoredTable,
    TensorInfo,
    read_header,
    read_tensors,
    saved_row_start,
)

RUN_FILE = "run.json"
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "LATEST"
BEST_FILE = "BEST"
CONFIG_FILE = "config.toml"
RELATION_FILE = "relation.safetensors"
SHARED_FILE = "shared.safetensors"
OPTIMIZER = "optimizer"
OPTIMIZER_FILE = "optim-relation.safetensors"
SHARED_OPTIMIZER_FILE = "optim-shared.safetensors"
LOCK_FILE = "lock"
METRICS_FILE = "metrics.jsonl"
RUN_NAMES = (
    *(RUN_FILE, CONFIG_FILE, LATEST_FILE, BEST_FILE, LOCK_FILE, METRICS_FILE),
    *("events.out.tfevents.*", "curves.png"),
    *(f"data/{name}" for name in DATASET_NAMES),
    *(
        f"checkpoints/step-*/{name}"
        for name in (
            "entity-*.safetensors",
            "relation*.safetensors",
            "optim-*.safetensors",
            SHARED_FILE,
            MANIFEST_FILE,
        )
    ),
    "eval/*.json",
    *(f"model/{name}" for name in ("model.safetensors", "model-*-of-*.safetensors", "optimizer.safetensors")),
    *(f"model/{name}" for name in ("model.safetensors.index.json", "config.json", "README.md")),
    *("model/entities.parquet", "model/relations.parquet"),
    *("index/index.json", "index/*.faiss", "index/labels.sqlite", f"index/{LOCK_FILE}"),
)
"""Patterns of the paths of all files that kgshard writes into a run, exports aside; see `run_names`."""


CHECKPOINT_NAME = re.compile("step-[0-9]{8,}")


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"step-{step:08d}"


def shard_name(rank: int, world_size: int, tensor_name: str = ENTITIES) -> str:
    """Return the file name of one rank's shard of a table, or of OPTIMIZER, its state of all tables.

    For people: order comes from the manifest.
    """
    table = {ENTITIES: "entity", RELATIONS: "relation", OPTIMIZER: "optim"}[tensor_name]
    return f"{table}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def state_name(parameter: str, part: str) -> str:
    """Return the tensor name of an optimizer's state: "entity_embedding.weight.sum"."""
    return f"{parameter}.{part}"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def world_size(self) -> int:
        return self.manifest.world_size

    @cached_property
    def entities(self) -> StoredTable:
        """The entity table, float[num_entities, dim], in as many pieces as there were ranks."""
        return self._table(ENTITIES)

    @cached_property
    def relations(self) -> StoredTable:
        """The relation table, float[relation rows, relation_dim]."""
        return self._table(RELATIONS)

    @cached_property
    def optimizer_tables(self) -> dict[str, StoredTable]:
        """The optimizer's state with a row for each row of a table, by name; see `state_name`."""
        saved = self.manifest.optimizer
        return {name: self._table(name) for name in (saved.tables if saved else {})}

    @cached_property
    def optimizer_shared(self) -> dict[str, TensorInfo]:
        """Where the optimizer's state of the parameters that all rows share lies in SHARED_OPTIMIZER_FILE."""
        saved = self.manifest.optimizer
        if saved is None or not saved.shared:
            return {}
        path = self.folder / SHARED_OPTIMIZER_FILE
        tensors, _ = read_header(path)
        found = {name: list(info.shape) for name, info in tensors.items()}
        _check_holds(path, found, saved.shared)
        return tensors

    @cached_property
    def shared(self) -> dict[str, Floats]:
        """The parameters that all rows share, float32, by name; most models have none."""
        return self._read_shared()

    def _read_shared(self) -> dict[str, Floats]:
        if not self.manifest.shared:
            return {}
        path = self.folder / SHARED_FILE
        tensors = read_tensors(path)
        _check_holds(
            path, {name: list(tensor.shape) for name, tensor in tensors.items()}, self.manifest.shared
        )
        for name, values in tensors.items():
            if not np.isfinite(values).all():
                raise NonFiniteError(f"{path}: shared parameter {name!r} is not finite")
        return tensors

    def _table(self, name: str) -> StoredTable:
        saved = self.manifest.optimizer
        entry = {**self.manifest.tables, **(saved.tables if saved else {})}.get(name)
        if entry is None or not entry.pieces:
            raise ShardError(f"{self.folder / MANIFEST_FILE}: names no pieces of {name}")
        table = StoredTable(name, [self._piece(name, piece) for piece in entry.pieces])
        if (table.dtype, table.shape) != (entry.dtype, entry.shape):
            raise ShardError(
                f"{self.folder}: the pieces of {name} make {table.dtype} {list(table.shape)}, "
                f"but {MANIFEST_FILE} says {entry.dtype} {list(entry.shape)}"
            )
        return table

    def _piece(self, name: str, entry: PieceInfo) -> Piece:
        path = self.folder / entry.file
        tensors, metadata = read_header(path)
        if name not in tensors or len(tensors[name].shape) != 2:
            raise ShardError(f"{path}: holds no table {name}", file=str(path), rank=entry.rank)
        first_row = saved_row_start(metadata, name)
        if first_row != entry.rows[0]:
            raise ShardError(
                f"{path}: begins at row {first_row}, expected {entry.rows[0]} (rank {entry.rank})",
                file=str(path),
                rank=entry.rank,
            )
        return Piece(path, range(*entry.rows), tensors[name], entry.rank)

    def verify(self) -> Iterator[Path]:
        """Yield every file after its SHA-256 was found right.

        Raises:
            ShardError: Naming the first file that is not what the manifest says, or the manifest.
        """
        check_seal(self.folder / MANIFEST_FILE)
        ranks = _ranks(self.manifest)
        for name, entry in self.manifest.files.items():
            path, rank = self.folder / name, ranks.get(name)
            try:
                digest = file_sha256(path)
            except OSError as error:
                raise ShardError(f"{path}: {error.strerror}", file=str(path), rank=rank) from error
            if digest != entry.sha256:
                raise ShardError(
                    f"{path}: SHA-256 differs from {MANIFEST_FILE}{_whose(rank)}", file=str(path), rank=rank
                )
            yield path

    def check_hashes(self) -> None:
        """Compare every file with its SHA-256, and raise as `verify` does."""
        for _ in self.verify():
            pass


def _check_holds(path: Path, found: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    if found != expected:
        raise ShardError(f"{path}: holds {found}, but {MANIFEST_FILE} says {expected}", file=str(path))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder; every file must be there with its length.

    Raises:
        ShardError: The manifest is missing or wrong, or a file is missing or of another length.
    """
    manifest = read_manifest(folder)
    _check_files(folder, manifest)
    checkpoint = Checkpoint(folder, manifest)
    checkpoint.entities, checkpoint.relations  # noqa: B018 - all headers are read and compared now
    ranks = [piece.rank for piece in manifest.tables[ENTITIES].pieces]
    if len(ranks) != manifest.world_size or ranks != list(range(len(ranks))):
        path = folder / MANIFEST_FILE
        raise ShardError(
            f"{path}: world_size is {manifest.world_size}, but shards are of ranks {ranks}", file=str(path)
        )
    for other in sorted(folder.glob("*.safetensors")):
        if other.name not in manifest.files:
            raise ShardError(f"{other}: is not in {MANIFEST_FILE}; remove it", file=str(other))
    return checkpoint


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; its files are not looked at.

    Raises:
        ShardError: It is missing, or says what none can say.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = read_json(path, Manifest)
        _check_manifest(manifest)
    except (OSError, ValueError) as error:
        raise ShardError(f"{path}: not a complete checkpoint: {error}", file=str(path)) from error
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError where a manifest contradicts itself, or names files outside its folder."""
    for name in manifest.files:
        if not is_file_name(name):
            raise ValueError(f"{name!r} is no name of a file in this folder")
    for piece in chain.from_iterable(_tables(manifest).values()):
        if piece.file not in manifest.files:
            raise ValueError(f"names a piece {piece.file!r} that is none of its files")
        if not all(0 <= row < 2**63 for row in piece.rows):
            raise ValueError(f"{piece.file!r} cannot hold rows {piece.rows[0]}..{piece.rows[1]}")


def run_names(folder: Path) -> list[str]:
    """Return patterns of the paths of all files that kgshard wrote into a run: an export lists its own."""
    names = list(RUN_NAMES)
    for record in folder.glob("export-*/config.json"):
        with suppress(OSError, ValueError):
            listed = [record.name, *read_json(record, Listing).files]
            names += [f"{glob.escape(record.parent.name)}/{glob.escape(name)}" for name in listed]
    return names


def is_file_name(name: str) -> bool:
    """Whether a name that data give is the plain name of a file, and no path."""
    is_plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    return is_plain and len(name.encode()) <= 255


def _tables(manifest: Manifest) -> dict[str, list[PieceInfo]]:
    """Return the pieces of every table, the optimizer's included."""
    saved = manifest.optimizer.tables if manifest.optimizer else {}
    return {name: table.pieces for name, table in {**manifest.tables, **saved}.items()}


def _ranks(manifest: Manifest) -> dict[str, int]:
    """Return whose each file is, of those of which every rank wrote one."""
    sharded = [pieces for pieces in _tables(manifest).values() if len(pieces) == manifest.world_size]
    return {piece.file: piece.rank for pieces in sharded for piece in pieces}


def _whose(rank: int | None) -> str:
    return f" (rank {rank})" if rank is not None else ""


def _check_files(folder: Path, manifest: Manifest) -> None:
    ranks = _ranks(manifest)
    for name, entry in manifest.files.items():
        path, rank = folder / name, ranks.get(name)
        wrong = None
        if path.is_symlink():
            wrong = "is a symbolic link; put the file itself there"
        elif not path.is_file():
            wrong = "is no ordinary file" if path.exists() else "missing"
        elif path.stat().st_size != entry.bytes:
            wrong = f"{path.stat().st_size} bytes, expected {entry.bytes}"
        if wrong is not None:
            raise ShardError(f"{path}: {wrong}{_whose(rank)}", file=str(path), rank=rank)


@dataclass(frozen=True)
class Run:
    """A finished or unfinished training run."""

    folder: Path
    info: RunInfo
    """The content of run.json."""

    @cached_property
    def dataset(self) -> Dataset:
        return open_dataset(self.folder / "data")

    @cached_property
    def model(self) -> LinkModel:
        try:
            return LinkModel.from_dict(self.info.model)
        except (ConfigError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"{self.folder / RUN_FILE}: $.model: {error}") from error

    def __fspath__(self) -> str:
        return str(self.folder)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that did best on valid, or the newest; see `open_checkpoint`."""
        return self.open_checkpoint()

    def open_checkpoint(self, name: str | None = None) -> Checkpoint:
        """Open a checkpoint of this run.

        Args:
            name: "best", "latest" or a checkpoint's name; by default the best where the run was evaluated
                while it trained, else the newest.

        Raises:
            RunError: There is none yet, or none of this name.
            ShardError: It is damaged, or belongs to another run or vocabulary.
        """
        if name is None:
            name = "best" if (self.folder / BEST_FILE).exists() else "latest"
        if name in ("best", "latest"):
            name = self._pointed_to(BEST_FILE if name == "best" else LATEST_FILE)
        if not CHECKPOINT_NAME.fullmatch(name):
            raise RunError(f"{self.folder}: {name!r} is no checkpoint's name")
        if not (self.folder / "checkpoints" / name).is_dir():
            there = sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))
            raise RunError(f"{self.folder}: no checkpoint {name} (there are: {', '.join(there) or 'none'})")
        checkpoint = open_checkpoint(self.folder / "checkpoints" / name)
        self._check_belongs(checkpoint)
        return checkpoint

    def _pointed_to(self, pointer: str) -> str:
        path = self.folder / pointer
        if path.exists() and not path.is_file():
            raise RunError(f"{path}: no ordinary file")
        try:
            return path.read_bytes().decode(errors="replace").strip()
        except FileNotFoundError:
            missing = {
                LATEST_FILE: "no checkpoint yet; training did not get that far",
                BEST_FILE: "no best checkpoint; the run was not evaluated while it trained (--eval-every)",
            }
            raise RunError(f"{self.folder}: {missing[pointer]}") from None

    def _check_belongs(self, checkpoint: Checkpoint) -> None:
        """Raise ShardError where a checkpoint is of another run or vocabulary."""
        if checkpoint.folder.name != checkpoint_name(checkpoint.step):
            raise ShardError(f"{checkpoint.folder}: holds step {checkpoint.step}; folders were renamed")
        ours = {"run_id": self.info.id, "vocabulary_sha256": self.dataset.vocabulary_sha256}
        for key, value in ours.items():
            if getattr(checkpoint.manifest, key) != value:
                raise ShardError(f"{checkpoint.folder}: {key} is not that of {self.folder}; files were mixed")
        model, dataset = self.model, self.dataset
        if (model.num_entities, model.num_relations) != (dataset.num_entities, dataset.num_relations):
            raise RunError(
                f"{self.folder / RUN_FILE}: $.model is of {model.num_entities} entities and"
                f" {model.num_relations} relations, but data/ has {dataset.num_entities} and"
                f" {dataset.num_relations}"
            )
        shapes = {
            ENTITIES: (dataset.num_entities, model.dim),
            RELATIONS: (model.num_relation_rows, model.relation_dim),
        }
        wanted = {name: list(how.shape) for name, how in model.scoring.shared_init(model.dim).items()}
        if checkpoint.manifest.shared != wanted:
            raise ShardError(
                f"{checkpoint.folder}: shared parameters are {checkpoint.manifest.shared}, expected {wanted}"
            )
        for name, shape in shapes.items():
            found = checkpoint.manifest.tables[name].shape
            if found != shape:
                raise ShardError(f"{checkpoint.folder}: {name} is {list(found)}, expected {list(shape)}")


def is_run(folder: Path) -> bool:
    """Whether `folder` holds a run: a run.json that says so."""
    return is_record(folder / RUN_FILE, RunInfo)


def open_run(folder: AnyPath) -> Run:
    """Open a run folder.

    Raises:
        RunError: It is not one, or of a format this version does not know.
    """
    folder = Path(folder)
    if not (folder / RUN_FILE).is_file():
        what = "not a run (no run.json)" if folder.is_dir() else "no such run folder"
        raise RunError(f"{folder}: {what}")
    try:
        run = Run(folder, read_json(folder / RUN_FILE, RunInfo))
        run.dataset  # noqa: B018 - opened now, so that a damaged run is refused at the door
    except (OSError, ValueError, DataError) as error:
        raise RunError(f"{folder / RUN_FILE}: {error}") from error
    return run
