"""From text to a prepared dataset: labels become ids, and no line is lost.

For every file, lines = triples + duplicates + blank. A malformed line stops everything before
anything is written.

Labels are dictionary-encoded block by block, so memory is bounded by the distinct labels of each
block and the codes of all triples, never by the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kgshard.data.dataset import MANIFEST, SPLITS, Dataset, Triples, open_dataset, vocabulary_sha256
from kgshard.data.readers import COLUMNS, read_triples
from kgshard.data.sources import Source
from kgshard.errors import DataError
from kgshard.files import file_sha256, replacing, replacing_directory, write_json
from kgshard.records import DatasetInfo, SplitInfo, describe_file
from kgshard.vocabulary import Vocabulary, hash_order

_Codes = npt.NDArray[np.int64]


def prepare(source: Source, folder: Path) -> Dataset:
    """Read `source`, number its labels, and write a prepared dataset at `folder`.

    Duplicates within a split are dropped (the first stays) and counted. Entities and relations that
    only valid or test name get ids too.

    Raises:
        DataError: A line is malformed (`file:line`), or train holds no triple.
    """
    entities, relations = _Encoder("entity"), _Encoder("relation")
    read = {split: _read_split(path, entities, relations) for split, path in source.files.items()}
    if not read["train"].num_triples:
        raise DataError(f"{source.files['train']}: no triples")
    entity_labels, entity_ids = entities.finish()
    relation_labels, relation_ids = relations.finish()
    dtype = np.int32 if max(len(entity_labels), len(relation_labels)) < 2**31 else np.int64

    triples = {split: np.empty((0, 3), dtype) for split in SPLITS}
    for split, codes in read.items():
        triples[split] = codes.decode(entity_ids, relation_ids, dtype)
    vocabularies = _vocabularies(entity_labels, relation_labels, triples["train"])
    splits = {split: _split_info(codes, triples[split]) for split, codes in read.items()}
    info = _describe(source.name, splits, triples, *vocabularies, not_read=source.not_read)
    _write(folder, info, triples, *vocabularies)
    return open_dataset(folder)


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a split's triples are from, and what else was in it."""

    source: str
    """Its name."""
    sha256: str | None = None
    blank: int = 0
    """Its blank lines."""
    unknown: int = 0
    """Its triples that were left out, since they name what has no row."""
    unit: Literal["lines", "rows"] = "rows"


