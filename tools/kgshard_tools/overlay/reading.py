"""Triples that name entities which a run does not know, numbered.

Shape letters: I labels, n new entities, t triples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kgshard.data.readers import read_triples
from kgshard.errors import DataError, UnknownRelationError
from kgshard.vocabulary import Vocabulary, hash_order
from kgshard_tools.stored import Stored

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NewTriples:
    """What triples say of entities that a run does not know."""

    labels: list[str]
    """In hash order, so that ids do not depend on the order of lines."""
    degrees: Ids
    """int64[n]: distinct triples that name each."""
    triples: Ids
    """int64[t, 3], distinct, ascending; new entities come after the run's."""
    counts: dict[str, int]
    """See `OverlayInfo.counts`."""


def read_new(path: Path, stored: Stored) -> NewTriples:
    """Number the triples of a file."""
    entities, relations = _Numbers(stored.dataset.entities), _Numbers(stored.dataset.relations)
    parts, num_lines, num_blank = [], 0, 0
    for block in read_triples(path):
        asked = relations.number(block.relations)
        if (asked >= len(stored.dataset.relations)).any():
            _refuse_relation(path, stored.dataset.relations, num_lines, block.num_lines)
        parts.append(np.stack([entities.number(block.heads), asked, entities.number(block.tails)], axis=1))
        num_lines, num_blank = num_lines + block.num_lines, num_blank + block.num_blank
    given = np.concatenate([np.empty((0, 3), np.int64), *parts])
    first = stored.model.num_entities
    about_new = given[(given[:, 0] >= first) | (given[:, 2] >= first)]
    if not len(about_new):
        raise DataError(
            f"{path}: none of {len(given):,} triples names an entity that {stored.run.folder} has not"
        )
    triples, labels = _in_order(np.unique(about_new, axis=0), entities.new, first)
    counts = {
        "lines": num_lines,
        "triples": len(triples),
        "duplicates": len(about_new) - len(triples),
        "blank": num_blank,
        "known": len(given) - len(about_new),
    }
    _check_tied(path, triples, labels, first)
    return NewTriples(labels, _degrees(triples, first, len(labels)), triples, counts)


class _Numbers:
    """Ids of labels: those of a vocabulary, and behind them new ones in the order they are met."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._numbers: dict[str, int] = {}
        self.new: list[str] = []

    def number(self, labels: pa.Array) -> Ids:
        """Return int64[I]."""
        encoded = labels.dictionary_encode()
        numbers = np.array([self._number(label) for label in encoded.dictionary.to_pylist()], np.int64)
        ids: Ids = numbers[encoded.indices.to_numpy()]
        return ids

    def _number(self, label: str) -> int:
        if label not in self._numbers:
            found = self._vocabulary.find(label)
            if found is None:
                found = len(self._vocabulary) + len(self.new)
                self.new.append(label)
            self._numbers[label] = found
        return self._numbers[label]


def _refuse_relation(path: Path, relations: Vocabulary, before: int, num_lines: int) -> None:
    """Raise UnknownRelationError for the first line, of those after `before`, with an unknown relation."""
    where, name = f"{path}: lines {before + 1}-{before + num_lines}", ""
    if path.is_file():
        line = 0
        for block in read_triples(path, block_bytes=1):  # A line at a time.
            line += block.num_lines
            unknown = [label for label in block.relations.to_pylist() if relations.find(label) is None]
            if unknown:
                where, name = f"{path}:{line}", unknown[0]
                break
    error = UnknownRelationError(name, relations.suggest(name) if name else ())
    error.message = f"{where}: {error.message if name else 'a relation that the run does not know'}"
    raise error


def _in_order(triples: Ids, new: Sequence[str], first: int) -> tuple[Ids, list[str]]:
    """Number new entities in hash order; return the triples, ascending, and the labels."""
    order = hash_order(pa.array(new, pa.large_string()))
    ids = np.empty(len(new), np.int64)
    ids[order] = np.arange(len(new))
    renumbered = triples.copy()
    for end in (0, 2):
        is_new = triples[:, end] >= first
        renumbered[is_new, end] = ids[triples[is_new, end] - first] + first
    return np.unique(renumbered, axis=0), [new[place] for place in order.tolist()]


def _degrees(triples: Ids, first: int, num_new: int) -> Ids:
    heads, tails = triples[:, 0] - first, triples[:, 2] - first
    tails = np.where(tails == heads, -1, tails)  # A loop is one triple.
    both = np.concatenate([heads, tails])
    degrees: Ids = np.bincount(both[both >= 0], minlength=num_new).astype(np.int64)
    return degrees


def _check_tied(path: Path, triples: Ids, labels: Sequence[str], first: int) -> None:
    """Raise DataError where new entities are tied to each other alone."""
    from kgshard.folding import components  # it imports torch

    counted = np.stack([triples[:, 0] - first, triples[:, 1], triples[:, 2] - first], axis=1)
    connected = components(counted, len(labels))
    ends = np.concatenate([counted[counted[:, 2] < 0, 0], counted[counted[:, 0] < 0, 2]])
    loose = ~np.isin(connected, connected[ends])
    if loose.any():
        label = labels[int(np.argmax(loose))]
        raise DataError(f"{path}: no triple ties {label!r}, even by other new entities, to one of the run")
