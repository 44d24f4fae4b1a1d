"""A prepared dataset: ids in memory-mapped arrays, labels in two vocabularies.

DATA/
    data.json                             format "kgshard.data/1": counts, sources, hashes
    entities.parquet, relations.parquet   see kgshard.vocabulary
    train.npy, valid.npy, test.npy        int32 or int64 [n, 3]: head, relation, tail ids
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.errors import DataError
from kgshard.files import is_record, link_or_copy, read_json, replacing_directory
from kgshard.records import DatasetInfo
from kgshard.vocabulary import Vocabulary

MANIFEST = "data.json"
SPLITS = ("train", "valid", "test")
DATASET_NAMES = (MANIFEST, "entities.parquet", "relations.parquet", *(f"{split}.npy" for split in SPLITS))
"""All names that kgshard writes into a prepared dataset."""

# numpy parses an .npy header as Python, which CPython 3.11 cannot do in several threads at once: now and
# then one gets a SystemError.
_ONE_AT_A_TIME = threading.Lock()

Triples = npt.NDArray[np.integer[Any]]
"""int32 or int64 [n, 3]: head, relation and tail ids of one triple a row."""


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset, opened for reading. The arrays are memory-mapped."""

    folder: Path
    info: DatasetInfo
    """The content of data.json."""

    @cached_property
    def entities(self) -> Vocabulary:
        return Vocabulary.load(self.folder / "entities.parquet", kind="entity")

    @cached_property
    def relations(self) -> Vocabulary:
        return Vocabulary.load(self.folder / "relations.parquet", kind="relation")

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def num_entities(self) -> int:
        return self.info.num_entities

    @property
    def num_relations(self) -> int:
        return self.info.num_relations

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of what `triples` returns."""
        return SPLITS

    @property
    def vocabulary_sha256(self) -> str:
        """One hash for both vocabularies: it differs where a label or an id does."""
        return self.info.vocabulary_sha256

    def triples(self, split: str) -> Triples:
        """Return the triples of "train", "valid" or "test".

        Raises:
            DataError: There is no such split, or its file is missing or damaged.
        """
        if split not in SPLITS:
            raise DataError(f"no split {split!r} (known: {', '.join(SPLITS)})")
        path = self.folder / f"{split}.npy"
        try:
            with _ONE_AT_A_TIME:
                triples: Triples = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: {error}") from error
        expected = self.info.splits[split].triples
        if triples.shape != (expected, 3):
            raise DataError(f"{path}: shape {triples.shape}, but {MANIFEST} says {expected} triples")
        for column, limit in ((0, self.num_entities), (1, self.num_relations), (2, self.num_entities)):
            ids = triples[:, column]
            if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
                raise DataError(
                    f"{path}: column {column} holds ids outside 0..{limit - 1}; the file is damaged"
                )
        return triples

    def known_triples(self, *splits: str) -> Triples:
        """Return the triples of several splits (all three by default) below each other, in one array."""
        return np.concatenate([self.triples(split) for split in splits or SPLITS])


def vocabulary_sha256(entities: Vocabulary, relations: Vocabulary) -> str:
    """Hash both vocabularies into one value; see `Dataset.vocabulary_sha256`."""
    return hashlib.sha256(f"{entities.sha256}\n{relations.sha256}\n".encode()).hexdigest()


def is_dataset(folder: Path) -> bool:
    """Whether `folder` holds a prepared dataset: a data.json that says so."""
    return is_record(folder / MANIFEST, DatasetInfo)


def open_dataset(folder: Path) -> Dataset:
    """Open what `prepare` wrote.

    Raises:
        DataError: It is not a prepared dataset, or of a format this version does not know.
    """
    path = folder / MANIFEST
    try:
        return Dataset(folder, read_json(path, DatasetInfo))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a prepared dataset: {error}") from error


def clone_dataset(dataset: Dataset, folder: Path) -> Dataset:
    """Give `folder` the same dataset, without a second copy of the bytes where the file system allows it."""
    with replacing_directory(folder) as temporary:
        for source in sorted(dataset.folder.iterdir()):
            if source.name in DATASET_NAMES:
                link_or_copy(source, temporary / source.name)
    return open_dataset(folder)
