"""labels.sqlite from a prepared dataset, streamed: memory does not grow with the number of labels."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np

from kgshard.data.dataset import Dataset
from kgshard.errors import KgshardError
from kgshard.files import replacing
from kgshard_tools.labels.grams import BLOCK, CODES, LONGEST_LABEL, bucket_of, hash_trigrams
from kgshard_tools.labels.matching import KINDS, Kind
from kgshard_tools.labels.rules import KEY_LENGTH, fold, words_of
from kgshard_tools.labels.scan import VOCABULARIES, read_columns
from kgshard_tools.labels.store import FORMAT, PREFIX_LENGTHS

_CACHE_KIB = 65536

_TABLES = """
CREATE TABLE {0}_labels (
    n INTEGER PRIMARY KEY, id INTEGER NOT NULL, degree INTEGER NOT NULL, label TEXT NOT NULL
);
CREATE TABLE {0}_keys (key BLOB, n INTEGER, PRIMARY KEY (key, n)) WITHOUT ROWID;
CREATE VIRTUAL TABLE {0}_words USING fts5(
    words, content = '', detail = none, columnsize = 0, prefix = '{1}', tokenize = 'ascii'
);
CREATE TABLE {0}_grams (
    block INTEGER, bucket INTEGER, code INTEGER, rows BLOB, PRIMARY KEY (block, bucket, code)
) WITHOUT ROWID;
"""
# The tokenizer called ascii takes every character beyond ASCII for part of a word: words are found by
# `rules.words_of`, and here only taken apart at the spaces between them.


def build_labels(dataset: Dataset, path: Path) -> None:
    """Write the labels of a dataset's entities and relations to `path`; what was there is replaced.

    Raises:
        DataError: A vocabulary is missing or damaged; what was at `path` stays.
        KgshardError: The disk is full, or this Python's SQLite was built without FTS5.
    """
    try:
        with (
            replacing(path) as temporary,
            closing(sqlite3.connect(temporary, isolation_level=None)) as database,
        ):
            _write(database, dataset)
    except sqlite3.Error as error:
        raise KgshardError(f"{path}: labels cannot be written: {error}") from error


def _write(database: sqlite3.Connection, dataset: Dataset) -> None:
    # A build that fails leaves no file, so that it needs no journal.
    _run(
        database,
        f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{_CACHE_KIB}; BEGIN;"
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    )
    meta = {"format": FORMAT, "vocabulary_sha256": dataset.vocabulary_sha256}
    for kind in KINDS:
        meta[kind] = str(_write_kind(database, dataset.folder / VOCABULARIES[kind], kind))
    database.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    database.execute("COMMIT")


def _run(database: sqlite3.Connection, statements: str) -> None:
    """Run statements in the open transaction, which `executescript` would end."""
    for statement in statements.split(";"):
        database.execute(statement)


def _write_kind(database: sqlite3.Connection, vocabulary: Path, kind: Kind) -> int:
    """Write the tables of one kind; return how many labels there are."""
    _run(database, _TABLES.format(kind, " ".join(map(str, PREFIX_LENGTHS))))
    _write_labels(database, vocabulary, kind)
    _write_keys(database, kind)
    number = 0
    for block in count():
        labels = _labels_of(database, kind, block)
        if not labels:
            return number
        folded = [fold(label)[:KEY_LENGTH] for label in labels]
        _write_words(database, kind, number + 1, folded)
        _write_grams(database, kind, block, folded)
        number += len(labels)
    raise AssertionError("count() ends never")


def _write_labels(database: sqlite3.Connection, vocabulary: Path, kind: Kind) -> None:
    """Write the labels in order of degree, then of id; SQLite sorts them, on disk where they are many."""
    database.execute("CREATE TEMP TABLE unsorted (id INTEGER PRIMARY KEY, degree INTEGER, label TEXT)")
    for batch in read_columns(vocabulary):
        columns = (batch.column(name).to_pylist() for name in ("id", "degree", "label"))
        database.executemany("INSERT INTO unsorted VALUES (?, ?, ?)", zip(*columns, strict=True))
    database.execute(
        f"INSERT INTO {kind}_labels (id, degree, label) "
        "SELECT id, degree, label FROM unsorted ORDER BY degree DESC, id"
    )
    database.execute("DROP TABLE unsorted")


def _write_keys(database: sqlite3.Connection, kind: Kind) -> None:
    database.create_function("key_of", 1, _key_of, deterministic=True)
    database.execute(
        f"INSERT INTO {kind}_keys SELECT key_of(label) AS key, n FROM {kind}_labels ORDER BY key, n"
    )


def _key_of(label: str) -> bytes:
    return fold(label)[:KEY_LENGTH].encode()


def _labels_of(database: sqlite3.Connection, kind: Kind, block: int) -> list[str]:
    """Return the labels of a block, in order of n."""
    rows = database.execute(
        f"SELECT label FROM {kind}_labels WHERE n > ? AND n <= ? ORDER BY n",
        (block * BLOCK, (block + 1) * BLOCK),
    )
    return [label for (label,) in rows]


def _write_words(database: sqlite3.Connection, kind: Kind, first: int, folded: Iterable[str]) -> None:
    rows = ((n, " ".join(words_of(text))) for n, text in enumerate(folded, start=first))
    database.executemany(f"INSERT INTO {kind}_words (rowid, words) VALUES (?, ?)", rows)


def _write_grams(database: sqlite3.Connection, kind: Kind, block: int, folded: list[str]) -> None:
    database.executemany(f"INSERT INTO {kind}_grams VALUES ({block}, ?, ?, ?)", _gram_lists(folded))


def _gram_lists(folded: list[str]) -> Iterator[tuple[int, int, bytes]]:
    """Yield bucket, code and rows (uint16, little-endian, ascending) of a block's labels; ascending."""
    rows = np.array([row for row, text in enumerate(folded) if len(text) <= LONGEST_LABEL], np.int64)
    if not len(rows):
        return
    codes, owners = hash_trigrams([folded[row] for row in rows])
    lengths = np.array([bucket_of(len(folded[row])) for row in rows], np.int64)
    keys = np.sort(((lengths[owners] * CODES + codes) << 16) | rows[owners])
    keys = keys[np.diff(keys, prepend=-1) > 0]  # np.unique hashes, which takes 40 times as long.
    lists = keys >> 16
    starts = np.flatnonzero(np.diff(lists, prepend=-1))
    packed = (keys & 0xFFFF).astype("<u2").tobytes()
    ends = [*starts[1:].tolist(), len(keys)]
    for start, end, one in zip(starts.tolist(), ends, lists[starts].tolist(), strict=True):
        yield one // CODES, one % CODES, packed[2 * start : 2 * end]
