"""How other programs lay out what a row holds: complex numbers, matrices, planes, angles.

Shape letters: B rows of a block, D values of a row, d of an entity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError
from kgshard.models.link import LinkModel
from kgshard.shards import Floats

Make = Callable[[Floats], npt.NDArray[Any]]
"""Makes [B, ...] of another program's layout from stored rows float32[B, D]."""

_EPSILON = 2.0
"""What the code of RotatE's paper adds to gamma where it bounds initial values."""


def as_they_are(rows: Floats) -> Floats:
    """Return the rows."""
    return rows


def part(index: int, count: int) -> Make:
    """Return what takes one of `count` equal blocks of each row."""
    return lambda rows: np.split(rows, count, axis=1)[index]


def interleave(count: int) -> Make:
    """Return what turns rows of `count` blocks into numbers of `count` parts that lie side by side.

    Of complex numbers [re | im] it makes re im re im ...
    """
    return lambda rows: rows.reshape(len(rows), count, -1).swapaxes(1, 2).reshape(len(rows), -1)


def square_matrices(rows: Floats) -> Floats:
    """Return float32[B, d, d]: RESCAL's matrices, h R t."""
    dim = round(rows.shape[1] ** 0.5)
    return rows.reshape(len(rows), dim, dim)


def unit_normals(rows: Floats) -> npt.NDArray[np.float64]:
    """Return [B, d]: the unit normals of TransH's relations [shift | normal]."""
    normals = np.split(rows.astype(np.float64), 2, axis=1)[1]
    units: npt.NDArray[np.float64] = normals / np.maximum(
        np.linalg.norm(normals, axis=1, keepdims=True), 1e-15
    )
    return units


def shifts_in_planes(rows: Floats) -> npt.NDArray[np.float64]:
    """Return [B, d]: the shifts of TransH's relations, projected, as other programs' are not."""
    shifts, normals = np.split(rows.astype(np.float64), 2, axis=1)[0], unit_normals(rows)
    projected: npt.NDArray[np.float64] = shifts - (shifts * normals).sum(1, keepdims=True) * normals
    return projected


def phases(model: LinkModel, program: str) -> Make:
    """Return what makes RotatE's angles the numbers of the paper's own code and its descendants.

    They divide them by emb_init / pi with emb_init = (gamma + 2) / hidden_dim, gamma being what they add to
    scores.

    Raises:
        ConfigError: The run adds so little to scores that there is no such number.
    """
    if model.offset <= -_EPSILON:
        raise ConfigError(
            f"{program} cannot score as this run does: it would need a gamma of {model.offset:g}, and "
            f"divides RotatE's angles by gamma + {_EPSILON:g}"
        )
    unit = (model.offset + _EPSILON) / model.relation_dim / math.pi
    return lambda angles: angles.astype(np.float64) * unit
