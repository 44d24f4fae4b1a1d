"""What foreign programs keep as text: numbered labels, and splits of labelled triples.

Labels are taken byte for byte: lines end with LF or CR LF, nothing is quoted, trimmed, or taken for a
missing value.

Letters: N rows of a table, T triples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.data.dataset import SPLITS, Dataset, open_dataset
from kgshard.data.prepare import Origin
from kgshard.data.readers import COLUMNS, TripleBlock, read_triples
from kgshard.data.sources import find_source
from kgshard.errors import DataError
from kgshard.files import file_sha256

_Rows: TypeAlias = npt.NDArray[np.int64]
_UNKNOWN = -1
_MAX_DIGITS = 19
_MARK = "\ufeff"
"""The byte order mark that some editors begin a text with."""


@dataclass(frozen=True)
class Splits:
    """Labelled triples by the rows of foreign tables."""

    triples: dict[str, _Rows]
    """Split to int64[T, 3]."""
    files: list[Path]
    notes: list[str] = field(default_factory=list)
    """What was left out, one line each."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """What else was in the file of each split."""


def read_numbered_labels(path: Path, delimiter: str = "\t") -> list[str]:
    """Return the labels of `id TAB label` lines, by id; ids may come in any order.

    Args:
        path: The file.
        delimiter: What is between id and label.

    Raises:
        DataError: A line is not of that form, or the ids are not 0..N-1, each once.
    """
    labels: dict[int, str] = {}
    for number, line in enumerate(_lines(path), start=1):
        id_text, found, label = line.partition(delimiter)
        if not (found and label and id_text.isascii() and id_text.isdigit() and len(id_text) < _MAX_DIGITS):
            between = "TAB" if delimiter == "\t" else repr(delimiter)
            raise DataError(f"{path}:{number}: expected a number, {between} and a label, got {line!r}")
        row = int(id_text)
        if row in labels:
            raise DataError(f"{path}:{number}: number {id_text} occurs twice")
        labels[row] = label
    return in_order(labels, path)


def in_order(labels: Mapping[int, str], path: Path) -> list[str]:
    """Return labels by id.

    Raises:
        DataError: The ids are not 0..N-1.
    """
    try:
        return [labels[number] for number in range(len(labels))]
    except KeyError as error:
        raise DataError(f"{path}: {len(labels)} labels, but none has number {error}") from None


def read_escaped_labels(path: Path) -> list[str]:
    r"""Return one label a line, newline written \n and backslash \\, as our exports write them."""
    return [_unescaped(line, f"{path}:{number}") for number, line in enumerate(_lines(path, cr=False), 1)]


def read_line_labels(path: Path) -> list[str]:
    """Return one label a line, as `read_escaped_labels`, of somebody else's file.

    A byte order mark is dropped, and a CR at the end of every line is part of the lines' ends.
    """
    labels = read_escaped_labels(path)
    if labels and all(label.endswith("\r") for label in labels):
        labels = [label.removesuffix("\r") for label in labels]
    return [label.removeprefix(_MARK) if row == 0 else label for row, label in enumerate(labels)]


def read_parquet_labels(path: Path) -> list[str]:
    """Return the column `label` of a Parquet file; a column `id` must count 0..N-1.

    Raises:
        DataError: It is no such file.
    """
    try:
        table = pq.read_table(path, memory_map=True)
        labels: list[str | None] = table["label"].cast(pa.large_string()).to_pylist()
        ids = table["id"].to_numpy() if "id" in table.column_names else np.arange(len(labels))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{path}: no table of labels: {error}") from error
    if not np.array_equal(ids, np.arange(len(labels))):
        raise DataError(f"{path}: ids must be 0..{len(labels) - 1}, in order")
    if None in labels:
        raise DataError(f"{path}: row {labels.index(None)} has no label")
    return [label for label in labels if label is not None]


def _lines(path: Path, *, cr: bool = True) -> Iterator[str]:
    """Yield the lines of a UTF-8 file.

    Args:
        path: The file.
        cr: Whether a CR before the LF belongs to the line's end, and a byte order mark to nothing.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8: {error}") from error
    if cr:
        text = text.removeprefix(_MARK)
    for line in text.removesuffix("\n").split("\n") if text else []:
        yield line.removesuffix("\r") if cr else line


def _unescaped(line: str, where: str) -> str:
    def meant(found: re.Match[str]) -> str:
        if found[0] not in ("\\n", "\\\\"):
            raise DataError(f"{where}: {found[0]!r} is no escape; expected \\n or \\\\")
        return "\n" if found[0] == "\\n" else "\\"

    return re.sub(r"\\.?", meant, line)


