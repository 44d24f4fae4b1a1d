"""Randomness that knows nothing of ranks: every draw is keyed by (seed, purpose, indices).

Whoever needs the negatives of step 17 or the initial rows of block 3 draws them alone and gets the
same values, at any world size.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return a fresh generator for one purpose, its 128-bit key hashed from all arguments."""
    name = "/".join([str(seed), purpose, *map(str, indices)])
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")
    return np.random.Generator(np.random.Philox(key=key))
