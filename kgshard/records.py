"""The JSON files that kgshard writes, field by field. Reading one checks every field's type.

data.json        DatasetInfo       RUN/run.json        RunInfo
manifest.json    Manifest          index/index.json    IndexFile
overlay.json     OverlayInfo
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from kgshard.files import file_sha256


class SplitInfo(Struct, frozen=True):
    """What became of one file: lines = triples + duplicates + blank + unknown."""

    triples: int
    source: str | None = None
    """File name; None where there was no such file."""
    sha256: str | None = None
    lines: int = 0
    duplicates: int = 0
    blank: int = 0
    unknown: int = 0
    """Triples left out, since they name what an imported model has no row for."""
    unit: Literal["lines", "rows"] = "lines"
    """What `lines` counts: those of a text, or the rows of an array."""

    def words(self) -> str:
        """Say what became of every line."""
        parts = [f"{self.triples:,} triples", f"{self.duplicates:,} duplicates"]
        if self.unit == "lines":
            parts.append(f"{self.blank:,} blank")
        if self.unknown:
            parts.append(f"{self.unknown:,} left out")
        return f"{self.lines:,} {self.unit} = {' + '.join(parts)}"


class DatasetInfo(Struct, frozen=True):
    """A prepared dataset."""

    format: Literal["kgshard.data/1"]
    name: str
    num_entities: int
    num_relations: int
    splits: dict[str, SplitInfo]
    unseen_in_train: dict[str, int]
    """Split to the number of its triples that name an entity which train does not."""
    vocabulary_sha256: str
    """Over both vocabularies: it differs where a label or an id does."""
    not_read: list[str] = []
    """Names of files beside the sources that nobody read."""
    files: dict[str, FileInfo] = {}
    """Every other file of the dataset by name."""

    def lines(self) -> list[str]:
        """Say in words what became of every line of every file."""
        lines = [f"{self.num_entities:,} entities, {self.num_relations:,} relations"]
        for split, counts in self.splits.items():
            if counts.source is not None:
                lines.append(f"{split}: {counts.words()}")
        if self.not_read:
            lines.append(f"not read: {', '.join(self.not_read)}")
        return lines


class ImportInfo(Struct, frozen=True):
    """Where a run comes from that kgshard did not train."""

    program: str
    files: list[str]
    """Names of the files that were read."""
    decisions: list[str]
    """What was decided about their layout."""


class RunInfo(Struct, frozen=True):
    """A run."""

    format: Literal["kgshard.run/1"]
    id: str
    """Random; every checkpoint and index of the run carries it."""
    data: str
    """Name of the dataset."""
    vocabulary_sha256: str
    model: dict[str, Any]
    """See `LinkModel.to_dict`."""
    config: dict[str, Any]
    """See `TrainConfig.to_dict`. Of an imported run only what is known: model, dim and corruption."""
    versions: dict[str, str]
    """Package to version."""
    imported: ImportInfo | None = None
    """None where kgshard trained the run itself."""


class PieceInfo(Struct, frozen=True):
    """Some rows of a table, in one file of the checkpoint."""

    file: str
    rank: int
    rows: tuple[int, int]
    """First row, and the row after the last."""


class TableInfo(Struct, frozen=True):
    """One table of a checkpoint."""

    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, int]
    pieces: list[PieceInfo]
    """In row order."""


class OptimizerInfo(Struct, frozen=True):
    """The optimizer's state in a checkpoint: its tables are cut into the rows that the parameters are."""

    name: str
    """A name of kgshard.config.OPTIMIZER_NAMES."""
    num_steps: int
    tables: dict[str, TableInfo] = {}
    """By name: "entity_embedding.weight.sum" is the optimizer's `sum` of the entity table."""
    shared: dict[str, list[int]] = {}
    """Shapes of the state of the parameters that all rows share, by name."""


