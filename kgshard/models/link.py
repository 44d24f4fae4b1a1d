"""A scoring function applied to links, in both directions, with or without reciprocal relations.

With reciprocal relations (Lacroix et al., 2018) every relation r has a second row, its inverse
r + num_relations, and (?, r, t) is asked as (t, inverse of r, ?). Without them the model's own
`query_heads` answers it. Either way one query vector and one metric answer one question, so whoever
trains, ranks or searches only needs `relation_row` and `queries`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kgshard.errors import ConfigError
from kgshard.models import SCORING
from kgshard.models.arrays import Array
from kgshard.models.metric import Metric
from kgshard.models.scoring import Scoring

Side = Literal["head", "tail"]
"""Which end of a triple is asked for."""

SIDES: tuple[Side, Side] = ("head", "tail")


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Everything but the values: which formula, how wide, and what the relation rows mean."""

    name: str
    """A name in kgshard.models.SCORING."""
    dim: int
    """Floats for each entity."""
    num_entities: int
    num_relations: int
    """Relations of the graph, inverses not counted."""
    reciprocal: bool

    def __post_init__(self) -> None:
        if self.name not in SCORING:
            raise ConfigError(f"model: unknown scoring function {self.name!r} (known: {', '.join(SCORING)})")
        self.scoring.check_dim(self.dim)

    @property
    def scoring(self) -> Scoring:
        return SCORING[self.name]

    @property
    def metric(self) -> Metric:
        return self.scoring.metric

    @property
    def relation_dim(self) -> int:
        """Floats for each relation."""
        return self.scoring.relation_dim(self.dim)

    @property
    def num_relation_rows(self) -> int:
        """Rows of the relation table, inverses counted."""
        return self.num_relations * (2 if self.reciprocal else 1)

    def relation_row(self, side: Side, relation_ids: Any) -> Any:
        """Return the rows of the relation table that ask for `side` (an int or an array of ints)."""
        return relation_ids + self.num_relations if self.reciprocal and side == "head" else relation_ids

    def queries(self, side: Side, anchors: Array, relations: Array) -> Array:
        """Return float[..., dim] query vectors for the missing `side`.

        Args:
            side: Which end is asked for.
            anchors: float[..., dim] rows of the given ends: heads where tails are asked for.
            relations: float[..., relation_dim] rows that `relation_row` names.
        """
        if side == "tail" or self.reciprocal:
            return self.scoring.query_tails(anchors, relations)
        return self.scoring.query_heads(anchors, relations)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that run.json and config.json carry."""
        return {
            "score_function": self.name,
            "embedding_dim": self.dim,
            "relation_dim": self.relation_dim,
            "metric": self.metric,
            "num_entities": self.num_entities,
            "num_relations": self.num_relations,
            "reciprocal": self.reciprocal,
            "complex_layout": "halves",
        }

    @staticmethod
    def from_dict(value: dict[str, Any]) -> LinkModel:
        """Read what `to_dict` wrote."""
        return LinkModel(
            name=str(value["score_function"]),
            dim=int(value["embedding_dim"]),
            num_entities=int(value["num_entities"]),
            num_relations=int(value["num_relations"]),
            reciprocal=bool(value["reciprocal"]),
        )
