"""A prepared dataset: counts, ids in range, and labels that are those of the vocabulary's hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.data.dataset import DATASET_NAMES, SPLITS, Dataset
from kgshard.data.dataset import MANIFEST as DATA_FILE
from kgshard.errors import ShardError
from kgshard.records import DatasetInfo
from kgshard.vocabulary import label_hash, read_labels
from kgshard_tools.artefacts import read_data_info, read_listing
from kgshard_tools.headers import read_array_header, read_parquet_header
from kgshard_tools.verify.hashes import Checks, check_hash, check_record

VOCABULARIES = ("entities.parquet", "relations.parquet")
_BLOCK_ROWS = 1 << 20


def dataset_files(folder: Path, *, deep: bool) -> Checks:
    """Yield the files of a prepared dataset that are right; see `kgshard_tools.verify.verify_files`."""
    path = folder / DATA_FILE
    record = check_record(path)
    dataset, listed = Dataset(folder, read_data_info(folder)), read_listing(path)
    _check_counts(path, dataset.info)
    yield record
    for name in dict.fromkeys([*DATASET_NAMES[1:], *listed]):
        if name in listed:
            check_hash(folder / name, listed[name], DATA_FILE)
        if name in DATASET_NAMES:
            _check_structure(dataset, folder / name)
        if deep and name.removesuffix(".npy") in SPLITS:
            dataset.triples(name.removesuffix(".npy"))  # raises where an id is out of range
        if deep and name == VOCABULARIES[-1]:
            check_labels(folder, dataset.vocabulary_sha256, DATA_FILE)
        yield folder / name, "SHA-256" if name in listed else "structure"
    if deep:
        _check_degrees(dataset)


def _check_counts(path: Path, info: DatasetInfo) -> None:
    """Raise ShardError where a record's counts contradict each other."""
    for split in SPLITS:
        counts = info.splits.get(split)
        if counts is None:
            raise ShardError(f"{path}: says nothing of {split}", file=str(path))
        if (
            counts.source is not None
            and counts.lines != counts.triples + counts.duplicates + counts.blank + counts.unknown
        ):
            raise ShardError(f"{path}: {split}: lines are not triples, duplicates and blank", file=str(path))


def _check_structure(dataset: Dataset, path: Path) -> None:
    if not path.is_file():
        raise ShardError(f"{path}: {'is no ordinary file' if path.exists() else 'missing'}", file=str(path))
    if path.suffix == ".npy":
        array, expected = read_array_header(path), (dataset.info.splits[path.stem].triples, 3)
        if array.shape != expected or array.dtype not in ("<i4", "<i8") or array.fortran_order:
            raise ShardError(
                f"{path}: {array.dtype} {list(array.shape)}, but {DATA_FILE} says {list(expected)}",
                file=str(path),
            )
    else:
        check_num_labels(
            path, dataset.num_entities if path.name == VOCABULARIES[0] else dataset.num_relations, DATA_FILE
        )


def check_num_labels(path: Path, expected: int, record: str) -> None:
    """Raise ShardError where a Parquet file of labels has another number of rows."""
    header = read_parquet_header(path)
    if header.rows != expected or not {"id", "label", "kind", "degree"} <= set(header.columns):
        raise ShardError(
            f"{path}: {header.rows:,} rows of {', '.join(header.columns)}, expected {expected:,} labels, "
            f"as {record} says",
            file=str(path),
        )


def check_labels(folder: Path, vocabulary_sha256: str, record: str) -> None:
    """Raise ShardError where a folder's labels are not those that a vocabulary's hash was made of."""
    digests = [_labels_sha256(folder / name) for name in VOCABULARIES]
    found = hashlib.sha256(f"{digests[0]}\n{digests[1]}\n".encode()).hexdigest()
    if found != vocabulary_sha256:
        raise ShardError(
            f"{folder}: labels are not those that the vocabulary's hash in {record} was made of",
            file=str(folder / VOCABULARIES[0]),
        )


def _labels_sha256(path: Path) -> str:
    """Return the hash of a vocabulary, as `Vocabulary.sha256`, without loading it."""
    digest, previous = hashlib.sha256(), (-1, "")
    try:
        for labels in read_labels(path):
            for label in labels:
                text, key = label.encode(), (label_hash(label), label)
                if key <= previous:
                    raise ShardError(f"{path}: {label!r} is out of order", file=str(path))
                digest.update(len(text).to_bytes(8, "little") + text)
                previous = key
    except (OSError, pa.ArrowException, AttributeError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise ShardError(f"{path}: labels cannot be read: {reason}", file=str(path)) from error
    return digest.hexdigest()


def _check_degrees(dataset: Dataset) -> None:
    """Raise ShardError where a vocabulary's ids or degrees are not what the train triples make them."""
    entities = np.zeros(dataset.num_entities, np.int64)
    relations = np.zeros(dataset.num_relations, np.int64)
    train = dataset.triples("train")
    for start in range(0, len(train), _BLOCK_ROWS):
        block = train[start : start + _BLOCK_ROWS]
        for counts, column in ((entities, 0), (relations, 1), (entities, 2)):
            np.add.at(counts, block[:, column], 1)
    for name, counts in zip(VOCABULARIES, (entities, relations), strict=True):
        _check_column(dataset.folder / name, "id", np.arange(len(counts)))
        _check_column(dataset.folder / name, "degree", counts)


def _check_column(path: Path, column: str, expected: npt.NDArray[np.int64]) -> None:
    start = 0
    for values in _columns(path, column):
        wrong = np.flatnonzero(values != expected[start : start + len(values)])
        if len(wrong):
            row = start + int(wrong[0])
            raise ShardError(
                f"{path}: {column} of row {row} is {values[wrong[0]]}, expected {expected[row]}",
                file=str(path),
            )
        start += len(values)


def _columns(path: Path, column: str) -> Iterator[npt.NDArray[np.int64]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BLOCK_ROWS, columns=[column]):
            yield batch.column(0).to_numpy(zero_copy_only=False)
