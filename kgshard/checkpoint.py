"""Writing checkpoints: every rank its own shard, rank 0 the rest; complete or not there at all.

Order: a temporary folder; every rank writes and syncs its file there; rank 0 writes the replicated
tables and, last, the manifest; the folder is synced and renamed into place; LATEST is replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kgshard.exchange import Exchange
from kgshard.files import place, sync, sync_tree, temporary_sibling, write_json, write_text
from kgshard.runs import (
    CHECKPOINT_FORMAT,
    LATEST_FILE,
    MANIFEST_FILE,
    Run,
    checkpoint_name,
    shard_name,
)
from kgshard.shards import ENTITIES, RELATIONS, header_bytes, sharding_metadata, write_blocks
from kgshard.table import ShardedTable

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_BLOCK_ROWS = 16384


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
        RankFailureError: On the others, naming that rank.
    """
    exchange = table.exchange
    folder = run.folder / "checkpoints" / checkpoint_name(step)
    temporary = _shared_temporary(exchange, folder)
    entry, error = None, None
    try:
        entry = _write_shard(temporary, table)
    except OSError as failure:
        error = failure
    exchange.share_failure(error)
    entries = [json.loads(text) for text in exchange.gather_bytes(json.dumps(entry).encode())]
    if exchange.rank == 0:
        try:
            _finish(run, temporary, folder, entries, table, relations, step=step, epoch=epoch)
        except OSError as failure:
            error = failure
    exchange.share_failure(error)
    return folder


def _shared_temporary(exchange: Exchange, folder: Path) -> Path:
    """Let rank 0 make a temporary folder; return it on every rank."""
    error, name = None, ""
    if exchange.rank == 0:
        try:
            temporary = temporary_sibling(folder)
            temporary.mkdir(parents=True)
            name = temporary.name
        except OSError as failure:
            error = failure
    exchange.share_failure(error)
    return folder.parent / exchange.gather_bytes(name.encode())[0].decode()


def _write_shard(folder: Path, table: ShardedTable) -> dict[str, Any]:
    rank, rows = table.exchange.rank, table.rows
    name = shard_name(rank, table.exchange.world_size)
    metadata = sharding_metadata(ENTITIES, rows.start)
    size, digest = _write_tensor(folder / name, ENTITIES, table.weight, metadata)
    return {"file": name, "rank": rank, "rows": [rows.start, rows.stop], "bytes": size, "sha256": digest}


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
    entries: list[dict[str, Any]],
    table: ShardedTable,
    relations: Tensor,
    *,
    step: int,
    epoch: int,
) -> None:
    """Write what exists once and give the checkpoint its name. On rank 0 only."""
    name = "relation.safetensors"
    size, digest = _write_tensor(temporary / name, RELATIONS, relations, {"format": "pt"})
    whole = {"file": name, "rank": 0, "rows": [0, len(relations)], "bytes": size, "sha256": digest}
    manifest = {
        "format": CHECKPOINT_FORMAT,
        "run_id": run.info["id"],
        "vocabulary_sha256": run.dataset.vocabulary_sha256,
        "step": step,
        "epoch": epoch,
        "world_size": table.exchange.world_size,
        "model": run.model.to_dict(),
        "tables": {
            ENTITIES: _table_entry(table.weight, table.partition.num_rows, entries),
            RELATIONS: _table_entry(relations, len(relations), [whole]),
        },
        "files": {
            entry["file"]: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for entry in [*entries, whole]
        },
    }
    write_json(temporary / MANIFEST_FILE, manifest)
    sync_tree(temporary)
    place(temporary, folder)
    sync(run.folder)
    write_text(run.folder / LATEST_FILE, folder.name + "\n")


def _table_entry(tensor: Tensor, num_rows: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
    pieces = [{key: entry[key] for key in ("file", "rank", "rows")} for entry in entries]
    return {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": [num_rows, tensor.shape[1]], "pieces": pieces}
