"""Trigrams of folded labels, for finding what is a few typing errors away. numpy is imported here.

A text is padded with two marks on both sides, so one of L characters has L + 2 trigrams, and an edit spoils
at most four of them: what is within `allowed_edits` shares at least one. A trigram is known by a hash of
CODES values; that two share one costs a comparison, never a match. Labels are kept by blocks of BLOCK in
order of n, so that a row of a block is a uint16, and by buckets of BUCKET lengths.

Shape letters: N labels, G trigrams of all of them, R labels of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kgshard_tools.labels.rules import LONGEST_FUZZY, allowed_edits

BLOCK = 1 << 16
BUCKET = 4
CODES = 1 << 12
MOST_CANDIDATES = 1000
"""Labels compared character by character: those that share the most trigrams."""
LONGEST_LABEL = LONGEST_FUZZY + 2
_PAD = 0x110000
"""The first number that is no character."""

Rows = npt.NDArray[np.int64]


def bucket_of(length: int) -> int:
    """Return the bucket of labels of some length."""
    return length // BUCKET


def buckets_near(length: int) -> range:
    """Return the buckets that hold what a text of some length may be meant to be."""
    edits = allowed_edits(length)
    return range(bucket_of(length - edits), bucket_of(length + edits) + 1)


def hash_trigrams(texts: Sequence[str]) -> tuple[Rows, Rows]:
    """Return the codes of all trigrams of N texts, int64[G], and whose they are, int64[G] in 0..N-1."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    owners = np.repeat(np.arange(len(texts)), lengths + 4)
    padded = np.full(len(owners), _PAD, np.uint32)
    places = np.arange(int(lengths.sum())) + np.repeat(np.arange(len(texts)) * 4 + 2, lengths)
    padded[places] = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    hashed = padded[:-2] * np.uint32(0x9E3779B1)
    hashed += padded[1:-1] * np.uint32(0x85EBCA77)
    hashed += padded[2:] * np.uint32(0xC2B2AE3D)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x2C1B3C6D)
    inside = owners[:-2] == owners[2:]
    return (hashed[inside] >> np.uint32(20)).astype(np.int64), owners[:-2][inside]


def wanted_codes(folded: str) -> list[int]:
    """Return the distinct codes of a text's trigrams, ascending."""
    return sorted(set(hash_trigrams([folded])[0].tolist()))


def least_shared(num_codes: int, length: int) -> int:
    """Return how many of a text's codes a label must hold to be within the allowed edits."""
    return max(1, num_codes - 4 * allowed_edits(length))


def best_rows(shared: Rows, least: int) -> Rows:
    """Return int64[M], ascending: which rows share at least `least`; of too many the most, then the first.

    Args:
        shared: int64[R], how many codes each shares.
        least: At least 1.
    """
    found = np.flatnonzero(shared >= least)
    if len(found) <= MOST_CANDIDATES:
        return found
    by_most = np.cumsum(np.bincount(shared[found])[::-1])
    cut = len(by_most) - 1 - int(np.searchsorted(by_most, MOST_CANDIDATES))
    above = found[shared[found] > cut]
    level = found[shared[found] == cut][: MOST_CANDIDATES - len(above)]
    return np.sort(np.concatenate([above, level]))


class Candidates:
    """The labels of all blocks that share the most codes with a text; blocks come in order of n."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._rows = np.zeros(0, np.int64)
        self._shared = np.zeros(0, np.int64)

    def add(self, first: int, shared: Rows) -> None:
        """Take in a block.

        Args:
            first: n of its first label.
            shared: int64[R], how many codes each of its labels shares.
        """
        rows = best_rows(shared, self._least)
        self._rows = np.concatenate([self._rows, rows + first])
        self._shared = np.concatenate([self._shared, shared[rows]])
        best = best_rows(self._shared, self._least)
        self._rows, self._shared = self._rows[best], self._shared[best]

    def rows(self) -> list[int]:
        """Return the n of the candidates, ascending."""
        rows: list[int] = self._rows.tolist()
        return rows
