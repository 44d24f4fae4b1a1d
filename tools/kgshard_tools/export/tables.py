"""What a format is given: rows and labels in their order, block by block, in the form that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.shards import Floats
from kgshard_tools.rows import Ids, StoredRows
from kgshard_tools.stored import Stored

TABLES = ("entities", "relations", "inverse_relations")
"""What there is to export, by the names of files; the last with reciprocal relations only."""
LabelEscape = Literal["refuse", "percent", "underscore"]


@dataclass(frozen=True, kw_only=True)
class Rows(StoredRows):
    """Rows with their labels."""

    vocabulary: Path
    """The Parquet file of their labels; see kgshard.vocabulary."""
    label_ids: Ids
    """Rows of the vocabulary: those of `ids`, but for inverse relations."""

    @cached_property
    def all_labels(self) -> bool:
        """Whether the labels are the whole vocabulary, in its order."""
        num_labels: int = pq.read_metadata(self.vocabulary).num_rows
        return self.label_ids == range(num_labels) if isinstance(self.label_ids, range) else False

    def part(self, positions: range) -> Rows:
        """Return some of these rows, consecutive ones."""
        here = slice(positions.start, positions.stop)
        return replace(self, ids=self.ids[here], label_ids=self.label_ids[here])

    def labels(self, size: int | None = None) -> Iterator[list[str]]:
        """Yield the labels in the order of the rows, in the same blocks as `blocks(size)`."""
        for columns in self.columns(["label"], size):
            yield columns.column("label").to_pylist()

    def columns(self, names: list[str], size: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield columns of the vocabulary (label, kind, degree) in the same blocks as `blocks(size)`."""
        size = size or self.block_size()
        if isinstance(self.label_ids, range):
            yield from _consecutive(self.vocabulary, self.label_ids, names, size)
            return
        table = pq.read_table(self.vocabulary, columns=names, memory_map=True)
        for start in range(0, len(self), size):
            yield _batch(table.take(pa.array(self.label_ids[start : start + size])))


def _consecutive(path: Path, wanted: range, names: list[str], size: int) -> Iterator[pa.RecordBatch]:
    """Yield columns of consecutive rows of a Parquet file; only row groups that hold some are read."""
    with pq.ParquetFile(path) as file:
        held, position = pa.Table.from_batches([], file.schema_arrow).select(names), 0
        for index in range(file.num_row_groups):
            count = file.metadata.row_group(index).num_rows
            start, stop = max(wanted.start, position), min(wanted.stop, position + count)
            if start < stop:
                group = file.read_row_group(index, columns=names)
                held = pa.concat_tables([held, group.slice(start - position, stop - start)])
            while len(held) >= size:
                yield _batch(held.slice(0, size))
                held = held.slice(size)
            position += count
        if len(held):
            yield _batch(held)


def _batch(table: pa.Table) -> pa.RecordBatch:
    return table.combine_chunks().to_batches()[0]


@dataclass
class Export:
    """Everything that a format may need, and where it leaves word of what it did."""

    stored: Stored
    entities: Rows
    relations: Rows
    """The graph's relations."""
    inverses: Rows | None
    """Row r is the inverse of relation r: (?, r, t) is asked as (t, inverse of r, ?)."""
    label_escape: LabelEscape = "refuse"
    notes: list[str] = field(default_factory=list)
    """What people should know: what was widened, rounded, escaped or left out."""
    config: dict[str, Any] = field(default_factory=dict)
    """More for config.json, which says how to read the files."""

    @property
    def tables(self) -> dict[str, Rows]:
        """What there is of TABLES, in their order."""
        every = zip(TABLES, (self.entities, self.relations, self.inverses), strict=True)
        return {name: rows for name, rows in every if rows is not None}

    @property
    def shared(self) -> dict[str, Floats]:
        """The parameters that all rows share, float32, by name."""
        return self.stored.checkpoint.shared

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)
