"""What new rows are fitted to, and what comes out.

Shape letters: n new entities, D floats for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.config import TrainConfig
from kgshard.data.dataset import Triples
from kgshard.models.link import LinkModel
from kgshard.shards import Floats, StoredTable

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A checkpoint, none of whose values change."""

    model: LinkModel
    entities: StoredTable
    relations: StoredTable
    shared: Mapping[str, Floats]
    train: Triples
    config: TrainConfig
    """Which loss and regularisers it was trained with."""
    row_name: Callable[[int], str] = "entity row {}".format
    """Names an entity for people; ids from num_entities on are new."""


@dataclass(frozen=True)
class FoldedRows:
    """Rows of new entities, and how they were found."""

    rows: Floats
    """float32[n, D]."""
    loss_before: npt.NDArray[np.float64]
    """float64[n]: the mean loss of the questions that name each, at the start."""
    loss_after: npt.NDArray[np.float64]
    steps: Ids
    """int64[n]: steps that each took."""
    converged: npt.NDArray[np.bool_]
    """bool[n]: whether more steps would have gained next to nothing."""
    typical_norm: float
    """The median 2-norm of trained rows."""
    num_rivals: int
    """Trained entities that answers compete with: all, or a sample."""
    num_train_questions: int
    """Questions of train that new rows compete in."""
    regulariser: str
    """What kept rows in bounds: names of settings, or "prior"."""
