"""Writing checkpoints: every rank its own shard, rank 0 the rest; complete or not there at all.

Order: a temporary folder; every rank writes and syncs its file there; rank 0 writes the replicated
tables and, last, the manifest; the folder is synced and renamed into place; LATEST and BEST are replaced.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from kgshard.records import FileInfo, Manifest, OptimizerInfo, PieceInfo, TableInfo
from kgshard.runs import (
    BEST_FILE,
    CHECKPOINT_NAME,
    LATEST_FILE,
    MANIFEST_FILE,
    OPTIMIZER,
    OPTIMIZER_FILE,
    RELATION_FILE,
    SHARED_FILE,
    SHARED_OPTIMIZER_FILE,
    Run,
    checkpoint_name,
    open_run,
    shard_name,
    state_name,
)
from kgshard.shards import ENTITIES, RELATIONS, STORED_DTYPES, header_bytes, sharding_metadata, write_blocks
from kgshard.table import ShardedTable, held_rows

_DTYPE_NAMES = {getattr(torch, name): stored for stored, (_, name) in STORED_DTYPES.items()}
_BLOCK_ROWS = 16384
_NOT_FINITE = "is not finite; no checkpoint was written; lower --lr"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """What the next step needs to know besides the parameters, as one rank holds it."""

    name: str
    """A name of kgshard.config.OPTIMIZER_NAMES."""
    num_steps: int
    entities: Mapping[str, Tensor]
    """By the name of what it is, one row for each row of the entity table that this rank holds."""
    relations: Mapping[str, Tensor]
    """The same of the relation table."""
    shared: Mapping[str, Mapping[str, Tensor]]
    """Of each parameter that all rows share, equal on every rank."""


class _Shard(msgspec.Struct, frozen=True):
    """A file that one rank wrote, and which rows of which tables are in it."""

    name: str
    file: FileInfo
    pieces: dict[str, PieceInfo]
    dtypes: dict[str, str]
    dims: dict[str, int]


_Held = Mapping[str, tuple[Tensor, range]]
"""Tables by name: float[rows, ...], and which global rows they are."""


def save_checkpoint(
    run: Run,
    table: ShardedTable,
    relations: ShardedTable | Tensor,
    shared: Mapping[str, Tensor] | None = None,
    *,
    optimizer: OptimizerState | None = None,
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
        optimizer: Its state, in files of its own; None leaves it out.
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
    exchange.share_failure(
        _non_finite(run, table, relations, shared) or (_non_finite_state(optimizer) if optimizer else None)
    )
    with exchange.patiently():  # Disks may take longer than a step ever does.
        _save(run, folder, table, relations, shared, optimizer, step=step, epoch=epoch, best=best)
    return folder


def _save(
    run: Run,
    folder: Path,
    table: ShardedTable,
    relations: ShardedTable | Tensor,
    shared: Mapping[str, Tensor],
    optimizer: OptimizerState | None,
    *,
    step: int,
    epoch: int,
    best: bool,
) -> None:
    exchange = table.exchange
    temporary = _shared_temporary(exchange, folder)
    try:
        shards = _write_shards(temporary, ENTITIES, {ENTITIES: (table.weight, table.rows)}, exchange)
        sharded, replicated = _state_tables(table, relations, optimizer)
        if isinstance(relations, ShardedTable):
            held = {RELATIONS: (relations.weight, relations.rows)}
            shards += _write_shards(temporary, RELATIONS, held, exchange)
        if sharded:
            shards += _write_shards(temporary, OPTIMIZER, sharded, exchange)
        with exchange.sharing_failure(OSError, RunError):
            if exchange.rank == 0:
                if isinstance(relations, Tensor):
                    held = {RELATIONS: (relations, range(len(relations)))}
                    shards.append(_write_shard(temporary, RELATION_FILE, held))
                if replicated:
                    shards.append(_write_shard(temporary, OPTIMIZER_FILE, replicated))
                files = _write_shared(temporary, shared, optimizer)
                manifest = _manifest(
                    run, exchange.world_size, shards, files, shared, optimizer, step=step, epoch=epoch
                )
                _finish(run, temporary, folder, manifest)
                _point(run, folder, best=best)
    except BaseException:
        if exchange.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _state_tables(
    table: ShardedTable, relations: ShardedTable | Tensor, optimizer: OptimizerState | None
) -> tuple[_Held, _Held]:
    """Return optimizer state that every rank has its rows of, and state that every rank has whole."""
    if optimizer is None:
        return {}, {}
    entities = _state_rows(ENTITIES, optimizer.entities, table.rows)
    if isinstance(relations, ShardedTable):
        return {**entities, **_state_rows(RELATIONS, optimizer.relations, relations.rows)}, {}
    return entities, _state_rows(RELATIONS, optimizer.relations, range(len(relations)))


def _state_rows(table: str, state: Mapping[str, Tensor], rows: range) -> _Held:
    """Name state as tensors [rows, C]; a number a row is a column."""
    return {
        state_name(table, name): (values.reshape(len(rows), math.prod(values.shape[1:])), rows)
        for name, values in state.items()
    }


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


def _non_finite_state(optimizer: OptimizerState) -> NonFiniteError | None:
    """Return the error of optimizer state that is not finite, or None."""
    tables = {"entity": optimizer.entities, "relation": optimizer.relations}
    of_each = tables | {f"shared parameter {name!r}": state for name, state in optimizer.shared.items()}
    for owner, state in of_each.items():
        for part, values in state.items():
            if any(not torch.isfinite(block).all() for block in values.split(_BLOCK_ROWS)):
                return NonFiniteError(f"optimizer state {part!r} of {owner} rows {_NOT_FINITE}")
    return None


def _first_non_finite(weight: Tensor) -> int | None:
    for block, rows in enumerate(weight.detach().split(_BLOCK_ROWS)):
        finite = torch.isfinite(rows).all(dim=1)
        if not finite.all():
            return block * _BLOCK_ROWS + int(finite.long().argmin())
    return None


def _write_shards(folder: Path, table: str, held: _Held, exchange: Exchange) -> list[_Shard]:
    """Let every rank write a file of its rows; return what all wrote, in rank order, on every rank."""
    with exchange.sharing_failure(OSError):
        name = shard_name(exchange.rank, exchange.world_size, table)
        shard = _write_shard(folder, name, held, rank=exchange.rank)
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


def _write_shard(folder: Path, name: str, held: _Held, *, rank: int = 0) -> _Shard:
    metadata = sharding_metadata({table: rows.start for table, (_, rows) in held.items()})
    written = _write_tensors(folder / name, {table: values for table, (values, _) in held.items()}, metadata)
    pieces = {table: PieceInfo(name, rank, (rows.start, rows.stop)) for table, (_, rows) in held.items()}
    dtypes = {table: _DTYPE_NAMES[values.dtype] for table, (values, _) in held.items()}
    return _Shard(
        name,
        FileInfo(*written),
        pieces,
        dtypes,
        {table: values.shape[1] for table, (values, _) in held.items()},
    )


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> tuple[int, str]:
    """Write a safetensors file; return its bytes and SHA-256."""
    # Wide numbers first, as the safetensors package has it: so all lie where they can be mapped.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
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


def _write_shared(
    folder: Path, shared: Mapping[str, Tensor], optimizer: OptimizerState | None
) -> dict[str, FileInfo]:
    """Write the parameters that all rows share, and their optimizer's state."""
    state = _shared_state(optimizer)
    return {
        name: FileInfo(*_write_tensors(folder / name, tensors))
        for name, tensors in ((SHARED_FILE, shared), (SHARED_OPTIMIZER_FILE, state))
        if tensors
    }


