"""Models of LibKGE (uma-pi1/kge): checkpoints of training, and packaged models.

    checkpoint_best.pt, checkpoint_00042.pt   of `kge start`, in an experiment's folder
    NAME.pt                                   of `kge package`: it holds the labels too

A file is a dict, pickled by torch.save: "model" is a pair whose first is the state dict, "config" a
Config whose `options` say which model it is, "dataset" may hold {"meta": {"entity_ids", "relation_ids"}}.
The graph is in LibKGE's own folder, given by --data, under names that `options` say too:

    train.del, valid.del, test.del            subject TAB relation TAB object, as ids
    entity_ids.del, relation_ids.del          id TAB label

Scores are LibKGE's where it ranks; that of a single triple has an epsilon in TransE. Complex numbers are
halves, angles radians, and reciprocal relations have the rows R + r, all as here.

Letters: N entities, R relations, n triples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kgshard.data.prepare import Origin
from kgshard.errors import ConfigError, DataError
from kgshard.files import file_sha256
from kgshard_tools.importers.foreign import ForeignFloats, ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.pickled_objects import MalformedError, Object, Scalar, scalar
from kgshard_tools.importers.pykeen import read_id_triples
from kgshard_tools.importers.texts import Splits, read_numbered_labels, read_splits
from kgshard_tools.importers.torch_files import read_torch

_RECIPROCAL = "reciprocal_relations_model"
_SPLITS = ("train", "valid", "test")
_CHECKPOINT = re.compile(r"checkpoint_(best|\d{5,})\.pt")
SCORING: dict[str, str | dict[float, str]] = {
    "distmult": "distmult",
    "complex": "complex",
    "rescal": "rescal",
    "cp": "cp",
    "simple": "simple",
    "transe": {1.0: "transe-l1", 2.0: "transe"},
    "rotate": {1.0: "rotate-moduli", 2.0: "rotate"},
}
"""By LibKGE's names, some by their norm."""
_REFUSED = {
    "conve": "it normalises over batches and adds entity biases; conve here does neither",
    "transh": "its translation is not projected; transh here projects it",
}


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The part of a checkpoint that an import depends on."""

    path: Path
    options: Mapping[str, Any]
    state: Mapping[str, Any]
    dataset: Mapping[str, Any]

    def option(self, *names: str) -> Scalar:
        """Return a nested option, None if there is none.

        Raises:
            DataError: It is no text, number or truth value, and so nothing that may be compared or shown.
        """
        value: object = self.options
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        try:
            return scalar(value)
        except MalformedError as error:
            raise DataError(f"{self.path}: option {'.'.join(names)} is {error}") from error

    def labels(self, key: str) -> list[str] | None:
        """Return "entity_ids" or "relation_ids" where the checkpoint holds them."""
        meta = self.dataset.get("meta")
        labels = meta.get(key) if isinstance(meta, dict) else None
        if labels is None:
            return None
        if not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
            raise DataError(f"{self.path}: {key} are no labels, or some are missing")
        return list(labels)


@dataclass(frozen=True, slots=True)
class _Graph:
    """Labels in the order of rows, and the triples that are known."""

    entities: list[str]
    relations: list[str]
    splits: Splits


def _recognises(source: Path) -> bool:
    if source.is_dir():
        return _latest(source) is not None
    if source.suffix != ".pt":
        return False
    try:
        content = read_torch(source)
    except DataError:
        return False
    return isinstance(content, dict) and {"model", "config"} <= content.keys()


def _latest(folder: Path) -> Path | None:
    """Return the best checkpoint of an experiment, or the last where none is called best."""
    names = sorted(path.name for path in folder.glob("checkpoint_*.pt") if _CHECKPOINT.fullmatch(path.name))
    return folder / names[-1] if names else None  # Letters come after digits.


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    checkpoint = _checkpoint(source)
    name, is_reciprocal = _model_name(checkpoint)
    scoring = _scoring(checkpoint, name, is_reciprocal)
    entities, relations = _weight(checkpoint, "entity"), _weight(checkpoint, "relation")
    num_relations = len(relations) // 2 if is_reciprocal else len(relations)
    if is_reciprocal and len(relations) % 2:
        raise DataError(f"{checkpoint.path}: {len(relations)} relation rows, which are no reciprocal pairs")
    graph = _graph(checkpoint, options, len(entities), num_relations)
    asked = "reciprocal relations, rows R + r" if is_reciprocal else "the model's own query"
    decisions = [f"{name} is scored by {scoring}, as LibKGE ranks; heads are asked by {asked}"]
    if source != checkpoint.path:
        decisions.append(f"read from {checkpoint.path.name}")
    if not graph.splits.triples:
        decisions.append("no triples: LibKGE's files hold none, give its dataset's folder by --data")
    return ForeignModel(
        program="LibKGE",
        scoring=scoring,
        reciprocal=is_reciprocal,
        entity_labels=graph.entities,
        relation_labels=graph.relations,
        entities=entities,
        relations=relations,
        triples=graph.splits.triples,
        origins=graph.splits.origins,
        decisions=[*decisions, *graph.splits.notes],
        files=[checkpoint.path, *graph.splits.files],
    )


# --- The checkpoint ------------------------------------------------------------------------------------


def _checkpoint(source: Path) -> _Checkpoint:
    path = _latest(source) if source.is_dir() else source
    if path is None:
        raise DataError(f"{source}: no checkpoint_best.pt and no checkpoint_NUMBER.pt")
    match read_torch(path):
        case {
            "model": (dict() as state, *_),
            "config": Object(state={"options": dict() as options}),
            **others,
        }:
            dataset = others.get("dataset")
            return _Checkpoint(path, options, state, dataset if isinstance(dataset, dict) else {})
    raise DataError(f"{path}: no checkpoint of LibKGE with a model and its config")


def _model_name(checkpoint: _Checkpoint) -> tuple[str, bool]:
    """Return the name of the model, and whether it is in LibKGE's wrapper for reciprocal relations."""
    name = checkpoint.option("model")
    is_reciprocal = name == _RECIPROCAL
    if is_reciprocal:
        name = checkpoint.option(_RECIPROCAL, "base_model", "type")
    if name not in SCORING:
        reason = _REFUSED.get(str(name), f"known: {', '.join(SCORING)}")
        raise ConfigError(f"{checkpoint.path}: the model {name!r} cannot be imported exactly ({reason})")
    return str(name), is_reciprocal


