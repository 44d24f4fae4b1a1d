"""Labels found with nothing built: every label is looked at, by the rules and in the order of the store."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kgshard.data.dataset import Dataset
from kgshard.errors import DataError
from kgshard_tools.labels import grams
from kgshard_tools.labels.matching import Kind, LabelSource, Row
from kgshard_tools.labels.rules import fold, has_words

VOCABULARIES: dict[Kind, str] = {"entity": "entities.parquet", "relation": "relations.parquet"}
"""Kind of label to the file of a prepared dataset that holds them."""


class LabelScan(LabelSource):
    """The labels of a dataset's vocabularies. Folded once, by the first question; then all are compared."""

    def __init__(self, dataset: Dataset) -> None:
        self._names = {kind: ScannedNames(dataset.folder / name) for kind, name in VOCABULARIES.items()}

    def names(self, kind: Kind) -> ScannedNames:
        return self._names[kind]


class ScannedNames:
    """The labels of one kind in a vocabulary file; see `Names`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def equal(self, folded: str) -> list[Row]:
        return list(self._rows_where(pc.equal(self._folded, folded)))

    def starting(self, folded: str, limit: int) -> list[Row]:
        return list(islice(self._rows_where(pc.starts_with(self._folded, folded)), limit))

    def with_words(self, words: list[str], limit: int) -> list[Row]:
        holds = functools.reduce(pc.and_, (pc.match_substring(self._folded, word) for word in words))
        near = self._rows_where(holds)
        return list(islice((row for row in near if has_words(fold(row.label), words)), limit))

    def sharing(self, folded: str) -> list[Row]:
        codes = grams.wanted_codes(folded)
        candidates = grams.Candidates(grams.least_shared(len(codes), len(folded)))
        buckets = grams.buckets_near(len(folded))
        lengths = pc.utf8_length(self._folded).to_numpy() // grams.BUCKET
        near = (lengths >= buckets[0]) & (lengths <= buckets[-1])
        for start in range(0, len(near), grams.BLOCK):
            rows = np.flatnonzero(near[start : start + grams.BLOCK])
            texts = self._folded.take(pa.array(rows + start)).to_pylist()
            candidates.add(start + 1, _count_shared(texts, rows, codes))
        return [self._row(n) for n in candidates.rows()]

    @cached_property
    def _table(self) -> pa.Table:
        """The vocabulary in order of degree, then of id."""
        schema = pa.schema([("id", pa.int64()), ("degree", pa.int64()), ("label", pa.large_string())])
        batches = [batch.cast(schema) for batch in read_columns(self._path)]  # beyond 2 GiB of text too
        return pa.Table.from_batches(batches, schema).sort_by([("degree", "descending"), ("id", "ascending")])

    @cached_property
    def _folded(self) -> pa.LargeStringArray:
        labels = (label for chunk in self._table["label"].iterchunks() for label in _texts(chunk))
        return pa.array((fold(label) for label in labels), pa.large_string())

    def _rows_where(self, holds: pa.BooleanArray) -> Iterator[Row]:
        """Yield the labels of which something holds, in order of n."""
        return (
            self._row(place + 1) for place in np.flatnonzero(holds.to_numpy(zero_copy_only=False)).tolist()
        )

    def _row(self, n: int) -> Row:
        """Return label n; n counts from 1."""
        return Row(n, *(self._table[name][n - 1].as_py() for name in ("id", "degree", "label")))


def read_columns(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the columns id, degree and label of a vocabulary file, some rows at a time, in order of id.

    Raises:
        DataError: It is missing or damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(grams.BLOCK, columns=["id", "degree", "label"])
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a vocabulary: {reason}") from error


def _texts(labels: pa.LargeStringArray) -> Iterator[str]:
    for start in range(0, len(labels), grams.BLOCK):
        yield from labels.slice(start, grams.BLOCK).to_pylist()


def _count_shared(texts: list[str], rows: grams.Rows, wanted: list[int]) -> grams.Rows:
    """Return int64[R]: how many of the wanted codes each label of a block shares.

    Args:
        texts: The labels that are compared.
        rows: int64[N], where they stand in the block; all others share nothing.
        wanted: Distinct codes.
    """
    codes, owners = grams.hash_trigrams(texts)
    shared = np.isin(codes, wanted)
    pairs = np.sort(owners[shared] * grams.CODES + codes[shared])
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    counts: grams.Rows = np.bincount(rows[pairs // grams.CODES])
    return counts
