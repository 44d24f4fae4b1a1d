"""Checkpoints of the RotatE paper's code (Sun et al., 2019; KnowledgeGraphEmbedding, codes/model.py).

    config.json              model, hidden_dim, gamma, nentity, nrelation
    entity_embedding.npy     float32[N, D], complex numbers as halves
    relation_embedding.npy   float32[R, E]
    entities.dict, relations.dict
                             in --data, beside these files, or in the folder above
    train.txt, valid.txt, test.txt
                             in --data (or a prepared dataset there), else beside entities.dict

Scores are gamma - ||h + r - t||_1 (TransE), gamma less the sum of the moduli (RotatE), or plain products.
"""

from __future__ import annotations

from pathlib import Path

from kgshard.errors import ConfigError
from kgshard_tools.importers.foreign import ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.ranged import Ranged, read_settings
from kgshard_tools.importers.texts import find_file, read_numbered_labels, read_splits

_ENTITIES, _RELATIONS, _CONFIG = "entity_embedding.npy", "relation_embedding.npy", "config.json"
_PI = 3.14159262358979323846
"""As the program spells it, one digit wrong: its angles are a hundred-millionth smaller."""

SCORING = {"TransE": "transe-l1", "DistMult": "distmult", "ComplEx": "complex", "RotatE": "rotate-moduli"}


def _recognises(source: Path) -> bool:
    return all((source / name).is_file() for name in (_ENTITIES, _RELATIONS, _CONFIG))


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    settings, _ = read_settings(source / _CONFIG, model="model", hidden_dim="hidden_dim")
    if settings.model not in SCORING:
        raise ConfigError(f"{source / _CONFIG}: {_why_not(settings.model)}")
    folders = (options.data, source, source.resolve().parent)
    entity_file = find_file(folders, ["entities.dict"], what="labels of entities")
    relation_file = find_file(folders, ["relations.dict"], what="labels of relations")
    labels = read_numbered_labels(entity_file), read_numbered_labels(relation_file)
    return Ranged(
        program="KnowledgeGraphEmbedding (RotatE paper)",
        pi=_PI,
        settings=settings,
        scoring=SCORING[settings.model],
        decisions=[f"heads are asked by the model's own query; scored by {SCORING[settings.model]}"],
        config=source / _CONFIG,
        entities=source / _ENTITIES,
        relations=source / _RELATIONS,
        labels=labels,
        label_files=(entity_file, relation_file),
        splits=read_splits(options.data or entity_file.parent, *labels),
    ).foreign()


def _why_not(model: str) -> str:
    if model == "pRotatE":
        return (
            "pRotatE multiplies its score by a trained modulus that the .npy files do not hold;"
            " it cannot be imported exactly"
        )
    return f"the model {model!r} cannot be imported (known: {', '.join(SCORING)})"


ROTATE = Importer("rotate", f"{_ENTITIES}, {_RELATIONS} and {_CONFIG}", _recognises, _read)