def _shared_state(optimizer: OptimizerState | None) -> dict[str, Tensor]:
    of_each = optimizer.shared if optimizer is not None else {}
    return {
        state_name(name, part): values for name, state in of_each.items() for part, values in state.items()
    }


def _manifest(
    run: Run,
    world_size: int,
    shards: list[_Shard],
    files: Mapping[str, FileInfo],
    shared: Mapping[str, Tensor],
    optimizer: OptimizerState | None,
    *,
    step: int,
    epoch: int,
) -> Manifest:
    tables = _tables(shards)
    state = {name: tables.pop(name) for name in list(tables) if name not in (ENTITIES, RELATIONS)}
    shapes = {name: list(values.shape) for name, values in _shared_state(optimizer).items()}
    return Manifest(
        format="kgshard.checkpoint/1",
        run_id=run.info.id,
        vocabulary_sha256=run.dataset.vocabulary_sha256,
        step=step,
        epoch=epoch,
        world_size=world_size,
        model=run.model.to_dict(),
        tables=tables,
        files={**{shard.name: shard.file for shard in shards}, **files},
        shared={name: list(values.shape) for name, values in shared.items()},
        optimizer=(
            OptimizerInfo(optimizer.name, optimizer.num_steps, state, shapes)
            if optimizer is not None
            else None
        ),
    )


def _tables(shards: list[_Shard]) -> dict[str, TableInfo]:
    """Put together what is known of each table from the files that hold its rows, in row order."""
    tables: dict[str, TableInfo] = {}
    for shard in shards:
        for name, piece in shard.pieces.items():
            before = tables[name].pieces if name in tables else []
            shape = (piece.rows[1], shard.dims[name])
            tables[name] = TableInfo(shard.dtypes[name], shape, [*before, piece])
    return tables


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
