"""Optimizers that touch only the rows that got a gradient.

State lives beside the table or on another device (`device="cpu"` keeps it in host memory while the
table is on a GPU); gradients then travel to the state and updates travel back.

Shape letters: U touched rows, D floats for each row, N rows of the table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kgshard.errors import ConfigError
from kgshard.routing import RowGradient


class RowOptimizer(ABC):
    """Updates the rows of one table in place."""

    def __init__(self, weight: Tensor, *, lr: float, device: torch.device | None = None) -> None:
        """Make zero state for a table.

        Args:
            weight: float[N, D], updated in place by `step`.
            lr: Learning rate, > 0.
            device: Where the state lives; by default where the table is.
        """
        if not lr > 0:
            raise ConfigError(f"lr must be > 0, got {lr}")
        self.weight = weight
        self.lr = lr
        self.device = device or weight.device

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def step(self, gradient: RowGradient) -> None:
        """Apply one update. A row is touched if it is listed, even where its gradient is zero."""
        rows = gradient.rows.to(self.device)
        update = self._update(rows, gradient.values.to(self.device, torch.float32))
        update = update.to(self.weight.device, self.weight.dtype)
        self.weight.index_add_(0, gradient.rows, update)

    @abstractmethod
    def _update(self, rows: Tensor, gradients: Tensor) -> Tensor:
        """Advance the state of int64[U] rows; return float32[U, D] to add to them."""


class SparseAdam(RowOptimizer):
    """Adam with moments that advance only when a row is touched (Kingma and Ba, 2015).

    Equal to torch.optim.SparseAdam: one step count for the table, bias-corrected.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(weight, lr=lr, device=device)
        self.betas = betas
        self.eps = eps
        self.num_steps = 0
        self.exp_avg = self._zeros(*weight.shape)
        self.exp_avg_sq = self._zeros(*weight.shape)

    def _update(self, rows: Tensor, gradients: Tensor) -> Tensor:
        self.num_steps += 1
        beta1, beta2 = self.betas
        average = self.exp_avg.index_select(0, rows).lerp_(gradients, 1 - beta1)
        squared = self.exp_avg_sq.index_select(0, rows).mul_(beta2)
        squared.addcmul_(gradients, gradients, value=1 - beta2)
        self.exp_avg.index_copy_(0, rows, average)
        self.exp_avg_sq.index_copy_(0, rows, squared)
        correction = math.sqrt(1 - beta2**self.num_steps) / (1 - beta1**self.num_steps)
        return average.div_(squared.sqrt_().add_(self.eps)).mul_(-self.lr * correction)


class Adagrad(RowOptimizer):
    """Adagrad, one accumulator for each value (Duchi et al., 2011)."""

    def __init__(
        self, weight: Tensor, *, lr: float, eps: float = 1e-10, device: torch.device | None = None
    ) -> None:
        super().__init__(weight, lr=lr, device=device)
        self.eps = eps
        self.sum = self._zeros(*weight.shape)

    def _update(self, rows: Tensor, gradients: Tensor) -> Tensor:
        total = self.sum.index_select(0, rows).addcmul_(gradients, gradients)
        self.sum.index_copy_(0, rows, total)
        return gradients.div(total.sqrt_().add_(self.eps)).mul_(-self.lr)


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one accumulator for each row: the mean square of its gradient.

    State is 4 bytes a row instead of 4 D (FBGEMM's exact_row_wise_adagrad, PyTorch-BigGraph).
    """

    def __init__(
        self, weight: Tensor, *, lr: float, eps: float = 1e-10, device: torch.device | None = None
    ) -> None:
        super().__init__(weight, lr=lr, device=device)
        self.eps = eps
        self.sum = self._zeros(len(weight))

    def _update(self, rows: Tensor, gradients: Tensor) -> Tensor:
        total = self.sum.index_select(0, rows).add_(gradients.square().mean(dim=1))
        self.sum.index_copy_(0, rows, total)
        return gradients * total.sqrt_().add_(self.eps).reciprocal_().mul_(-self.lr)[:, None]


OPTIMIZERS: dict[str, type[SparseAdam] | type[Adagrad] | type[RowWiseAdagrad]] = {
    "adam": SparseAdam,
    "adagrad": Adagrad,
    "adagrad-rowwise": RowWiseAdagrad,
}
"""Every optimizer by the name that `--optimizer` takes."""
