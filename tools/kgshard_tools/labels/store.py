"""labels.sqlite, opened read-only. Pages are read as they are needed: opening costs the same for any size."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kgshard.errors import RunError
from kgshard.files import AnyPath
from kgshard_tools.labels.matching import Kind, LabelSource, Row
from kgshard_tools.labels.rules import KEY_LENGTH, fold, has_words, wanted_words

LABELS_FILE = "labels.sqlite"
FORMAT = "kgshard.labels/1"
_INDEX_FOLDER = "index"

PREFIX_LENGTHS = (1, 2, 3, 5, 8)
"""Beginnings of words, of so many characters, for which FTS5 has the labels ready in order of n."""
_MAPPED = 1 << 40
"""Bytes that are read through a map, as much as SQLite allows: no copy, and no call, for each page."""
_SORTED_AT_ONCE = 2000
"""Labels with a common beginning that are put in order of n; of more, the first are met soon."""
_MET_IN_ORDER = 5000
"""Labels that are looked at in order of n for what few enough others lack."""


def labels_path(run: AnyPath) -> Path:
    """Return where the labels of a run are, if they were built."""
    return Path(run) / _INDEX_FOLDER / LABELS_FILE


class LabelStore(LabelSource):
    """The labels of labels.sqlite. Threads may share it; each gets a connection of its own."""

    def __init__(self, path: AnyPath, *, vocabulary_sha256: str | None = None) -> None:
        """Open a file that `build_labels` wrote.

        Args:
            path: The file.
            vocabulary_sha256: The hash of the dataset whose labels they must be; None: of any.

        Raises:
            RunError: It is missing, damaged, of another format or of other labels.
        """
        self.path = Path(path)
        self._own = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._check(vocabulary_sha256)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections of all threads."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def names(self, kind: Kind) -> StoredNames:
        return StoredNames(self, kind)

    def count(self, kind: Kind) -> int:
        """Return how many labels of a kind there are."""
        return int(self._meta()[kind])

    def rows(self, query: str, values: Iterable[Any] = ()) -> list[Any]:
        """Return all rows of a query. Raises RunError where the file is damaged."""
        return list(self.stream(query, values))

    def stream(self, query: str, values: Iterable[Any] = ()) -> Iterator[Any]:
        """Yield the rows of a query as SQLite finds them. Raises RunError where the file is damaged."""
        with self.naming_damage():
            yield from self._connection().execute(query, tuple(values))

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Say of errors of SQLite, and of values that cannot be, which file is damaged and what to do."""
        try:
            yield
        except (sqlite3.Error, ValueError, KeyError) as error:
            if self._closed and isinstance(error, sqlite3.ProgrammingError):
                raise ValueError(f"{self.path}: is closed") from error
            reason = str(error).partition("\n")[0]
            raise RunError(
                f"{self.path}: cannot be read as labels ({reason}); run kgshard index again"
            ) from error

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            # Nobody writes to a finished file, so that no lock is needed; the path may hold ? # and %.
            uri = f"file:{quote(bytes(self.path.absolute()))}?mode=ro&immutable=1"
            with self._lock:
                if self._closed:
                    raise sqlite3.ProgrammingError("closed")
                connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
                connection.execute(f"PRAGMA mmap_size = {_MAPPED}")
                self._connections.append(connection)
            self._own.connection = connection
        return connection

    def _meta(self) -> dict[str, str]:
        return dict(self.rows("SELECT key, value FROM meta"))

    def _check(self, vocabulary_sha256: str | None) -> None:
        if not self.path.is_file():
            raise RunError(f"{self.path}: there is no such file; run kgshard index")
        meta = self._meta()
        if meta.get("format") != FORMAT:
            raise RunError(
                f"{self.path}: format is {meta.get('format')!r}, not {FORMAT!r}; run kgshard index again"
            )
        if vocabulary_sha256 not in (None, meta.get("vocabulary_sha256")):
            raise RunError(f"{self.path}: holds other labels than this run has; run kgshard index again")


