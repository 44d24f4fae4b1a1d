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

from pathlib import Path
from typing import Any

import numpy as np

from kgshard.errors import ConfigError, DataError
from kgshard.files import read_json
from kgshard.models.link import LinkModel
from kgshard_tools.importers.foreign import ForeignFloats, ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.texts import (
    Splits,
    find_file,
    read_escaped_labels,
    read_numbered_labels,
    read_parquet_labels,
    read_splits,
)

_READERS = {".parquet": read_parquet_labels, ".txt": read_escaped_labels, ".tsv": read_numbered_labels}


def read_array(path: Path) -> ForeignFloats:
    """Return a mapped array of floats.

    Raises:
        DataError: The file is missing, damaged, pickled, or holds something else.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        what = getattr(array, "dtype", "an archive of arrays")
        raise DataError(f"{path}: holds {what}, expected one array of floats")
    return array


def read_labels_of(kind: str, folders: tuple[Path | None, ...]) -> tuple[list[str], Path]:
    """Return the labels of "entities" or "relations", and the file they are from."""
    path = find_file(folders, [kind + ending for ending in _READERS], what=f"labels of {kind}")
    return _READERS[path.suffix](path), path


def _recognises(source: Path) -> bool:
    return all((source / f"{kind}.npy").is_file() for kind in ("entities", "relations"))


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    config = _config(source)
    scoring = options.model or config.get("score_function")
    if not isinstance(scoring, str):
        raise ConfigError(f"{source}: no config.json that names the scoring function; give --model")
    inverses = source / "inverse_relations.npy"
    reciprocal = inverses.is_file()
    entity_labels, entity_file = read_labels_of("entities", (source, options.data))
    relation_labels, relation_file = read_labels_of("relations", (source, options.data))
    arrays = [source / "entities.npy", source / "relations.npy", *([inverses] if reciprocal else [])]
    relations = read_array(arrays[1])
    if reciprocal:
        relations = _stacked(relations, read_array(inverses), inverses)
    shared = {path.stem.removeprefix("shared-"): path for path in sorted(source.glob("shared-*.npy"))}
    splits = read_splits(options.data, entity_labels, relation_labels) if options.data else Splits({}, [])
    return ForeignModel(
        program="kgshard export" if config else "numpy arrays",
        scoring=scoring,
        reciprocal=reciprocal,
        entity_labels=entity_labels,
        relation_labels=relation_labels,
        entities=read_array(arrays[0]),
        relations=relations,
        shared={name: read_array(path) for name, path in shared.items()},
        triples=splits.triples,
        offset=float(config.get("offset", 0.0)),
        decisions=[*_decisions(scoring, config, options, reciprocal=reciprocal), *splits.notes],
        files=[*arrays, *shared.values(), entity_file, relation_file, *splits.files],
    )


def _config(source: Path) -> dict[str, Any]:
    """Return what our exports say of their arrays; {} where the arrays are somebody else's."""
    path = source / "config.json"
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
        ours = isinstance(config, dict) and config.get("model_type") == "kgshard"
        if ours:
            LinkModel.from_dict(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {error}") from error
    return config if ours else {}


def _stacked(relations: ForeignFloats, inverses: ForeignFloats, path: Path) -> ForeignFloats:
    if inverses.shape != relations.shape:
        raise DataError(f"{path}: shape {list(inverses.shape)}, but relations have {list(relations.shape)}")
    return np.concatenate([relations, inverses])


def _decisions(
    scoring: str, config: dict[str, Any], options: ImportOptions, *, reciprocal: bool
) -> list[str]:
    source = "given with --model" if options.model else "named by config.json"
    lines = [f"scored by {scoring}, {source}; rows are in kgshard's layout, complex numbers as halves"]
    lines.append(
        "heads are asked by inverse relations" if reciprocal else "heads are asked by the model's own query"
    )
    if config.get("normalized"):
        lines.append("entity rows were scaled to length 1 when they were exported: scores are not the run's")
    if config.get("offset"):
        lines.append(f"scores have {config['offset']} added, as the model that was exported")
    return lines


ARRAYS = Importer("npy", "entities.npy and relations.npy", _recognises, _read)
