"""Every model that `--model` takes: what it computes, and what it costs at some dimension."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kgshard.errors import ConfigError
from kgshard.models import SCORING
from kgshard.models.scoring import Scoring


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model at one dimension."""

    name: str
    formula: str
    """In words, with its paper."""
    metric: str
    """A name of kgshard.models.metric.METRICS."""
    own_head_queries: bool
    """Whether it can ask for heads without reciprocal relations."""
    relation_prediction: bool
    """Whether a query finds the relations of (h, ?, t)."""
    relation_floats: int | None
    """Floats for each relation row; None where the dimension does not suit the model."""
    shared: dict[str, list[int]] | None
    """Shapes of the parameters that all rows share, by name."""
    refused: str | None = None
    """Why the dimension does not suit the model."""

    def cells(self) -> list[str]:
        """Return what a table says, in the order of its header."""
        shared = sum(math.prod(shape) for shape in (self.shared or {}).values())
        floats = [f"{self.relation_floats:,}", f"{shared:,}"] if self.refused is None else ["-", "-"]
        whether = ["yes" if has else "no" for has in (self.own_head_queries, self.relation_prediction)]
        return [self.name, self.metric, *floats, *whether, self.refused or self.formula]


_HEADER = ["model", "metric", "relation", "shared", "heads", "relations", "formula"]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All models at one dimension."""

    dim: int
    """Floats for each entity."""
    models: list[ModelInfo]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return a table, one line a model."""
        rows = [_HEADER, *(model.cells() for model in self.models)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            f"--dim {self.dim}: floats for each relation row, and floats that all rows share; whether heads",
            "can be asked for without reciprocal relations; whether relations can be predicted",
            *(_aligned(row, widths) for row in rows),
        ]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    sides = "<<>><<"  # Numbers to the right; the formula comes last and is not padded.
    cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False))
    return "  ".join([*cells, row[-1]])


def list_models(dim: int) -> Catalogue:
    """Describe every registered model with entities of `dim` floats.

    Raises:
        ConfigError: dim is below 1.
    """
    if dim < 1:
        raise ConfigError(f"--dim must be >= 1, got {dim}")
    return Catalogue(dim, [_describe(name, scoring, dim) for name, scoring in SCORING.items()])


def _describe(name: str, scoring: Scoring, dim: int) -> ModelInfo:
    refused = _why_not(scoring, dim)
    shared = {} if refused else scoring.shared_init(dim)
    return ModelInfo(
        name=name,
        formula=formula(scoring),
        metric=scoring.metric.name,
        own_head_queries=scoring.has_head_queries,
        relation_prediction=scoring.has_relation_queries,
        relation_floats=None if refused else scoring.relation_dim(dim),
        shared=None if refused else {parameter: list(how.shape) for parameter, how in shared.items()},
        refused=refused,
    )


def _why_not(scoring: Scoring, dim: int) -> str | None:
    try:
        scoring.check_dim(dim)
    except ConfigError as error:
        return str(error)
    return None


def formula(scoring: Scoring) -> str:
    """Return the first paragraph of the module that defines a model, which says the formula."""
    text = sys.modules[type(scoring).__module__].__doc__ or type(scoring).__doc__ or ""
    return " ".join(text.strip().split("\n\n")[0].split()).rstrip(".")
