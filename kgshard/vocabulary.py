"""Labels and their row ids. Row i is label i, always.

Ids follow the hash order of labels: label i has the i-th smallest (BLAKE2b-64 of its UTF-8 bytes, label).
Two things follow. Contiguous row ranges are a random sample of the labels, so shards are balanced at any
world size; and a label's id is found by guessing from its hash, a few probes for a million labels, with no
dictionary in memory.

On disk a vocabulary is one Parquet file with the columns `id` (int64, ascending from 0), `label`
(string), `kind` (string) and `degree` (int64: train triples that name it).
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kgshard.errors import DataError, UnknownEntityError, UnknownRelationError
from kgshard.files import replacing

_NUM_SUGGESTIONS = 5
_MAX_COMPARED = 2000
_ROW_GROUP = 1 << 16
_FOUND_WHILE_HASHED = 64
"""How many labels a table of hashes takes in while one is found by bisection."""
_MAX_GROUPS = 32
"""Row groups that are read one by one before all are."""


def label_hash(label: str) -> int:
    """Return the unsigned 64-bit hash that orders labels."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "big")


def _is_text(label: str) -> bool:
    """Whether a string is Unicode text: bytes of an argument that are not UTF-8 arrive as lone surrogates."""
    return not re.search("[\ud800-\udfff]", label)


def hash_order(labels: pa.Array) -> npt.NDArray[np.int64]:
    """Return int64[N]: the positions of `labels` in hash order."""
    texts = labels.to_pylist()
    hashes = np.fromiter((label_hash(text) for text in texts), np.uint64, len(texts))
    order = np.argsort(hashes, kind="stable")
    if len(order) and bool((np.diff(hashes[order]) == 0).any()):
        return np.array(sorted(order.tolist(), key=lambda i: (hashes[i], texts[i])), np.int64)
    return order.astype(np.int64, copy=False)


