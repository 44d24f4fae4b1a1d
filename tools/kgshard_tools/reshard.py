"""Cut a run's tables into other shards, optimizer state included, from file to file.

Training, evaluation, merge and export take a run of any world size; other programs that read shards, and
disks that each hold a part, may want another. The new run is the same run: id, settings, data and steps are
kept, only the pieces differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kgshard.data.dataset import clone_dataset
from kgshard.errors import ConfigError
from kgshard.files import (
    AnyPath,
    copy_file,
    write_json,
    write_text,
)
from kgshard.partition import RowPartition
from kgshard.records import Manifest, OptimizerInfo, PieceInfo, TableInfo, describe_file
from kgshard.runs import (
    BEST_FILE,
    CONFIG_FILE,
    LATEST_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    OPTIMIZER,
    OPTIMIZER_FILE,
    RELATION_FILE,
    RUN_FILE,
    SHARED_FILE,
    SHARED_OPTIMIZER_FILE,
    Checkpoint,
    Run,
    is_run,
    shard_name,
)
from kgshard.shards import ENTITIES, RELATIONS, StoredTable, sharding_metadata
from kgshard.start import replacing_run
from kgshard_tools.rows import Advance, as_stored, no_progress, write_safetensors
from kgshard_tools.stored import check_outside, open_stored
from kgshard_tools.written import Written, describe_folder

_MAX_WORLD_SIZE = 99_999
"""What five digits of a shard's name can say."""


def reshard(
    source: AnyPath,
    world_size: int,
    out: AnyPath,
    *,
    overwrite: bool = False,
    verify: bool = False,
    advance: Advance = no_progress,
) -> Written:
    """Write a run whose checkpoints are cut into `world_size` shards.

    Args:
        source: A run, whose newest and best checkpoints are taken, or one of its checkpoint folders.
        world_size: Shards of each table that was cut over ranks; some are empty where it has fewer rows.
        out: The run folder to make.
        overwrite: Replace a run that is there already.
        verify: First compare every shard, label and triple with its SHA-256.
        advance: Told how many bytes more are written.

    Raises:
        ConfigError: `world_size` is out of range.
        RunError: `source` is no run, or `out` may not be replaced.
        ShardError: A shard is missing, damaged or of another run.
    """
    began = time.monotonic()
    if not 1 <= world_size <= _MAX_WORLD_SIZE:
        raise ConfigError(f"--world-size must be from 1 to {_MAX_WORLD_SIZE}, got {world_size}")
    stored, out = open_stored(source), Path(out)
    check_outside(out, stored.run)
    pointers = _checkpoints(stored.run) if is_run(Path(source)) else {LATEST_FILE: stored.checkpoint}
    checkpoints = {checkpoint.folder.name: checkpoint for checkpoint in pointers.values()}
    place = Path(os.path.realpath(out))
    with replacing_run(out, overwrite=overwrite) as temporary:
        if verify:
            stored.verify()
            for checkpoint in checkpoints.values():
                if checkpoint.folder != stored.checkpoint.folder:
                    checkpoint.check_hashes()
        _copy_rest(stored.run, temporary)
        for name, checkpoint in checkpoints.items():
            _Cut(checkpoint, world_size, advance).write(temporary / "checkpoints" / name)
        for pointer, checkpoint in pointers.items():
            write_text(temporary / pointer, checkpoint.folder.name + "\n")
    return describe_folder(out, place, stored.model.num_entities, began, python=_PYTHON)


def _checkpoints(run: Run) -> dict[str, Checkpoint]:
    """Return a run's checkpoints by the pointers that name them."""
    found = {LATEST_FILE: run.open_checkpoint("latest")}
    if (run.folder / BEST_FILE).exists():
        found[BEST_FILE] = run.open_checkpoint("best")
    return found


def _copy_rest(run: Run, folder: Path) -> None:
    """Take over what does not depend on the shards: settings, data, what was logged and evaluated."""
    clone_dataset(run.dataset, folder / "data")
    (folder / "eval").mkdir()
    paths = [run.folder / name for name in (RUN_FILE, CONFIG_FILE, METRICS_FILE)]
    for path in [*paths, *sorted((run.folder / "eval").glob("*.json"))]:
        if path.is_file():
            copy_file(path, folder / path.relative_to(run.folder))


@dataclass(frozen=True)
class _Cut:
    """One checkpoint, cut anew."""

    checkpoint: Checkpoint
    world_size: int
    advance: Advance

    def write(self, folder: Path) -> None:
        """Fill the new checkpoint's folder."""
        folder.mkdir(parents=True)
        written: dict[str, list[PieceInfo]] = {}
        for name, rank, tables in self._files():
            parts = {table: as_stored(stored, rows, self.advance) for table, (stored, rows) in tables.items()}
            metadata = sharding_metadata({table: rows.start for table, (_, rows) in tables.items()})
            write_safetensors(folder / name, parts, metadata)
            for table, (_, rows) in tables.items():
                written.setdefault(table, []).append(PieceInfo(name, rank, (rows.start, rows.stop)))
        for name in (SHARED_FILE, SHARED_OPTIMIZER_FILE):
            if name in self.checkpoint.manifest.files:
                copy_file(self.checkpoint.folder / name, folder / name)
        write_json(folder / MANIFEST_FILE, self._manifest(folder, written))

    def _files(self) -> Iterator[tuple[str, int, dict[str, tuple[StoredTable, range]]]]:
        """Yield the files to write: name, rank, and by name the tables and their rows that are in it."""
        checkpoint, state = self.checkpoint, self.checkpoint.optimizer_tables
        of_entities = {name: table for name, table in state.items() if name.startswith(f"{ENTITIES}.")}
        of_relations = {name: table for name, table in state.items() if name not in of_entities}
        relations = {RELATIONS: checkpoint.relations}
        is_cut = checkpoint.manifest.tables[RELATIONS].pieces[0].file != RELATION_FILE
        for rank in range(self.world_size):
            yield self._shard(ENTITIES, rank, {ENTITIES: checkpoint.entities})
            if is_cut:
                yield self._shard(RELATIONS, rank, relations)
            mine = of_entities | (of_relations if is_cut else {})
            if mine:
                yield self._shard(OPTIMIZER, rank, mine)
        if not is_cut:
            for name, tables in ((RELATION_FILE, relations), (OPTIMIZER_FILE, of_relations)):
                if tables:
                    yield name, 0, {key: (table, range(table.num_rows)) for key, table in tables.items()}

    def _shard(
        self, kind: str, rank: int, tables: Mapping[str, StoredTable]
    ) -> tuple[str, int, dict[str, tuple[StoredTable, range]]]:
        rows = {
            name: (table, RowPartition(table.num_rows, self.world_size).rows_of(rank))
            for name, table in tables.items()
        }
        return shard_name(rank, self.world_size, kind), rank, rows

    def _manifest(self, folder: Path, written: Mapping[str, list[PieceInfo]]) -> Manifest:
        old = self.checkpoint.manifest

        def cut(tables: Mapping[str, TableInfo]) -> dict[str, TableInfo]:
            return {name: TableInfo(info.dtype, info.shape, written[name]) for name, info in tables.items()}

        saved = old.optimizer
        return msgspec.structs.replace(
            old,
            world_size=self.world_size,
            tables=cut(old.tables),
            files={path.name: describe_file(path) for path in sorted(folder.iterdir())},
            optimizer=(
                OptimizerInfo(saved.name, saved.num_steps, cut(saved.tables), saved.shared)
                if saved is not None
                else None
            ),
        )


_PYTHON = ["import kgshard", 'model = kgshard.load(".")', "model.evaluate()"]
