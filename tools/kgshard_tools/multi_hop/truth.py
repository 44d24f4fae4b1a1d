"""Degrees of truth, and the t-norms that combine them.

A degree p in [0, 1] is kept as its log odds log(p / (1 - p)). So a sigmoid is the identity, a negation a
sign, and neither what is nearly false nor what is nearly true runs into ties: 1e-300 and 1 - 1e-300 are as
far from 0 and 1 as float64 can tell. FALSE and TRUE stand for 0 and 1 themselves.

    min           min(p, q)                Gödel
    product       p q
    lukasiewicz   max(0, p + q - 1)

"or" is the t-norm's dual, not(not p and not q): max, p + q - p q, min(1, p + q).

Shape letters: B ways to an answer, n answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Degrees = npt.NDArray[np.float64]

FALSE, TRUE = -1e300, 1e300
_MARGIN = 2.0**-47
"""No chain of t-norms is off by more, relative to 1 + |log odds|."""
_SAFE = 1e290
"""Odds between this and its inverse are exact to rounding."""


class TNorm(ABC):
    """A conjunction of degrees; elementwise, broadcast."""

    name: str

    @abstractmethod
    def both(self, a: Degrees, b: Degrees) -> Degrees:
        """Return the degrees of a and b."""

    def either(self, a: Degrees, b: Degrees) -> Degrees:
        """Return the degrees of a or b."""
        return -self.both(-a, -b)

    def best(self, ways: Degrees, links: Degrees) -> Degrees:
        """Return float64[n]: the best of B >= 1 ways [B], each with its own link [B, n] to every answer."""
        best: Degrees = self.both(ways[:, None], links).max(axis=0)
        return best


class Min(TNorm):
    name = "min"

    def both(self, a: Degrees, b: Degrees) -> Degrees:
        return np.minimum(a, b)


class Product(TNorm):
    """The odds against both are e^-a + e^-b + e^-(a + b)."""

    name = "product"

    def both(self, a: Degrees, b: Degrees) -> Degrees:
        low, high = np.minimum(a, b), np.maximum(a, b)
        # The largest of the three terms is taken out: e^-low, or e^-(a + b) where both are improbable.
        is_likely = high >= 0
        largest = np.where(is_likely, low, low + high)
        others = np.exp(np.where(is_likely, -high, low)) + np.exp(np.where(is_likely, low - high, high))
        found: Degrees = np.maximum(largest - np.log1p(others), FALSE)
        return found

    def best(self, ways: Degrees, links: Degrees) -> Degrees:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            against = np.exp(-links)
            each = np.exp(-ways)[:, None]
            against *= 1 + each
            against += each
            least = against.min(axis=0)
            unsafe = np.flatnonzero(~((least > 1 / _SAFE) & (least < _SAFE)))
            best: Degrees = -np.log(np.where(least > 0, least, 1.0))
        if len(unsafe):
            best[unsafe] = super().best(ways, links[:, unsafe])
        return best


class Lukasiewicz(TNorm):
    """The odds against both are (e^-a + e^-b + 2 e^-(a + b)) / (1 - e^-(a + b)), if a + b > 0."""

    name = "lukasiewicz"

    def both(self, a: Degrees, b: Degrees) -> Degrees:
        low, high, total = np.minimum(a, b), np.maximum(a, b), np.add(a, b)
        is_any = total > 0
        low, high = np.where(is_any, low, 0.0), np.where(is_any, high, 0.0)
        rest = np.log(-np.expm1(-np.where(is_any, total, 1.0)))
        found = low - np.log1p(np.exp(low - high) + 2 * np.exp(-high)) + rest
        return np.where(is_any, found, FALSE)


T_NORMS: dict[str, TNorm] = {norm.name: norm for norm in (Min(), Product(), Lukasiewicz())}
"""Every t-norm by its name."""


def raised(degrees: Degrees) -> Degrees:
    """Return degrees that are higher by all that rounding may have taken; TRUE and FALSE stay."""
    return np.where(np.abs(degrees) < TRUE, degrees + _MARGIN * (1 + np.abs(degrees)), degrees)


def lowered(degrees: Degrees) -> Degrees:
    """Return degrees that are lower by all that rounding may have added; TRUE and FALSE stay."""
    return -raised(-degrees)


def probabilities(degrees: Degrees) -> Degrees:
    """Return degrees as numbers in [0, 1]."""
    small = np.exp(-np.abs(degrees))
    found: Degrees = np.where(degrees >= 0, 1.0, small) / (1 + small)
    return found


def log_odds(probabilities: Degrees) -> Degrees:
    """Return numbers in [0, 1] as degrees."""
    with np.errstate(divide="ignore"):
        odds = np.log(probabilities) - np.log1p(-probabilities)
    clipped: Degrees = np.clip(odds, FALSE, TRUE)
    return clipped