class Vocabulary(Sequence[str]):
    """An immutable, ordered set of labels; `vocabulary[i]` is label i."""

    finder: Callable[[str, int], list[Any]] | None = None
    """What `search` asks; whoever has an index of the labels sets it."""

    def __init__(self, labels: pa.Array, degrees: npt.NDArray[np.int64], *, kind: str) -> None:
        """Wrap labels that are in hash order.

        Args:
            labels: large_string[N], distinct, in hash order.
            degrees: int64[N], how many train triples name each label.
            kind: "entity" or "relation", used in messages.
        """
        self._whole = labels, degrees
        self.kind = kind

    @property
    def _labels(self) -> pa.Array:
        return self._whole[0]

    @property
    def degrees(self) -> npt.NDArray[np.int64]:
        """int64[N]: how many train triples name each label."""
        return self._whole[1]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"{self.kind} id {index} is outside 0..{len(self) - 1}")
        return self._label(index)

    def _label(self, index: int) -> str:
        return str(self._labels[index].as_py())

    def labels_of(self, ids: npt.NDArray[np.integer[Any]]) -> list[str]:
        """Return the labels of ids int[I], in their order: much faster than one by one."""
        labels: list[str] = self._labels.take(pa.array(ids)).to_pylist()
        return labels

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 65536):
            yield from self._labels.slice(start, 65536).to_pylist()

    def __contains__(self, label: object) -> bool:
        return isinstance(label, str) and self.find(label) is not None

    def row_name(self, row: int) -> str:
        """Name a row of the table of these labels, as errors do: "entity 3 ('Austria')".

        Args:
            row: Of a relation table also an inverse's, which comes as far behind its relation's.
        """
        what = "entity" if self.kind == "entity" else "relation row"
        return f"{what} {row} ({self[row % len(self)]!r})"

    def find(self, label: str) -> int | None:
        """Return the id of `label`, or None where there is no such label."""
        if not isinstance(label, str):
            raise TypeError(f"{self.kind} names are str, got {type(label).__name__}")
        if not _is_text(label):
            return None
        wanted = label_hash(label)
        low, high = 0, len(self)
        # Hashes are spread evenly, so a hash says about where its label is.
        least, most = 0, 1 << 64
        while low < high:
            guess = low + (wanted - least) * (high - low) // max(most - least, 1)
            middle = min(max(guess, low), high - 1)
            probe = self[middle]
            found = label_hash(probe)
            if probe == label:
                return middle
            if (found, probe) < (wanted, label):
                low, least = middle + 1, found
            else:
                high, most = middle, found
        return None

    def id_of(self, name: str) -> int:
        """Return the id of a label, or of `#123`, which names row 123 where no label reads so.

        Raises:
            UnknownEntityError, UnknownRelationError: No such label or row; suggests near ones.
        """
        found = self.find(name)
        if found is not None:
            return found
        if re.fullmatch("#[0-9]{1,18}", name) and int(name[1:]) < len(self):
            return int(name[1:])
        unknown = UnknownRelationError if self.kind == "relation" else UnknownEntityError
        raise unknown(name, self.suggest(name))

    def ids_of(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return int64[I], one id a name; see `id_of`."""
        names = list(names)
        ids = self.find_all(dict.fromkeys(names))
        return np.array([self.id_of(name) if ids[name] is None else ids[name] for name in names], np.int64)

    def find_all(self, names: Collection[str]) -> dict[str, int | None]:
        """Return the id of each of many distinct labels, or None; see `find`."""
        if len(names) * _FOUND_WHILE_HASHED < len(self) or not all(
            isinstance(name, str) and _is_text(name) for name in names
        ):
            return {name: self.find(name) for name in names}
        places = pc.index_in(pa.array(list(names), pa.large_string()), self._labels)
        return dict(zip(names, places.to_pylist(), strict=True))

    def search(self, text: str, limit: int = 10) -> list[Any]:
        """Return what fits `text` best: of a loaded run matches with id and label, else labels like it."""
        return self.finder(text, limit) if self.finder is not None else self.suggest(text)[:limit]

    def suggest(self, name: str) -> list[str]:
        """Return up to five labels that look like `name`, the most similar first."""
        if not _is_text(name):
            return []
        close = difflib.get_close_matches(name, self._candidates(name), n=_NUM_SUGGESTIONS, cutoff=0.6)
        return close or self._candidates_containing(name)[:_NUM_SUGGESTIONS]

    def _candidates(self, name: str) -> list[str]:
        """Return the labels worth the slow comparison: of about the same length, sharing most with `name`."""
        lengths = pc.utf8_length(self._labels)
        near = pc.less_equal(pc.abs(pc.subtract(lengths, len(name))), max(1, len(name) // 3))
        labels = self._labels.filter(near)
        if len(labels) > _MAX_COMPARED:
            shared = np.zeros(len(labels), np.int16)
            for start in range(max(1, min(len(name), 40) - 2)):
                shared += pc.match_substring(labels, name[start : start + 3], ignore_case=True).to_numpy(
                    zero_copy_only=False
                )
            labels = labels.take(pa.array(np.argsort(-shared, kind="stable")[:_MAX_COMPARED]))
        candidates: list[str] = labels.to_pylist()
        return candidates

    def _candidates_containing(self, name: str) -> list[str]:
        find = pc.match_substring if len(name) >= 3 else pc.starts_with
        matches = find(self._labels, name, ignore_case=True)
        return sorted(self._labels.filter(matches).to_pylist(), key=lambda label: (len(label), label))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 over all labels in id order, each as its length (8 bytes, little-endian) and its bytes."""
        digest = hashlib.sha256()
        for start in range(0, len(self), 65536):
            encoded = [label.encode() for label in self._labels.slice(start, 65536).to_pylist()]
            digest.update(b"".join(len(text).to_bytes(8, "little") + text for text in encoded))
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the vocabulary as Parquet."""
        table = pa.table(
            {
                "id": pa.array(np.arange(len(self), dtype=np.int64)),
                "label": self._labels,
                "kind": pa.array([self.kind] * len(self), pa.string()),
                "degree": pa.array(self.degrees),
            }
        )
        with replacing(path) as temporary:
            pq.write_table(
                table, temporary, compression="zstd", use_dictionary=["kind"], row_group_size=_ROW_GROUP
            )

    @staticmethod
    def load(path: Path, *, kind: str) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
            DataError: The file is missing or not such a Parquet file.
        """
        return _StoredVocabulary(path, kind)


class _StoredVocabulary(Vocabulary):
    """A vocabulary on disk. A few labels cost a few of its row groups; many, or all, cost all of them."""

    def __init__(self, path: Path, kind: str) -> None:
        self.kind = kind
        self._path = path
        with self._reading():
            self._file = pq.ParquetFile(path, memory_map=True)
            metadata = self._file.metadata
            if missing := {"label", "degree"} - set(metadata.schema.names):
                raise KeyError(f"no column {min(missing)}")
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._stops = np.cumsum(sizes, dtype=np.int64)
        self._groups: dict[int, pa.Array] = {}
        self._lock = Lock()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{self._path}: not a vocabulary: {reason}") from error

    @cached_property
    def _whole(self) -> tuple[pa.Array, npt.NDArray[np.int64]]:  # type: ignore[override]
        with self._reading():
            table = pq.read_table(self._path, columns=["label", "degree"], memory_map=True)
        return _joined(table["label"]), table["degree"].to_numpy()

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def _label(self, index: int) -> str:
        if "_whole" in self.__dict__ or len(self._groups) >= _MAX_GROUPS:
            return super()._label(index)
        group = int(np.searchsorted(self._stops, index, side="right"))
        labels = self._groups.get(group)
        if labels is None:
            with self._lock, self._reading():  # A Parquet file is no thing for several threads.
                labels = _joined(self._file.read_row_group(group, columns=["label"])["label"])
            self._groups[group] = labels
        return str(labels[index - int(self._stops[group]) + len(labels)].as_py())


def _joined(labels: pa.ChunkedArray) -> pa.Array:
    """Return labels as one array with 64-bit offsets."""
    joined = labels.cast(pa.large_string()).combine_chunks()
    if isinstance(joined, pa.ChunkedArray):
        return pa.concat_arrays(joined.chunks) if joined.num_chunks else pa.array([], pa.large_string())
    return joined


def read_labels(path: Path) -> Iterator[list[str]]:
    """Yield the labels of a vocabulary on disk in id order, some at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROW_GROUP, columns=["label"]):
            yield batch.column(0).to_pylist()
