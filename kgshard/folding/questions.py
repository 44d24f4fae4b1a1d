"""The questions that new entities are fitted to.

Shape letters: q questions, K rivals, k trained rows, Q train questions, c new entities of a group, D floats
an entity, E floats a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.models.link import Side

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """Questions about one side, of which some ends may be new."""

    side: Side
    relations: Tensor
    """float[q, relation width]: rows of the relation table."""
    known: Tensor
    """float[k, D]: the trained rows among the ends."""
    anchors: Tensor
    """int64[q]: places in the new rows and, behind them, `known`."""
    answers: Tensor
    """int64[q], likewise."""
    shares: Tensor
    """float[q]: see `Loss.answers`."""
    hits: tuple[Tensor, Tensor]
    """Pairs of a question and a rival that is none."""
    scores: Tensor | None = None
    """float[q, K] of rivals, where no step changes them and there are few."""

    def block(self, start: int, stop: int) -> Asked:
        """Return some of the questions."""
        return Asked(
            self.side,
            self.relations[start:stop],
            self.known,
            self.anchors[start:stop],
            self.answers[start:stop],
            self.shares[start:stop],
            hits_within(self.hits, start, stop),
            None if self.scores is None else self.scores[start:stop],
        )


@dataclass(frozen=True)
class Competition:
    """Questions of train about one side, none of which a new entity answers."""

    side: Side
    queries: Tensor
    """float[Q, E]."""
    constants: Tensor
    """float[Q, 1]: see `Loss.constants`."""
    weights: Tensor
    """float[Q, 1]: how many questions of train each stands for."""
    links: tuple[Ids, Ids]
    """int64[Q] anchors and int64[Q] relations."""


@dataclass(frozen=True)
class Questions:
    """Everything that the rows of a group are fitted to."""

    asked: list[Asked]
    allowed: list[Tensor | None]
    """For each competition bool[Q, c]: whether a new entity is a rival there; None where all are."""
    counts: Tensor
    """float[c]: questions that name each new entity."""
    num_new: int


def per_entity(asked: Asked, values: Tensor, num_new: int) -> Tensor:
    """Return float[c]: values float[q] summed over the questions that name each new entity, once each."""
    total = torch.zeros(num_new)
    for places, counted in (
        (asked.anchors, asked.anchors < num_new),
        (asked.answers, (asked.answers < num_new) & (asked.answers != asked.anchors)),
    ):
        total.index_add_(0, places[counted], values[counted])
    return total


def hits_within(hits: tuple[Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return those pairs whose question is in a range, counted from its start."""
    inside = (hits[0] >= start) & (hits[0] < stop)
    return hits[0][inside] - start, hits[1][inside]
