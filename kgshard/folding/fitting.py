"""Rows that minimise an objective.

Shape letters: c new entities of a group, D floats for each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.folding.objective import Objective
from kgshard.folding.questions import Questions, per_entity

Ids = npt.NDArray[np.int64]

_STEP_SIZE = 0.25
"""The first steps, in standard deviations of trained coordinates."""
_PATIENCE = 5
_ENOUGH = 1e-3
"""Of what they cost: rows that gain less in _PATIENCE steps go on from their best with shorter ones."""
_SHORTER = 0.25
_NUM_SIZES = 4
"""Rows that gain no more with the shortest steps have converged."""


def fit(
    objective: Objective, questions: Questions, start: Tensor, connected: Ids, steps: int
) -> tuple[Tensor, Ids, npt.NDArray[np.bool_]]:
    """Fit the rows of a group by Adam, those that are connected until they have converged.

    Args:
        objective: What is minimised.
        questions: Those of the group.
        start: float[c, D].
        connected: int64[c], equal for rows that triples connect.
        steps: At most.

    Returns:
        float[c, D] the best rows that were met, int64[c] steps taken, bool[c] whether converged.
    """
    _, numbers = np.unique(connected, return_inverse=True)
    part = torch.from_numpy(numbers)
    pace = _Pace(int(part.max()) + 1)
    rows = start.clone()
    objective.shorten(rows)
    best, sizes = rows.clone(), _STEP_SIZE * objective.spread.deviation
    slopes, squares = torch.zeros_like(rows), torch.zeros_like(rows)
    for step in range(steps + 1):
        value, gradient = _value_and_gradient(objective, questions, rows, part, len(pace.least))
        better, stuck = pace.judge(value)
        best[better[part]] = rows[better[part]]
        if step == steps or not pace.active.any():
            break
        pace.taken += pace.active
        slopes.lerp_(gradient, 0.1)
        squares.lerp_(gradient.square(), 0.01)
        unit = (slopes / (1 - 0.9 ** (step + 1))) / ((squares / (1 - 0.99 ** (step + 1))).sqrt() + 1e-12)
        rows[stuck[part]] = best[stuck[part]]
        rows -= sizes * unit * (pace.sizes * pace.active)[part][:, None]
        objective.shorten(rows)
    return best, pace.taken[part].numpy(), ~pace.active[part].numpy()


class _Pace:
    """How long the steps of rows are that triples connect, each such part by itself, and when it is done."""

    def __init__(self, num_parts: int) -> None:
        self.least = torch.full((num_parts,), torch.inf)
        """The least that each part has cost."""
        self.sizes = torch.ones(num_parts)
        self.active = torch.ones(num_parts, dtype=torch.bool)
        """Which have not converged."""
        self.taken = torch.zeros(num_parts, dtype=torch.int64)
        """Steps."""
        self._reference = self.least.clone()
        self._waited = torch.zeros(num_parts, dtype=torch.int64)

    def judge(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take note of what the parts cost now, float[parts].

        Returns:
            bool[parts] which never cost less, and bool[parts] which go on from their best with shorter steps.
        """
        better = self.active & (value < self.least)
        self.least = torch.where(better, value, self.least)
        gained = self.least < self._reference - _ENOUGH * self.least.abs()
        self._reference = torch.where(gained, self.least, self._reference)
        self._waited = torch.where(gained, 0, self._waited + 1)
        stuck = self.active & (self._waited >= _PATIENCE)
        self._waited[stuck] = 0
        self.sizes[stuck] *= _SHORTER
        self.active = self.active & (self.sizes > _SHORTER ** (_NUM_SIZES - 0.5))
        return better, stuck


def _value_and_gradient(
    objective: Objective, questions: Questions, rows: Tensor, part: Tensor, num_parts: int
) -> tuple[Tensor, Tensor]:
    """Return float[parts] what each part of the rows costs, and the gradient float[c, D] of their sum."""
    leaf, total = rows.clone().requires_grad_(), torch.zeros(num_parts)
    with torch.enable_grad():
        for block in objective.blocks(questions):
            losses = objective.losses(block, leaf)
            torch.autograd.backward(losses.sum())
            named = torch.minimum(block.anchors, block.answers)  # A new end: trained ones come behind.
            total.index_add_(0, part[named], losses.detach())
        rest = objective.rivalry(questions, leaf) + objective.penalty(questions, leaf)
        torch.autograd.backward(rest.sum())
    total.index_add_(0, part, rest.detach())
    assert leaf.grad is not None
    return total, leaf.grad


def mean_losses(objective: Objective, questions: Questions, rows: Tensor) -> npt.NDArray[np.float64]:
    """Return float64[c]: the mean loss of the questions that name each new entity."""
    total = torch.zeros(questions.num_new)
    for block in objective.blocks(questions):
        total += per_entity(block, objective.losses(block, rows), questions.num_new)
    mean: npt.NDArray[np.float64] = (total / questions.counts).double().numpy()
    return mean
