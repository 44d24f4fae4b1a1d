"""Models of DGL-KE (awslabs/dgl-ke, dglke_train).

    DATASET_MODEL_entity.npy, DATASET_MODEL_relation.npy    float32, complex numbers as halves
    config.json        model or model_name, emb_size or hidden_dim, gamma, dataset, emap_file or emp_file
    entities.tsv, relations.tsv, or entities.dict, relations.dict
                       id TAB label: beside these files or in --data
    train, valid, test files of labels, in --data

Scores are those of `score_fun.py`, to which gamma belongs for distances: what training and DGL-KE's
evaluation compute (dglke_predict leaves gamma out unless it takes a logarithm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgshard.errors import ConfigError, DataError
from kgshard.files import read_json
from kgshard_tools.importers.arrays import read_array
from kgshard_tools.importers.foreign import ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.rotate import Settings, as_angles, read_settings
from kgshard_tools.importers.texts import Splits, find_file, read_numbered_labels, read_splits

_CONFIG = "config.json"
SCORING = {
    "TransE": "transe",
    "TransE_l2": "transe",
    "TransE_l1": "transe-l1",
    "DistMult": "distmult",
    "ComplEx": "complex",
    "RotatE": "rotate-moduli",
    "RESCAL": "rescal",
    "SimplE": "simple",
}
_WITH_MARGIN = ("TransE", "TransE_l2", "TransE_l1", "RotatE")
_NOTES = {
    "RotatE": "complex numbers are halves, real parts first, as here",
    "ComplEx": "complex numbers are halves, real parts first, as here",
    "SimplE": "DGL-KE clamps scores to -20..20; here they go on, so that no two beyond are equal",
    "RESCAL": "scores are h . R t, as DGL-KE gives a triple; its own ranking of tails takes t . R h",
}


def _recognises(source: Path) -> bool:
    return (source / _CONFIG).is_file() and len(_tables(source)) == 1


def _tables(source: Path) -> list[tuple[Path, Path]]:
    """Return the pairs of entity and relation tables in a folder."""
    pairs = [
        (path, path.with_name(path.name.removesuffix("_entity.npy") + "_relation.npy"))
        for path in sorted(source.glob("*_entity.npy"))
    ]
    return [(entities, relations) for entities, relations in pairs if relations.is_file()]


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    settings, config = _settings(source / _CONFIG)
    entity_path, relation_path = _only_pair(source)
    entity_file = _label_file("entities", source, options, config, ("emap_file", "emp_file"))
    relation_file = _label_file("relations", source, options, config, ("rmap_file",))
    entity_labels, relation_labels = read_numbered_labels(entity_file), read_numbered_labels(relation_file)
    splits = read_splits(options.data, entity_labels, relation_labels) if options.data else Splits({}, [])
    relations = read_array(relation_path)
    decisions = [f"{settings.model} is scored by {SCORING[settings.model]}; heads by the model's own query"]
    if settings.model == "RotatE":
        relations = as_angles(relations, settings.range / math.pi)
        decisions.append(
            f"relation values are angles times {settings.range:.6g} / pi; they are divided by it"
        )
    if settings.model in _NOTES:
        decisions.append(_NOTES[settings.model])
    offset = settings.gamma if settings.model in _WITH_MARGIN else 0.0
    if offset:
        decisions.append(f"scores have the margin gamma = {offset:g} added; ranks do not depend on it")
    return ForeignModel(
        program="DGL-KE",
        scoring=SCORING[settings.model],
        reciprocal=False,
        entity_labels=entity_labels,
        relation_labels=relation_labels,
        entities=read_array(entity_path),
        relations=relations,
        triples=splits.triples,
        offset=offset,
        decisions=[*decisions, *splits.notes],
        files=[source / _CONFIG, entity_path, relation_path, entity_file, relation_file, *splits.files],
    )


def _settings(path: Path) -> tuple[Settings, Mapping[str, Any]]:
    """Read config.json as 0.1.2 writes it (model, emb_size) or as the main branch does."""
    try:
        keys = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    new = isinstance(keys, dict) and "model_name" in keys
    settings, config = read_settings(
        path, model="model_name" if new else "model", hidden_dim="hidden_dim" if new else "emb_size"
    )
    if settings.model not in SCORING:
        reason = {
            "TransR": "its projections are no part of an entity's query here",
            "ConvE": "its network is another than conve's",
        }.get(settings.model, f"known: {', '.join(SCORING)}")
        raise ConfigError(f"{path}: the model {settings.model!r} cannot be imported ({reason})")
    return settings, config


def _only_pair(source: Path) -> tuple[Path, Path]:
    pairs = _tables(source)
    if len(pairs) != 1:
        found = ", ".join(entities.name for entities, _ in pairs) or "none"
        raise DataError(f"{source}: expected one *_entity.npy with its *_relation.npy, found {found}")
    return pairs[0]


def _label_file(
    kind: str, source: Path, options: ImportOptions, config: Mapping[str, Any], keys: tuple[str, ...]
) -> Path:
    """Return the file that numbers labels: what config.json names, or one of the usual names."""
    named = [Path(str(config[key])).name for key in keys if config.get(key)]
    return find_file(
        (source, options.data), [*named, f"{kind}.tsv", f"{kind}.dict"], what=f"labels of {kind}"
    )


DGLKE = Importer(
    "dglke", "DATASET_MODEL_entity.npy, DATASET_MODEL_relation.npy and config.json", _recognises, _read
)