class StoredNames:
    """The labels of one kind in labels.sqlite; see `Names`."""

    def __init__(self, store: LabelStore, kind: Kind) -> None:
        self._store = store
        self._kind = kind

    def equal(self, folded: str) -> list[Row]:
        key = folded[:KEY_LENGTH].encode()
        found = self._stream(
            "SELECT l.n, l.id, l.degree, l.label FROM {0}_keys k JOIN {0}_labels l ON l.n = k.n "
            "WHERE k.key = ? ORDER BY k.n",
            [key],
        )
        return [row for row in found if len(folded) < KEY_LENGTH or fold(row.label) == folded]

    def starting(self, folded: str, limit: int) -> list[Row]:
        if len(folded) >= KEY_LENGTH:
            return self._starting_long(folded, limit)
        if not folded:
            return list(self._stream(f"{_ROWS} ORDER BY n LIMIT ?", [limit]))
        key = folded.encode()
        bounds = (key, key + b"\xff")  # No UTF-8 holds this byte.
        between = "SELECT n FROM {0}_keys WHERE key >= ? AND key < ?"
        numbers = self._numbers(f"{between} LIMIT ?", [*bounds, _SORTED_AT_ONCE + 1])
        if len(numbers) <= _SORTED_AT_ONCE:
            return self._labels(sorted(numbers)[:limit])
        first = self._starting_in_order(folded, limit)
        if len(first) < limit:
            return self._labels(self._numbers(f"{between} ORDER BY n LIMIT ?", [*bounds, limit]))
        return first

    def with_words(self, words: list[str], limit: int) -> list[Row]:
        begins = [_indexed_beginning(word) for word in words]
        if begins == words:
            return list(islice(self._stream_words(words), limit))
        # FTS5 collects all labels of a beginning that has no list of its own, and that may be each of them.
        # Where they are many, the first are soon met among those of a shorter beginning.
        first, num_met = [], 0
        for row in islice(self._stream_words(begins), _MET_IN_ORDER):
            num_met += 1
            if has_words(fold(row.label), words):
                first.append(row)
            if len(first) == limit:
                return first
        return first if num_met < _MET_IN_ORDER else list(islice(self._stream_words(words), limit))

    def sharing(self, folded: str) -> list[Row]:
        import numpy as np  # completion does without

        from kgshard_tools.labels import grams

        codes = grams.wanted_codes(folded)
        buckets = grams.buckets_near(len(folded))
        candidates = grams.Candidates(grams.least_shared(len(codes), len(folded)))
        query = (
            f"SELECT rows FROM {self._kind}_grams WHERE block = ? AND bucket IN ({_marks(buckets)}) "
            f"AND code IN ({_marks(codes)})"
        )
        with self._store.naming_damage():
            for block in range(-(-self._store.count(self._kind) // grams.BLOCK)):
                lists = self._store.rows(query, [block, *buckets, *codes])
                rows = np.frombuffer(b"".join(rows for (rows,) in lists), np.dtype("<u2"))
                candidates.add(block * grams.BLOCK + 1, np.bincount(rows))
        return self._labels(candidates.rows())

    def _starting_in_order(self, folded: str, limit: int) -> list[Row]:
        """Return the first labels that begin with a text, of those that are met within reason."""
        begins = [_indexed_beginning(word) for word in wanted_words(folded)]
        rows = self._stream_words(begins) if begins else self._stream(f"{_ROWS} ORDER BY n", [])
        near = islice(rows, _MET_IN_ORDER)
        return list(islice((row for row in near if fold(row.label).startswith(folded)), limit))

    def _starting_long(self, folded: str, limit: int) -> list[Row]:
        """Return the first labels that begin with a text of which only the beginning is indexed."""
        numbers = self._numbers(
            "SELECT n FROM {0}_keys WHERE key = ? ORDER BY n", [folded[:KEY_LENGTH].encode()]
        )
        rows = (row for n in numbers for row in self._labels([n]))
        return list(islice((row for row in rows if fold(row.label).startswith(folded)), limit))

    def _stream_words(self, words: list[str]) -> Iterator[Row]:
        """Yield the labels in which words begin with each of `words`, in order of n."""
        # Words hold no quote and no NUL, so that in quotes nothing is syntax.
        wanted = " ".join(f'"{word}"*' for word in words)
        return self._stream(
            "SELECT l.n, l.id, l.degree, l.label FROM {0}_words w CROSS JOIN {0}_labels l ON l.n = w.rowid "
            "WHERE w.{0}_words MATCH ? ORDER BY w.rowid",
            [wanted],
        )

    def _stream(self, query: str, values: list[Any]) -> Iterator[Row]:
        return map(Row._make, self._store.stream(query.format(self._kind), values))

    def _numbers(self, query: str, values: list[Any]) -> list[int]:
        return [n for (n,) in self._store.rows(query.format(self._kind), values)]

    def _labels(self, numbers: list[int]) -> list[Row]:
        """Return the labels of some n, which ascend."""
        rows: list[Row] = []
        for start in range(0, len(numbers), _ASKED_AT_ONCE):
            some = numbers[start : start + _ASKED_AT_ONCE]
            rows += self._stream(f"{_ROWS} WHERE n IN ({_marks(some)}) ORDER BY n", some)
        with self._store.naming_damage():
            if len(rows) != len(numbers):
                raise ValueError("a label is missing")
        return rows


def _marks(values: Sized) -> str:
    """Return what stands in a query for some values."""
    return ",".join("?" * len(values))


def _indexed_beginning(word: str) -> str:
    """Return as much of a word as there is a list of labels for."""
    return word[: max(length for length in PREFIX_LENGTHS if length <= max(len(word), 1))]


_ROWS = "SELECT n, id, degree, label FROM {0}_labels"
_ASKED_AT_ONCE = 500
"""Values in one query; SQLite may be built to take no more than 999."""
