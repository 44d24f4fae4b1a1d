"""What formats of whole models share: triples as text, tensors made from rows, relations with their inverses.

Shape letters: B rows of a block, D values of a row.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from kgshard.data.dataset import SPLITS
from kgshard.errors import ConfigError
from kgshard.files import replacing
from kgshard.shards import Floats
from kgshard_tools.export.layouts import Make
from kgshard_tools.export.tables import Export, Rows
from kgshard_tools.rows import Part, write_safetensors

_BLOCK_TRIPLES = 1 << 16

Layout = TypeVar("Layout")


def find_layout(
    what: Export,
    program: str,
    layouts: Mapping[str, Layout],
    reasons: Mapping[str, str] | None = None,
) -> Layout:
    """Return how a program lays out the run's model.

    Args:
        what: The export.
        program: The program's name, as people write it.
        layouts: By our models' names, without arguments.
        reasons: Why a model is not among them, where the program has one of its name that scores otherwise.

    Raises:
        ConfigError: The program cannot score with this model.
    """
    name = what.stored.model.name
    family = name.partition(":")[0]
    if family in layouts:
        return layouts[family]
    reason = (reasons or {}).get(family, f"it has no {name}")
    raise ConfigError(f"{program} cannot score as this run does: {reason}; it can take {', '.join(layouts)}")


def note_offset(what: Export, program: str) -> None:
    """Say that the program knows nothing of the number that is added to every score, if there is one."""
    if what.stored.model.offset:
        what.note(
            f"scores in {program} are lower by {what.stored.model.offset:g}, which this run adds to each; "
            "ranks are the same"
        )


def note_empty_splits(what: Export, text: str) -> None:
    """Say what follows where valid or test holds no triple; `text` is said of their names."""
    empty = [split for split in SPLITS if not len(what.stored.dataset.triples(split))]
    if empty:
        what.note(f"{' and '.join(empty)}: no triples; {text}")


@dataclass(frozen=True)
class Derived:
    """A float32 tensor made from stored rows, block by block; a `kgshard_tools.rows.Part`."""

    shape: tuple[int, ...]
    source: Callable[[], Iterator[Floats]]
    make: Make
    dtype: str = "F32"

    def blocks(self) -> Iterator[Floats]:
        """Yield float32[B, ...] in order."""
        for rows in self.source():
            yield np.ascontiguousarray(self.make(rows), "<f4").reshape(len(rows), *self.shape[1:])

    def write(self, file: BinaryIO) -> None:
        """Append the values to an open file, in C order, little-endian."""
        for values in self.blocks():
            file.write(values.data)


def entity_tensor(what: Export, make: Make) -> Derived:
    """Return what `make` makes of the entity rows, a row each."""
    rows = what.entities
    return Derived((len(rows), *_made_shape(rows, make)), lambda: row_blocks(rows), make)


def relation_tensor(what: Export, make: Make, *, interleaved: bool = False) -> Derived:
    """Return what `make` makes of the relation rows, a row each.

    Inverse relations come behind the relations, or, `interleaved`, each right behind its own.
    """
    shape = (what.stored.model.num_relation_rows, *_made_shape(what.relations, make))
    return Derived(shape, lambda: _relation_blocks(what, interleaved=interleaved), make)


def tensor_of(rows: Rows, make: Make) -> Derived:
    """Return what `make` makes of some rows, a row each."""
    return Derived((len(rows), *_made_shape(rows, make)), lambda: row_blocks(rows), make)


def _made_shape(rows: Rows, make: Make) -> tuple[int, ...]:
    return tuple(make(np.ones((1, rows.dim), np.float32)).shape[1:])


def row_blocks(rows: Rows) -> Iterator[Floats]:
    """Yield float32[B, D] in order, B smaller where rows are long."""
    for _, values in rows.blocks():
        yield values


def _relation_blocks(what: Export, *, interleaved: bool) -> Iterator[Floats]:
    if what.inverses is None:
        yield from row_blocks(what.relations)
    elif interleaved:
        for rows, inverses in zip(row_blocks(what.relations), row_blocks(what.inverses), strict=True):
            yield np.stack([rows, inverses], axis=1).reshape(-1, rows.shape[1])
    else:
        yield from row_blocks(what.relations)
        yield from row_blocks(what.inverses)


def write_weights(path: Path, tensors: Mapping[str, Part]) -> None:
    """Write float32 tensors as safetensors."""
    with replacing(path) as temporary:
        write_safetensors(temporary, tensors)


def write_text_blocks(path: Path, blocks: Iterable[bytes]) -> None:
    """Write pieces of text one after the other; gzip them where `path` ends so."""
    with replacing(path) as temporary, temporary.open("wb") as file, _packed(file, path) as target:
        for block in blocks:
            target.write(block)


@contextmanager
def _packed(file: BinaryIO, path: Path) -> Iterator[IO[bytes]]:
    if path.suffix != ".gz":
        yield file
        return
    # No name and no time in the header: equal exports are equal bytes.
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed:
        yield cast(IO[bytes], packed)


def triple_lines(
    what: Export, split: str, *, columns: Sequence[int] = (0, 1, 2), separator: str = "\t"
) -> Iterator[bytes]:
    """Yield the triples of a split as lines of ids.

    Args:
        what: The export.
        split: "train", "valid" or "test".
        columns: Which of head (0), relation (1) and tail (2), in their order.
        separator: Between the ids.
    """
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter=separator)
    for block in triple_blocks(what, split):
        sink = pa.BufferOutputStream()
        table = pa.table({str(column): np.ascontiguousarray(block[:, column]) for column in columns})
        pyarrow.csv.write_csv(table, sink, options)
        yield sink.getvalue().to_pybytes()


def triple_blocks(what: Export, split: str) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Yield [B, 3] head, relation and tail ids, in the split's order."""
    triples = what.stored.dataset.triples(split)
    for start in range(0, len(triples), _BLOCK_TRIPLES):
        yield triples[start : start + _BLOCK_TRIPLES]


def name_inverses(what: Export, program: str, write: Callable[[str], str]) -> list[str]:
    """Return names for inverse relations where they must be relations of their own; say what they are.

    Args:
        what: The export.
        program: The program's name, as people write it.
        write: Turns a label into what is written.

    Returns:
        One for each relation, in their order, none of them a relation's; nothing where there are no inverses.
    """
    if what.inverses is None:
        return []
    labels = [write(label) for block in what.relations.labels() for label in block]
    taken, suffix = set(labels), "_inverse"
    while any(label + suffix in taken for label in labels):
        suffix += "_"
    what.note(
        f"{program} has no reciprocal relations: ask heads as (tail, RELATION{suffix}, ?), whose ids come "
        f"{len(labels):,} behind the relations'; its own ranking of heads asks otherwise"
    )
    return [label + suffix for label in labels]


def written_labels(rows: Rows, write: Callable[[str], str]) -> Iterator[str]:
    """Yield the labels of rows as they are written, in their order."""
    for labels in rows.labels():
        yield from map(write, labels)


def numbered_lines(labels: Iterable[str], *, id_first: bool = True) -> Iterator[bytes]:
    """Yield lines of an id and its label, a tab between them."""
    for number, label in enumerate(labels):
        yield (f"{number}\t{label}\n" if id_first else f"{label}\t{number}\n").encode()


def csv_quoted(labels: Iterable[str]) -> Iterator[str]:
    """Yield labels as fields of a tab-separated CSV file, quoted where they must be."""
    for label in labels:
        yield '"' + label.replace('"', '""') + '"' if any(c in label for c in '"\t\n\r') else label
