"""Rows for entities that were not trained, from their triples; everything else stays as it is.

Shape letters: n new entities, D floats for each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kgshard.data.dataset import Triples
from kgshard.errors import NonFiniteError
from kgshard.folding.connected import components, from_first, groups
from kgshard.folding.fitting import fit, mean_losses
from kgshard.folding.frozen import FoldedRows, FrozenModel
from kgshard.folding.objective import Objective
from kgshard.folding.starting import starting_rows
from kgshard.shards import first_non_finite

Ids = npt.NDArray[np.int64]


@torch.no_grad()
def fold_in(
    frozen: FrozenModel,
    triples: Triples,
    num_new: int,
    *,
    steps: int = 100,
    seed: int = 0,
    rivals: Ids | None = None,
    advance: Callable[[int], None] = lambda num_entities: None,
) -> FoldedRows:
    """Find rows for the entities num_entities, num_entities + 1, ... from their triples.

    Args:
        frozen: What they are fitted to.
        triples: int[n, 3], distinct; each names a new entity at one end or at both.
        num_new: How many are new; every one is named.
        steps: Steps at most.
        seed: Fixes what is sampled: rivals, train questions, rows to start from.
        rivals: int64, ascending: the only trained entities to compete with; by default all.
        advance: Told how many entities more are done.

    Raises:
        NonFiniteError: A row of the run that is needed, or a new row, is NaN or infinite.
    """
    given = np.asarray(triples, np.int64)
    objective = Objective(frozen, given, seed, rivals)
    folded = _fit_all(frozen, objective, given, num_new, steps, seed, advance)
    bad = first_non_finite(folded.rows)
    if bad is not None:
        raise NonFiniteError(f"{frozen.row_name(objective.first + bad)}: no finite row fits its triples")
    return folded


def _fit_all(
    frozen: FrozenModel,
    objective: Objective,
    given: Ids,
    num_new: int,
    steps: int,
    seed: int,
    advance: Callable[[int], None],
) -> FoldedRows:
    """Fit the rows group by group."""
    start = starting_rows(frozen, objective, given, num_new, seed)
    rows, before, after = start.clone(), np.zeros(num_new), np.zeros(num_new)
    taken, converged = np.zeros(num_new, np.int64), np.zeros(num_new, np.bool_)
    counted = from_first(given, objective.first)
    connected = components(counted, num_new)
    for members, mine in groups(counted, connected, objective.block_size):
        places, questions = torch.from_numpy(members), objective.questions_of(given[mine], members)
        before[members] = mean_losses(objective, questions, start[places])
        fitted = fit(objective, questions, start[places], connected[members], steps)
        rows[places], taken[members], converged[members] = fitted
        after[members] = mean_losses(objective, questions, rows[places])
        advance(len(members))
    return FoldedRows(
        rows.numpy(),
        before,
        after,
        taken,
        converged,
        objective.spread.typical_norm,
        len(objective.rivals),
        objective.num_train_questions,
        objective.regulariser,
    )
