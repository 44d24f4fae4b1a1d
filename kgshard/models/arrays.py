"""The few array functions that model formulas need, for numpy arrays and torch tensors alike.

Training runs the formulas on tensors with gradients; answers run the same lines on numpy arrays,
so that a query costs no torch import. Everything else that formulas use (+, *, slicing) both kinds
of array spell the same way.

Shape letters: B batch, N candidates, D floats for each entity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", "torch.Tensor", "npt.NDArray[Any]")
"""A torch tensor or a numpy array; a function takes and returns one kind."""


def _namespace(array: object) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def concat(parts: Sequence[Array]) -> Array:
    """Join along the last axis."""
    return _namespace(parts[0]).concatenate(tuple(parts), axis=-1)


def halves(array: Array) -> tuple[Array, Array]:
    """Split the last axis in two: real parts first, then imaginary parts."""
    middle = array.shape[-1] // 2
    return array[..., :middle], array[..., middle:]


def cos(array: Array) -> Array:
    return _namespace(array).cos(array)


def sin(array: Array) -> Array:
    return _namespace(array).sin(array)


def moduli(array: Array) -> Array:
    """Return the moduli [..., D / 2] of complex numbers stored as halves."""
    real, imaginary = halves(array)
    # The gradient of sqrt at 0 is infinite; a row of zeros must not become NaN.
    namespace = _namespace(array)
    return namespace.sqrt(namespace.clip(real * real + imaginary * imaginary, 1e-30, None))


def norm(array: Array) -> Array:
    """Return the 2-norms [...] along the last axis. In torch the gradient at 0 is 0, not NaN."""
    return _namespace(array).linalg.vector_norm(array, axis=-1)


def distances(order: Literal["l2", "l1"], queries: Array, candidates: Array, *, exact: bool) -> Array:
    """Return float[B, N]: the distance of each query [B, D] from each candidate [N, D]."""
    if isinstance(queries, np.ndarray):
        axis_order = 2 if order == "l2" else 1
        rows = [np.linalg.vector_norm(candidates - query, ord=axis_order, axis=-1) for query in queries]
        return np.stack(rows) if rows else np.empty((0, len(candidates)), queries.dtype)
    mode = "donot_use_mm_for_euclid_dist" if exact else "use_mm_for_euclid_dist"
    power = 2.0 if order == "l2" else 1.0
    return _namespace(queries).cdist(queries, candidates, p=power, compute_mode=mode)
