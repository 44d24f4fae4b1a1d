"""Stochastic gradient descent: w -= lr g."""

from __future__ import annotations

from torch import Tensor

from kgshard.optim.base import RowOptimizer, Rows


class SGD(RowOptimizer):
    """Plain descent, as torch.optim.SGD without momentum; it has no state."""

    def _update(self, rows: Rows, gradients: Tensor) -> Tensor:
        return gradients * -self.lr
