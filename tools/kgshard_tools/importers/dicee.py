"""Run folders of dicee (dice-embeddings) 0.3.

    configuration.json         model, embedding_dim, scoring_technique, p and q, normalization, ...
    model.pt                   the state dict; read as data
    entity_to_idx.csv, relation_to_idx.csv    or .p, a pickled dict, of older versions
    train_set.npy, valid_set.npy, test_set.npy    int[n, 3] of row numbers; or text splits in --data

Where dicee trains on whole rows of answers (KvsAll, 1vsAll, ...) it adds (t, r_inverse, h) for every
triple, as a second half of each split, and asks for heads by r_inverse, which its Test metrics in
eval_report.json count too: they are those of `kgshard evaluate` over both sides. With sampled negatives it
adds none, and asks for heads by the model itself. A relation that only looks like an inverse by its name is
told by the triples.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kgshard.data.dataset import SPLITS
from kgshard.data.prepare import Origin
from kgshard.data.readers import COLUMNS
from kgshard.errors import ConfigError, DataError
from kgshard.files import file_sha256, read_json
from kgshard_tools.importers.foreign import ForeignFloats, ForeignIds, ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.mapped import map_ids
from kgshard_tools.importers.pickles import read_pickle
from kgshard_tools.importers.texts import Splits, find_file, in_order, read_splits
from kgshard_tools.importers.torch_files import read_torch

_CONFIG, _WEIGHTS = "configuration.json", "model.pt"
_INVERSE = "_inverse"
_EPSILON = 1e-6
"""What torch's pairwise_distance adds to every coordinate of a difference."""
_ENTITIES, _RELATIONS = "entity_embeddings.weight", "relation_embeddings.weight"

_COEFFICIENTS = ("p_coefficients.weight", "q_coefficients.weight")

State = dict[str, ForeignFloats]
Convert = Callable[[ForeignFloats], ForeignFloats]


@dataclass(frozen=True, slots=True)
class _Formula:
    """How one of dicee's models is said here."""

    scoring: str
    convert: Convert = lambda relations: relations
    """From dicee's relation rows to kgshard's."""
    offset: float = 0.0
    decisions: tuple[str, ...] = ()


def _with_epsilon(relations: ForeignFloats) -> ForeignFloats:
    return relations + np.float32(_EPSILON)


def _unit_fours(relations: ForeignFloats) -> ForeignFloats:
    """Divide every four consecutive floats by their norm, as QMult does (they are not one quaternion)."""
    fours = relations.reshape(len(relations), -1, 4)
    norms = np.sqrt((fours * fours).sum(axis=-1, keepdims=True))
    units: ForeignFloats = (fours / np.maximum(norms, 1e-12)).reshape(relations.shape)
    return units


