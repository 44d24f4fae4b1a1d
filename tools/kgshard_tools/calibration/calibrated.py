"""How probable it is that an answer with some score is true.

The question is one as valid asks: (h, r, ?) or (?, r, t) with an answer that train lacks. Two steps, each
for tails and for heads:

1. For all relations together, the rising function of the score that fits best (isotonic regression), straight
   between the means of its pools.
2. For each relation a line on the log odds which that gives (Platt, 1999), drawn towards those of the other
   relations as far as its own triples say little.

So a probability rises with the score, within a relation and a side. By default it is that of an answer among
all entities, of which nearly none is true; a base rate is the share of true triples among those that
somebody asks about, and then true and false answers of each relation are weighed so (Tabacof and Costabello,
2020).

What valid does not hold counts as false. A graph holds not all that is true, so probabilities are rather too
low.

RUN/eval/calibration-00012000.json keeps a fit, format "kgshard.calibration/1"; one for a base rate or another
seed has that in its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError, ShardError
from kgshard.files import check_seal, read_json, write_json
from kgshard.models.link import SIDES, Side
from kgshard.stderr import tell
from kgshard_tools.calibration.isotonic import pool_violators
from kgshard_tools.calibration.logistic import Lines, Points, fit_lines, log_odds, probability
from kgshard_tools.calibration.pairs import Pairs, collect
from kgshard_tools.search import Ids, Scores
from kgshard_tools.stored import Stored


class SideFit(msgspec.Struct, frozen=True):
    """The fit of one side."""

    answers: float
    """To questions of valid; so many were sampled, or stand for others."""
    true: int
    """Of these, those that valid holds."""
    relations: int
    """Relations with a true answer: the others have the mean line."""
    scores: list[float]
    """Knots of the rising function, ascending."""
    log_odds: list[float]
    """Its values there; beyond the ends it is constant."""
    slopes: list[float]
    """One a relation, >= 0."""
    intercepts: list[float]


class CalibrationFile(msgspec.Struct, frozen=True):
    """What is kept beside a run."""

    format: Literal["kgshard.calibration/1"]
    run_id: str
    step: int
    vocabulary_sha256: str
    base_rate: float | None
    """None: as among all answers to the questions of valid."""
    seed: int
    sides: dict[Side, SideFit]


class Calibration:
    """Probabilities from scores, for the sides that were fitted."""

    def __init__(self, file: CalibrationFile) -> None:
        self.file = file

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(self.file.sides)

    def probabilities(self, scores: Scores, relations: Ids, side: Side) -> Scores:
        """Return float64[n]: how probable it is that answers are true; it rises with a relation's scores.

        Args:
            scores: float64[n], as the model has them when `side` is asked for.
            relations: int64[n], of the questions.
            side: One that was fitted.
        """
        if side not in self.file.sides:
            raise ValueError(f"side {side!r} was not fitted (fitted: {', '.join(self.sides)})")
        knots, values, lines = self._arrays[side]
        odds = np.interp(np.asarray(scores, np.float64), knots, values)
        return probability(lines.at(np.asarray(relations, np.int64), odds))

    @cached_property
    def _arrays(self) -> dict[Side, tuple[Scores, Scores, Lines]]:
        return {
            side: (
                np.array(fit.scores),
                np.array(fit.log_odds),
                Lines(np.array(fit.slopes), np.array(fit.intercepts)),
            )
            for side, fit in self.file.sides.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return what a result says of its probabilities; the fit itself is in the file."""
        file = self.file
        counts = {side: {"answers": fit.answers, "true": fit.true} for side, fit in file.sides.items()}
        return {"split": "valid", "base_rate": file.base_rate, "seed": file.seed, "sides": counts}

    def line(self) -> str:
        """Say what a probability means."""
        rate = self.file.base_rate
        among = (
            "an answer to a question as valid asks, among all entities"
            if rate is None
            else f"a triple where {100 * rate:.4g} % of those asked about are true"
        )
        return f"probability: of {among}; what valid does not hold counted as false"


def pooled(probabilities: Sequence[Scores]) -> Scores:
    """Return float64[n]: one probability of several float64[n] of the same, by the mean of their log odds."""
    least = np.finfo(np.float64).tiny
    clipped = [np.clip(each, least, 1 - 2.0**-53) for each in probabilities]
    return probability(np.mean([log_odds(each) for each in clipped], axis=0))


