"""A run folder made of a foreign model: it evaluates, merges, exports and indexes as a trained one does.

Foreign rows are in foreign order, and kgshard's follow the hash of their labels. They are put in order
block by block, so memory holds labels and ids but no second table. The run appears whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kgshard.data.prepare import Numbered, Renumbered, prepare_numbered
from kgshard.errors import ConfigError, DataError, NonFiniteError
from kgshard.files import AnyPath, replacing, start_writeback, write_json, write_text
from kgshard.models.link import LinkModel
from kgshard.records import FileInfo, ImportInfo, Manifest, PieceInfo, RunInfo, TableInfo
from kgshard.runs import (
    LATEST_FILE,
    MANIFEST_FILE,
    RELATION_FILE,
    SHARED_FILE,
    Run,
    checkpoint_name,
    open_run,
    shard_name,
)
from kgshard.shards import (
    ENTITIES,
    RELATIONS,
    first_non_finite,
    header_bytes,
    sharding_metadata,
    write_blocks,
)
from kgshard.start import describe_run, replacing_run, write_record
from kgshard.vocabulary import Vocabulary
from kgshard_tools.importers.foreign import ForeignFloats, ForeignModel
from kgshard_tools.importers.read_ahead import ReadAhead

_BLOCK_BYTES = 1 << 22
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive rows of a table of ours, by where they are in a foreign one."""

    table: ForeignFloats
    rows: _Rows
    """int64[n]: row i of the part is convert(table[rows[i]])."""
    convert: Callable[[ForeignFloats], ForeignFloats] = lambda rows: rows


def write_run(foreign: ForeignModel, out: AnyPath, *, overwrite: bool = False) -> Run:
    """Write a foreign model as a run with one checkpoint, at step 0.

    Args:
        foreign: The model.
        out: The run folder.
        overwrite: Replace a run that is there.

    Raises:
        UsageError: Tables and labels do not fit each other or the scoring function, a label occurs twice,
            or `out` may not be replaced.
        NonFiniteError: A row is not finite.
    """
    _check_shapes(foreign)
    model = _link_model(foreign)
    with replacing_run(out, overwrite=overwrite) as temporary:
        renumbered = prepare_numbered(
            Numbered(
                Path(out).resolve().name,
                foreign.program,
                foreign.entity_labels,
                foreign.relation_labels,
                foreign.triples,
                foreign.origins,
            ),
            temporary / "data",
        )
        info = describe_run(renumbered.dataset, model, _known_settings(model), _import_info(foreign))
        write_record(temporary, info)
        in_order = {name: foreign.shared[name] for name in model.scoring.shared_init(model.dim)}
        ordered = replace(foreign, shared=in_order)
        _write_checkpoint(ordered, renumbered, info, temporary / "checkpoints" / checkpoint_name(0))
        write_text(temporary / LATEST_FILE, checkpoint_name(0) + "\n")
        # Whatever reads runs must read this one; shapes that the scoring function asks for come out here.
        open_run(temporary).open_checkpoint()
    return open_run(out)


def _link_model(foreign: ForeignModel) -> LinkModel:
    try:
        return LinkModel(
            name=foreign.scoring,
            dim=foreign.entities.shape[1],
            num_entities=len(foreign.entity_labels),
            num_relations=len(foreign.relation_labels),
            reciprocal=foreign.reciprocal,
            offset=foreign.offset,
        )
    except ConfigError as error:
        raise ConfigError(f"{foreign.program}, {foreign.scoring}: {error}") from None


def _check_shapes(foreign: ForeignModel) -> None:
    """Raise DataError where tables, labels and scoring function do not fit each other."""
    num_relations = len(foreign.relation_labels)
    in_table = num_relations * (2 if foreign.reciprocal and foreign.inverses is None else 1)
    if foreign.relation_rows is not None:
        in_table = len(foreign.relations) if len(foreign.relation_rows) == in_table else -1
    wanted = {"entity": len(foreign.entity_labels), "relation": in_table, "inverse": num_relations}
    for kind, table in _tables(foreign):
        if table.ndim != 2 or len(table) != wanted[kind] or not wanted[kind]:
            num_labels = wanted["entity"] if kind == "entity" else num_relations
            raise DataError(
                f"{foreign.program}: the {kind} table is {list(table.shape)}, with {num_labels} labels"
            )
        if table.dtype.kind != "f":
            raise DataError(f"{foreign.program}: the {kind} table holds {table.dtype}, expected floats")
    model = _link_model(foreign)
    for kind, table in _tables(foreign)[1:]:
        if table.shape[1] != model.relation_dim:
            raise DataError(
                f"{foreign.program}: {kind} rows have {table.shape[1]} floats; {model.name} of dim "
                f"{model.dim} has {model.relation_dim}"
            )
    shared = {name: how.shape for name, how in model.scoring.shared_init(model.dim).items()}
    found = {name: values.shape for name, values in foreign.shared.items()}
    if found != shared:
        raise DataError(f"{foreign.program}: shared parameters are {found}; {model.name} has {shared}")


def _tables(foreign: ForeignModel) -> list[tuple[str, ForeignFloats]]:
    """Return the tables by what their rows are of."""
    tables = [("entity", foreign.entities), ("relation", foreign.relations)]
    return [*tables, ("inverse", foreign.inverses)] if foreign.inverses is not None else tables


