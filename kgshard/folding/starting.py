"""Where the search for a new row starts.

Shape letters: n new entities, D floats for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.folding.frozen import FrozenModel
from kgshard.folding.objective import Objective
from kgshard.folding.sampling import drawn
from kgshard.models.link import SIDES, Side

Ids = npt.NDArray[np.int64]

_POOL = 64
"""Entities at one end of a relation whose mean is a start."""


def starting_rows(frozen: FrozenModel, objective: Objective, triples: Ids, num_new: int, seed: int) -> Tensor:
    """Return float[n, D]: for each new entity the mean of entities that stand where it does.

    Where: at the same end of the same relation in train, triple by triple.
    """
    first, total, uses = frozen.model.num_entities, torch.zeros(num_new, frozen.model.dim), np.zeros(num_new)
    for side in SIDES:
        column = 0 if side == "head" else 2
        own = triples[triples[:, column] >= first]
        for relation, mean in _pool_means(frozen, side, np.unique(own[:, 1]), objective, seed):
            new, counts = np.unique(own[own[:, 1] == relation, column] - first, return_counts=True)
            total[torch.from_numpy(new)] += torch.from_numpy(counts.astype(np.float32))[:, None] * mean
            uses[new] += counts
    return total / torch.from_numpy(np.maximum(uses, 1).astype(np.float32))[:, None]


def _pool_means(
    frozen: FrozenModel, side: Side, relations: Ids, objective: Objective, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield each relation with the mean row float[D] of some entities that train has at that end of it."""
    column = 0 if side == "head" else 2
    train = frozen.train[np.isin(frozen.train[:, 1], relations)]
    for relation in relations.tolist():
        pool = np.unique(train[train[:, 1] == relation, column]).astype(np.int64)
        chosen = pool[drawn(len(pool), _POOL, seed, f"pool/{side}/{relation}")]
        rows = objective.entity_rows(chosen)
        yield relation, rows.mean(dim=0) if len(chosen) else objective.spread.mean
