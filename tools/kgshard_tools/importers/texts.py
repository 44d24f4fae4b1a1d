"""What foreign programs keep as text: numbered labels, and splits of labelled triples.

Labels are taken byte for byte: lines end with LF or CR LF, nothing is quoted, trimmed, or taken for a
missing value.

Letters: N rows of a table, T triples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.data.dataset import SPLITS, Dataset, open_dataset
from kgshard.data.readers import COLUMNS, TripleBlock, read_triples
from kgshard.data.sources import find_source
from kgshard.errors import DataError

_Rows: TypeAlias = npt.NDArray[np.int64]
_UNKNOWN = -1


@dataclass(frozen=True)
class Splits:
    """Labelled triples by the rows of foreign tables."""

    triples: dict[str, _Rows]
    """Split to int64[T, 3]."""
    files: list[Path]
    notes: list[str] = field(default_factory=list)
    """What was left out, one line each."""


def read_numbered_labels(path: Path) -> list[str]:
    """Return the labels of `id TAB label` lines, by id; ids may come in any order.

    Raises:
        DataError: A line is not of that form, or the ids are not 0..N-1, each once.
    """
    labels: dict[int, str] = {}
    for number, line in enumerate(_lines(path), start=1):
        id_text, tab, label = line.partition("\t")
        if not tab or not re.fullmatch("[0-9]{1,18}", id_text) or not label:
            raise DataError(f"{path}:{number}: expected a number, TAB and a label, got {line!r}")
        if int(id_text) in labels:
            raise DataError(f"{path}:{number}: number {id_text} occurs twice")
        labels[int(id_text)] = label
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
    """Yield the lines of a UTF-8 file; `cr` says whether a CR before the LF belongs to the line's end."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8: {error}") from error
    for line in text.removesuffix("\n").split("\n") if text else []:
        yield line.removesuffix("\r") if cr else line


def _unescaped(line: str, where: str) -> str:
    def meant(found: re.Match[str]) -> str:
        if found[0] not in ("\\n", "\\\\"):
            raise DataError(f"{where}: {found[0]!r} is no escape; expected \\n or \\\\")
        return "\n" if found[0] == "\\n" else "\\"

    return re.sub(r"\\.?", meant, line)


def read_splits(folder: Path, entities: Sequence[str], relations: Sequence[str]) -> Splits:
    """Read the triples of a folder by the rows of a foreign model.

    Valid and test triples that name what the model has no row for are left out, and counted.

    Args:
        folder: With train, valid and test files, or a prepared dataset.
        entities: Label i belongs to row i.
        relations: The same of relations.

    Raises:
        DataError: It is no such folder, or train names what the model has no row for.
    """
    source = find_source(folder)
    rows = _RowLookup(entities, "entity"), _RowLookup(relations, "relation")
    if isinstance(source, Path):
        return _prepared_splits(open_dataset(source), *rows)
    splits = Splits({}, list(source.files.values()))
    for split, path in source.files.items():
        blocks = [_block_rows(block, *rows) for block in read_triples(path)]
        triples = np.concatenate(blocks) if blocks else np.empty((0, 3), np.int64)
        _keep_known(splits, split, triples, path, partial(_labels_at, path))
    return splits


class _RowLookup:
    """Looks up the rows of labels."""

    def __init__(self, labels: Sequence[str], kind: str) -> None:
        self._rows = {label: row for row, label in enumerate(labels)}
        self.kind = kind

    def __call__(self, labels: Sequence[str]) -> _Rows:
        """Return int64[I]; -1 where a label is unknown."""
        return np.array([self._rows.get(label, _UNKNOWN) for label in labels], np.int64)

    def of_column(self, column: pa.Array) -> _Rows:
        encoded = column.dictionary_encode()
        rows: _Rows = self(encoded.dictionary.to_pylist())[encoded.indices.to_numpy(zero_copy_only=False)]
        return rows


def _block_rows(block: TripleBlock, entities: _RowLookup, relations: _RowLookup) -> _Rows:
    columns = (block.heads, entities), (block.relations, relations), (block.tails, entities)
    return np.stack([rows.of_column(column) for column, rows in columns], axis=1)


def _labels_at(path: Path, row: int) -> tuple[str, ...]:
    """Return the labels of one triple of a file."""
    for block in read_triples(path):
        if row < len(block.heads):
            return tuple(column[row].as_py() for column in (block.heads, block.relations, block.tails))
        row -= len(block.heads)
    raise AssertionError(f"{path}: no triple {row}")


def _prepared_splits(dataset: Dataset, entities: _RowLookup, relations: _RowLookup) -> Splits:
    splits = Splits({}, [dataset.folder])
    by_entity, by_relation = entities(list(dataset.entities)), relations(list(dataset.relations))
    for split in SPLITS:
        ids = dataset.triples(split)
        rows = np.stack([by_entity[ids[:, 0]], by_relation[ids[:, 1]], by_entity[ids[:, 2]]], axis=1)
        _keep_known(splits, split, rows, dataset.folder, partial(_prepared_labels_at, dataset, split))
    return splits


def _prepared_labels_at(dataset: Dataset, split: str, row: int) -> tuple[str, ...]:
    head, relation, tail = dataset.triples(split)[row].tolist()
    return dataset.entities[head], dataset.relations[relation], dataset.entities[tail]


def _keep_known(
    splits: Splits, split: str, triples: _Rows, path: Path, labels_of: Callable[[int], tuple[str, ...]]
) -> None:
    """Add the triples [T, 3] of a split, without those that name what the model has no row for."""
    known = (triples != _UNKNOWN).all(axis=1)
    num_unknown = int((~known).sum())
    if num_unknown and (split == "train" or not known.any()):
        first = int(np.argmin(known))
        column = int(np.argmin(triples[first] != _UNKNOWN))
        raise DataError(
            f"{path}: triple {first + 1} of {split} names the {COLUMNS[column]} {labels_of(first)[column]!r},"
            " for which the model has no row; give the data it was trained on (--data)"
        )
    if num_unknown:
        splits.notes.append(
            f"{split}: {num_unknown:,} of {len(triples):,} triples name what the model has no row for;"
            " they are left out"
        )
    splits.triples[split] = triples[known]


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
