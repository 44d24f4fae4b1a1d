"""A run with its overlay, as one: what reads a `Stored` reads it without knowing.

Ids and rows go on behind the run's. Triples of the overlay are a split of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from kgshard.data.dataset import SPLITS, Dataset, Triples
from kgshard.files import AnyPath
from kgshard.models.link import LinkModel
from kgshard.runs import Checkpoint
from kgshard.shards import StoredTable
from kgshard.vocabulary import Vocabulary
from kgshard_tools.overlay.stored import Overlay, open_overlay
from kgshard_tools.stored import Stored

OVERLAY_SPLIT = "overlay"


@dataclass(frozen=True)
class ExtendedDataset(Dataset):
    """The labels and triples of a run's graph, and those of an overlay."""

    base: Dataset
    overlay: Overlay

    @cached_property
    def entities(self) -> Vocabulary:
        return self.overlay.extend_vocabulary(self.base.entities)

    @cached_property
    def relations(self) -> Vocabulary:
        return self.base.relations

    @property
    def num_entities(self) -> int:
        return self.base.num_entities + len(self.overlay)

    @property
    def splits(self) -> tuple[str, ...]:
        return (*SPLITS, OVERLAY_SPLIT)

    def triples(self, split: str) -> Triples:
        """Return the triples of a split of the run, or those of the overlay, "overlay"."""
        return self.overlay.triples if split == OVERLAY_SPLIT else self.base.triples(split)


@dataclass(frozen=True)
class ExtendedCheckpoint(Checkpoint):
    """A checkpoint whose entity table goes on with rows of an overlay."""

    base: Checkpoint
    overlay: Overlay

    @cached_property
    def entities(self) -> StoredTable:
        return self.overlay.extend_table(self.base.entities)


@dataclass(frozen=True)
class ExtendedStored(Stored):
    """A checkpoint of a run, and behind its entities those of an overlay."""

    overlay: Overlay

    @cached_property
    def dataset(self) -> Dataset:
        return ExtendedDataset(
            self.run.folder / "data", self.run.dataset.info, self.run.dataset, self.overlay
        )

    @cached_property
    def model(self) -> LinkModel:
        return replace(self.run.model, num_entities=self.dataset.num_entities)

    @property
    def has_indexes(self) -> bool:
        return False


def extend(stored: Stored, overlay: AnyPath) -> ExtendedStored:
    """Return a run with its overlay; see `open_overlay`."""
    opened = open_overlay(overlay, stored)
    base = stored.checkpoint
    return ExtendedStored(stored.run, ExtendedCheckpoint(base.folder, base.manifest, base, opened), opened)