def _unit_octonions(relations: ForeignFloats) -> ForeignFloats:
    parts = relations.reshape(len(relations), 8, -1)
    norms = np.sqrt((parts * parts).sum(axis=1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):  # The writer refuses what is not finite.
        units: ForeignFloats = (parts / norms).reshape(relations.shape)
    return units


_FORMULAS = {
    "DistMult": _Formula("distmult"),
    "ComplEx": _Formula("complex"),
    "TransE": _Formula(
        "transe",
        _with_epsilon,
        4.0,
        ("scores have dicee's margin 4 added; its 1e-6 in each coordinate is added to relation rows",),
    ),
    "RotatE": _Formula(
        "rotate",
        offset=6.0,
        decisions=(
            "scores have dicee's margin 6 added; its 1e-6 in each coordinate of a difference is left out,"
            " which changes no score by more than 1e-6 times the root of dim",
        ),
    ),
    "QMult": _Formula(
        "qmult",
        _unit_fours,
        decisions=(
            "relation rows are divided by the norms of four consecutive floats, as dicee does to score",
        ),
    ),
    "OMult": _Formula(
        "omult",
        _unit_octonions,
        decisions=("relation rows are divided by the norms of their octonions, as dicee does to score",),
    ),
    "DualE": _Formula(
        "duale",
        np.negative,
        decisions=("relation rows are negated: dicee's score is the negative of duale's",),
    ),
}
_REFUSED = {
    "MuRE": "its distance is not squared, which mure's is",
    "TransH": "its distance is squared, which transh's is not",
}


def _recognises(source: Path) -> bool:
    return (source / _CONFIG).is_file() and (source / _WEIGHTS).is_file()


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    config = _configuration(source / _CONFIG)
    formula = _formula(config, source / _CONFIG)
    state = _state(source / _WEIGHTS)
    shared, taken = _coefficients(state, formula)
    _check_all_taken(state, {_ENTITIES, _RELATIONS, *taken}, source / _WEIGHTS)
    entity_labels, entity_file = _labels("entity", source, options)
    row_labels, relation_file = _labels("relation", source, options)
    # dicee adds no inverses either where nothing is to be evaluated.
    reciprocal = bool(config.get("apply_reciprical_or_noise")) and config.get("eval_model") is not None
    splits = _splits(source, options, entity_labels, row_labels, reciprocal=reciprocal)
    relations = _Relations.find(row_labels, splits, reciprocal=reciprocal, where=relation_file)
    _check_rows(state, len(entity_labels), len(row_labels), source / _WEIGHTS)
    return ForeignModel(
        program="dicee",
        scoring=formula.scoring,
        reciprocal=reciprocal,
        entity_labels=entity_labels,
        relation_labels=[row_labels[row] for row in relations.rows],
        entities=state[_ENTITIES],
        relations=state[_RELATIONS],
        relation_rows=relations.rows + relations.inverses,
        convert=formula.convert,
        shared=shared,
        triples={split: relations.renumbered(ids) for split, ids in splits.triples.items()},
        origins=splits.origins,
        offset=formula.offset,
        decisions=[*formula.decisions, *relations.decisions(row_labels), *splits.notes],
        files=[source / _CONFIG, source / _WEIGHTS, entity_file, relation_file, *splits.files],
    )


def _configuration(path: Path) -> Mapping[str, Any]:
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        raise DataError(f"{path}: names no model")
    return config


def _formula(config: Mapping[str, Any], path: Path) -> _Formula:
    """Return how the model is said here.

    Raises:
        ConfigError: It cannot be said exactly.
    """
    name = config["model"]
    if config.get("normalization") not in (None, "None"):
        raise ConfigError(f"{path}: normalization {config['normalization']!r} is no part of any model here")
    if config.get("byte_pair_encoding"):
        raise ConfigError(f"{path}: byte_pair_encoding: its entities have no rows of their own")
    if name in ("Keci", "CKeci"):
        p, q = _signature(config, "p", path), _signature(config, "q", path)
        return _keci(p, q, config.get("scoring_technique"), f"{path}: {name} with p = {p}, q = {q}")
    if name not in _FORMULAS:
        known = ", ".join((*_FORMULAS, "Keci", "CKeci"))
        raise ConfigError(f"{path}: {name} cannot be imported ({_REFUSED.get(name, f'known: {known}')})")
    return _FORMULAS[name]


def _signature(config: Mapping[str, Any], key: str, path: Path) -> int:
    """Return p or q, which dicee takes as 0 where they are missing or null."""
    value = config.get(key)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise DataError(f"{path}: {key} is {value!r}, expected a number from 0")
    return value


def _keci(p: int, q: int, technique: object, where: str) -> _Formula:
    if max(p, q) > 1:
        raise ConfigError(
            f"{where}: dicee adds bivectors to the score, and keci does not; only p and q of 0 or 1 have none"
        )
    if p == 0:
        return _Formula(f"keci:{p},{q}")
    if technique in ("NegSample", "FixedNegSample"):
        raise ConfigError(
            f"{where}: with p > 0 dicee scores a triple by its whole batch, and {technique} trains"
            " that; only runs that score all entities (KvsAll, 1vsAll) are a model of triples"
        )
    note = "scores are those of dicee's forward_k_vs_all; its forward_triples sums over its batch where p > 0"
    return _Formula(f"keci:{p},{q}", decisions=(note,))


def _state(path: Path) -> State:
    """Return the tensors of model.pt by name."""
    state = read_torch(path)
    if not isinstance(state, dict) or not all(isinstance(array, np.ndarray) for array in state.values()):
        raise DataError(f"{path}: is no state dict")
    for name in (_ENTITIES, _RELATIONS):
        if name not in state or state[name].ndim != 2:
            raise DataError(f"{path}: holds no table {name}")
    return state


def _coefficients(state: State, formula: _Formula) -> tuple[dict[str, ForeignFloats], list[str]]:
    """Return Keci's learned coefficients, and the names they have in model.pt."""
    names: list[str] = [name for name in _COEFFICIENTS if name in state]
    if not formula.scoring.startswith("keci") or not names:
        return {}, []
    return {"coefficients": np.concatenate([state[name].reshape(-1) for name in names])}, names


def _check_all_taken(state: State, taken: set[str], path: Path) -> None:
    """Raise ConfigError where a parameter would be lost."""
    if others := sorted(set(state) - taken):
        raise ConfigError(f"{path}: has parameters that no model here takes: {', '.join(others)}")


def _check_rows(state: State, num_entities: int, num_relation_rows: int, path: Path) -> None:
    for name, labels in ((_ENTITIES, num_entities), (_RELATIONS, num_relation_rows)):
        if len(state[name]) != labels:
            raise DataError(f"{path}: {name} has {len(state[name])} rows, but there are {labels} labels")


def _labels(kind: str, source: Path, options: ImportOptions) -> tuple[list[str], Path]:
    """Return the labels of "entity" or "relation" by row, and the file they are from."""
    folders = source, options.data
    path = find_file(folders, [f"{kind}_to_idx.csv", f"{kind}_to_idx.p"], what=f"labels of {kind} rows")
    return (_csv_labels(path) if path.suffix == ".csv" else _pickled_labels(path)), path


def _csv_labels(path: Path) -> list[str]:
    """Read what pandas and polars write: a header, then number and label, quoted where needed."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            next(rows)
            labels = _distinct_rows(((int(number), label) for number, label in rows), path)
    except (OSError, ValueError, csv.Error, StopIteration) as error:
        raise DataError(f"{path}: no table of numbers and labels: {error}") from error
    if "" in labels.values():
        row = next(number for number, label in labels.items() if not label)
        raise DataError(
            f"{path}: row {row} has no label; dicee took a label such as NA or null for a missing value"
        )
    return in_order(labels, path)


def _pickled_labels(path: Path) -> list[str]:
    found = read_pickle(path)
    if not isinstance(found, dict) or not all(
        isinstance(label, str) and type(row) is int for label, row in found.items()
    ):
        raise DataError(f"{path}: is no dict of labels to numbers")
    return in_order(_distinct_rows(((row, label) for label, row in found.items()), path), path)


def _distinct_rows(pairs: Iterable[tuple[int, str]], path: Path) -> dict[int, str]:
    """Return labels by row.

    Raises:
        DataError: A row occurs twice.
    """
    labels: dict[int, str] = {}
    for row, label in pairs:
        if row in labels:
            raise DataError(f"{path}: row {row} occurs twice, of {labels[row]!r} and of {label!r}")
        labels[row] = label
    return labels


def _splits(
    source: Path, options: ImportOptions, entities: list[str], rows: list[str], *, reciprocal: bool
) -> Splits:
    """Return the graph's own triples by row numbers, without the inverses that dicee adds."""
    if options.data is not None:
        return read_splits(options.data, entities, rows)
    splits = Splits({}, [])
    for split in SPLITS:
        path = source / f"{split}_set.npy"
        if path.is_file():
            ids = _ids(path, len(entities), len(rows))
            splits.triples[split] = np.asarray(_first_half(ids, rows, path) if reciprocal else ids, np.int64)
            splits.origins[split] = Origin(path.name, file_sha256(path))
            splits.files.append(path)
    if "train" not in splits.triples:
        raise DataError(f"{source}: no train_set.npy; say where the triples are (--data)")
    return splits


def _ids(path: Path, num_entities: int, num_relation_rows: int) -> ForeignIds:
    ids = map_ids(path)
    if ids.ndim != 2 or ids.shape[1] != 3:
        raise DataError(f"{path}: expected whole numbers [n, 3], found {list(ids.shape)}")
    for column, limit in enumerate((num_entities, num_relation_rows, num_entities)):
        numbers = ids[:, column]
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < limit):
            raise DataError(
                f"{path}: {COLUMNS[column]} numbers run from {numbers.min()} to {numbers.max()},"
                f" but there are labels for 0..{limit - 1}"
            )
    return ids


