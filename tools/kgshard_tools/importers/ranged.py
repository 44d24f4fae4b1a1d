"""What the RotatE paper's code and DGL-KE, which took it over, have in common.

Distances have a margin gamma on top. Of RotatE a relation's value v is the angle v / (range / pi), range =
(gamma + 2) / hidden_dim. Complex numbers are halves, as here.

Letters: R relations, E floats a relation row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kgshard.errors import DataError
from kgshard.files import read_json
from kgshard_tools.importers.foreign import ForeignFloats, ForeignModel
from kgshard_tools.importers.mapped import map_floats
from kgshard_tools.importers.texts import Splits

_WITH_MARGIN = ("TransE", "TransE_l1", "TransE_l2", "RotatE")


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of a config.json that scores depend on."""

    model: str
    hidden_dim: float
    gamma: float

    @property
    def range(self) -> float:
        """Half the width of the interval in which embeddings start."""
        return (self.gamma + 2.0) / self.hidden_dim


def read_settings(path: Path, *, model: str, hidden_dim: str) -> tuple[Settings, dict[str, Any]]:
    """Read a config.json.

    Args:
        path: The file.
        model: The key of the model's name.
        hidden_dim: The key of the dimension.

    Raises:
        DataError: A key is missing or of another kind.
    """
    try:
        config = read_json(path)
        settings = Settings(str(config[model]), float(config[hidden_dim]), float(config["gamma"]))
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: {error}") from error
    except KeyError as error:
        raise DataError(f"{path}: has no {error}") from error
    if not (settings.hidden_dim > 0 and np.isfinite(settings.range)):
        raise DataError(
            f"{path}: {hidden_dim} {settings.hidden_dim} and gamma {settings.gamma} make no range"
        )
    return settings, config


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranged:
    """A model of one of these programs, and where its parts lie."""

    program: str
    pi: float
    """As the program spells it."""
    settings: Settings
    scoring: str
    decisions: list[str]
    """The program's own, which come first."""
    config: Path
    entities: Path
    relations: Path
    labels: tuple[list[str], list[str]]
    """Of entities and of relations."""
    label_files: tuple[Path, Path]
    splits: Splits

    def foreign(self) -> ForeignModel:
        """Return the model in kgshard's layout."""
        is_rotation = self.settings.model == "RotatE"
        scale = self.settings.range / self.pi
        entity_labels, relation_labels = self.labels
        offset = self.settings.gamma if self.settings.model in _WITH_MARGIN else 0.0
        return ForeignModel(
            program=self.program,
            scoring=self.scoring,
            reciprocal=False,
            entity_labels=entity_labels,
            relation_labels=relation_labels,
            entities=map_floats(self.entities),
            relations=map_floats(self.relations),
            convert=partial(as_angles, scale=scale) if is_rotation else lambda rows: rows,
            triples=self.splits.triples,
            origins=self.splits.origins,
            offset=offset,
            decisions=[*self.decisions, *self._decisions(offset), *self.splits.notes],
            files=[self.config, self.entities, self.relations, *self.label_files, *self.splits.files],
        )

    def _decisions(self, offset: float) -> list[str]:
        decisions = []
        if self.settings.model == "RotatE":
            values = f"relation values are angles times {self.settings.range:.6g} / pi"
            decisions.append(f"{values}; they are divided by it")
        if self.settings.model in ("RotatE", "ComplEx"):
            decisions.append("complex numbers are halves, real parts first, as here")
        if offset:
            decisions.append(f"scores have the margin gamma = {offset:g} added; ranks do not depend on it")
        return decisions


def as_angles(values: ForeignFloats, scale: float) -> ForeignFloats:
    """Return relation values [R, E] divided by `scale`, in the arithmetic of float32, as the programs do."""
    return (np.asarray(values, np.float32) / np.float32(scale)).astype(np.float32)