def read_splits(
    folder: Path,
    entities: Sequence[str],
    relations: Sequence[str],
    *,
    order: str = "hrt",
    partial: bool = False,
) -> Splits:
    """Read the triples of a folder by the rows of a foreign model.

    Valid and test triples that name what the model has no row for are left out, and counted.

    Args:
        folder: With train, valid and test files, or a prepared dataset.
        entities: Label i belongs to row i.
        relations: The same of relations.
        order: In which order head, relation and tail are on a line of a text.
        partial: Whether the model is known to lack rows: then train triples may be left out too.

    Raises:
        DataError: It is no such folder, or train names what the model has no row for.
    """
    source = find_source(folder)
    rows = _RowLookup(entities), _RowLookup(relations)
    if isinstance(source, Path):
        return _prepared_splits(open_dataset(source), *rows, partial=partial)
    splits = Splits({}, list(source.files.values()))
    for split, path in source.files.items():
        given = _read_file(path, *rows, order=order)
        triples = _keep_known(splits, split, given, partial=partial)
        unknown = len(given.rows) - len(triples)
        splits.triples[split] = triples
        splits.origins[split] = Origin(path.name, file_sha256(path), given.num_blank, unknown, "lines")
    return splits


class _RowLookup:
    """Looks up the rows of labels."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._rows = {label: row for row, label in enumerate(labels)}

    def __call__(self, labels: Sequence[str]) -> _Rows:
        """Return int64[I]; -1 where a label is unknown."""
        return np.array([self._rows.get(label, _UNKNOWN) for label in labels], np.int64)

    def of_column(self, column: pa.Array) -> _Rows:
        encoded = column.dictionary_encode()
        rows: _Rows = self(encoded.dictionary.to_pylist())[encoded.indices.to_numpy(zero_copy_only=False)]
        return rows


@dataclass(frozen=True, slots=True)
class _Given:
    """A split as it was given."""

    path: Path
    rows: _Rows
    """int64[T, 3]: head, relation, tail; -1 where there is none."""
    first_unknown: tuple[str, ...] | None = None
    """Labels of the first triple that has a -1."""
    num_blank: int = 0


def _read_file(path: Path, entities: _RowLookup, relations: _RowLookup, *, order: str) -> _Given:
    blocks, first_unknown, num_blank = [np.empty((0, 3), np.int64)], None, 0
    for block in read_triples(path):
        columns = _columns(block, order)
        lookups = entities, relations, entities
        rows = np.stack(
            [rows.of_column(column) for column, rows in zip(columns, lookups, strict=True)], axis=1
        )
        unknown = np.flatnonzero((rows == _UNKNOWN).any(axis=1))
        if first_unknown is None and len(unknown):
            first_unknown = tuple(column[int(unknown[0])].as_py() for column in columns)
        blocks.append(rows)
        num_blank += block.num_blank
    return _Given(path, np.concatenate(blocks), first_unknown, num_blank)


def _columns(block: TripleBlock, order: str) -> list[pa.Array]:
    """Return heads, relations and tails of lines that are in an order of their own ("htr")."""
    columns = block.heads, block.relations, block.tails
    return [columns[order.index(letter)] for letter in "hrt"]


def _prepared_splits(
    dataset: Dataset, entities: _RowLookup, relations: _RowLookup, *, partial: bool
) -> Splits:
    splits = Splits({}, [dataset.folder])
    by_entity, by_relation = entities(list(dataset.entities)), relations(list(dataset.relations))
    for split in SPLITS:
        ids = dataset.triples(split)
        rows = np.stack([by_entity[ids[:, 0]], by_relation[ids[:, 1]], by_entity[ids[:, 2]]], axis=1)
        unknown = np.flatnonzero((rows == _UNKNOWN).any(axis=1))
        first = _labels_of(dataset, ids[unknown[0]].tolist()) if len(unknown) else None
        triples = _keep_known(splits, split, _Given(dataset.folder, rows, first), partial=partial)
        splits.triples[split] = triples
        splits.origins[split] = Origin(f"{split}.npy", unknown=len(rows) - len(triples))
    return splits


def _labels_of(dataset: Dataset, triple: list[int]) -> tuple[str, ...]:
    head, relation, tail = triple
    return dataset.entities[head], dataset.relations[relation], dataset.entities[tail]


def _keep_known(splits: Splits, split: str, given: _Given, *, partial: bool) -> _Rows:
    """Return the triples [T, 3] of a split, without those that name what the model has no row for."""
    known = (given.rows != _UNKNOWN).all(axis=1)
    num_unknown = int((~known).sum())
    if num_unknown and not partial and (split == "train" or not known.any()):
        assert given.first_unknown is not None
        first = int(np.argmin(known))
        column = int(np.argmin(given.rows[first] != _UNKNOWN))
        raise DataError(
            f"{given.path}: triple {first + 1} of {split} names the {COLUMNS[column]}"
            f" {given.first_unknown[column]!r}, for which the model has no row;"
            " give the data it was trained on (--data)"
        )
    if num_unknown:
        splits.notes.append(
            f"{split}: {num_unknown:,} of {len(known):,} triples name what the model has no row for;"
            " they are left out"
        )
    kept: _Rows = given.rows[known]
    return kept


def find_file(folders: Sequence[Path | None], names: Sequence[str], *, what: str) -> Path:
    """Return the first file of one of these names in one of these folders.

    Raises:
        DataError: There is none.
    """
    there = [folder for folder in folders if folder is not None]
    for folder in there:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    looked = ", ".join(map(str, there))
    raise DataError(f"{what}: no {' or '.join(names)} in {looked}; say where it is (--data)")
