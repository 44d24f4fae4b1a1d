"""Arrays in .npy files, mapped: whatever a header says is checked before numpy sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kgshard.errors import DataError, ShardError
from kgshard_tools.headers import ArrayInfo, read_array_header
from kgshard_tools.importers.foreign import ForeignFloats, ForeignIds


def map_floats(path: Path) -> ForeignFloats:
    """Return a mapped array of floats.

    Raises:
        DataError: The file is missing, damaged, pickled, or holds something else.
    """
    return _map(path, "f", "floats")


def map_ids(path: Path) -> ForeignIds:
    """Return a mapped array of whole numbers; errors as `map_floats`."""
    return _map(path, "iu", "whole numbers")


def _map(path: Path, kinds: str, what: str) -> npt.NDArray[Any]:
    if not path.is_file():  # A pipe would wait for somebody to write.
        raise DataError(f"{path}: {'no ordinary file' if path.exists() else 'missing'}")
    try:
        info = read_array_header(path)
        dtype = np.dtype(info.dtype)
        if dtype.kind not in kinds:
            raise DataError(f"{path}: holds {dtype}, expected one array of {what}")
        return _mapped(path, info, dtype)
    except ShardError as error:
        raise DataError(str(error)) from error
    except (OSError, TypeError, ValueError) as error:  # No dtype of that size, no array of that shape.
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _mapped(path: Path, info: ArrayInfo, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if 0 in info.shape:
        return np.empty(info.shape, dtype)
    order: Literal["F", "C"] = "F" if info.fortran_order else "C"
    mapped: npt.NDArray[Any] = np.memmap(path, dtype, "r", info.offset, info.shape or (1,), order)
    return mapped.reshape(info.shape)