def _known_settings(model: LinkModel) -> dict[str, object]:
    """Return the settings that a model shows; how it was trained its program alone knows."""
    return {
        "model": model.name,
        "dim": model.dim,
        "corruption": "reciprocal" if model.reciprocal else "both-sides",
    }


def _import_info(foreign: ForeignModel) -> ImportInfo:
    decisions = list(foreign.decisions)
    for kind, table in _tables(foreign):
        if table.dtype.itemsize != 4:
            how = "rounded" if table.dtype.itemsize > 4 else "widened, exactly,"
            decisions.append(f"{kind} rows were {table.dtype.name}; they are {how} to float32")
    if not any(len(triples) for triples in foreign.triples.values()):
        decisions.append(
            "no triples came with the model: nothing counts as known, and nothing can be evaluated"
        )
    return ImportInfo(foreign.program, [path.name for path in foreign.files], decisions)


def _write_checkpoint(foreign: ForeignModel, renumbered: Renumbered, info: RunInfo, folder: Path) -> None:
    folder.mkdir(parents=True)
    dataset = renumbered.dataset
    entities = [_Part(foreign.entities, renumbered.entity_rows)]
    tables = (
        (ENTITIES, shard_name(0, 1), entities, dataset.entities),
        (RELATIONS, RELATION_FILE, _relation_parts(foreign, renumbered.relation_rows), dataset.relations),
    )
    written, files = {}, {}
    for tensor_name, file_name, parts, vocabulary in tables:
        shape = sum(len(part.rows) for part in parts), parts[0].table.shape[1]
        metadata = sharding_metadata({tensor_name: 0})
        files[file_name] = _write_file(
            folder / file_name, {tensor_name: shape}, metadata, _ordered(parts, vocabulary)
        )
        written[tensor_name] = TableInfo("F32", shape, [PieceInfo(file_name, 0, (0, shape[0]))])
    if foreign.shared:
        shapes = {name: values.shape for name, values in foreign.shared.items()}
        files[SHARED_FILE] = _write_file(folder / SHARED_FILE, shapes, {}, _shared_blocks(foreign.shared))
    manifest = Manifest(
        format="kgshard.checkpoint/1",
        run_id=info.id,
        vocabulary_sha256=info.vocabulary_sha256,
        step=0,
        epoch=0,
        world_size=1,
        model=info.model,
        tables=written,
        files=files,
        shared={name: list(values.shape) for name, values in foreign.shared.items()},
    )
    write_json(folder / MANIFEST_FILE, manifest)


def _relation_parts(foreign: ForeignModel, order: _Rows) -> list[_Part]:
    """Return where relations are, and behind them their inverses.

    Args:
        foreign: The model.
        order: int64[R], the foreign number of each of our relations.
    """
    taken = np.arange(len(foreign.relations)) if foreign.relation_rows is None else foreign.relation_rows
    rows = np.asarray(taken, np.int64)
    parts = [_Part(foreign.relations, rows[order], foreign.convert)]
    if foreign.inverses is not None:
        parts.append(_Part(foreign.inverses, order, foreign.convert))
    elif foreign.reciprocal:
        parts.append(_Part(foreign.relations, rows[order + len(order)], foreign.convert))
    return parts


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    metadata: dict[str, str],
    blocks: Iterator[memoryview],
) -> FileInfo:
    """Write a safetensors file of float32."""
    header = header_bytes({name: ("F32", shape) for name, shape in shapes.items()}, metadata)
    with replacing(path) as temporary, temporary.open("wb") as file:
        size, digest = write_blocks(file, _written_back(file, chain([header], blocks)))
    return FileInfo(size, digest)


def _written_back(file: BinaryIO, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield blocks that are written to a file, and let the disk begin with each before the next is made."""
    for block in blocks:
        position = file.tell()
        yield block
        file.flush()
        start_writeback(file, position, len(block))


def _ordered(parts: Sequence[_Part], vocabulary: Vocabulary) -> Iterator[memoryview]:
    """Yield the rows of all parts as float32 in C order, however they lie in memory, some rows at a time."""
    first = 0
    for part in parts:
        size = max(1, _BLOCK_BYTES // (4 * part.table.shape[1]))
        ahead = ReadAhead.of(part.table)
        for start in range(0, len(part.rows), size):
            rows = part.rows[start : start + size]
            ahead.ask_for(rows)
            block = _as_float32(part.convert(part.table[rows]))
            found = first_non_finite(block)
            if found is not None:
                name = vocabulary.row_name(first + start + found)
                raise NonFiniteError(f"{name} is not finite; no run was written")
            yield block.reshape(-1).view(np.uint8).data
        first += len(part.rows)


def _shared_blocks(shared: Mapping[str, ForeignFloats]) -> Iterator[memoryview]:
    for name, values in shared.items():
        block = _as_float32(values)
        if not np.isfinite(block).all():
            raise NonFiniteError(f"shared parameter {name!r} is not finite; no run was written")
        yield block.reshape(-1).view(np.uint8).data


def _as_float32(values: ForeignFloats) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # What no float32 can say becomes infinite, and is refused as that.
        return np.ascontiguousarray(values, "<f4")
