"""Labels and rows of a dataset, as queries name them."""

from __future__ import annotations

from kgshard.data.dataset import Dataset
from kgshard_tools.multi_hop.results import NamedEntity


class DatasetNames:
    """Finds rows by label or #ROW, and labels by row."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def entity(self, name: str) -> int:
        return self._dataset.entities.id_of(name)

    def relation(self, name: str) -> int:
        return self._dataset.relations.id_of(name)

    def entity_label(self, row: int) -> str:
        return self._dataset.entities[row]

    def relation_label(self, row: int) -> str:
        return self._dataset.relations[row]

    def named(self, row: int) -> NamedEntity:
        return NamedEntity(self.entity_label(row), row)
