"""Writing checkpoints: every rank its own shard, rank 0 the rest; complete or not there at all.

Order: a temporary folder; every rank writes and syncs its file there; rank 0 writes the replicated
tables and, last, the manifest; the folder is synced and renamed into place; LATEST is replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kgshard.errors import NonFiniteError, RunError
from kgshard.exchange import Exchange
from kgshard.files import place, remove_stale, sync, sync_tree, temporary_sibling, write_json, write_text
from kgshard.records import FileInfo, Manifest, PieceInfo, TableInfo
from kgshard.runs import (
    LATEST_FILE,
    MANIFEST_FILE,
    Run,
    checkpoint_name,
    open_run,
    shard_name,
)
from kgshard.shards import ENTITIES, RELATIONS, TABLE_DTYPES, header_bytes, sharding_metadata, write_blocks
from kgshard.table import ShardedTable

_DTYPE_NAMES = {getattr(torch, name): stored for stored, (_, name) in TABLE_DTYPES.items()}
_BLOCK_ROWS = 16384
_NOT_FINITE = "is not finite; no checkpoint was written; lower --lr"


class _Shard(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    piece: PieceInfo
    file: FileInfo


def save_checkpoint(run: Run, table: ShardedTable, relations: Tensor, *, step: int, epoch: int) -> Path:
    """Write one checkpoint; every rank must call this. Return its folder.

    Args:
        run: Where it goes.
        table: This rank's entity rows.
        relations: float[relation rows, relation_dim], equal on every rank.
        step: Optimizer steps made.
        epoch: Epochs finished.

    Raises:
        OSError: On the rank whose write failed.
        NonFiniteError: On the rank whose rows hold NaN or infinity. Nothing was written.
        RankFailureError: On the others, naming that rank.
    """
    exchange = table.exchange
    folder = run.folder / "checkpoints" / checkpoint_name(step)
    exchange.share_failure(_non_finite(run, table, relations))
    temporary = _shared_temporary(exchange, folder)
    try:
        shards = _write_shards(temporary, table)
        with exchange.sharing_failure(OSError, RunError):
            if exchange.rank == 0:
                _finish(run, temporary, folder, shards, table, relations, step=step, epoch=epoch)
    except BaseException:
        if exchange.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _non_finite(run: Run, table: ShardedTable, relations: Tensor) -> NonFiniteError | None:
    """Return the error of this rank's first row that is not finite, or None."""
    for block, rows in enumerate(table.weight.detach().split(_BLOCK_ROWS)):
        finite = torch.isfinite(rows).all(dim=1)
        if not finite.all():
            entity = table.rows.start + block * _BLOCK_ROWS + int(finite.long().argmin())
            label = run.dataset.entities[entity]
            return NonFiniteError(f"entity {entity} ({label!r}) {_NOT_FINITE}")
    if not torch.isfinite(relations).all():
        return NonFiniteError(f"a relation {_NOT_FINITE}")
    return None


def _write_shards(folder: Path, table: ShardedTable) -> list[_Shard]:
    """Let every rank write its own shard; return all of them, in rank order, on every rank."""
    exchange = table.exchange
    with exchange.sharing_failure(OSError):
        shard = _write_shard(folder, table)
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


def _write_shard(folder: Path, table: ShardedTable) -> _Shard:
    rank, rows = table.exchange.rank, table.rows
    name = shard_name(rank, table.exchange.world_size)
    metadata = sharding_metadata(ENTITIES, rows.start)
    size, digest = _write_tensor(folder / name, ENTITIES, table.weight, metadata)
    return _Shard(PieceInfo(name, rank, (rows.start, rows.stop)), FileInfo(size, digest))


def _write_tensor(path: Path, name: str, tensor: Tensor, metadata: dict[str, str]) -> tuple[int, str]:
    """Write one tensor as a safetensors file; return its bytes and SHA-256."""
    header = header_bytes({name: (_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))}, metadata)
    with path.open("xb") as file:
        written = write_blocks(file, _blocks(header, tensor))
        file.flush()
        os.fsync(file.fileno())
    return written


def _blocks(header: bytes, tensor: Tensor) -> Iterator[bytes | memoryview]:
    yield header
    for block in tensor.detach().split(_BLOCK_ROWS):
        if block.numel():
            raw = block.cpu().contiguous().view(torch.uint8).numpy()
            yield memoryview(raw.reshape(-1))


def _finish(
    run: Run,
    temporary: Path,
    folder: Path,
    shards: list[_Shard],
    table: ShardedTable,
    relations: Tensor,
    *,
    step: int,
    epoch: int,
) -> None:
    """Write what exists once and give the checkpoint its name. On rank 0 only."""
    name = "relation.safetensors"
    size, digest = _write_tensor(temporary / name, RELATIONS, relations, sharding_metadata(RELATIONS, 0))
    whole = _Shard(PieceInfo(name, 0, (0, len(relations))), FileInfo(size, digest))
    manifest = Manifest(
        format="kgshard.checkpoint/1",
        run_id=run.info.id,
        vocabulary_sha256=run.dataset.vocabulary_sha256,
        step=step,
        epoch=epoch,
        world_size=table.exchange.world_size,
        model=run.model.to_dict(),
        tables={
            ENTITIES: _table_info(table.weight, table.partition.num_rows, shards),
            RELATIONS: _table_info(relations, len(relations), [whole]),
        },
        files={shard.piece.file: shard.file for shard in [*shards, whole]},
    )
    write_json(temporary / MANIFEST_FILE, manifest)
    sync_tree(temporary)
    if open_run(run.folder).info.id != run.info.id:
        raise RunError(f"{run.folder}: was replaced by another run while this one trained")
    place(temporary, folder)
    sync(run.folder)
    write_text(run.folder / LATEST_FILE, folder.name + "\n")


def _table_info(tensor: Tensor, num_rows: int, shards: list[_Shard]) -> TableInfo:
    pieces = [shard.piece for shard in shards]
    return TableInfo(_DTYPE_NAMES[tensor.dtype], (num_rows, tensor.shape[1]), pieces)
