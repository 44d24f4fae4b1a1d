"""A scoring function applied to links, in both directions, with or without reciprocal relations.

With reciprocal relations (Lacroix et al., 2018) every relation r has a second row, its inverse
r + num_relations, and (?, r, t) is asked as (t, inverse of r, ?). Without them the model's own
`query_heads` answers it. Either way one query vector and one metric answer one question, so whoever
trains, ranks or searches only needs `relation_row` and `queries`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kgshard.errors import ConfigError
from kgshard.models import find_scoring
from kgshard.models.arrays import Array
from kgshard.models.metric import Metric
from kgshard.models.scoring import SIDES, Scoring, Side

__all__ = ["SIDES", "LinkModel", "Side"]


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Everything but the values: which formula, how wide, and what the relation rows mean."""

    name: str
    """See `kgshard.models.find_scoring`."""
    dim: int
    """Floats for each entity."""
    num_entities: int
    num_relations: int
    """Relations of the graph, inverses not counted."""
    reciprocal: bool
    offset: float = 0.0
    """Added to every score: a foreign program's margin. No rank depends on it."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.offset):
            raise ConfigError(f"the offset of scores must be a finite number, got {self.offset}")
        self.scoring.check_dim(self.dim)
        has_queries = type(self.scoring).query_heads is not Scoring.query_heads
        if not (self.reciprocal or (self.scoring.has_head_queries and has_queries)):
            raise ConfigError(f"{self.name} has no query for heads; it needs reciprocal relations")

    @property
    def scoring(self) -> Scoring:
        return find_scoring(self.name)

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

    def asks_heads(self, side: Side) -> bool:
        """Whether the model's own query for heads asks for `side`."""
        return side == "head" and not self.reciprocal

    @property
    def lifts(self) -> bool:
        """Whether candidates are more than entity rows as they are."""
        return type(self.scoring).candidates is not Scoring.candidates

    @property
    def roles_differ(self) -> bool:
        """Whether a row's sizes in the score are others for heads than for tails, or not its magnitudes."""
        return type(self.scoring).factors is not Scoring.factors

    @property
    def sides_differ(self) -> bool:
        """Whether queries for heads and for tails are compared with different candidates."""
        return not self.reciprocal and self.lifts

    def _asked(self, side: Side) -> Side:
        return "head" if self.asks_heads(side) else "tail"

    def queries(
        self, side: Side, anchors: Array, relations: Array, shared: Mapping[str, Any] | None = None
    ) -> Array:
        """Return float[..., query width] query vectors for the missing `side`.

        Args:
            side: Which end is asked for.
            anchors: float[..., dim] rows of the given ends: heads where tails are asked for.
            relations: float[..., relation_dim] rows that `relation_row` names.
            shared: Values of the model's shared parameters, where it has some.
        """
        scoring = self.scoring.bind(shared or {})
        if self._asked(side) == "tail":
            return scoring.query_tails(anchors, relations)
        return scoring.query_heads(anchors, relations)

    def candidates(self, side: Side, rows: Array) -> Array:
        """Return float[..., E]: what queries for `side` are compared with, from entity rows [..., dim]."""
        return self.scoring.candidates(self._asked(side), rows)

    def relation_queries(
        self, side: Side, anchors: Array, answers: Array, shared: Mapping[str, Any] | None = None
    ) -> Array:
        """Return float[..., relation_dim] that ask which relation row asks for `side` here."""
        heads, tails = (anchors, answers) if self._asked(side) == "tail" else (answers, anchors)
        return self.scoring.bind(shared or {}).query_relations(heads, tails)

    def factors(self, side: Side, anchors: Array, relations: Array, answers: Array) -> tuple[Array, ...]:
        """Return the magnitudes that the N3 regulariser cubes, for questions about `side`."""
        heads, tails = (anchors, answers) if self._asked(side) == "tail" else (answers, anchors)
        return self.scoring.factors(heads, relations, tails)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that run.json and config.json carry."""
        return {
            "score_function": self.name,
            "embedding_dim": self.dim,
            "relation_dim": self.relation_dim,
            "metric": self.metric.name,
            "num_entities": self.num_entities,
            "num_relations": self.num_relations,
            "reciprocal": self.reciprocal,
            "complex_layout": "halves",
            "offset": self.offset,
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
            offset=float(value.get("offset", 0.0)),
        )
