"""What a question is compared with: entity rows as they are, of length 1, or as a model's candidates.

Shape letters: I rows, D floats for each entity, E floats for each candidate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.models.link import LinkModel, Side
from kgshard.shards import Floats

Wide = npt.NDArray[np.float64]


class Lift:
    """Rows as they are; other lifts make something of them."""

    name = "none"
    """What index.json says was done to rows."""

    def __call__(self, rows: Wide) -> Wide:
        """Return float64[I, E], which scores are defined on, from rows float64[I, D]."""
        return rows

    def rounded(self, rows: Floats) -> Floats:
        """Return float32[I, E], off by no more than `Metric.slack` allows for, from rows float32[I, D]."""
        return rows

    def width(self, dim: int) -> int:
        """Return E, given D."""
        return int(self(np.zeros((1, dim))).shape[1])


class UnitLength(Lift):
    """Rows divided by their 2-norms; rows of zeros stay. Inner products with these are cosines."""

    name = "unit length"

    def __call__(self, rows: Wide) -> Wide:
        return unit_rows(rows)

    def rounded(self, rows: Floats) -> Floats:
        with np.errstate(over="ignore"):
            lengths = np.sqrt(squares(rows))
        if ((lengths > 1e-15) & (lengths < 1e15)).all():
            divided: Floats = rows / lengths[:, None]
            return divided
        # Squares of these leave float32.
        return unit_rows(rows.astype(np.float64)).astype(np.float32)


class Candidates(Lift):
    """What a model compares the queries for one side with."""

    name = "candidates"

    def __init__(self, model: LinkModel, side: Side) -> None:
        self._model = model
        self._side = side

    def __call__(self, rows: Wide) -> Wide:
        return self._model.candidates(self._side, rows)

    def rounded(self, rows: Floats) -> Floats:
        with np.errstate(over="ignore"):  # What leaves float32 is found by its length.
            return self(rows.astype(np.float64)).astype(np.float32)


AS_STORED, UNIT_LENGTH = Lift(), UnitLength()


def link_lift(model: LinkModel, side: Side) -> Lift:
    """Return what the queries for `side` are compared with; most models compare rows as they are."""
    return Candidates(model, side) if model.lifts else AS_STORED


def unit_rows(rows: Wide) -> Wide:
    """Return rows [I, D] divided by their 2-norms; rows of zeros stay zeros."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def squares(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the squared 2-norms [I] of rows [I, D], in their dtype; no array of that size is made."""
    summed: npt.NDArray[Any] = np.einsum("id,id->i", rows, rows)
    return summed
