"""Tiny graphs and finished runs whose tables a test chose, with no training.

A run is begun as `kgshard train` begins it and its checkpoint written as ranks write it, on threads.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from runs import begun_run
from safetensors.numpy import save_file
from worlds import ThreadWorld

from kgshard.checkpoint import OptimizerState, save_checkpoint
from kgshard.config import TrainConfig
from kgshard.exchange import Exchange
from kgshard.partition import RowPartition
from kgshard.runs import Run
from kgshard.shards import Piece, StoredTable, read_header
from kgshard.table import ShardedTable

Triple = tuple[str, str, str]
Floats = npt.NDArray[np.float32]

ENTITIES = "entity_embedding.weight"
RELATIONS = "relation_embedding.weight"


def write_graph(
    folder: Path, train: Iterable[Triple], valid: Iterable[Triple] = (), test: Iterable[Triple] = ()
) -> Path:
    """Write train, valid and test TSV files; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, triples in (("train", train), ("valid", valid), ("test", test)):
        lines = ["\t".join(triple) + "\n" for triple in triples]
        (folder / f"{name}.tsv").write_bytes("".join(lines).encode())
    return folder


def ring(num_entities: int, num_relations: int = 1) -> list[Triple]:
    """Return triples e0 -r0-> e1 -r1-> e2 ... -> e0: every entity and every relation occurs."""
    return [
        (f"e{i % num_entities}", f"r{i % num_relations}", f"e{(i + 1) % num_entities}")
        for i in range(max(num_entities, num_relations))
    ]


def begin_run(
    folder: Path,
    train: Sequence[Triple],
    valid: Sequence[Triple] = (),
    test: Sequence[Triple] = (),
    **settings: Any,
) -> Run:
    """Begin folder/run on a graph; it has no checkpoint yet. `settings` are those of TrainConfig."""
    source = write_graph(folder / "source", train, valid, test)
    return begun_run(source, folder / "run", TrainConfig(**settings))


def make_run(
    folder: Path,
    train: Sequence[Triple],
    valid: Sequence[Triple] = (),
    test: Sequence[Triple] = (),
    *,
    entities: npt.ArrayLike | None = None,
    relations: npt.ArrayLike | None = None,
    world_size: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    state: bool = False,
    shard_relations: bool = False,
    **settings: Any,
) -> Run:
    """Make folder/run with one checkpoint at step 1.

    Args:
        folder: Where; a new or empty folder.
        train: Triples; so are `valid` and `test`.
        entities: [num_entities, dim] in row order; by default drawn from `seed`.
        relations: [relation rows, relation_dim]; by default drawn too, as are parameters that rows share.
        world_size: Ranks that write the shards.
        dtype: dtype of the tables on disk.
        seed: Fixes the values that are drawn.
        state: Save optimizer state too, of numbers that tell rows apart; see `optimizer_state`.
        shard_relations: Let every rank write relation rows of its own.
        **settings: See TrainConfig.
    """
    run = begin_run(folder, train, valid, test, **settings)
    model, source = run.model, np.random.default_rng(seed)
    if entities is None:
        entities = source.standard_normal((model.num_entities, model.dim))
    if relations is None:
        relations = source.standard_normal((model.num_relation_rows, model.relation_dim))
    inits = model.scoring.shared_init(model.dim)
    shared = {name: source.standard_normal(how.shape) for name, how in inits.items()}
    save_tables(
        run,
        entities,
        relations,
        shared,
        world_size=world_size,
        dtype=dtype,
        state=state,
        shard_relations=shard_relations,
    )
    return run


def optimizer_state(table: str, rows: range, dim: int) -> dict[str, torch.Tensor]:
    """Return what Adam with a step count a row might hold of some rows of a table."""
    numbers = torch.arange(rows.start, rows.stop, dtype=torch.float32)[:, None] + torch.linspace(0, 0.5, dim)
    numbers = numbers + 1000 * (table == RELATIONS)
    steps = torch.arange(rows.start, rows.stop, dtype=torch.int32) + 7
    return {"exp_avg": numbers, "exp_avg_sq": (numbers**2).bfloat16(), "row_steps": steps}


def save_tables(
    run: Run,
    entities: npt.ArrayLike,
    relations: npt.ArrayLike,
    shared: Mapping[str, npt.ArrayLike] | None = None,
    *,
    world_size: int = 1,
    step: int = 1,
    best: bool = False,
    dtype: torch.dtype = torch.float32,
    state: bool = False,
    shard_relations: bool = False,
) -> Path:
    """Write a checkpoint on `world_size` ranks; return its folder. `best` keeps it beside later ones."""
    tables = [torch.from_numpy(np.array(table, np.float32)).to(dtype) for table in (entities, relations)]
    for_all = {
        name: torch.from_numpy(np.array(values, np.float32)) for name, values in (shared or {}).items()
    }
    # Training saves no table that is not finite; a test may, to see who notices.
    with patch("kgshard.checkpoint._non_finite", return_value=None):
        folders = ThreadWorld(world_size).run(
            _save, run, *tables, for_all, step, best, state, shard_relations
        )
    folder: Path = folders[0]
    return folder


