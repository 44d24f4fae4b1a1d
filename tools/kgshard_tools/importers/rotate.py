"""Checkpoints of the RotatE paper's code (Sun et al., 2019; KnowledgeGraphEmbedding, codes/model.py).

    config.json              model, hidden_dim, gamma, nentity, nrelation
    entity_embedding.npy     float32[N, D], complex numbers as halves
    relation_embedding.npy   float32[R, E]
    entities.dict, relations.dict, train.txt, valid.txt, test.txt
                             of the graph: beside these files, in the folder above, or in --data

Scores are gamma - ||h + r - t||_1 (TransE), gamma less the sum of the moduli (RotatE), or plain products.
Of RotatE a relation's value v is the angle v / (range / pi), range = (gamma + 2) / hidden_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kgshard.errors import ConfigError, DataError
from kgshard.files import read_json
from kgshard_tools.importers.arrays import read_array
from kgshard_tools.importers.foreign import ForeignFloats, ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.texts import find_file, read_numbered_labels, read_splits

_ENTITIES, _RELATIONS, _CONFIG = "entity_embedding.npy", "relation_embedding.npy", "config.json"
_PI = 3.14159262358979323846
"""As the program spells it, one digit wrong: its angles are a hundred-millionth smaller."""

SCORING = {"TransE": "transe-l1", "DistMult": "distmult", "ComplEx": "complex", "RotatE": "rotate-moduli"}
_WITH_MARGIN = ("TransE", "RotatE")


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
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {error}") from error
    except KeyError as error:
        raise DataError(f"{path}: has no {error}") from error
    if not (settings.hidden_dim > 0 and np.isfinite(settings.range)):
        raise DataError(
            f"{path}: {hidden_dim} {settings.hidden_dim} and gamma {settings.gamma} make no range"
        )
    return settings, config


def as_angles(values: ForeignFloats, scale: float) -> ForeignFloats:
    """Return relation values [R, E] divided by `scale`, in the arithmetic of float32, as the programs do."""
    return (np.asarray(values, np.float32) / np.float32(scale)).astype(np.float32)


def _recognises(source: Path) -> bool:
    return all((source / name).is_file() for name in (_ENTITIES, _RELATIONS, _CONFIG))


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    settings, _ = read_settings(source / _CONFIG, model="model", hidden_dim="hidden_dim")
    if settings.model not in SCORING:
        raise ConfigError(f"{source / _CONFIG}: {_why_not(settings.model)}")
    folders = (options.data,) if options.data else (source, source.resolve().parent)
    entity_file = find_file(folders, ["entities.dict"], what="labels of entities")
    relation_file = find_file(folders, ["relations.dict"], what="labels of relations")
    entity_labels, relation_labels = read_numbered_labels(entity_file), read_numbered_labels(relation_file)
    splits = read_splits(entity_file.parent, entity_labels, relation_labels)
    relations = read_array(source / _RELATIONS)
    decisions = [f"heads are asked by the model's own query; scored by {SCORING[settings.model]}"]
    if settings.model == "RotatE":
        relations = as_angles(relations, settings.range / _PI)
        decisions.append(
            f"relation values are angles times {settings.range:.6g} / pi; they are divided by it"
        )
    if settings.model in ("RotatE", "ComplEx"):
        decisions.append("complex numbers are halves, real parts first, as here")
    offset = settings.gamma if settings.model in _WITH_MARGIN else 0.0
    if offset:
        decisions.append(f"scores have the margin gamma = {offset:g} added; ranks do not depend on it")
    return ForeignModel(
        program="KnowledgeGraphEmbedding (RotatE paper)",
        scoring=SCORING[settings.model],
        reciprocal=False,
        entity_labels=entity_labels,
        relation_labels=relation_labels,
        entities=read_array(source / _ENTITIES),
        relations=relations,
        triples=splits.triples,
        offset=offset,
        decisions=[*decisions, *splits.notes],
        files=[
            *(source / name for name in (_CONFIG, _ENTITIES, _RELATIONS)),
            *(entity_file, relation_file),
            *splits.files,
        ],
    )


def _why_not(model: str) -> str:
    if model == "pRotatE":
        return (
            "pRotatE multiplies its score by a trained modulus that the .npy files do not hold;"
            " it cannot be imported exactly"
        )
    return f"the model {model!r} cannot be imported (known: {', '.join(SCORING)})"


ROTATE = Importer("rotate", f"{_ENTITIES}, {_RELATIONS} and {_CONFIG}", _recognises, _read)
