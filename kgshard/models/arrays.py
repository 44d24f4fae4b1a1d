"""The few array functions that model formulas need, for numpy arrays and torch tensors alike.

Training runs the formulas on tensors with gradients; answers run the same lines on numpy arrays,
so that a query costs no torch import. Everything else that formulas use (+, *, slicing) both kinds
of array spell the same way.

Shape letters: B batch, N candidates, D floats for each entity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", "torch.Tensor", "npt.NDArray[Any]")
"""A torch tensor or a numpy array; a function takes and returns one kind."""


def _namespace(array: object) -> Any:
    if isinstance(array, np.ndarray | np.generic):  # Sums along the only axis are no arrays.
        return np
    import torch

    return torch


def concat(parts: Sequence[Array]) -> Array:
    """Join along the last axis; leading axes are broadcast."""
    namespace = _namespace(parts[0])
    leading: tuple[int, ...] = np.broadcast_shapes(*(tuple(part.shape[:-1]) for part in parts))
    wide = [namespace.broadcast_to(part, (*leading, part.shape[-1])) for part in parts]
    return namespace.concatenate(wide, axis=-1)


def blocks(array: Array, count: int) -> list[Array]:
    """Split the last axis [count * k] into `count` parts [k]."""
    if isinstance(array, np.ndarray):
        return np.split(array, count, axis=-1)
    # One operation to differentiate; each slice would be one, with a gradient as wide as the whole.
    return list(array.chunk(count, dim=-1))


def halves(array: Array) -> tuple[Array, Array]:
    """Split the last axis in two: real parts first, then imaginary parts."""
    first, second = blocks(array, 2)
    return first, second


def complex_product(x: Array, y: Array, *, conjugate: bool = False) -> Array:
    """Return the products [..., D] of complex numbers stored as halves, x times y or its conjugate."""
    if isinstance(x, np.ndarray | np.generic):
        (a, b), (c, d) = halves(x), halves(y)
        return concat([a * c + b * d, b * c - a * d] if conjugate else [a * c - b * d, b * c + a * d])
    from kgshard.products import complex_product_of_tensors

    return complex_product_of_tensors(x, y, conjugate=conjugate)


def outer(x: Array, y: Array) -> Array:
    """Return [..., n * m]: every x [..., n] times every y [..., m], y's index running faster."""
    products = x[..., :, None] * y[..., None, :]
    return products.reshape(*products.shape[:-2], x.shape[-1] * y.shape[-1])


def ones_like(array: Array) -> Array:
    return _namespace(array).ones_like(array)


def cos(array: Array) -> Array:
    return _namespace(array).cos(array)


def sin(array: Array) -> Array:
    return _namespace(array).sin(array)


def relu(array: Array) -> Array:
    return floored(array, 0)


def moduli(array: Array, num_blocks: int = 2) -> Array:
    """Return the moduli [..., D / num_blocks] of complex numbers, quaternions, ... stored as blocks."""
    if isinstance(array, np.ndarray):
        squares: Any = sum(part * part for part in blocks(array, num_blocks))
        return np.sqrt(squares)
    from kgshard.moduli import moduli as in_torch

    return in_torch(array, num_blocks)


def floored(array: Array, least: float) -> Array:
    """Return the array with values below `least` replaced by that."""
    return _namespace(array).clip(array, least, None)


def norm(array: Array) -> Array:
    """Return the 2-norms [...] along the last axis. In torch the gradient at 0 is 0, not NaN."""
    return _namespace(array).linalg.vector_norm(array, axis=-1)


def unit(array: Array) -> Array:
    """Return rows [..., D] divided by their 2-norms; rows shorter than 1e-15 are divided by that."""
    return array / floored(norm(array), 1e-15)[..., None]


def layer_norm(array: Array, epsilon: float = 1e-5) -> Array:
    """Return rows [..., D] with mean 0 and variance 1, each by itself (Ba et al., 2016)."""
    centred = array - array.mean(-1)[..., None]
    return centred / ((centred * centred).mean(-1)[..., None] + epsilon) ** 0.5


def convolve(images: Array, filters: Array) -> Array:
    """Return [..., F, H - h + 1, W - w + 1]: images [..., H, W] seen through filters [F, h, w], unpadded.

    As in neural networks, filters are not flipped.
    """
    if isinstance(images, np.ndarray):
        windows = np.lib.stride_tricks.sliding_window_view(images, filters.shape[1:], axis=(-2, -1))
        return np.moveaxis(np.tensordot(windows, filters, axes=([-2, -1], [1, 2])), -1, -3)
    maps = _namespace(images).conv2d(images.reshape(-1, 1, *images.shape[-2:]), filters[:, None])
    return maps.reshape(*images.shape[:-2], *maps.shape[1:])


def add_product(bias: Array, queries: Array, candidates: Array, *, factor: float) -> Array:
    """Return [B, N]: bias [N] + factor * queries [B, D] @ candidates [N, D].T."""
    if isinstance(queries, np.ndarray):
        product = (factor * queries) @ candidates.T
        return np.add(product, bias, out=product if product.dtype == np.result_type(product, bias) else None)
    return _namespace(queries).addmm(bias, queries, candidates.T, alpha=factor)


def distances(order: Literal["l2", "l1"], queries: Array, candidates: Array, *, exact: bool) -> Array:
    """Return float[B, N]: the distance of each query [B, D] from each candidate [N, D]."""
    if isinstance(queries, np.ndarray):
        axis_order = 2 if order == "l2" else 1
        return _row_by_row(
            lambda query: np.linalg.vector_norm(candidates - query, ord=axis_order, axis=-1),
            queries,
            candidates,
        )
    mode = "donot_use_mm_for_euclid_dist" if exact else "use_mm_for_euclid_dist"
    power = 2.0 if order == "l2" else 1.0
    return _namespace(queries).cdist(queries, candidates, p=power, compute_mode=mode)


def moduli_distances(queries: Array, candidates: Array) -> Array:
    """Return float[B, N]: sums of moduli of the complex differences, rows stored as halves."""
    if isinstance(queries, np.ndarray):
        return _row_by_row(lambda query: moduli(candidates - query).sum(-1), queries, candidates)
    from kgshard.moduli import moduli_distances as in_torch

    return in_torch(queries, candidates)


def _row_by_row(
    distance: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    queries: npt.NDArray[Any],
    candidates: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    rows = [distance(query) for query in queries]
    return np.stack(rows) if rows else np.empty((0, len(candidates)), queries.dtype)
