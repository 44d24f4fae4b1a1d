"""How trained rows lie. Shape letters: D floats an entity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """How trained rows lie."""

    mean: Tensor
    """float[D]."""
    deviation: Tensor
    """float[D], above 0."""
    typical_norm: float

    @staticmethod
    def of(rows: Tensor) -> Spread:
        deviation = rows.double().std(dim=0, correction=0)
        # A constant column, or table, still has a scale.
        least = 1e-3 * max(float(deviation.mean()), float(rows.double().square().mean().sqrt()), 1e-6)
        norms = torch.linalg.vector_norm(rows.double(), dim=1)
        return Spread(
            rows.double().mean(dim=0).float(), deviation.clamp(min=least).float(), float(norms.median())
        )
