"""Writing checkpoints: every rank its own shard, rank 0 the rest; complete or not there at all.

Order: a temporary folder; every rank writes and syncs its file there; rank 0 writes the replicated
tables and, last, the manifest; the folder is synced and renamed into place; LATEST and BEST are replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kgshard.errors import NonFiniteError, RunError
from kgshard.exchange import Exchange
from kgshard.files import (
    place,
    read_json,
    remove_stale,
    sync,
    sync_tree,
    temporary_sibling,
    write_json,
    write_text,
)
from kgshard.records import FileInfo, Manifest, PieceInfo, TableInfo
from kgshard.runs import (
    BEST_FILE,
    CHECKPOINT_NAME,
    LATEST_FILE,
    MANIFEST_FILE,
    RELATION_FILE,
    SHARED_FILE,
    Run,
    checkpoint_name,
    open_run,
    shard_name,
)
from kgshard.shards import ENTITIES, RELATIONS, TABLE_DTYPES, header_bytes, sharding_metadata, write_blocks
from kgshard.table import ShardedTable, held_rows

_DTYPE_NAMES = {getattr(torch, name): stored for stored, (_, name) in TABLE_DTYPES.items()}
_BLOCK_ROWS = 16384
_NOT_FINITE = "is not finite; no checkpoint was written; lower --lr"


class _Shard(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    piece: PieceInfo
    file: FileInfo


def save_checkpoint(
    run: Run,
    table: ShardedTable,
    relations: ShardedTable | Tensor,
    shared: Mapping[str, Tensor] | None = None,
    *,
    step: int,
    epoch: int,
    best: bool = False,
) -> Path:
    """Write one checkpoint; every rank must call this. Return its folder.

    Args:
        run: Where it goes.
        table: This rank's entity rows.
        relations: Sharded too, or float[relation rows, relation_dim] equal on every rank.
        shared: The parameters that all rows share, float32, equal on every rank.
        step: Batches trained on.
        epoch: Epochs finished.
        best: It did better on valid than every checkpoint before. Checkpoints that are neither the
            best nor the newest are removed once this one is there.

    Raises:
        OSError: On the rank whose write failed.
        NonFiniteError: On the rank whose rows hold NaN or infinity. Nothing was written.
        RankFailureError: On the others, naming that rank.
    """
    exchange, shared = table.exchange, shared or {}
    folder = run.folder / "checkpoints" / checkpoint_name(step)
    exchange.share_failure(_non_finite(run, table, relations, shared))
    with exchange.patiently():  # Disks may take longer than a step ever does.
        _save(run, folder, table, relations, shared, step=step, epoch=epoch, best=best)
    return folder


def _save(
    run: Run,
    folder: Path,
    table: ShardedTable,
    relations: ShardedTable | Tensor,
    shared: Mapping[str, Tensor],
    *,
    step: int,
    epoch: int,
    best: bool,
) -> None:
    exchange = table.exchange
    temporary = _shared_temporary(exchange, folder)
    try:
        shards = {ENTITIES: _write_shards(temporary, ENTITIES, table)}
        if isinstance(relations, ShardedTable):
            shards[RELATIONS] = _write_shards(temporary, RELATIONS, relations)
        with exchange.sharing_failure(OSError, RunError):
            if exchange.rank == 0:
                files = _write_whole(temporary, shards, relations, shared)
                manifest = _manifest(run, table, relations, shards, files, shared, step=step, epoch=epoch)
                _finish(run, temporary, folder, manifest)
                _point(run, folder, best=best)
    except BaseException:
        if exchange.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _non_finite(
    run: Run, table: ShardedTable, relations: ShardedTable | Tensor, shared: Mapping[str, Tensor]
) -> NonFiniteError | None:
    """Return the error of this rank's first row that is not finite, or None."""
    entity = _first_non_finite(table.weight)
    if entity is not None:
        return NonFiniteError(f"{run.dataset.entities.row_name(entity + table.rows.start)} {_NOT_FINITE}")
    row = _first_non_finite(held_rows(relations))
    if row is not None:
        row += relations.rows.start if isinstance(relations, ShardedTable) else 0
        return NonFiniteError(f"{run.dataset.relations.row_name(row)} {_NOT_FINITE}")
    for name, values in shared.items():
        if not torch.isfinite(values).all():
            return NonFiniteError(f"shared parameter {name!r} {_NOT_FINITE}")
    return None


def _first_non_finite(weight: Tensor) -> int | None:
    for block, rows in enumerate(weight.detach().split(_BLOCK_ROWS)):
        finite = torch.isfinite(rows).all(dim=1)
        if not finite.all():
            return block * _BLOCK_ROWS + int(finite.long().argmin())
    return None


def _write_shards(folder: Path, tensor_name: str, table: ShardedTable) -> list[_Shard]:
    """Let every rank write its own shard; return all of them, in rank order, on every rank."""
    exchange = table.exchange
    with exchange.sharing_failure(OSError):
        shard = _write_shard(folder, tensor_name, table)
    gathered = exchange.gather_bytes(msgspec.json.encode(shard))
    return [msgspec.json.decode(text, type=_Shard) for text in gathered]


