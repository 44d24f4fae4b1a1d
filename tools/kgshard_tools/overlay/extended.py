"""Labels and rows of a run, and behind them those of an overlay.

Shape letters: I ids, n rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kgshard.shards import Floats, StoredTable
from kgshard.vocabulary import Vocabulary

Ids = npt.NDArray[np.int64]

_NUM_SUGGESTIONS = 5


class ExtendedVocabulary(Vocabulary):
    """The labels of a run, and behind them those of an overlay."""

    def __init__(self, base: Vocabulary, added: Sequence[str], degrees: Ids) -> None:
        """Put labels behind others.

        Args:
            base: The run's own.
            added: Distinct labels, none of them in `base`; id len(base) + i is added[i].
            degrees: int64[len(added)]: how many triples name each.
        """
        super().__init__(pa.array(added, pa.large_string()), degrees, kind=base.kind)
        self._base = base
        self._added = list(added)
        self._places = {label: len(base) + place for place, label in enumerate(added)}

    def __len__(self) -> int:
        return len(self._base) + len(self._added)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if len(self._base) <= index < len(self):
            return self._added[index - len(self._base)]
        if not 0 <= index < len(self):
            raise IndexError(f"{self.kind} id {index} is outside 0..{len(self) - 1}")
        return self._base[index]

    def __iter__(self) -> Iterator[str]:
        yield from self._base
        yield from self._added

    def labels_of(self, ids: npt.NDArray[np.integer[Any]]) -> list[str]:
        """Return the labels of some ids, in their order."""
        is_new = np.asarray(ids) >= len(self._base)
        own = iter(self._base.labels_of(ids[~is_new]))
        return [
            self._added[place - len(self._base)] if new else next(own)
            for place, new in zip(ids.tolist(), is_new.tolist(), strict=True)
        ]

    @property
    def degrees(self) -> Ids:
        """int64[len(self)]: how many triples name each, in train or in the overlay."""
        return np.concatenate([self._base.degrees, super().degrees])

    def find(self, label: str) -> int | None:
        """Return the id of `label`, or None where there is no such label."""
        found = self._base.find(label)
        return self._places.get(label) if found is None else found

    def find_all(self, names: Collection[str]) -> dict[str, int | None]:
        """Return the id of each of many distinct labels, or None; see `find`."""
        found = self._base.find_all(names)
        return {name: self._places.get(name) if id is None else id for name, id in found.items()}

    def suggest(self, name: str) -> list[str]:
        """Return up to five labels that look like `name`, the most similar first."""
        near = [*super().suggest(name), *self._base.suggest(name)]
        matcher = difflib.SequenceMatcher(b=name)

        def likeness(label: str) -> float:
            matcher.set_seq1(label)
            return -matcher.ratio()

        return sorted(near, key=likeness)[:_NUM_SUGGESTIONS]

    @property
    def sha256(self) -> str:
        """The hash of the run's own labels, by which its files know each other."""
        return self._base.sha256

    def save(self, path: Path) -> None:
        """Refuse: a vocabulary file is in hash order, which these labels are not."""
        raise TypeError("labels of a run and an overlay have no file of their own")


class ExtendedTable(StoredTable):
    """The rows of a run, and behind them those of an overlay. What a caller gets is float32."""

    def __init__(self, base: StoredTable, added: StoredTable) -> None:
        """Put float32 rows behind others, as wide as they are."""
        self.name = base.name
        self.pieces = [*base.pieces, *added.pieces]
        self.dtype = base.dtype
        """Of the run's rows; an overlay's are F32."""
        self.dim = base.dim
        self.num_rows = base.num_rows + added.num_rows
        self._base, self._added = base, added

    def release(self) -> None:
        """Let go of what is mapped, in the run and in the overlay."""
        self._base.release()
        self._added.release()

    def read(self, rows: range) -> Floats:
        """Return float32[len(rows), dim]: consecutive rows.

        Raises:
            IndexError: They leave the table.
        """
        if len(rows) and not (rows.start >= 0 and rows.stop <= self.num_rows):
            raise IndexError(f"rows {rows.start}..{rows.stop} leave a table of {self.num_rows} rows")
        edge = self._base.num_rows
        if rows.stop <= edge or not len(rows):
            return self._base.read(rows if len(rows) else range(0))
        behind = self._added.read(range(max(0, rows.start - edge), rows.stop - edge))
        if rows.start >= edge:
            return behind
        return np.concatenate([self._base.read(range(rows.start, edge)), behind])

    def gather(self, ids: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Floats:
        """Return float32[I, dim]: the rows of `ids`, in their order.

        Raises:
            IndexError: An id is outside the table.
        """
        wanted = np.asarray(ids, np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.num_rows):
            wrong = wanted[(wanted < 0) | (wanted >= self.num_rows)][0]
            raise IndexError(f"row {wrong} is outside a table of {self.num_rows} rows")
        is_new = wanted >= self._base.num_rows
        gathered = np.empty((len(wanted), self.dim), np.float32)
        gathered[~is_new] = self._base.gather(wanted[~is_new])
        gathered[is_new] = self._added.gather(wanted[is_new] - self._base.num_rows)
        return gathered

    def byte_ranges(self, rows: range | None = None) -> Iterator[tuple[Path, int, int]]:
        """Yield (file, offset, length) of rows of the run; those of an overlay may be of another dtype.

        Raises:
            IndexError: Some are of the overlay.
        """
        rows = rows if rows is not None else range(self.num_rows)
        if rows.stop > self._base.num_rows:
            raise IndexError(f"rows {rows.start}..{rows.stop} are not all stored in the run")
        return self._base.byte_ranges(rows)
