"""From a model's scores to degrees of truth.

    softmax      e^score over its sum for all entities, what training with a softmax makes of a score, is how
                 probable an entity is to be drawn; this is how probable it is in as many draws as there are
                 known answers, or in one
    minmax       (score - lowest) / (highest - lowest), among all entities (Arakelyan et al., 2021)
    sigmoid      1 / (1 + e^-score): what training with a binary loss makes of it
    calibrated   how probable it is, as fitted to valid

All rise with the score, for each question (anchor, relation) by itself. A sigmoid of scores that were not
trained for one is near 1 for every good answer, and then the worst link of an answer decides alone.

Shape letters: B questions, n answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kgshard.errors import ConfigError
from kgshard.known import Ids
from kgshard.models.link import Side
from kgshard_tools.multi_hop.truth import FALSE, TRUE, Degrees, log_odds
from kgshard_tools.stored import Stored

_RARE = -300.0
"""Below it, log odds are the log probability to rounding, and n draws are n times as probable as one."""
Calibrate = Callable[[Degrees, int, Side], Degrees]
"""Takes scores of any shape, a relation and the side that is asked for; returns probabilities in [0, 1] that
rise with the score."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The scores of all entities as answers to B questions."""

    lowest: Degrees
    """float64[B, 1]; so are the others."""
    highest: Degrees
    log_total: Degrees
    """log of the sum of e^score."""
    num_known: Ids
    """int64[B, 1]: how many answers are known, at least 1."""


class Scale(ABC):
    """Turns scores into degrees."""

    name: str
    needs_spread = False
    """Whether a degree depends on the scores of all entities."""

    @abstractmethod
    def degrees(self, scores: Degrees, relation: int, side: Side, spread: Spread | None) -> Degrees:
        """Return the degrees of scores [B, n]; `spread` is None unless it is needed."""


class Sigmoid(Scale):
    name = "sigmoid"

    def degrees(self, scores: Degrees, relation: int, side: Side, spread: Spread | None) -> Degrees:
        return np.clip(scores, FALSE, TRUE)


class MinMax(Scale):
    name = "minmax"
    needs_spread = True

    def degrees(self, scores: Degrees, relation: int, side: Side, spread: Spread | None) -> Degrees:
        assert spread is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = np.log(scores - spread.lowest) - np.log(spread.highest - scores)
        # In this order all are true where all score the same.
        odds = np.where(scores <= spread.lowest, FALSE, odds)
        return np.clip(np.where(scores >= spread.highest, TRUE, odds), FALSE, TRUE)


class Softmax(Scale):
    name = "softmax"
    needs_spread = True

    def degrees(self, scores: Degrees, relation: int, side: Side, spread: Spread | None) -> Degrees:
        assert spread is not None
        log_once = np.minimum(scores - spread.log_total, 0.0)
        with np.errstate(divide="ignore"):
            # log(1 - p), by what is precise for p near 1 and near 0.
            log_not = np.where(log_once > -1, np.log(-np.expm1(log_once)), np.log1p(-np.exp(log_once)))
            log_never = spread.num_known * log_not
            odds = np.log(-np.expm1(log_never)) - log_never
        odds = np.where(log_once > _RARE, odds, log_once + np.log(spread.num_known))
        return np.clip(odds, FALSE, TRUE)


class Calibrated(Scale):
    name = "calibrated"

    def __init__(self, calibrate: Calibrate) -> None:
        self._calibrate = calibrate

    def degrees(self, scores: Degrees, relation: int, side: Side, spread: Spread | None) -> Degrees:
        return log_odds(self._calibrate(scores, relation, side))


_PLAIN: dict[str, Callable[[], Scale]] = {"sigmoid": Sigmoid, "minmax": MinMax, "softmax": Softmax}
SCALES = (*_PLAIN, Calibrated.name)
"""The name of every scale."""


def find_scale(name: str, stored: Stored) -> Scale:
    """Return a scale by its name.

    Raises:
        ConfigError: There is none of this name.
        DataError: calibrated: valid holds too few triples.
    """
    if name in _PLAIN:
        return _PLAIN[name]()
    if name != Calibrated.name:
        raise ConfigError(f"--scores: unknown value {name!r} (known: {', '.join(SCALES)})")
    from kgshard_tools.calibration import calibration

    fitted = calibration(stored)

    def calibrate(scores: Degrees, relation: int, side: Side) -> Degrees:
        relations = np.full(scores.size, relation, np.int64)
        return fitted.probabilities(scores.ravel(), relations, side).reshape(scores.shape)

    return Calibrated(calibrate)