def _scoring(checkpoint: _Checkpoint, name: str, is_reciprocal: bool) -> str:
    found = SCORING[name]
    if isinstance(found, str):
        return found
    norm = checkpoint.option(_RECIPROCAL, "base_model", "l_norm") if is_reciprocal else None
    norm = checkpoint.option(name, "l_norm") if norm is None else norm
    if norm not in (1, 2):
        raise ConfigError(f"{checkpoint.path}: {name} with l_norm {norm}, which is neither 1 nor 2")
    return found[int(norm)]


def _weight(checkpoint: _Checkpoint, kind: str) -> ForeignFloats:
    """Return the table of "entity" or "relation" embeddings."""
    for prefix in ("_base_model.", ""):
        for attribute in ("_embeddings", "embeddings"):  # Without the underscore before 2020.
            weight = checkpoint.state.get(f"{prefix}_{kind}_embedder.{attribute}.weight")
            if isinstance(weight, np.ndarray) and weight.ndim == 2:
                return weight
    raise ConfigError(
        f"{checkpoint.path}: {kind} embeddings are no lookup_embedder's; they cannot be imported"
    )


# --- Labels and triples --------------------------------------------------------------------------------


def _graph(checkpoint: _Checkpoint, options: ImportOptions, num_entities: int, num_relations: int) -> _Graph:
    entities, relations = checkpoint.labels("entity_ids"), checkpoint.labels("relation_ids")
    if relations is not None and relations[num_relations:] == [
        f"{label}_reciprocal" for label in relations[:num_relations]
    ]:
        relations = relations[:num_relations]  # The wrapper for reciprocal relations named its own too.
    files = [_file(checkpoint, options.data, key) for key in ("entity_ids", "relation_ids")]
    if None not in files:
        entities, relations = (
            _same(read_numbered_labels(path), held, path)
            for path, held in zip(files, (entities, relations), strict=True)
            if path is not None
        )
    if entities is None or relations is None:
        raise DataError(f"{checkpoint.path}: holds no labels; give the folder of its dataset (--data)")
    if (len(entities), len(relations)) != (num_entities, num_relations):
        raise DataError(
            f"{checkpoint.path}: rows of {num_entities} entities and {num_relations} relations,"
            f" but labels of {len(entities)} and {len(relations)};"
            " give the dataset it was trained on (--data)"
        )
    splits = _splits(checkpoint, options.data, entities, relations)
    return _Graph(entities, relations, replace(splits, files=[*filter(None, files), *splits.files]))


def _same(labels: list[str], held: list[str] | None, path: Path) -> list[str]:
    if held is not None and labels != held:
        raise DataError(f"{path}: other labels than the checkpoint's own; it is another dataset")
    return labels


def _file(checkpoint: _Checkpoint, data: Path | None, key: str) -> Path | None:
    """Return the file of the dataset's folder that LibKGE has under a key, if there is one."""
    name = checkpoint.option("dataset", "files", key, "filename") or f"{key}.del"
    path = data / Path(str(name)).name if data is not None else None
    return path if path is not None and path.is_file() else None


def _splits(checkpoint: _Checkpoint, data: Path | None, entities: list[str], relations: list[str]) -> Splits:
    """Read LibKGE's own splits of ids where they are, or else splits of labels."""
    if data is None:
        return Splits({}, [])
    found = {split: path for split in _SPLITS if (path := _file(checkpoint, data, split)) is not None}
    if not found:
        return read_splits(data, entities, relations)
    triples = {split: read_id_triples(path, len(entities), len(relations)) for split, path in found.items()}
    origins = {split: Origin(path.name, file_sha256(path)) for split, path in found.items()}
    return Splits(triples, list(found.values()), origins=origins)


LIBKGE = Importer("libkge", "checkpoint_best.pt, or a packaged model's .pt", _recognises, _read)