def calibration(
    stored: Stored, *, side: Side | None = None, base_rate: float | None = None, seed: int = 0
) -> Calibration:
    """Fit probabilities to valid, or read what was fitted before.

    Args:
        stored: The model.
        side: Only answers to questions about this side; None fits both.
        base_rate: The share of true triples among those that are asked about; None: that among all entities
            as answers to the questions of valid.
        seed: Fixes what is drawn.

    Raises:
        ConfigError: The base rate is not between 0 and 1.
        DataError: Valid holds too few triples.
        NonFiniteError: A row or a query is NaN or infinite.
    """
    if base_rate is not None and not 0 < base_rate < 1:
        raise ConfigError(f"--base-rate must be a number between 0 and 1, got {base_rate}")
    path, empty = _kept_at(stored, base_rate, seed), _unfitted(stored, base_rate, seed)
    kept = _read(path, empty)
    wanted = SIDES if side is None else (side,)
    missing = [each for each in wanted if each not in kept.sides]
    if missing:
        fits = {each: fit_side(collect(stored, each, seed=seed), stored, base_rate) for each in missing}
        kept = msgspec.structs.replace(kept, sides={**kept.sides, **fits})
        _keep(path, kept)
    return Calibration(kept)


def fit_side(pairs: Pairs, stored: Stored, base_rate: float | None = None) -> SideFit:
    """Fit both steps to the pairs of one side."""
    num_relations = stored.dataset.num_relations
    weights = pairs.weights if base_rate is None else _at_rate(pairs, base_rate, num_relations)
    outcomes = pairs.true.astype(np.float64)
    pools = pool_violators(pairs.scores, outcomes, weights)
    knots, values = pools.scores, pools.log_odds()
    odds = np.interp(pairs.scores, knots, values)
    lines, _ = fit_lines(Points(pairs.relations, odds, outcomes, weights, num_relations))
    return SideFit(
        answers=float(pairs.weights.sum()),
        true=int(pairs.true.sum()),
        relations=len(np.unique(pairs.relations[pairs.true])),
        scores=knots.tolist(),
        log_odds=values.tolist(),
        slopes=lines.slopes.tolist(),
        intercepts=lines.intercepts.tolist(),
    )


def _at_rate(pairs: Pairs, base_rate: float, num_relations: int) -> npt.NDArray[np.float64]:
    """Return weights [n] under which so many of each relation's answers are true; those of true ones stay."""
    true = np.bincount(pairs.relations, pairs.weights * pairs.true, num_relations)
    false = np.bincount(pairs.relations, pairs.weights * ~pairs.true, num_relations)
    factors = true * (1 - base_rate) / base_rate / np.maximum(false, np.finfo(np.float64).tiny)
    scaled: npt.NDArray[np.float64] = pairs.weights * np.where(pairs.true, 1, factors[pairs.relations])
    return scaled


def _kept_at(stored: Stored, base_rate: float | None, seed: int) -> Path:
    parts = [f"calibration-{stored.checkpoint.step:08d}"]
    parts += [] if base_rate is None else [f"rate-{base_rate!r}"]
    parts += [] if seed == 0 else [f"seed-{seed}"]
    return stored.run.folder / "eval" / f"{'-'.join(parts)}.json"


def _unfitted(stored: Stored, base_rate: float | None, seed: int) -> CalibrationFile:
    return CalibrationFile(
        format="kgshard.calibration/1",
        run_id=stored.run.info.id,
        step=stored.checkpoint.step,
        vocabulary_sha256=stored.dataset.vocabulary_sha256,
        base_rate=base_rate,
        seed=seed,
        sides={},
    )


def _read(path: Path, empty: CalibrationFile) -> CalibrationFile:
    """Return what was kept for this very checkpoint and these settings, or the empty one."""
    if not path.exists():
        return empty
    try:
        check_seal(path)
        kept = read_json(path, CalibrationFile)
        if msgspec.structs.replace(kept, sides={}) != empty:
            return empty
    except (OSError, ValueError, ShardError) as error:
        told = str(error) if str(path) in str(error) else f"{path}: {error}"
        tell(f"Warning: {told}; probabilities are fitted again")
        return empty
    return kept


def _keep(path: Path, file: CalibrationFile) -> None:
    """Keep a fit beside its run; a run that cannot be written is no reason to lose it."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, file)
    except OSError as error:
        tell(f"Warning: {path} was not written: {error.strerror}")