@dataclass(frozen=True, slots=True)
class Numbered:
    """Triples that another program numbered: an id is a row of its tables."""

    name: str
    """Of the dataset."""
    source: str
    """Whose numbers they are: what data.json says of splits without an origin."""
    entity_labels: Sequence[str]
    """Label i belongs to row i; no triple need name it."""
    relation_labels: Sequence[str]
    triples: Mapping[str, Triples]
    """Split to int[n, 3]; splits may be absent or empty."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """By split, where it is known."""


@dataclass(frozen=True, slots=True)
class Renumbered:
    """A prepared dataset, and where its rows were before."""

    dataset: Dataset
    entity_rows: _Codes
    """int64[N]: row i of the dataset was row entity_rows[i]."""
    relation_rows: _Codes


def prepare_numbered(numbered: Numbered, folder: Path) -> Renumbered:
    """Write a prepared dataset at `folder` from triples that are numbered already, in our own order.

    Every label gets an id, whether a triple names it or not.

    Raises:
        DataError: A label is empty, no text, or not the only one of its kind, or an id has no label.
    """
    entity_labels, entity_rows = _in_hash_order(numbered.entity_labels, "entity")
    relation_labels, relation_rows = _in_hash_order(numbered.relation_labels, "relation")
    ids = _inverse(entity_rows), _inverse(relation_rows), _inverse(entity_rows)
    triples = {split: _renumber(numbered.triples.get(split), ids, split) for split in SPLITS}
    splits = {
        split: _numbered_info(numbered.origins.get(split, Origin(numbered.source)), given, triples[split])
        for split, given in numbered.triples.items()
    }
    vocabularies = _vocabularies(entity_labels, relation_labels, triples["train"])
    info = _describe(numbered.name, splits, triples, *vocabularies)
    _write(folder, info, triples, *vocabularies)
    return Renumbered(open_dataset(folder), entity_rows, relation_rows)


def _numbered_info(origin: Origin, given: Triples, triples: Triples) -> SplitInfo:
    return SplitInfo(
        triples=len(triples),
        source=origin.source,
        sha256=origin.sha256,
        lines=len(given) + origin.blank + origin.unknown,
        duplicates=len(given) - len(triples),
        blank=origin.blank,
        unknown=origin.unknown,
        unit=origin.unit,
    )


def _in_hash_order(labels: Sequence[str], kind: str) -> tuple[pa.Array, _Codes]:
    """Return labels in hash order, and the position that each one had."""
    for row, label in enumerate(labels):
        if not isinstance(label, str):
            raise DataError(f"the {kind} label of row {row} is no text: {label!r}")
    try:
        given = pa.array(labels, pa.large_string())
    except UnicodeEncodeError as error:
        raise DataError(f"{kind} label {error.object!r} is no Unicode text") from None
    order = hash_order(given)
    ordered = given.take(pa.array(order))
    repeated = pc.equal(ordered[1:], ordered[:-1]).to_numpy(zero_copy_only=False)
    if repeated.any():
        first, second = sorted(order[int(np.argmax(repeated)) :][:2].tolist())
        raise DataError(f"{kind} label {labels[first]!r} belongs to row {first} and to row {second}")
    if (empty := pc.index(ordered, "").as_py()) >= 0:
        raise DataError(f"the {kind} label of row {order[empty]} is empty")
    return ordered, order


def _inverse(order: _Codes) -> _Codes:
    positions = np.empty(len(order), np.int64)
    positions[order] = np.arange(len(order))
    return positions


def _renumber(given: Triples | None, ids: tuple[_Codes, _Codes, _Codes], split: str) -> Triples:
    """Return the distinct triples [n, 3] by our ids, in the order given."""
    dtype = np.int32 if max(map(len, ids)) < 2**31 else np.int64
    if given is None:
        return np.empty((0, 3), dtype)
    triples = np.empty((len(given), 3), dtype)
    for column, new in enumerate(ids):
        old = given[:, column]
        if len(old) and not (old.min() >= 0 and old.max() < len(new)):
            raise DataError(
                f"{split}: {COLUMNS[column]} ids run from {old.min()} to {old.max()}, "
                f"but there are labels for 0..{len(new) - 1}"
            )
        triples[:, column] = new[old]
    return triples[first_occurrences(triples)]


class _Encoder:
    """Turns blocks of labels into provisional codes, and those into final ids at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._dictionaries: list[pa.Array] = []
        self._size = 0

    def encode(self, labels: pa.Array) -> _Codes:
        """Return int64[I] codes; equal labels may get different codes in different blocks."""
        encoded = labels.dictionary_encode()
        codes: _Codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64) + self._size
        self._dictionaries.append(encoded.dictionary)
        self._size += len(encoded.dictionary)
        return codes

    def finish(self) -> tuple[pa.Array, _Codes]:
        """Return the distinct labels in hash order, and int64[codes]: the id that each code stands for."""
        if not self._dictionaries:
            return pa.array([], pa.large_string()), np.empty(0, np.int64)
        merged = pa.concat_arrays(self._dictionaries).dictionary_encode()
        order = hash_order(merged.dictionary)
        id_of_position = np.empty(len(order), np.int64)
        id_of_position[order] = np.arange(len(order))
        return merged.dictionary.take(pa.array(order)), id_of_position[merged.indices.to_numpy()]


