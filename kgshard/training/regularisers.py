"""Penalties on the rows that a batch's questions use. All are sums over questions.

n3   sum of cubed magnitudes of the three factors (Lacroix et al., 2018)
l2   sum of squares            l3   sum of absolute cubes, coordinate by coordinate
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kgshard.models.link import LinkModel, Side


@dataclass(frozen=True, slots=True)
class Regulariser:
    """Weighted penalties, each question's share of the loss."""

    n3: float = 0.0
    l2: float = 0.0
    l3: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.n3 or self.l2 or self.l3)

    def __call__(
        self, model: LinkModel, side: Side, anchors: Tensor, relations: Tensor, answers: Tensor | None
    ) -> Tensor:
        """Return the penalty of questions about one side.

        Args:
            model: Knows its rows' magnitudes.
            side: What is asked for.
            anchors: float[q, dim].
            relations: float[q, relation_dim].
            answers: float[q, dim]; None where all entities are candidates and none is the question's own.
        """
        rows = [anchors, relations] if answers is None else [anchors, relations, answers]
        terms = []
        if self.n3:
            sizes = self._factors(model, side, anchors, relations, answers)
            terms.append(self.n3 * torch.stack([_cube_sum(size) for size in sizes]).sum())
        if self.l2:
            terms.append(self.l2 * torch.stack([part.square().sum() for part in rows]).sum())
        if self.l3:
            terms.append(self.l3 * torch.stack([part.abs().pow(3).sum() for part in rows]).sum())
        return torch.stack(terms).sum()

    def _factors(
        self, model: LinkModel, side: Side, anchors: Tensor, relations: Tensor, answers: Tensor | None
    ) -> tuple[Tensor, ...]:
        if answers is not None:
            return model.factors(side, anchors, relations, answers)
        # Models may leave the relation free.
        heads, *between, tails = model.factors(side, anchors, relations, anchors)
        return (tails if model.asks_heads(side) else heads, *between)


def _cube_sum(sizes: Tensor) -> Tensor:
    total: Tensor = _CubeSum.apply(sizes)  # type: ignore[no-untyped-call]
    return total


class _CubeSum(torch.autograd.Function):
    """sum of x³: half the passes over x that autograd of products makes."""

    @staticmethod
    def forward(ctx: Any, sizes: Tensor) -> Tensor:
        squares = sizes.square()
        ctx.save_for_backward(squares)
        return (squares * sizes).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (squares,) = ctx.saved_tensors
        slope: Tensor = squares * (3 * gradient)
        return slope
