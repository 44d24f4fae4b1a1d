r"""Plain numpy arrays with labels: what `kgshard export --format numpy` writes, and what others keep.

    entities.npy             float[N, D]
    relations.npy            float[R, E]
    inverse_relations.npy    the same shape, where heads are asked by inverse relations
    shared-NAME.npy          parameters that all rows share
    entities.txt             one label a line, row i on line i (\n and \\ are escapes); or
    entities.parquet         a column label; or
    entities.tsv             id TAB label. The same for relations.
    config.json              as our exports have it; without one the model must be given

Arrays are mapped, of any float, C or Fortran order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kgshard.data.dataset import vocabulary_sha256
from kgshard.errors import ConfigError, DataError
from kgshard.files import read_json
from kgshard.models import SCORING
from kgshard.models.link import LinkModel
from kgshard.vocabulary import Vocabulary
from kgshard_tools.importers.foreign import ForeignFloats, ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.mapped import map_floats
from kgshard_tools.importers.texts import (
    Splits,
    find_file,
    read_escaped_labels,
    read_line_labels,
    read_numbered_labels,
    read_parquet_labels,
    read_splits,
)

_CONFIG, _INVERSES = "config.json", "inverse_relations.npy"
_READERS = {".parquet": read_parquet_labels, ".txt": read_line_labels, ".tsv": read_numbered_labels}


@dataclass(frozen=True, slots=True)
class _Config:
    """What our exports say of their arrays."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    """Empty where the arrays are somebody else's."""
    model: LinkModel | None = None

    @property
    def rows(self) -> int:
        """Entities that were exported."""
        assert self.model is not None
        rows = self.values.get("rows", self.model.num_entities)
        if type(rows) is not int:
            raise DataError(f"{self.path}: rows is {rows!r}, expected a number")
        return rows

    @property
    def is_partial(self) -> bool:
        """Whether only some of the run's entities were exported."""
        return self.model is not None and self.rows < self.model.num_entities


@dataclass(frozen=True, slots=True)
class _Arrays:
    """What lies in the folder."""

    entities: ForeignFloats
    relations: ForeignFloats
    inverses: ForeignFloats | None
    entity_labels: list[str]
    relation_labels: list[str]


def _recognises(source: Path) -> bool:
    return all((source / f"{kind}.npy").is_file() for kind in ("entities", "relations"))


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    config = _config(source / _CONFIG, options.model)
    scoring = options.model or (config.model.name if config.model else None)
    if scoring is None:
        raise ConfigError(f"{source}: no config.json that names the scoring function; give --model")
    entity_labels, entity_file = _labels("entities", source, options, ours=config.model is not None)
    relation_labels, relation_file = _labels("relations", source, options, ours=config.model is not None)
    paths = [source / "entities.npy", source / "relations.npy"]
    if (source / _INVERSES).exists():
        paths.append(source / _INVERSES)
    entities, relations, *inverses = map(map_floats, paths)
    arrays = _Arrays(entities, relations, next(iter(inverses), None), entity_labels, relation_labels)
    _check_inverses(arrays, source)
    if config.model is not None:
        _check_config(config, config.model, arrays)
    shared = {path.stem.removeprefix("shared-"): path for path in sorted(source.glob("shared-*.npy"))}
    splits = Splits({}, [])
    if options.data:
        splits = read_splits(options.data, entity_labels, relation_labels, partial=config.is_partial)
    return ForeignModel(
        program="kgshard export" if config.model else "numpy arrays",
        scoring=scoring,
        reciprocal=arrays.inverses is not None,
        entity_labels=entity_labels,
        relation_labels=relation_labels,
        entities=arrays.entities,
        relations=arrays.relations,
        inverses=arrays.inverses,
        shared={name: map_floats(path) for name, path in shared.items()},
        triples=splits.triples,
        origins=splits.origins,
        offset=config.model.offset if config.model else 0.0,
        decisions=[*_decisions(scoring, config, arrays), *splits.notes],
        files=[*paths, *shared.values(), entity_file, relation_file, *splits.files],
    )


def _labels(kind: str, source: Path, options: ImportOptions, *, ours: bool) -> tuple[list[str], Path]:
    """Return the labels of "entities" or "relations", and the file they are from."""
    path = find_file((source, options.data), [kind + ending for ending in _READERS], what=f"labels of {kind}")
    if ours and path.suffix == ".txt":  # Byte for byte: a CR at its end is a label's own.
        return read_escaped_labels(path), path
    return _READERS[path.suffix](path), path


