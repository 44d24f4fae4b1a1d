"""Trying a scoring function of the user's own on a few rows, before anything is trained with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError
from kgshard.models.link import SIDES, LinkModel, Side

_NUM_ROWS = 3


def check_formula(model: LinkModel) -> None:
    """Ask a model a few questions of random rows.

    Raises:
        ConfigError: It fails on numpy rows, scores are not finite or of the wrong shape, a score depends on
            what else is asked or on which of its queries asks, it has too few factors, or its parameters have
            no usable names or sizes.
    """
    scoring = model.scoring
    try:
        if scoring.relation_dim(model.dim) < 1:
            raise ConfigError(f"relation_dim is {scoring.relation_dim(model.dim)}, expected >= 1")
        shared = _random_shared(model)
        for side in SIDES:
            _check_side(model, side, shared)
    except ConfigError as error:
        raise ConfigError(f"{model.name}: {error}") from None
    except Exception as error:  # Whatever the user's formula raises.
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{model.name} fails on numpy rows: {type(error).__name__}: {first_line}"
        ) from error


def _random_shared(model: LinkModel) -> dict[str, npt.NDArray[np.float64]]:
    source, shared = np.random.default_rng(0), {}
    for name, how in model.scoring.shared_init(model.dim).items():
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise ConfigError(f"shared parameter {name!r}: a name is of letters, digits and _")
        if not how.shape or min(how.shape) < 1:
            raise ConfigError(f"shared parameter {name!r}: shape {how.shape} holds nothing")
        shared[name] = source.uniform(0.5, 1.5, how.shape)
    return shared


def _check_side(model: LinkModel, side: Side, shared: Mapping[str, Any]) -> None:
    source = np.random.default_rng(1)
    anchors, answers = source.uniform(-1, 1, (2, _NUM_ROWS, model.dim))
    relations = source.uniform(-1, 1, (_NUM_ROWS, model.relation_dim))
    together = _scores(model, side, anchors, relations, answers, shared)
    if together.shape != (_NUM_ROWS,) or not np.isfinite(together).all():
        raise ConfigError(f"scores of {_NUM_ROWS} triples are {together!r}, expected as many finite numbers")
    for row in range(_NUM_ROWS):
        part = slice(row, row + 1)
        alone = _scores(model, side, anchors[part], relations[part], answers[part], shared)
        if not np.allclose(alone, together[part], rtol=1e-9, atol=1e-9):
            raise ConfigError(f"a triple scores {alone[0]:.6g} alone and {together[row]:.6g} among others")
    num_factors = len(model.factors(side, anchors, relations, answers))
    if num_factors < 2:
        raise ConfigError(f"factors returns {num_factors} arrays, expected head's and tail's at least")
    if model.scoring.has_relation_queries:
        queries = model.relation_queries(side, anchors, answers, shared)
        by_relation = np.asarray((queries * relations).sum(axis=-1))
        if not np.allclose(by_relation, together, rtol=1e-9, atol=1e-9):
            raise ConfigError(
                f"a triple scores {by_relation[0]:.6g} by query_relations and {together[0]:.6g} without it"
            )


def _scores(
    model: LinkModel,
    side: Side,
    anchors: npt.NDArray[np.float64],
    relations: npt.NDArray[np.float64],
    answers: npt.NDArray[np.float64],
    shared: Mapping[str, Any],
) -> npt.NDArray[np.float64]:
    queries = model.queries(side, anchors, relations, shared)
    return np.asarray(model.metric.score_pairs(queries, model.candidates(side, answers)))
