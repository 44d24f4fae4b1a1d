"""Products whose gradients are products of the same kind: fewer passes than autograd makes of their parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def complex_product_of_tensors(x: Tensor, y: Tensor, *, conjugate: bool) -> Tensor:
    """Return the products [..., D] of complex numbers stored as halves, x times y or its conjugate."""
    if x.shape != y.shape:
        x, y = torch.broadcast_tensors(x, y)
    product: Tensor = _ComplexProduct.apply(x, y, conjugate)
    return product


class _ComplexProduct(torch.autograd.Function):
    """x y, whose gradients are g conj(y) and g conj(x); or x conj(y): g y and x conj(g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, conjugate: bool) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.conjugate = conjugate
        return _multiplied(x, y, conjugate=conjugate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y = ctx.saved_tensors
        of_x, of_y, _ = ctx.needs_input_grad
        factors = (x, gradient) if ctx.conjugate else (gradient, x)
        return (
            _multiplied(gradient, y, conjugate=not ctx.conjugate) if of_x else None,
            _multiplied(*factors, conjugate=True) if of_y else None,
            None,
        )


def _multiplied(x: Tensor, y: Tensor, *, conjugate: bool) -> Tensor:
    """Return x y or x conj(y): four passes over halves, nothing in between."""
    product = x.new_empty(x.shape)
    (a, b), (c, d), (real, imaginary) = (part.chunk(2, dim=-1) for part in (x, y, product))
    sign = -1 if conjugate else 1
    torch.mul(a, c, out=real).addcmul_(b, d, value=-sign)
    torch.mul(b, c, out=imaginary).addcmul_(a, d, value=sign)
    return product
