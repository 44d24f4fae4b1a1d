"""Moduli in torch, with the gradient at 0 taken as 0.

Sums of complex moduli between all queries and all candidates are made a slice of queries at a time.

Shape letters: B queries, N candidates, C complex coordinates, D = 2 C floats for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kgshard.memory import SLICE_NUMBERS

_TINY = 1e-15
"""Divides in place of smaller moduli."""


def moduli(rows: Tensor, num_blocks: int) -> Tensor:
    """Return float[..., D / num_blocks]: moduli of numbers stored as num_blocks blocks."""
    result: Tensor = _Moduli.apply(rows, num_blocks)  # type: ignore[no-untyped-call]
    return result


class _Moduli(torch.autograd.Function):
    """Two passes over the rows; autograd of squares, sum and root makes a dozen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_blocks: int) -> Tensor:
        first, *others = rows.square().chunk(num_blocks, dim=-1)
        sizes = sum(others, start=first).sqrt_()
        ctx.save_for_backward(rows, sizes)
        return sizes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rows, sizes = ctx.saved_tensors
        weights = gradient / sizes.clamp(min=_TINY)
        by_block = rows.unflatten(-1, (rows.shape[-1] // sizes.shape[-1], -1))
        return (by_block * weights.unsqueeze(-2)).flatten(-2), None


def moduli_distances(queries: Tensor, candidates: Tensor) -> Tensor:
    """Return float[B, N]: sum_c |q_c - e_c| for rows [real | imaginary]; never B x N x D at once."""
    distances: Tensor = _ModuliDistances.apply(queries, candidates)  # type: ignore[no-untyped-call]
    return distances


class _ModuliDistances(torch.autograd.Function):
    """Differences are made again in the backward pass: keeping them would take B x N x D floats."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(queries, candidates)
        sums = queries.new_empty(len(queries), len(candidates))
        for part in _slices(queries, candidates):
            _, _, modulus = _differences(queries[part], candidates)
            sums[part] = modulus.sum(-1)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        queries, candidates = ctx.saved_tensors
        to_queries, to_candidates = torch.empty_like(queries), torch.zeros_like(candidates)
        for part in _slices(queries, candidates):
            real, imaginary, modulus = _differences(queries[part], candidates)
            weights = gradient[part][..., None] / modulus.clamp_(min=_TINY)
            pulls = torch.cat([real.mul_(weights), imaginary.mul_(weights)], dim=-1)
            to_queries[part] = pulls.sum(1)
            to_candidates -= pulls.sum(0)
        return to_queries, to_candidates


def _slices(queries: Tensor, candidates: Tensor) -> Iterator[slice]:
    size = max(1, SLICE_NUMBERS // max(1, candidates.numel() // 2))
    return (slice(start, start + size) for start in range(0, len(queries), size))


def _differences(queries: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return real and imaginary parts, and moduli, of all differences: float[b, N, C] each."""
    (a, b), (c, d) = (rows.chunk(2, dim=-1) for rows in (queries, candidates))
    real, imaginary = a[:, None] - c, b[:, None] - d
    return real, imaginary, torch.hypot(real, imaginary)