def _save(
    exchange: Exchange,
    run: Run,
    entities: torch.Tensor,
    relations: torch.Tensor,
    shared: Mapping[str, torch.Tensor],
    step: int,
    best: bool,
    state: bool,
    shard_relations: bool,
) -> Path:
    partition = RowPartition(len(entities), exchange.world_size)
    rows = partition.rows_of(exchange.rank)
    table = ShardedTable(entities[rows.start : rows.stop].clone(), partition, exchange)
    held: torch.Tensor | ShardedTable = relations
    relation_rows = range(len(relations))
    if shard_relations:
        partition = RowPartition(len(relations), exchange.world_size)
        relation_rows = partition.rows_of(exchange.rank)
        held = ShardedTable(relations[relation_rows.start : relation_rows.stop].clone(), partition, exchange)
    optimizer = OptimizerState(
        name="adam-rowstep",
        num_steps=3,
        entities=optimizer_state(ENTITIES, rows, entities.shape[1]),
        relations=optimizer_state(RELATIONS, relation_rows, relations.shape[1]),
        shared={
            name: {"exp_avg": values + 1, "row_steps": torch.ones(1, dtype=torch.int32)}
            for name, values in shared.items()
        },
    )
    return save_checkpoint(
        run,
        table,
        held,
        shared,
        optimizer=optimizer if state else None,
        step=step,
        epoch=1,
        best=best,
    )


def write_sparse_checkpoint(run: Run, *, num_shards: int) -> Path:
    """Write a checkpoint of zeros, as holes in files: a large table that costs no time. Return its folder.

    Written by hand, from the format that kgshard.runs and kgshard.shards describe.
    """
    model = run.model
    folder = run.folder / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    edges = [model.num_entities * shard // num_shards for shard in range(num_shards + 1)]
    pieces = [
        {"file": f"shard-{shard}.safetensors", "rank": shard, "rows": [edges[shard], edges[shard + 1]]}
        for shard in range(num_shards)
    ]
    whole = {"file": "relation.safetensors", "rank": 0, "rows": [0, model.num_relation_rows]}
    for piece in pieces:
        _write_hole(folder / str(piece["file"]), ENTITIES, piece["rows"], model.dim)
    _write_hole(folder / "relation.safetensors", RELATIONS, whole["rows"], model.relation_dim)
    shapes = {
        ENTITIES: ([model.num_entities, model.dim], pieces),
        RELATIONS: ([model.num_relation_rows, model.relation_dim], [whole]),
    }
    manifest = {
        "format": "kgshard.checkpoint/1",
        "run_id": json.loads((run.folder / "run.json").read_bytes())["id"],
        "vocabulary_sha256": run.dataset.vocabulary_sha256,
        "step": 1,
        "epoch": 1,
        "world_size": num_shards,
        "model": model.to_dict(),
        "tables": {name: {"dtype": "F32", "shape": s, "pieces": p} for name, (s, p) in shapes.items()},
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": ""} for path in folder.iterdir()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (run.folder / "LATEST").write_text(folder.name + "\n")
    return folder


def _write_hole(path: Path, name: str, rows: Any, dim: int) -> None:
    shape = [rows[1] - rows[0], dim]
    num_bytes = 4 * shape[0] * dim
    where = json.dumps({name: {"saved_offsets": [rows[0], 0]}})
    header = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": where},
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]},
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num_bytes)


def tree(folder: Path) -> dict[str, str]:
    """Return every path below a folder with a hash of its bytes, to see that nothing was changed."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def stored_table(folder: Path, rows: npt.ArrayLike, *, num_pieces: int = 1) -> StoredTable:
    """Write a float32 table [N, D] in pieces, by the safetensors package, and open it."""
    array = np.ascontiguousarray(rows, np.float32)
    pieces = []
    for part in np.array_split(np.arange(len(array)), num_pieces):
        path = folder / f"{uuid.uuid4().hex}.safetensors"
        start = int(part[0]) if len(part) else len(array)
        save_file({"t": array[start : start + len(part)]}, path)
        pieces.append(Piece(path, range(start, start + len(part)), read_header(path)[0]["t"]))
    return StoredTable("t", pieces)
