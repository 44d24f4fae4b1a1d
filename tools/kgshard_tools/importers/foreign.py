"""What every importer hands over: one foreign model in kgshard's layout, not yet in kgshard's order.

Foreign conventions end here. Whatever reads a program's files turns them into a ForeignModel; the rest
(`kgshard_tools.importers.writer`) knows nothing of the program.

Letters: N entities, R relations, D floats an entity, E floats a relation row, n triples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kgshard.data.prepare import Origin

ForeignFloats: TypeAlias = npt.NDArray[np.floating[Any]]
ForeignIds: TypeAlias = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model as another program trained it, with its rows in that program's order."""

    program: str
    """What made it: "dicee 0.3.3", "PyKEEN", "DGL-KE"."""
    scoring: str
    """kgshard's name of the scoring function: "rotate-moduli", "keci:1,1"."""
    reciprocal: bool
    """Whether (?, r, t) is asked as (t, r', ?), with a row of its own for r'."""
    entity_labels: Sequence[str]
    """N labels: label i belongs to row i of `entities`."""
    relation_labels: Sequence[str]
    """R labels of the graph's relations; inverses are not counted."""
    entities: ForeignFloats
    """float[N, D], in kgshard's layout (complex numbers as halves); may be mapped, strided, of any float."""
    relations: ForeignFloats
    """float[R or 2R, E]; where reciprocal, the inverse of relation r is row r + R, if not in `inverses`."""
    inverses: ForeignFloats | None = None
    """float[R, E]: the inverses, where they are a table of their own."""
    relation_rows: Sequence[int] | None = None
    """R or 2R rows: relation r is row relation_rows[r] of `relations`; by default row r."""
    convert: Callable[[ForeignFloats], ForeignFloats] = lambda rows: rows
    """From the program's relation rows [n, E] to kgshard's [n, E]; asked for some rows at a time."""
    shared: Mapping[str, ForeignFloats] = field(default_factory=dict)
    """Parameters that all rows share, by the names kgshard's scoring function has for them."""
    triples: Mapping[str, ForeignIds] = field(default_factory=dict)
    """By split ("train", "valid", "test"): int[n, 3], head, relation, tail, as foreign row numbers."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """By split, the file that its triples are from."""
    offset: float = 0.0
    """What the foreign score has on top of kgshard's (a margin gamma): foreign = kgshard + offset."""
    decisions: Sequence[str] = ()
    """What was decided about the layout, one line each; the command prints them, run.json keeps them."""
    files: Sequence[Path] = ()
    """The files that were read, for run.json."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What the user says about a source beyond where it is."""

    data: Path | None = None
    """A folder with the triples (and label files) where the source itself does not hold them."""
    model: str | None = None
    """The scoring function, where the source does not say."""


@dataclass(frozen=True)
class Importer:
    """One foreign format. A new one is one file, and one line in `kgshard_tools.importers.IMPORTERS`."""

    name: str
    """What `--format` takes."""
    looks_for: str
    """By which files it is known, for messages: "model.pt and configuration.json"."""
    recognises: Callable[[Path], bool]
    """Whether a folder or file is of this format, by names and small files alone; never raises for others."""
    read: Callable[[Path, ImportOptions], ForeignModel]
    """Read it. Raises UsageError, naming the file, where something is missing or cannot be said exactly."""
    takes_model: bool = False
    """Whether a source may leave open which scoring function it is for; else --model is refused."""
