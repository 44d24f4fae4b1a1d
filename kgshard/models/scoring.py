"""What every model is: a query in entity space and a metric.

    score(h, r, t) = metric(query_tails(h, r), candidates("tail", t))
                   = metric(query_heads(t, r), candidates("head", h))

One abstraction serves training, ranking, FAISS and serving. A model is pure maths on rows: it knows
nothing of ids, tables, ranks, files or FAISS, and runs on torch tensors and numpy arrays alike. Most models
compare queries with entity rows as they are; a few add columns that make their score a plain metric
(MuRE's biases and squared lengths), which is what `candidates` is for.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kgshard.errors import ConfigError
from kgshard.models.arrays import Array
from kgshard.models.metric import Metric

Side = Literal["head", "tail"]
"""Which end of a triple is asked for."""

SIDES: tuple[Side, Side] = ("head", "tail")


@dataclass(frozen=True, slots=True)
class Init:
    """How values are drawn before training."""

    kind: Literal["normal", "uniform"]
    scale: float
    """Standard deviation (normal), or half the width of an interval (uniform). 0 makes a constant."""
    center: float = 0.0

    def scaled(self, factor: float) -> Init:
        """Return the same around the same center, `factor` times as wide."""
        return replace(self, scale=self.scale * factor)


Columns = tuple[tuple[int, Init], ...]
"""How a row starts, where not all its floats start alike: (width, how), from left to right."""


@dataclass(frozen=True, slots=True)
class SharedInit:
    """A parameter that all rows share (a neural head's weights), and how it starts."""

    shape: tuple[int, ...]
    init: Init


class Scoring(ABC):
    """A scoring function. Rows are float[..., dim]; complex numbers are halves, real parts first."""

    metric: Metric
    has_head_queries: bool = True
    """False where no query vector finds the heads of (?, r, t); such models need reciprocal relations."""
    has_relation_queries: bool = False
    """Whether the score is an inner product with the relation's row too; see `query_relations`."""
    takes_dropout: bool = True
    """Whether any of a query's coordinates may be dropped and the score still means something."""
    shared: Mapping[str, Any] = {}
    """Values of the shared parameters, in a copy that `bind` made."""

    def configured(self, arguments: str) -> Scoring:
        """Return the variant that `--model NAME:ARGUMENTS` means.

        Raises:
            ConfigError: There are no such variants.
        """
        raise ConfigError(f"takes no arguments, got {arguments!r}")

    def relation_dim(self, dim: int) -> int:
        """Return the floats for each relation, given the floats for each entity."""
        return dim

    def check_dim(self, dim: int) -> None:
        """Raise ConfigError where the model has no form of this dimension."""
        if dim < 1:
            raise ConfigError(f"dim must be >= 1, got {dim}")

    def entity_init(self, dim: int) -> Init | Columns:
        """Return how entity rows start."""
        return Init("normal", 1e-2)

    def relation_init(self, dim: int) -> Init | Columns:
        """Return how relation rows start."""
        return self.entity_init(dim)

    def shared_init(self, dim: int) -> dict[str, SharedInit]:
        """Return the parameters that all rows share, by name."""
        return {}

    def bind(self, shared: Mapping[str, Any]) -> Scoring:
        """Return this scoring function with values for its shared parameters."""
        if not shared:
            return self
        bound = copy.copy(self)
        bound.shared = shared
        return bound

    @abstractmethod
    def query_tails(self, heads: Array, relations: Array) -> Array:
        """Return the queries [...] with which the tails of (h, r, ?) are compared."""

    def query_heads(self, tails: Array, relations: Array) -> Array:
        """Return the queries [...] with which the heads of (?, r, t) are compared."""
        raise ConfigError("has no query for heads; use reciprocal relations")

    def query_relations(self, heads: Array, tails: Array) -> Array:
        """Return float[..., relation_dim]: its inner product with a relation's row is the score."""
        raise ConfigError("has no query for relations")

    def candidates(self, side: Side, rows: Array) -> Array:
        """Return float[..., E]: what queries for this side are compared with, made from entity rows."""
        return rows

    def magnitudes(self, rows: Array) -> Array:
        """Return the non-negative sizes of a row's coordinates: absolute values, or moduli."""
        return abs(rows)

    def factors(self, heads: Array, relations: Array, tails: Array) -> tuple[Array, ...]:
        """Return the magnitudes whose cubes the N3 regulariser sums (Lacroix et al., 2018)."""
        return tuple(self.magnitudes(rows) for rows in (heads, relations, tails))


def whole_numbers(arguments: str, form: str, *, at_least: int) -> list[int]:
    """Read the arguments of `--model NAME:ARGUMENTS`.

    Args:
        arguments: "1,2".
        form: What they are called, "p,q"; as many are read.
        at_least: The least that each may be.

    Raises:
        ConfigError: Something else is there.
    """
    parts = arguments.split(",")
    readable = all(part.isascii() and part.isdecimal() and len(part) < 5 for part in parts)
    numbers = [int(part) for part in parts] if readable else []
    if len(numbers) != len(form.split(",")) or min(numbers) < at_least:
        article = "whole numbers" if "," in form else "a whole number"
        raise ConfigError(f"takes {form}, {article} from {at_least} to 9999, got {arguments!r}")
    return numbers


class BlockScoring(Scoring):
    """A scoring function over rows of equal blocks: complex numbers, quaternions, two roles."""

    num_blocks: int
    kind: str
    """What such rows are called."""

    def check_dim(self, dim: int) -> None:
        super().check_dim(dim)
        if dim % self.num_blocks:
            wanted = "even" if self.num_blocks == 2 else f"a multiple of {self.num_blocks}"
            raise ConfigError(f"dim must be {wanted} for {self.kind} embeddings, got {dim}")


class ComplexScoring(BlockScoring):
    """A scoring function over complex entity rows, stored as halves."""

    num_blocks = 2
    kind = "complex"
