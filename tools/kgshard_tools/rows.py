"""Stored rows on their way into files: as they are stored, or scaled and rounded, block by block.

Shape letters: B rows of a block, D values of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from kgshard.errors import ConfigError, NonFiniteError, ShardError
from kgshard.files import copy_bytes, start_writeback
from kgshard.shards import (
    ITEM_BYTES,
    TABLE_DTYPES,
    Floats,
    StoredTable,
    TensorInfo,
    first_non_finite,
    header_bytes,
    narrow,
    widen,
)

METADATA = {"format": "pt"}
"""What torch and the Hugging Face libraries look for in a file."""
BLOCK_ROWS = 8192
_BLOCK_VALUES = 1 << 20
DTYPES = {name: stored for stored, (_, name) in TABLE_DTYPES.items()}
"""What tables may be written as: torch's name to that of safetensors."""
Advance = Callable[[int], None]
"""Told how many bytes more are done."""
Ids = range | npt.NDArray[np.int64]


def no_progress(num_bytes: int) -> None:
    """Tell nobody."""


class Part(Protocol):
    """What can become a tensor of a file."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def write(self, file: BinaryIO) -> None:
        """Append the values to an open file, in C order, little-endian."""


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Some rows of a stored table, as they are written elsewhere."""

    table: StoredTable
    ids: Ids
    """Rows of the table, in the order they are written in."""
    dtype: str
    """What is written, as safetensors spells it."""
    normalize: bool = False
    """Whether rows are scaled to a 2-norm of 1."""
    row_name: Callable[[int], str] = "row {}".format
    """Names a row of the table for people."""
    advance: Advance = no_progress

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        return self.table.dim

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.ids), self.table.dim

    @property
    def as_stored(self) -> bool:
        """Whether the bytes that are written are those that are stored, in their order."""
        return isinstance(self.ids, range) and self.dtype == self.table.dtype and not self.normalize

    def write(self, file: BinaryIO) -> None:
        """Append the values to an open file, in C order, little-endian.

        What is written as it is stored goes from file to file, and no row passes through this process.
        """
        if self.as_stored:
            assert isinstance(self.ids, range)
            for path, offset, length in self.table.byte_ranges(self.ids):
                with path.open("rb") as source:
                    copy_bytes(source, offset, length, file, self.advance)
            return
        position = file.tell()
        for _, stored in self._stored_blocks(self.block_size()):
            file.write(stored.data)
            start_writeback(file, position, stored.nbytes)
            position += stored.nbytes

    def block_size(self, num_values: int = _BLOCK_VALUES) -> int:
        """Return how many rows make a block of about so many values."""
        return max(1, min(BLOCK_ROWS, num_values // max(1, self.dim)))

    def blocks(self, size: int | None = None) -> Iterator[tuple[range, Floats]]:
        """Yield float32[B, D] in order, each with its positions among these rows.

        Values are scaled, and rounded to `dtype`, as they will be written. No more than a block stays in
        memory, however many were read.

        Args:
            size: B at most; by default `block_size()`.

        Raises:
            NonFiniteError: A row is not finite.
            ConfigError: A row has no direction to be normalised, or a value is beyond what `dtype` holds.
        """
        for block, stored in self._stored_blocks(size or self.block_size()):
            yield block, widen(stored, self.dtype)

    def _stored_blocks(self, size: int) -> Iterator[tuple[range, npt.NDArray[Any]]]:
        """Yield [B, D] as it is written, in C order."""
        for start in range(0, len(self), size):
            block = range(start, min(start + size, len(self)))
            yield block, self._stored(self.ids[block.start : block.stop])
            self.table.release()
            self.advance(len(block) * self.dim * ITEM_BYTES[self.dtype])

    def _stored(self, ids: Ids) -> npt.NDArray[Any]:
        values = self.table.read(ids) if isinstance(ids, range) else self.table.gather(ids)
        bad = first_non_finite(values)
        if bad is not None:
            raise NonFiniteError(f"{self.row_name(int(ids[bad]))} is not finite")
        if self.normalize:
            values = self._unit_length(values, ids)
        stored = np.ascontiguousarray(narrow(values, self.dtype))
        if self.dtype != "F32":
            self._check_holds(values, stored, ids)
        return stored

    def _unit_length(self, values: Floats, ids: Ids) -> Floats:
        lengths = np.sqrt(np.einsum("bd,bd->b", values, values, dtype=np.float64))
        if not lengths.all():
            name = self.row_name(int(ids[int(np.argmin(lengths))]))
            raise ConfigError(f"--normalize: {name} is all zeros, which has no direction")
        scaled: Floats = (values / lengths[:, None]).astype(np.float32)
        return scaled

    def _check_holds(self, values: Floats, stored: npt.NDArray[Any], ids: Ids) -> None:
        """Raise ConfigError where a finite value was rounded to infinity."""
        is_half = self.dtype == "F16"
        finite = (np.isfinite(stored) if is_half else (stored & 0x7F80) != 0x7F80).all(axis=1)
        if not finite.all():
            bad = int(np.argmin(finite))
            raise ConfigError(
                f"{self.row_name(int(ids[bad]))} holds {np.abs(values[bad]).max():g}, "
                f"which {TABLE_DTYPES[self.dtype][1]} cannot; use --dtype float32"
            )


@dataclass(frozen=True)
class Values:
    """A few values that are in memory anyway, such as a parameter that all rows share."""

    array: Floats
    dtype: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def write(self, file: BinaryIO) -> None:
        file.write(np.ascontiguousarray(self.array, "<f4").data)


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of a file, written as it is stored."""

    path: Path
    info: TensorInfo

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def write(self, file: BinaryIO) -> None:
        with self.path.open("rb") as source:
            copy_bytes(source, self.info.offset, self.info.num_bytes, file)


def as_stored(table: StoredTable, rows: range | None = None, advance: Advance = no_progress) -> StoredRows:
    """Return rows of a table (all by default) to be written as they are stored."""
    rows = rows if rows is not None else range(table.num_rows)
    return StoredRows(table=table, ids=rows, dtype=table.dtype, advance=advance)


def num_bytes(part: Part) -> int:
    """Return how many bytes a tensor takes."""
    return ITEM_BYTES[part.dtype] * math.prod(part.shape)


def shared_parts(shared: Mapping[str, Floats]) -> dict[str, Part]:
    """Return the parameters that all rows share by the names that they have beside tables."""
    return {f"shared.{name}": Values(values) for name, values in shared.items()}


def write_safetensors(path: Path, parts: Mapping[str, Part], metadata: Mapping[str, str] = METADATA) -> None:
    """Fill a temporary file of the caller's with tensors.

    Raises:
        ShardError: The safetensors package, which users will read the file with, sees something else in it.
    """
    # Wide numbers first, as that package has it: so all lie where they can be mapped.
    parts = dict(sorted(parts.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))
    with path.open("wb") as file:
        header = {name: (part.dtype, part.shape) for name, part in parts.items()}
        file.write(header_bytes(header, dict(metadata)))
        for part in parts.values():
            part.write(file)
    _check_readable(path, {name: part.shape for name, part in parts.items()})


def _check_readable(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    with safe_open(path, framework="numpy") as file:
        for name, shape in shapes.items():
            if tuple(file.get_slice(name).get_shape()) != tuple(shape):
                raise ShardError(f"{path}: safetensors does not read {name} as {list(shape)}")
