"""Updates of float32 rows on a CPU in one pass over memory, where there was a compiler at installation.

torch's own operations do the same in a dozen passes; they are used elsewhere, and where the environment says
KGSHARD_KERNELS=0. The compiled part is kgshard/native/rows.c.

Shape letters: U touched rows, C values for each, N rows of the table.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from kgshard.routing import RowGradient

_LEAST_VALUES = 1 << 16
"""For one thread: to hand less to another takes longer than to do it."""
_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_PLACES = [_POINTER, _POINTER, _INT64, _INT64, _INT64]
_ARGUMENTS = {
    "kgshard_adam": [*[_POINTER] * 3, *_PLACES, *[_FLOAT] * 3, _POINTER, _POINTER, _INT64],
    "kgshard_adagrad": [*[_POINTER] * 2, *_PLACES, _FLOAT, _FLOAT],
    "kgshard_adagrad_rowwise": [*[_POINTER] * 2, *_PLACES, _FLOAT, _FLOAT],
}


def can_update(gradient: RowGradient, weight: Tensor, *state: Tensor) -> bool:
    """Whether kernels can: all of it float32 in host memory, and rows (ascending) that the table has."""
    tables = (weight, *state, gradient.values)
    if _library() is None or not all(
        tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        for tensor in tables
    ):
        return False
    rows, num_rows = gradient.rows, weight.shape[0] if weight.ndim else 1
    if gradient.values.shape != (len(rows), weight.numel() // max(1, num_rows)):
        return False
    inside = len(rows) == 0 or bool(rows.min() >= 0 and rows.max() < num_rows)
    return rows.dtype == torch.int64 and rows.is_contiguous() and inside


def adam(
    gradient: RowGradient,
    weight: Tensor,
    average: Tensor,
    squared: Tensor,
    *,
    betas: tuple[float, float],
    factor: float | Tensor,
    eps: float | Tensor,
) -> None:
    """Do m += (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g², w += factor m / (sqrt(v) + eps).

    Args:
        gradient: g, float32[U, C], of some rows.
        weight: w, float32[N, ...].
        average: m, of its shape.
        squared: v, of its shape.
        betas: beta1 and beta2.
        factor: One number for all, or float32[U, 1].
        eps: As factor.
    """
    numbers = [torch.as_tensor(value, dtype=torch.float32).contiguous() for value in (factor, eps)]
    each = int(numbers[0].numel() > 1)
    pointers = [number.data_ptr() for number in numbers]
    beta1, beta2 = betas
    rates = 1 - beta1, beta2, 1 - beta2
    _run("kgshard_adam", gradient, [weight, average, squared], *rates, *pointers, each)


def adagrad(gradient: RowGradient, weight: Tensor, sums: Tensor, *, lr: float, eps: float) -> None:
    """Do s += g², w -= lr g / (sqrt(s) + eps); where sums is float32[N], g² is its mean over a row."""
    name = "kgshard_adagrad" if sums.shape == weight.shape else "kgshard_adagrad_rowwise"
    _run(name, gradient, [weight, sums], lr, eps)


def _run(name: str, gradient: RowGradient, tables: list[Tensor], *numbers: float) -> None:
    """Call a kernel for all rows, parts of which go to other threads where they are many."""
    function, (num_rows, width) = getattr(_library(), name), gradient.values.shape
    pointers = [tensor.data_ptr() for tensor in (*tables, gradient.rows, gradient.values)]
    num_parts = max(1, min(torch.get_num_threads(), num_rows * width // _LEAST_VALUES))
    edges = [num_rows * part // num_parts for part in range(num_parts + 1)]

    def update(part: tuple[int, int]) -> None:
        function(*pointers, *part, width, *numbers)

    first, *others = pairwise(edges)
    begun = [_threads().submit(update, part) for part in others]
    update(first)
    for part in begun:
        part.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kgshard-rows")


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("KGSHARD_KERNELS") == "0":
        return None
    folder = Path(__file__).parents[1] / "native"
    for path in (folder / f"rows{suffix}" for suffix in EXTENSION_SUFFIXES):
        if path.is_file():
            library = ctypes.CDLL(str(path))
            for name, arguments in _ARGUMENTS.items():
                getattr(library, name).argtypes = arguments
                getattr(library, name).restype = None
            return library
    return None