def _shared_temporary(exchange: Exchange, folder: Path) -> Path:
    """Let rank 0 make a temporary folder; return it on every rank."""
    temporary = temporary_sibling(folder)
    with exchange.sharing_failure(OSError):
        if exchange.rank == 0:
            folder.parent.mkdir(exist_ok=True)
            remove_stale(folder.parent)
            temporary.mkdir()
    return folder.parent / exchange.gather_bytes(temporary.name.encode())[0].decode()


def _write_shard(folder: Path, tensor_name: str, table: ShardedTable) -> _Shard:
    rank, rows = table.exchange.rank, table.rows
    name = shard_name(rank, table.exchange.world_size, tensor_name)
    metadata = sharding_metadata(tensor_name, rows.start)
    size, digest = _write_tensors(folder / name, {tensor_name: table.weight}, metadata)
    return _Shard(PieceInfo(name, rank, (rows.start, rows.stop)), FileInfo(size, digest))


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> tuple[int, str]:
    """Write a safetensors file; return its bytes and SHA-256."""
    described = {name: (_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    header = header_bytes(described, metadata or {})
    with path.open("xb") as file:
        written = write_blocks(file, _blocks(header, tensors.values()))
        file.flush()
        os.fsync(file.fileno())
    return written


def _blocks(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for block in chain.from_iterable(tensor.detach().split(_BLOCK_ROWS) for tensor in tensors):
        if block.numel():
            raw = block.cpu().contiguous().view(torch.uint8).numpy()
            yield memoryview(raw.reshape(-1))


def _write_whole(
    folder: Path,
    shards: dict[str, list[_Shard]],
    relations: ShardedTable | Tensor,
    shared: Mapping[str, Tensor],
) -> dict[str, FileInfo]:
    """Write what exists once, on rank 0; add it to `shards`. Return all files of the checkpoint."""
    if isinstance(relations, Tensor):
        path = folder / RELATION_FILE
        written = _write_tensors(path, {RELATIONS: relations}, sharding_metadata(RELATIONS, 0))
        shards[RELATIONS] = [_Shard(PieceInfo(path.name, 0, (0, len(relations))), FileInfo(*written))]
    files = {shard.piece.file: shard.file for table in shards.values() for shard in table}
    if shared:
        files[SHARED_FILE] = FileInfo(*_write_tensors(folder / SHARED_FILE, shared))
    return files


def _manifest(
    run: Run,
    table: ShardedTable,
    relations: ShardedTable | Tensor,
    shards: dict[str, list[_Shard]],
    files: dict[str, FileInfo],
    shared: Mapping[str, Tensor],
    *,
    step: int,
    epoch: int,
) -> Manifest:
    num_relation_rows = relations.num_rows if isinstance(relations, ShardedTable) else len(relations)
    return Manifest(
        format="kgshard.checkpoint/1",
        run_id=run.info.id,
        vocabulary_sha256=run.dataset.vocabulary_sha256,
        step=step,
        epoch=epoch,
        world_size=table.exchange.world_size,
        model=run.model.to_dict(),
        tables={
            ENTITIES: _table_info(table.weight, table.num_rows, shards[ENTITIES]),
            RELATIONS: _table_info(held_rows(relations), num_relation_rows, shards[RELATIONS]),
        },
        files=files,
        shared={name: list(values.shape) for name, values in shared.items()},
    )


def _finish(run: Run, temporary: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest and give the checkpoint its name. On rank 0 only."""
    write_json(temporary / MANIFEST_FILE, manifest)
    sync_tree(temporary)
    if open_run(run.folder).info.id != run.info.id:
        raise RunError(f"{run.folder}: was replaced by another run while this one trained")
    place(temporary, folder)
    sync(run.folder)


def _point(run: Run, folder: Path, *, best: bool) -> None:
    """Name a new checkpoint in LATEST and BEST; remove those that neither names any more."""
    for pointer in (LATEST_FILE, BEST_FILE) if best else (LATEST_FILE,):
        write_text(run.folder / pointer, folder.name + "\n")
    pointers = [run.folder / name for name in (LATEST_FILE, BEST_FILE)]
    named = {pointer.read_text().strip() for pointer in pointers if pointer.exists()}
    for other in folder.parent.iterdir():
        if other.name not in named and _belongs(other, run):
            shutil.rmtree(other)


def _belongs(folder: Path, run: Run) -> bool:
    """Whether a folder is a complete checkpoint of this run, which alone may be removed."""
    try:
        manifest = read_json(folder / MANIFEST_FILE, Manifest)
    except (OSError, ValueError):
        return False
    return bool(CHECKPOINT_NAME.fullmatch(folder.name)) and manifest.run_id == run.info.id


def _table_info(tensor: Tensor, num_rows: int, shards: list[_Shard]) -> TableInfo:
    pieces = [shard.piece for shard in shards]
    return TableInfo(_DTYPE_NAMES[tensor.dtype], (num_rows, tensor.shape[1]), pieces)
