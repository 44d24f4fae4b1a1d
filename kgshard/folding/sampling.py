"""How much of a large run is looked at, and which part of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kgshard.seeds import generator

Ids = npt.NDArray[np.int64]

FEWEST = 256
"""Rows that are looked at, however wide they are."""


def how_many(num_floats: int, width: int) -> int:
    """Return how many rows of a width make so many floats; at least FEWEST."""
    return max(FEWEST, num_floats // max(1, width))


def drawn(num_items: int, count: int, seed: int, purpose: str) -> Ids:
    """Return `count` of the numbers below num_items, ascending, or all where there are no more."""
    if num_items <= count:
        return np.arange(num_items)
    return np.sort(generator(seed, f"fold-in/{purpose}").choice(num_items, count, replace=False))