def _first_half(ids: ForeignIds, rows: list[str], path: Path) -> ForeignIds:
    """Return a split without its second half, which must be the inverses of the first."""
    half = len(ids) // 2
    given, inverses = ids[:half], ids[half:]
    row_of = {label: row for row, label in enumerate(rows)}
    turned = np.array([row_of.get(label + _INVERSE, -1) for label in rows], np.int64)
    wanted = given[:, [2, 1, 0]].astype(np.int64)
    wanted[:, 1] = turned[wanted[:, 1]]
    if len(ids) % 2 or not np.array_equal(wanted, inverses):
        raise DataError(
            f"{path}: its second half is not the inverses of the first; give the graph's triples (--data)"
        )
    return given


@dataclass(frozen=True)
class _Relations:
    """Which rows of dicee's relation table are what."""

    rows: list[int]
    """Of the graph's relations."""
    inverses: list[int]
    """Of their inverses; [] without reciprocal relations."""

    @staticmethod
    def find(labels: list[str], splits: Splits, *, reciprocal: bool, where: Path) -> _Relations:
        """Tell relations from inverses that dicee made: what a triple of the graph names is a relation.

        Raises:
            DataError: A relation has no inverse.
        """
        if not reciprocal:
            return _Relations(list(range(len(labels))), [])
        row_of = {label: row for row, label in enumerate(labels)}
        used = {int(row) for ids in splits.triples.values() for row in np.unique(ids[:, 1])}
        rows = [row for row, label in enumerate(labels) if row in used or not _is_inverse(label, row_of)]
        missing = [labels[row] for row in rows if labels[row] + _INVERSE not in row_of]
        if missing:
            raise DataError(f"{where}: relation {missing[0]!r} has no inverse {missing[0] + _INVERSE!r}")
        return _Relations(rows, [row_of[labels[row] + _INVERSE] for row in rows])

    def renumbered(self, triples: ForeignIds) -> ForeignIds:
        """Return triples [n, 3] with relations numbered by their place in `rows`."""
        places = np.full(max(self.rows, default=-1) + 1, -1, np.int64)
        places[self.rows] = np.arange(len(self.rows))
        renumbered = np.array(triples, np.int64)
        renumbered[:, 1] = places[renumbered[:, 1]]
        return renumbered

    def decisions(self, labels: list[str]) -> list[str]:
        if not self.inverses:
            return ["heads are asked by the model's own query: dicee made no inverse relations"]
        both = sorted(set(self.rows) & set(self.inverses))
        return [
            f"heads are asked by inverse relations, dicee's rows RELATION{_INVERSE}",
            *(
                f"{labels[row]!r} is a relation and dicee's inverse of another; both have its one row"
                for row in both
            ),
        ]


def _is_inverse(label: str, row_of: Mapping[str, int]) -> bool:
    return label.endswith(_INVERSE) and label.removesuffix(_INVERSE) in row_of


DICEE = Importer("dicee", f"{_CONFIG} and {_WEIGHTS}", _recognises, _read)
