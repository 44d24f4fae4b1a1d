"""What every model is: a query in entity space and a metric.

    score(h, r, t) = metric(query_tails(h, r), t) = metric(query_heads(t, r), h)

One abstraction serves training, ranking, FAISS and serving. A model is pure maths on rows: it knows
nothing of ids, tables, ranks, files or FAISS, and runs on torch tensors and numpy arrays alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from kgshard.errors import ConfigError
from kgshard.models.arrays import Array
from kgshard.models.metric import Metric


@dataclass(frozen=True, slots=True)
class Init:
    """How a table's values are drawn before training."""

    kind: Literal["normal", "uniform"]
    scale: float
    """Standard deviation (normal), or half the width of an interval around 0 (uniform)."""


class Scoring(ABC):
    """A scoring function. Rows are float[..., dim]; complex numbers are halves, real parts first."""

    metric: Metric

    def relation_dim(self, dim: int) -> int:
        """Return the floats for each relation, given the floats for each entity."""
        return dim

    def check_dim(self, dim: int) -> None:
        """Raise ConfigError where the model has no form of this dimension."""
        if dim < 1:
            raise ConfigError(f"dim must be >= 1, got {dim}")

    def entity_init(self, dim: int) -> Init:
        """Return how entity rows start."""
        return Init("normal", 1e-2)

    def relation_init(self, dim: int) -> Init:
        """Return how relation rows start."""
        return self.entity_init(dim)

    @abstractmethod
    def query_tails(self, heads: Array, relations: Array) -> Array:
        """Return float[..., dim]: what the tails of (h, r, ?) are compared with."""

    @abstractmethod
    def query_heads(self, tails: Array, relations: Array) -> Array:
        """Return float[..., dim]: what the heads of (?, r, t) are compared with."""

    def magnitudes(self, rows: Array) -> Array:
        """Return the non-negative sizes whose cubes the N3 regulariser sums (Lacroix et al., 2018)."""
        return abs(rows)


class ComplexScoring(Scoring):
    """A scoring function over complex entity rows, stored as halves."""

    def check_dim(self, dim: int) -> None:
        super().check_dim(dim)
        if dim % 2:
            raise ConfigError(f"dim must be even for complex embeddings, got {dim}")
