"""Every value of a file: numbers must be finite. In blocks; memory does not grow with the file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.errors import NonFiniteError, RunError, ShardError
from kgshard.runs import Checkpoint, Run
from kgshard.shards import (
    ENTITIES,
    RELATIONS,
    StoredTable,
    TensorInfo,
    find_non_finite,
    first_non_finite,
    read_header,
    widen,
)
from kgshard_tools.artefacts import Kind
from kgshard_tools.headers import read_array_header, read_index_header, read_parquet_header

RowName = Callable[[str, int], str]
"""Names a row of a tensor, for messages."""

_BLOCK_VALUES = 1 << 20
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def plain_row(tensor: str, row: int) -> str:
    """Name a row where nobody knows its label."""
    return f"row {row} of {tensor}"


def check_file(kind: Kind, path: Path, *, deep: bool, row_name: RowName = plain_row) -> None:
    """Check the header of a single file, and with `deep` its values.

    Raises:
        ShardError: It is damaged, or holds NaN or infinity.
        RunError: It is of a kind that kgshard does not open.
    """
    if kind == "safetensors":
        tensors, _ = read_header(path)
        for name, tensor in tensors.items() if deep else ():
            _check_tensor(path, name, tensor, row_name)
    elif kind == "npy":
        array = read_array_header(path)
        if deep and array.dtype[1] == "f":
            shape = array.shape[::-1] if array.fortran_order else array.shape
            _check_floats(path, path.stem, array.offset, array.dtype, shape, row_name)
    elif kind == "parquet":
        read_parquet_header(path)
        if deep:
            _check_columns(path)
    elif kind == "faiss":
        check_index_values(path, row_name) if deep else read_index_header(path)
    else:
        raise RunError(f"{path}: is a pickle or holds one, which kgshard does not open; nothing was checked")


def _check_tensor(path: Path, name: str, tensor: TensorInfo, row_name: RowName) -> None:
    if tensor.dtype in _FLOATS:
        _check_floats(path, name, tensor.offset, tensor.dtype, tensor.shape, row_name)


def _check_floats(
    path: Path, name: str, offset: int, dtype: str, shape: tuple[int, ...], row_name: RowName
) -> None:
    """Raise ShardError where values [rows, ...] that lie at `offset` are not all finite."""
    rows = shape[0] if shape else 1
    width = math.prod(shape[1:])
    if not rows * width:
        return
    kind, size = np.dtype(_FLOATS.get(dtype, dtype)), max(1, _BLOCK_VALUES // width)
    for start in range(0, rows, size):
        # Mapped anew for each block, so that no more than a block stays in memory.
        place, shape = offset + start * width * kind.itemsize, (min(size, rows - start), width)
        stored = np.memmap(path, kind, "r", place, shape)
        bad = first_non_finite(widen(stored, dtype) if dtype == "BF16" else stored)
        if bad is not None:
            raise ShardError(f"{path}: {row_name(name, start + bad)} is not finite", file=str(path))


def _check_columns(path: Path) -> None:
    """Read all of a Parquet file; numbers in it, or in lists in it, must be finite."""
    try:
        with pq.ParquetFile(path) as file:
            row_bytes = sum(
                file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)
            ) / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(max(1, int(4 * _BLOCK_VALUES / max(1.0, row_bytes)))):
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if not _is_finite(column):
                        reason = f"column {name} holds a value that is not finite"
                        raise ShardError(f"{path}: {reason}", file=str(path))
    except (OSError, UnicodeError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0][:300]
        raise ShardError(f"{path}: cannot be read: {reason}", file=str(path)) from error


def _is_finite(values: pa.Array) -> bool:
    """Whether all numbers in a column are finite, in whatever lists, maps and structures they lie."""
    kind = values.type
    if pa.types.is_floating(kind):
        return bool(np.isfinite(values.drop_null().to_numpy(zero_copy_only=False)).all())
    if pa.types.is_map(kind):
        return _is_finite(values.keys) and _is_finite(values.items)
    if pa.types.is_struct(kind):
        return all(map(_is_finite, values.flatten()))
    return _is_finite(values.flatten()) if pa.types.is_nested(kind) and hasattr(values, "flatten") else True


def check_index_values(path: Path, row_name: RowName = plain_row, first_row: int = 0) -> None:
    """Read every vector of a flat FAISS index from a given row on. Of other types only the header is known.

    Raises:
        ShardError: It is damaged, or holds NaN or infinity.
    """
    header = read_index_header(path)
    if header.offset is not None:
        shape = (header.rows, header.dim)
        _check_floats(
            path, ENTITIES, header.offset, "F32", shape, lambda name, row: row_name(name, first_row + row)
        )


def check_lone_index(path: Path) -> str:
    """Check an index that no record knows, and return what it is, in words.

    A flat one is read here, every value. Of others only FAISS knows the inside: a process with limits reads
    and searches it, which must end well.

    Raises:
        ShardError: It is damaged, holds NaN or infinity, or FAISS cannot use it within its limits.
    """
    check_index_values(path)
    header = read_index_header(path)
    if header.offset is None:
        from kgshard_tools.index.foreign import describe_foreign

        found = describe_foreign(path)
        if (found.rows, found.dim) != (header.rows, header.dim):
            ours, theirs = f"{header.rows} x {header.dim}", f"{found.rows} x {found.dim}"
            raise ShardError(f"{path}: its header says {ours}, FAISS finds {theirs}", file=str(path))
    return f"{header.type}, {header.rows} x {header.dim}, {header.metric}"


def check_checkpoint_values(checkpoint: Checkpoint, row_name: RowName) -> None:
    """Read every value of a checkpoint.

    Raises:
        ShardError: One is not finite; names entity, label, file and rank.
    """
    tables = [checkpoint.entities, checkpoint.relations, *checkpoint.optimizer_tables.values()]
    for table in tables:
        row = find_non_finite(table)
        if row is not None:
            _refuse_row(table, row, row_name)
    try:
        checkpoint.shared  # noqa: B018 - they are read, and must be finite
    except NonFiniteError as error:
        raise ShardError(str(error)) from error


def _refuse_row(table: StoredTable, row: int, row_name: RowName) -> None:
    piece = next(piece for piece in table.pieces if row in piece.rows)
    raise ShardError(
        f"{piece.path}: {row_name(table.name, row)} is not finite (rank {piece.rank})",
        file=str(piece.path),
        rank=piece.rank,
    )


def names_of(run: Run | None) -> RowName:
    """Return what names rows of a run's tables by their labels, or only by number where there is no run."""
    if run is None:
        return plain_row

    def name(tensor: str, row: int) -> str:
        for table, labels in ((ENTITIES, run.dataset.entities), (RELATIONS, run.dataset.relations)):
            if tensor.startswith(table) and len(labels):
                of = "" if tensor == table else f"{tensor.removeprefix(table + '.')} of "
                return of + labels.row_name(row)
        return plain_row(tensor, row)

    return name