class FileInfo(Struct, frozen=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


def describe_file(path: Path) -> FileInfo:
    """Return what a record says of a file: its length and SHA-256."""
    return FileInfo(path.stat().st_size, file_sha256(path))


class ListedFile(Struct, frozen=True):
    """What a folder's record may say of a file beside it."""

    bytes: int
    sha256: str | None = None
    """Where it was asked for."""


class Listing(Struct, frozen=True):
    """What any record may say of the files beside it, by their paths from there."""

    files: dict[str, ListedFile] = {}


class Manifest(Struct, frozen=True):
    """A checkpoint: the only source of order and of truth."""

    format: Literal["kgshard.checkpoint/1"]
    run_id: str
    vocabulary_sha256: str
    step: int
    """Batches trained on."""
    epoch: int
    """Epochs finished."""
    world_size: int
    model: dict[str, Any]
    tables: dict[str, TableInfo]
    files: dict[str, FileInfo]
    shared: dict[str, list[int]] = {}
    """Shapes of the parameters that all rows share, by name."""
    optimizer: OptimizerInfo | None = None
    """None where it was not saved."""


class IndexPart(Struct, frozen=True):
    """A file of an index, which holds some rows of the table."""

    file: str
    rows: tuple[int, int]
    """The first, and one beyond the last."""
    bytes: int
    sha256: str


class RecallPoint(Struct, frozen=True):
    """What an index gives with one way to search it, on queries it was tuned with."""

    search: dict[str, int]
    """`nprobe` lists or `ef` nodes, and `depth`: candidates scored again for each answer."""
    recall: dict[str, float]
    """Recall at 10 by side ("tail", "head"), or of "neighbors"."""
    queries_per_second: float


class GroupRecall(Struct, frozen=True):
    """Recall of the questions about one relation."""

    side: str
    relation: str
    queries: int
    recall: float


class RecallInfo(Struct, frozen=True):
    """How many of the true best an approximate index finds, measured on this table."""

    at: int
    """k: recall at k."""
    target: float
    measured: dict[str, float]
    """By side, with the chosen way to search, on queries that it was not tuned with."""
    queries: int
    """For each side."""
    seed: int
    flat_queries_per_second: float
    """Of the exact scan, on the same queries."""
    queries_per_second: float
    curve: list[RecallPoint]
    lowest: list[GroupRecall] = []
    """The relations with the lowest recall, of those with five queries or more."""


class IndexInfo(Struct, frozen=True):
    """One FAISS index of a run."""

    type: str
    exact: bool
    metric: Literal["dot", "l2", "l1", "moduli", "hyperplane"]
    """A name of kgshard.models.metric.METRICS."""
    transform: Literal["none", "unit length", "candidates"]
    """What was done to rows before they were added: "candidates" is what the model makes of them."""
    rows: int
    dim: int
    """Floats for each vector in the index."""
    longest: float
    """The largest 2-norm of such a vector."""
    model: str
    run_id: str
    step: int
    vocabulary_sha256: str
    parts: list[IndexPart]
    built_with: dict[str, int] = {}
    """What its structure was built with: lists, links of a node, rows it was trained on, seed."""
    search: dict[str, int] = {}
    """How it is searched; see RecallPoint. Nothing where it is exact."""
    recall: RecallInfo | None = None
    """None where it is exact."""

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


class IndexFile(Struct, frozen=True):
    """All indexes of a run, by what they are for."""

    format: Literal["kgshard.index/1"] = "kgshard.index/1"
    indexes: dict[str, IndexInfo] = {}
    labels: FileInfo | None = None
    """labels.sqlite, where it was built."""


class OverlayInfo(Struct, frozen=True):
    """Entities that were added to a trained run: rows fitted to their triples, everything else frozen."""

    format: Literal["kgshard.overlay/1"]
    run_id: str
    step: int
    """Of the checkpoint that the rows were fitted to."""
    vocabulary_sha256: str
    """The run's own, without the added entities."""
    model: str
    approximate: Literal[True]
    """No row of an overlay was trained."""
    first_id: int
    """The id of the first added entity: as many as the run has."""
    num_entities: int
    """Added."""
    dim: int
    settings: dict[str, int | str]
    """How the rows were found."""
    counts: dict[str, int]
    """What became of the lines read: lines = triples + duplicates + blank + known, the last of which name
    no new entity."""
    files: dict[str, FileInfo]
    """Every other file of the overlay by name."""
