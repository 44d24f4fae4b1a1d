"""Adam on touched rows, with one step count for the table or one for each row (Kingma and Ba, 2015).

    m += (1 - beta1) (g - m),   v = beta2 v + (1 - beta2) g²
    w -= lr m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)

m and v advance only when a row is touched. The two classes differ in t.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from kgshard.errors import ConfigError
from kgshard.optim import kernels
from kgshard.optim.base import RowOptimizer, Rows, Storage
from kgshard.routing import RowGradient


class SparseAdam(RowOptimizer):
    """Adam whose t counts the steps of the table, as torch.optim.SparseAdam.

    Like that, it adds eps to sqrt(v) itself, which is eps / sqrt(1 - beta2**t) in the formula above: it
    shows where gradients are nearly as small as eps.

    A row touched for the first time at a late step moves by more than lr, up to
    (1 - beta1) / sqrt(1 - beta2) = 3.16 times as far: its moments start at zero, but t did not.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(weight, lr=lr, **storage)
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas must be in [0, 1), got {betas}")
        if not eps > 0:
            raise ConfigError(f"eps must be > 0, got {eps}")
        self.betas = betas
        self.eps = eps
        self.exp_avg = self._zeros(weight.shape)
        self.exp_avg_sq = self._zeros(weight.shape)

    def _update(self, rows: Rows, gradients: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        average = self._read("exp_avg", rows).lerp_(gradients, 1 - beta1)
        self._write("exp_avg", rows, average)
        squared = self._read("exp_avg_sq", rows).mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        self._write("exp_avg_sq", rows, squared)
        factor, eps = self._corrected(rows)
        root = squared.sqrt().add_(eps)
        return torch.div(average, root, out=root).mul_(factor)

    def _update_in_one_pass(self, gradient: RowGradient) -> bool:
        tables = (self.weight, self.exp_avg, self.exp_avg_sq)
        if not kernels.can_update(gradient, *tables):
            return False
        factor, eps = self._corrected(gradient.rows)
        kernels.adam(gradient, *tables, betas=self.betas, factor=factor, eps=eps)
        return True

    def _corrected(self, rows: Rows) -> tuple[float | Tensor, float | Tensor]:
        """Return a and e of the update a m / (sqrt(v) + e), numbers or float32[U, 1]."""
        beta1, beta2 = self.betas
        correction = math.sqrt(1 - beta2**self.num_steps) / (1 - beta1**self.num_steps)
        return -self.lr * correction, self.eps


class RowStepAdam(SparseAdam):
    """Adam whose t counts the steps that touched a row, 4 bytes a row.

    Each row is trained as torch.optim.Adam would train it on its own gradients alone; the first time, it
    moves by lr, however late that is.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(weight, lr=lr, betas=betas, eps=eps, **storage)
        self.row_steps = self._make_zeros(weight.shape[:1], torch.int32, self.device)

    def _corrected(self, rows: Rows) -> tuple[Tensor, Tensor]:
        steps = self._read("row_steps", rows).add_(1)
        self._write("row_steps", rows, steps)
        # In float32 alone, 1 - 0.999 would be off by 1e-5 of itself.
        first, second = (1 - beta ** steps.double() for beta in self.betas)
        root = second.sqrt()
        return (root / first * -self.lr).float(), (root * self.eps).float()
