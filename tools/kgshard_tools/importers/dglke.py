"""Models of DGL-KE (awslabs/dgl-ke, dglke_train).

    DATASET_MODEL_entity.npy, DATASET_MODEL_relation.npy    float32, complex numbers as halves
    config.json        model or model_name, emb_size or hidden_dim, gamma, dataset, emap_file or emp_file;
                       of newer versions also format and delimiter, which say how the graph's files are read
    entities.tsv, relations.tsv, or entities.dict, relations.dict
                       id, delimiter (TAB), label: beside these files or in --data
    train, valid, test files of labels, in --data; or a prepared dataset

Scores are those of `score_fun.py`, to which gamma belongs for distances: what training and DGL-KE's
evaluation compute (dglke_predict leaves gamma out unless it takes a logarithm).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgshard.data.dataset import is_dataset
from kgshard.errors import ConfigError, DataError
from kgshard.files import read_json
from kgshard_tools.importers.foreign import ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.ranged import Ranged, Settings, read_settings
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
_ORDER = re.compile("(?:raw_)?udd_([hrt]{3})")
"""A `format`: the order of the columns; without "raw_" they are ids."""
_NOTES = {
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
    scoring = SCORING[settings.model]
    entity_path, relation_path = _only_pair(source, settings.model)
    entity_file = _label_file("entities", source, options, config, ("emap_file", "emp_file"))
    relation_file = _label_file("relations", source, options, config, ("rmap_file",))
    delimiter = _delimiter(config, source / _CONFIG)
    labels = (
        read_numbered_labels(entity_file, delimiter),
        read_numbered_labels(relation_file, delimiter),
    )
    decisions = [f"{settings.model} is scored by {scoring}; heads by the model's own query"]
    if settings.model in _NOTES:
        decisions.append(_NOTES[settings.model])
    return Ranged(
        program="DGL-KE",
        pi=math.pi,
        settings=settings,
        scoring=scoring,
        decisions=decisions,
        config=source / _CONFIG,
        entities=entity_path,
        relations=relation_path,
        labels=labels,
        label_files=(entity_file, relation_file),
        splits=_splits(options.data, labels, config, source / _CONFIG),
    ).foreign()


def _delimiter(config: Mapping[str, Any], path: Path) -> str:
    delimiter = config.get("delimiter") or "\t"
    if not isinstance(delimiter, str):
        raise DataError(f"{path}: delimiter {delimiter!r} is no text")
    return delimiter


def _splits(
    data: Path | None, labels: tuple[list[str], list[str]], config: Mapping[str, Any], path: Path
) -> Splits:
    """Read the graph's files as DGL-KE did: in its order of columns.

    Raises:
        ConfigError: Its files are of numbers, or not between TABs.
    """
    if data is None:
        return Splits({}, [])
    if is_dataset(data):
        return read_splits(data, *labels)
    advice = "give a prepared dataset of its labels (kgshard ingest) as --data"
    form, delimiter = str(config.get("format") or "built_in"), _delimiter(config, path)
    if delimiter != "\t":
        raise ConfigError(f"{path}: delimiter {delimiter!r}: only splits between TABs are read; {advice}")
    if form == "built_in":
        return read_splits(data, *labels)
    found = _ORDER.fullmatch(form)
    if found is None or len(set(found[1])) < 3:
        raise ConfigError(f"{path}: format {form!r} is not known; {advice}")
    if not form.startswith("raw_"):
        raise ConfigError(f"{path}: format {form!r}: its splits hold numbers, not labels; {advice}")
    splits = read_splits(data, *labels, order=found[1])
    splits.notes.append(f"splits are read in the order {', '.join(found[1])}, by format {form!r}")
    return splits


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


def _only_pair(source: Path, model: str) -> tuple[Path, Path]:
    pairs = _tables(source)
    if len(pairs) != 1:
        found = ", ".join(entities.name for entities, _ in pairs) or "none"
        raise DataError(f"{source}: expected one *_entity.npy with its *_relation.npy, found {found}")
    [(entities, relations)] = pairs
    if not entities.name.endswith(f"_{model}_entity.npy"):
        raise DataError(f"{entities}: is not named as a table of {model}, the model in {_CONFIG}")
    return entities, relations


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
