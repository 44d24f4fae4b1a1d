"""A run folder made of a foreign model: it evaluates, merges, exports and indexes as a trained one does.

Foreign rows are in foreign order, and kgshard's follow the hash of their labels. They are put in order
block by block, so memory holds labels and ids but no second table. The run appears whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kgshard.data.prepare import Numbered, Renumbered, prepare_numbered
from kgshard.errors import ConfigError, DataError, NonFiniteError
from kgshard.files import AnyPath, replacing, write_json, write_text
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

_BLOCK_BYTES = 1 << 22
_Rows = npt.NDArray[np.int64]


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
    relation_rows = len(foreign.relation_labels) * (2 if foreign.reciprocal else 1)
    tables = (
        ("entity", foreign.entities, len(foreign.entity_labels)),
        ("relation", foreign.relations, relation_rows),
    )
    for kind, table, num_rows in tables:
        if table.ndim != 2 or len(table) != num_rows or not num_rows:
            raise DataError(
                f"{foreign.program}: the {kind} table is {list(table.shape)}, with {num_rows} labels"
            )
        if table.dtype.kind != "f":
            raise DataError(f"{foreign.program}: the {kind} table holds {table.dtype}, expected floats")
    model = _link_model(foreign)
    if foreign.relations.shape[1] != model.relation_dim:
        raise DataError(
            f"{foreign.program}: relation rows have {foreign.relations.shape[1]} floats; {model.name} of dim "
            f"{model.dim} has {model.relation_dim}"
        )
    wanted = {name: how.shape for name, how in model.scoring.shared_init(model.dim).items()}
    found = {name: values.shape for name, values in foreign.shared.items()}
    if found != wanted:
        raise DataError(f"{foreign.program}: shared parameters are {found}; {model.name} has {wanted}")


def _known_settings(model: LinkModel) -> dict[str, object]:
    """Return the settings that a model shows; how it was trained its program alone knows."""
    return {
        "model": model.name,
        "dim": model.dim,
        "corruption": "reciprocal" if model.reciprocal else "both-sides",
    }


def _import_info(foreign: ForeignModel) -> ImportInfo:
    decisions = list(foreign.decisions)
    for kind, table in (("entity", foreign.entities), ("relation", foreign.relations)):
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
    dataset, relation_rows = renumbered.dataset, renumbered.relation_rows
    if foreign.reciprocal:
        relation_rows = np.concatenate([relation_rows, relation_rows + len(relation_rows)])
    tables = (
        (ENTITIES, shard_name(0, 1), foreign.entities, renumbered.entity_rows, dataset.entities),
        (RELATIONS, RELATION_FILE, foreign.relations, relation_rows, dataset.relations),
    )
    written, files = {}, {}
    for tensor_name, file_name, table, rows, vocabulary in tables:
        blocks = _ordered(table, rows, vocabulary)
        shape = len(rows), table.shape[1]
        files[file_name] = _write_file(
            folder / file_name, {tensor_name: shape}, sharding_metadata({tensor_name: 0}), blocks
        )
        written[tensor_name] = TableInfo("F32", shape, [PieceInfo(file_name, 0, (0, len(rows)))])
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


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    metadata: dict[str, str],
    blocks: Iterator[memoryview],
) -> FileInfo:
    """Write a safetensors file of float32."""
    header = header_bytes({name: ("F32", shape) for name, shape in shapes.items()}, metadata)
    with replacing(path) as temporary, temporary.open("wb") as file:
        size, digest = write_blocks(file, chain([header], blocks))
    return FileInfo(size, digest)


def _ordered(table: ForeignFloats, rows: _Rows, vocabulary: Vocabulary) -> Iterator[memoryview]:
    """Yield table[rows] as float32 in C order, however the table lies in memory, some rows at a time."""
    size = max(1, _BLOCK_BYTES // (4 * table.shape[1]))
    for start in range(0, len(rows), size):
        block = _as_float32(table[rows[start : start + size]])
        found = first_non_finite(block)
        if found is not None:
            raise NonFiniteError(f"{vocabulary.row_name(start + found)} is not finite; no run was written")
        yield block.reshape(-1).view(np.uint8).data


def _shared_blocks(shared: Mapping[str, ForeignFloats]) -> Iterator[memoryview]:
    for name, values in shared.items():
        block = _as_float32(values)
        if not np.isfinite(block).all():
            raise NonFiniteError(f"shared parameter {name!r} is not finite; no run was written")
        yield block.reshape(-1).view(np.uint8).data


def _as_float32(values: ForeignFloats) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # What no float32 can say becomes infinite, and is refused as that.
        return np.ascontiguousarray(values, "<f4")
