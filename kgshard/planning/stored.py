"""What ranks and checkpoints store: counted exactly. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kgshard.config import TrainConfig
from kgshard.errors import ConfigError
from kgshard.models.link import LinkModel
from kgshard.partition import RowPartition

_STATE: dict[str, tuple[int, int, int]] = {
    "adagrad": (1, 0, 0),
    "adagrad-rowwise": (0, 1, 0),
    "adam": (2, 0, 0),
    "adam-rowstep": (2, 0, 4),
    "sgd": (0, 0, 0),
}
"""Optimizer state: numbers for each value, numbers for each row, other bytes for each row."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """How large a graph is."""

    entities: int
    relations: int
    triples: int
    """Of train."""
    valid: int = 0
    num_bytes: int = 0
    """Of its prepared dataset; 0 is not known, and taken to be int32 triples alone."""

    @property
    def dataset_bytes(self) -> int:
        return self.num_bytes or 12 * (self.triples + self.valid)

    def __post_init__(self) -> None:
        for name, least in (("entities", 1), ("relations", 1), ("triples", 1), ("valid", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--num-{name} must be >= {least}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that a rank holds."""

    rows: int
    columns: int
    value_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.columns * self.value_bytes

    def state_bytes(self, config: TrainConfig) -> int:
        values, numbers, others = _STATE[config.optimizer]
        row_bytes = (values * self.columns + numbers) * self.value_bytes + others
        return self.rows * row_bytes


def held_tables(model: LinkModel, config: TrainConfig, world_size: int) -> list[Table]:
    """Return what the first of some ranks, which has most, holds: entities, relations, shared parameters."""

    def rows(count: int, *, sharded: bool) -> int:
        return len(RowPartition(count, world_size if sharded else 1).rows_of(0))

    is_sharded, width = config.shards_relations(model), config.value_bytes
    return [
        Table(rows(model.num_entities, sharded=True), model.dim, width),
        Table(rows(model.num_relation_rows, sharded=is_sharded), model.relation_dim, width),
        *(
            Table(how.shape[0] if how.shape else 1, math.prod(how.shape[1:]), 4)
            for how in model.scoring.shared_init(model.dim).values()
        ),
    ]