def _config(path: Path, model: str | None) -> _Config:
    """Return what our exports say of their arrays.

    Args:
        path: The file, which may be missing or somebody else's.
        model: What --model says.

    Raises:
        DataError: The file is damaged.
        ConfigError: It contradicts --model, or names code to run that --model does not name.
    """
    if not path.exists():
        return _Config(path)
    try:
        values = read_json(path)
        if not isinstance(values, dict) or values.get("model_type") != "kgshard":
            return _Config(path)
        _check_name(values["score_function"], model, path)
        link = LinkModel.from_dict(values)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if type(values["reciprocal"]) is not bool:
        raise DataError(f"{path}: reciprocal is {values['reciprocal']!r}, expected true or false")
    return _Config(path, values, link)


def _check_name(name: object, model: str | None, path: Path) -> None:
    """Raise where --model says otherwise, or a file alone asks for somebody's module to be imported."""
    if not isinstance(name, str):
        raise DataError(f"{path}: score_function is {name!r}, expected a name")
    if model is not None and model != name:
        raise ConfigError(f"--model {model}, but the arrays are of {name}; leave --model out")
    family, colon, _ = name.partition(":")
    if colon and family not in SCORING and model is None:
        raise ConfigError(f"names code to run, {name!r}; if you trust it, give --model {name}")


def _check_inverses(arrays: _Arrays, source: Path) -> None:
    inverses, relations = arrays.inverses, arrays.relations
    if inverses is not None and inverses.shape != relations.shape:
        path = source / _INVERSES
        raise DataError(f"{path}: shape {list(inverses.shape)}, but relations have {list(relations.shape)}")


def _check_config(config: _Config, model: LinkModel, arrays: _Arrays) -> None:
    """Raise DataError where arrays or labels are not those that our config.json is of."""
    found: dict[str, tuple[object, object]] = {
        "reciprocal": (model.reciprocal, arrays.inverses is not None),
        "rows": (config.rows, len(arrays.entity_labels)),
        "embedding_dim": (model.dim, arrays.entities.shape[-1] if arrays.entities.ndim else None),
        "relation_dim": (config.values.get("relation_dim", model.relation_dim), model.relation_dim),
        "metric": (config.values.get("metric", model.metric.name), model.metric.name),
        "num_relations": (model.num_relations, len(arrays.relation_labels)),
    }
    for key, (said, is_there) in found.items():
        if said != is_there:
            what = f"{_INVERSES} is {'there' if is_there else 'missing'}"
            raise DataError(
                f"{config.path}: {key} is {said}, but {what if key == 'reciprocal' else f'found {is_there}'}"
            )
    if model.num_entities < len(arrays.entity_labels):
        raise DataError(f"{config.path}: num_entities is {model.num_entities}, but there are more rows")
    said = config.values.get("vocab_sha256")
    if said is not None and not config.is_partial and said != _vocabulary_sha256(arrays):
        raise DataError(f"{config.path}: labels are not those of the export, or in another order")


def _vocabulary_sha256(arrays: _Arrays) -> str:
    labels = {"entity": arrays.entity_labels, "relation": arrays.relation_labels}
    entities, relations = (
        Vocabulary(pa.array(texts, pa.large_string()), np.zeros(len(texts), np.int64), kind=kind)
        for kind, texts in labels.items()
    )
    return vocabulary_sha256(entities, relations)


def _decisions(scoring: str, config: _Config, arrays: _Arrays) -> list[str]:
    source = "named by config.json" if config.model else "given with --model"
    lines = [f"scored by {scoring}, {source}; rows are in kgshard's layout, complex numbers as halves"]
    is_reciprocal = arrays.inverses is not None
    asked = "inverse relations" if is_reciprocal else "the model's own query"
    lines.append(f"heads are asked by {asked}")
    if config.is_partial:
        assert config.model is not None
        lines.append(
            f"only {config.rows:,} of {config.model.num_entities:,} entities were exported:"
            " ranks are among these alone"
        )
    if config.values.get("normalized"):
        lines.append("entity rows were scaled to length 1 when they were exported: scores are not the run's")
    if config.model and config.model.offset:
        lines.append(f"scores have {config.model.offset:g} added, as the model that was exported")
    return lines


ARRAYS = Importer("npy", "entities.npy and relations.npy", _recognises, _read, takes_model=True)