@dataclass(slots=True)
class _SplitCodes:
    """What one file held, in provisional codes."""

    path: Path
    heads: list[_Codes] = field(default_factory=list)
    relations: list[_Codes] = field(default_factory=list)
    tails: list[_Codes] = field(default_factory=list)
    num_lines: int = 0
    num_blank: int = 0

    @property
    def num_triples(self) -> int:
        return sum(map(len, self.heads))

    def decode(self, entity_ids: _Codes, relation_ids: _Codes, dtype: npt.DTypeLike) -> Triples:
        """Return the distinct triples [n, 3] in file order."""
        triples = np.empty((self.num_triples, 3), dtype)
        columns = (
            (0, self.heads, entity_ids),
            (1, self.relations, relation_ids),
            (2, self.tails, entity_ids),
        )
        for column, blocks, ids in columns:
            if blocks:
                triples[:, column] = ids[np.concatenate(blocks)]
        return triples[first_occurrences(triples)]


def _read_split(path: Path, entities: _Encoder, relations: _Encoder) -> _SplitCodes:
    codes = _SplitCodes(path)
    for block in read_triples(path):
        codes.heads.append(entities.encode(block.heads))
        codes.relations.append(relations.encode(block.relations))
        codes.tails.append(entities.encode(block.tails))
        codes.num_lines += block.num_lines
        codes.num_blank += block.num_blank
    return codes


def first_occurrences(triples: Triples) -> npt.NDArray[np.int64]:
    """Return the ascending positions of the first of each distinct row."""
    if len(triples) == 0:
        return np.empty(0, np.int64)
    order = np.lexsort((triples[:, 2], triples[:, 1], triples[:, 0]))  # stable: the first comes first
    ordered = triples[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(order[is_first])


def _vocabularies(
    entity_labels: pa.Array, relation_labels: pa.Array, train: Triples
) -> tuple[Vocabulary, Vocabulary]:
    entity_degrees = np.bincount(train[:, 0], minlength=len(entity_labels))
    entity_degrees += np.bincount(train[:, 2], minlength=len(entity_labels))
    relation_degrees = np.bincount(train[:, 1], minlength=len(relation_labels))
    return (
        Vocabulary(entity_labels, entity_degrees, kind="entity"),
        Vocabulary(relation_labels, relation_degrees, kind="relation"),
    )


def _split_info(codes: _SplitCodes, triples: Triples) -> SplitInfo:
    return SplitInfo(
        triples=len(triples),
        source=codes.path.name,
        sha256=file_sha256(codes.path),
        lines=codes.num_lines,
        duplicates=codes.num_triples - len(triples),
        blank=codes.num_blank,
    )


def _describe(
    name: str,
    splits: dict[str, SplitInfo],
    triples: dict[str, Triples],
    entities: Vocabulary,
    relations: Vocabulary,
    not_read: Sequence[str] = (),
) -> DatasetInfo:
    return DatasetInfo(
        format="kgshard.data/1",
        name=name,
        num_entities=len(entities),
        num_relations=len(relations),
        splits={split: splits.get(split, SplitInfo(triples=0)) for split in SPLITS},
        unseen_in_train={
            split: _num_with_unseen_entity(triples[split], entities.degrees) for split in ("valid", "test")
        },
        vocabulary_sha256=vocabulary_sha256(entities, relations),
        not_read=list(not_read),
    )


def _num_with_unseen_entity(triples: Triples, degrees: npt.NDArray[np.int64]) -> int:
    unseen = degrees == 0
    return int((unseen[triples[:, 0]] | unseen[triples[:, 2]]).sum())


def _write(
    folder: Path,
    info: DatasetInfo,
    triples: dict[str, Triples],
    entities: Vocabulary,
    relations: Vocabulary,
) -> None:
    with replacing_directory(folder) as temporary:
        entities.save(temporary / "entities.parquet")
        relations.save(temporary / "relations.parquet")
        for split in SPLITS:
            save_array(temporary / f"{split}.npy", triples[split])
        files = {path.name: describe_file(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / MANIFEST, msgspec.structs.replace(info, files=files))


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an .npy file in C order, whole or not at all."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
