"""Penalties on the rows that a batch's questions use. All are sums over questions.

A row is looked at once, however many questions use it: that is most of them, on graphs with hubs.

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
class UsedRows:
    """Distinct rows, and how often questions use each of them."""

    rows: Tensor
    """float[U, width]."""
    uses: tuple[Tensor, ...]
    """float[U] each: in each of their roles."""

    @property
    def total(self) -> Tensor:
        """float[U]: in all roles together."""
        return torch.stack(self.uses).sum(dim=0)

    @staticmethod
    def of(rows: Tensor, *places: Tensor) -> UsedRows:
        """Return those of rows [n, width] that are used, from where in them (int64[q]), role by role."""
        uses = torch.stack([torch.bincount(where, minlength=len(rows)) for where in places])
        used = uses.sum(dim=0).nonzero()[:, 0]
        chosen = torch.nn.functional.embedding(used, rows)
        return UsedRows(chosen, tuple(uses[:, used].to(rows.dtype)))


@dataclass(frozen=True, slots=True)
class Regulariser:
    """Weighted penalties, each question's share of the loss."""

    n3: float = 0.0
    l2: float = 0.0
    l3: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.n3 or self.l2 or self.l3)

    def __call__(self, model: LinkModel, side: Side, entities: UsedRows, relations: UsedRows) -> Tensor:
        """Return the penalty of questions about one side.

        Args:
            model: Knows its rows' magnitudes.
            side: What is asked for.
            entities: Used as anchors, and as answers: never, where all entities are candidates and none is
                the question's own.
            relations: Used as such.
        """
        everything = (entities, relations)
        terms = []
        if self.n3:
            cubes = [_cubes(sizes, uses) for sizes, uses in _factors(model, side, entities, relations)]
            terms.append(self.n3 * torch.stack(cubes).sum())
        if self.l2:
            squares = [used.total @ used.rows.square().sum(dim=1) for used in everything]
            terms.append(self.l2 * torch.stack(squares).sum())
        if self.l3:
            terms.append(
                self.l3 * torch.stack([_cubes(used.rows.abs(), used.total) for used in everything]).sum()
            )
        return torch.stack(terms).sum()


def _factors(
    model: LinkModel, side: Side, entities: UsedRows, relations: UsedRows
) -> list[tuple[Tensor, Tensor]]:
    """Return sizes [U, n] and how often they are used, float[U], of each factor of the score."""
    if not model.roles_differ:
        magnitudes = model.scoring.magnitudes
        return [(magnitudes(used.rows), used.total) for used in (entities, relations)]
    head, *between, tail = model.factors(side, entities.rows, relations.rows, entities.rows)
    as_anchor, as_answer = entities.uses
    ends = (as_answer, as_anchor) if model.asks_heads(side) else (as_anchor, as_answer)
    # Models may leave the relation free.
    return [(head, ends[0]), *((sizes, relations.total) for sizes in between), (tail, ends[1])]


def _cubes(sizes: Tensor, uses: Tensor) -> Tensor:
    total: Tensor = _Cubes.apply(sizes, uses)  # type: ignore[no-untyped-call]
    return total


class _Cubes(torch.autograd.Function):
    """sum of u x³ over rows used u times: half the passes over x that autograd of products makes."""

    @staticmethod
    def forward(ctx: Any, sizes: Tensor, uses: Tensor) -> Tensor:
        squares = sizes.square()
        ctx.save_for_backward(squares, uses)
        return (squares * sizes).sum(dim=1) @ uses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        squares, uses = ctx.saved_tensors
        return squares * (uses * (3 * gradient))[:, None], None
