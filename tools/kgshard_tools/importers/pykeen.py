"""Models of PyKEEN, as `PipelineResult.save_to_directory` leaves them.

    trained_model.pkl                        the whole model, pickled by torch.save
    training_triples/base.pth                num_entities, num_relations (without inverses), ...
    training_triples/entity_to_id.tsv.gz     id TAB label, a header, quoted as pandas quotes
    training_triples/relation_to_id.tsv.gz   the same of relations, inverses not counted
    training_triples/numeric_triples.tsv.gz  head TAB relation TAB tail, as ids, with a header

The interaction decides what a model is, not its name: `ERModel` takes any. Complex numbers are interleaved
(re, im, re, im, ...), and with inverse triples relation r has the rows 2 r and 2 r + 1, the inverse second.
Valid and test triples are nowhere in the folder.

Letters: N entities, R relations, D floats an entity, E floats a relation row, n triples.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from kgshard.data.prepare import Origin
from kgshard.errors import ConfigError, DataError
from kgshard.files import file_sha256
from kgshard_tools.importers.foreign import ForeignFloats, ForeignModel, Importer, ImportOptions
from kgshard_tools.importers.pickled_objects import Object, Scalar, Symbol
from kgshard_tools.importers.texts import Splits, in_order, read_splits
from kgshard_tools.importers.torch_files import module_tensors, read_torch

_MODEL, _TRIPLES = "trained_model.pkl", "training_triples"
_ENTITY_FILE, _RELATION_FILE, _TRIPLE_FILE = (
    "entity_to_id.tsv.gz",
    "relation_to_id.tsv.gz",
    "numeric_triples.tsv.gz",
)


@dataclass(frozen=True, slots=True)
class _Pickled:
    """What the scores of a pickled model depend on."""

    interaction: Object
    entities: list[ForeignFloats]
    """Each float[N, ...]; complex ones float[N, ..., 2]."""
    relations: list[ForeignFloats]
    """Each float[R or 2R, ...], rows in PyKEEN's order."""
    normalizers: list[object]
    """What PyKEEN applies to each of `relations` before it scores."""
    has_inverses: bool
    has_sigmoid: bool

    def option(self, name: str) -> Scalar:
        """Return an attribute of the interaction, None if it has none of this name.

        What is neither number nor text is named by its type: to compare or show it may take for ever.
        """
        value = _attribute(self.interaction, name)
        return value if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class _Tables:
    """The same in kgshard's layout."""

    scoring: str
    entities: ForeignFloats
    relations: ForeignFloats
    shared: Mapping[str, ForeignFloats] = field(default_factory=dict)
    decisions: Sequence[str] = ()


def _recognises(source: Path) -> bool:
    return (source / _MODEL).is_file() and (source / _TRIPLES / "base.pth").is_file()


def _read(source: Path, options: ImportOptions) -> ForeignModel:
    path = source / _MODEL
    pickled = _pickled(path)
    tables = _tables(pickled, path)
    folder = source / _TRIPLES
    entity_labels = _read_labels(folder / _ENTITY_FILE)
    relation_labels = _read_labels(folder / _RELATION_FILE)
    _check_rows(pickled, len(entity_labels), len(relation_labels), path)
    splits = read_splits(options.data, entity_labels, relation_labels) if options.data else Splits({}, [])
    train = read_id_triples(
        folder / _TRIPLE_FILE, len(entity_labels), len(relation_labels), columns=("head", "relation", "tail")
    )
    return ForeignModel(
        program="PyKEEN",
        scoring=tables.scoring,
        reciprocal=pickled.has_inverses,
        entity_labels=entity_labels,
        relation_labels=relation_labels,
        entities=tables.entities,
        relations=tables.relations[0::2] if pickled.has_inverses else tables.relations,
        inverses=tables.relations[1::2] if pickled.has_inverses else None,
        shared=tables.shared,
        triples={**splits.triples, "train": train},
        origins={**splits.origins, "train": Origin(_TRIPLE_FILE, file_sha256(folder / _TRIPLE_FILE))},
        decisions=[*tables.decisions, *_decisions(pickled, splits, options), *splits.notes],
        files=[
            path,
            *(folder / name for name in (_ENTITY_FILE, _RELATION_FILE, _TRIPLE_FILE)),
            *splits.files,
        ],
    )


def _decisions(pickled: _Pickled, splits: Splits, options: ImportOptions) -> list[str]:
    decisions = []
    if pickled.has_inverses:
        decisions.append("heads are asked by PyKEEN's inverse relations; its rows 2 r + 1 become rows R + r")
    else:
        decisions.append("heads are asked by the model's own query")
    if pickled.has_sigmoid:
        decisions.append("PyKEEN predicts the sigmoid of these scores, which ranks alike")
    if options.data is None:
        decisions.append("only training triples are there; PyKEEN keeps no others, give them by --data")
    elif "train" in splits.triples:
        decisions.append(f"training triples are those of {_TRIPLES}, the other splits those of --data")
    return decisions


def _check_rows(pickled: _Pickled, num_entities: int, num_relations: int, path: Path) -> None:
    rows = num_relations * (2 if pickled.has_inverses else 1)
    for tables, expected, what in (
        (pickled.entities, num_entities, "entities"),
        (pickled.relations, rows, "relations, inverses counted"),
    ):
        for table in tables:
            if len(table) != expected:
                raise DataError(f"{path}: {len(table)} rows, but {_TRIPLES} numbers {expected} {what}")


# --- The pickled model ---------------------------------------------------------------------------------


def _pickled(path: Path) -> _Pickled:
    model = read_torch(path)
    interaction = _child(model, "interaction")
    entities = _representations(model, "entity_representations", path)
    relations = _representations(model, "relation_representations", path)
    if interaction is None or not entities:
        raise ConfigError(f"{path}: {_class_name(model)} is no ERModel of PyKEEN's; it cannot be imported")
    inverter = _attribute(model, "relation_inverter")
    if inverter is not None and _class_name(inverter) != "DefaultRelationInverter":
        raise ConfigError(
            f"{path}: inverse relations numbered by {_class_name(inverter)}; only the default is known"
        )
    for representation in entities:
        if _attribute(representation, "normalizer") is not None:
            raise ConfigError(f"{path}: its entities go through a normalizer; it cannot be imported")
    return _Pickled(
        interaction=interaction,
        entities=[_weight(part, path) for part in entities],
        relations=[_weight(part, path) for part in relations],
        normalizers=[_attribute(part, "normalizer") for part in relations],
        has_inverses=bool(_attribute(model, "use_inverse_triples")),
        has_sigmoid=bool(_attribute(model, "predict_with_sigmoid")),
    )


def _representations(model: object, name: str, path: Path) -> list[Object]:
    parts = list(_children(_child(model, name)).values())
    for part in parts:
        if _class_name(part) != "Embedding":
            raise ConfigError(
                f"{path}: {name} are made by {_class_name(part)}, which is more than a table of rows"
            )
    return [part for part in parts if isinstance(part, Object)]


def _weight(representation: Object, path: Path) -> ForeignFloats:
    """Return float[rows, ...] in the representation's own shape."""
    embedding = _child(representation, "_embeddings")
    shape = _attribute(representation, "_shape")  # Two parts a number, where numbers are complex.
    try:
        weight = module_tensors(embedding)["weight"]
        return weight.reshape(len(weight), *shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: an Embedding without a weight of its shape: {error}") from error


def _class_name(made: object) -> str:
    """Return the name of an object's class, without its module where that is PyKEEN's own."""
    symbol = made.symbol if isinstance(made, Object) else None
    if not isinstance(symbol, Symbol):
        return "something"
    return symbol.name if symbol.module.startswith("pykeen.") else str(symbol)


def _attribute(module: object, name: str) -> Any:
    state = module.state if isinstance(module, Object) else None
    return state.get(name) if isinstance(state, dict) else None


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"a {type(value).__name__} where a number must be")
    return float(value)


def _children(module: object) -> Mapping[str, object]:
    children = _attribute(module, "_modules")
    return children if isinstance(children, dict) else {}


def _child(module: object, name: str) -> Object | None:
    child = _children(module).get(name)
    return child if isinstance(child, Object) else None


# --- Interactions --------------------------------------------------------------------------------------


def _tables(pickled: _Pickled, path: Path) -> _Tables:
    name = _class_name(pickled.interaction)
    if name == "ClampedInteraction":
        return _tables(_unclamped(pickled, path), path)
    if name not in _INTERACTIONS:
        reason = _REFUSED.get(name, f"known: {', '.join(_INTERACTIONS)}")
        raise ConfigError(f"{path}: {name} cannot be imported exactly ({reason})")
    if name != "QuatEInteraction" and any(normalizer is not None for normalizer in pickled.normalizers):
        raise ConfigError(f"{path}: its relations go through a normalizer; it cannot be imported")
    try:
        tables = _INTERACTIONS[name](pickled)
    except (IndexError, KeyError, ValueError) as error:
        raise DataError(f"{path}: its tables do not have the shapes of {name}: {error}") from error
    except _Inexact as error:
        raise ConfigError(f"{path}: {name} cannot be imported exactly ({error})") from error
    if tables.entities.ndim != 2 or tables.relations.ndim != 2:
        raise DataError(f"{path}: its tables do not have the shapes of {name}")
    return tables


class _Inexact(Exception):
    """A variant that no scoring function here equals; says which."""


def _unclamped(pickled: _Pickled, path: Path) -> _Pickled:
    base = _child(pickled.interaction, "base")
    if pickled.option("clamp_score") is not None or base is None:
        raise ConfigError(f"{path}: scores are clamped; it cannot be imported exactly")
    return replace(pickled, interaction=base)


def _transe(pickled: _Pickled) -> _Tables:
    norm, is_power = pickled.option("p"), pickled.option("power_norm")
    scoring = "transe-l1" if norm == 1 else "transe" if norm == 2 and not is_power else None
    if scoring is None:
        raise _Inexact(f"norm {norm}{', to that power' if is_power else ''}")
    return _Tables(scoring, pickled.entities[0], pickled.relations[0], decisions=[f"scored by {scoring}"])


def _distmult(pickled: _Pickled) -> _Tables:
    return _Tables("distmult", pickled.entities[0], pickled.relations[0], decisions=["scored by distmult"])


def _complex(pickled: _Pickled) -> _Tables:
    return _Tables(
        "complex",
        _blocks(pickled.entities[0], 2),
        _blocks(pickled.relations[0], 2),
        decisions=["scored by complex; complex numbers, interleaved there, become halves"],
    )


def _rotate(pickled: _Pickled) -> _Tables:
    relations = _blocks(pickled.relations[0], 2)
    real, imaginary = np.split(relations, 2, axis=-1)
    if np.abs(np.hypot(real, imaginary) - 1).max(initial=0) > 1e-5:
        raise _Inexact("relations are no rotations: their moduli are not 1")
    return _Tables(
        "rotate",
        _blocks(pickled.entities[0], 2),
        np.arctan2(imaginary, real),
        decisions=["scored by rotate; complex numbers become halves, relations their angles in radians"],
    )


def _simple(pickled: _Pickled) -> _Tables:
    if pickled.option("clamp_score") is not None:
        raise _Inexact("scores are clamped")
    return _Tables(
        "distmult",
        np.concatenate(pickled.entities, axis=1),
        np.concatenate(pickled.relations, axis=1) / 2,
        decisions=["scored by distmult: PyKEEN's SimplE multiplies vectors of the same role, not of two"],
    )


def _cp(pickled: _Pickled) -> _Tables:
    heads, tails = (_flat(table) for table in pickled.entities)
    return _Tables(
        "cp",
        np.concatenate([heads, tails], axis=1),
        _flat(pickled.relations[0]),
        decisions=["scored by cp; ranks and dimensions are one axis, which a sum does not see"],
    )


def _rescal(pickled: _Pickled) -> _Tables:
    return _Tables("rescal", pickled.entities[0], _flat(pickled.relations[0]), decisions=["scored by rescal"])


def _mure(pickled: _Pickled) -> _Tables:
    if pickled.option("p") != 2 or not pickled.option("power_norm"):
        raise _Inexact("its distance is not the squared 2-norm")
    vectors, as_head, as_tail = pickled.entities
    shift, stretch = pickled.relations
    return _Tables(
        "mure",
        np.concatenate([vectors, as_head.reshape(-1, 1), as_tail.reshape(-1, 1)], axis=1),
        np.concatenate([stretch, shift], axis=1),
        decisions=["scored by mure; both biases are an entity's last two floats"],
    )


def _quate(pickled: _Pickled) -> _Tables:
    match pickled.normalizers:
        case [Symbol("pykeen.nn.quaternion", "normalize")]:
            scoring = "quate"
        case [None]:
            scoring = "qmult"
        case _:
            raise _Inexact("its relations go through a normalizer that is not the quaternions'")
    return _Tables(
        scoring,
        _blocks(pickled.entities[0], 4),
        -_blocks(pickled.relations[0], 4),
        decisions=[
            f"scored by {scoring}; quaternions, interleaved there, become quarters",
            "relations are negated, since PyKEEN negates the score",
        ],
    )


def _tucker(pickled: _Pickled) -> _Tables:
    core = np.moveaxis(np.asarray(module_tensors(pickled.interaction)["core_tensor"], np.float64), 1, 0)
    before = _normalisation(pickled.interaction, "head_batch_norm")
    after = _normalisation(pickled.interaction, "head_relation_batch_norm")
    if before is None and after is None:
        return _Tables(
            f"tucker:{len(core)}",
            pickled.entities[0],
            pickled.relations[0],
            {"core": core.astype(np.float32)},
            decisions=["scored by tucker"],
        )
    neutral = np.ones(core.shape[2]), np.zeros(core.shape[2])
    return _Tables(
        f"tucker:{len(core) + 1}",
        _with_one(pickled.entities[0]),
        _with_one(pickled.relations[0]),
        {"core": _folded(core, *(before or neutral), *(after or neutral)).astype(np.float32)},
        decisions=[
            "scored by tucker; its batch normalisations, fixed by now, are folded into the core, for which"
            " every row gets a 1 at its end"
        ],
    )


def _normalisation(
    interaction: Object, name: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Return factors [D] and shifts [D] of a batch normalisation as it is after training, if there is one."""
    layer = _child(interaction, name)
    if layer is None:
        return None
    values = {key: np.asarray(value, np.float64) for key, value in module_tensors(layer).items()}
    factors = values["weight"] / np.sqrt(values["running_var"] + _number(_attribute(layer, "eps")))
    return factors, values["bias"] - factors * values["running_mean"]


def _folded(
    core: npt.NDArray[np.float64],
    head_factors: npt.NDArray[np.float64],
    head_shifts: npt.NDArray[np.float64],
    tail_factors: npt.NDArray[np.float64],
    tail_shifts: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the core for rows that end in 1 that does what `core` does between two normalisations.

    Args:
        core: float64[E, D, D], axes relation, head, tail.
        head_factors: float64[D]; heads are multiplied by these,
        head_shifts: float64[D]; and these are added, before the core.
        tail_factors: float64[D]; the query, which tails are multiplied by, is multiplied by these,
        tail_shifts: float64[D]; and these are added, after the core.

    Returns:
        float64[E + 1, D + 1, D + 1].
    """
    relation_dim, dim, _ = core.shape
    folded = np.zeros((relation_dim + 1, dim + 1, dim + 1))
    scaled = core * tail_factors
    folded[:-1, :-1, :-1] = scaled * head_factors[:, None]
    folded[:-1, -1, :-1] = np.einsum("aij,i->aj", scaled, head_shifts)
    folded[-1, -1, :-1] = tail_shifts
    return folded


def _with_one(rows: ForeignFloats) -> ForeignFloats:
    return np.concatenate([rows, np.ones((len(rows), 1), rows.dtype)], axis=1)


def _flat(table: ForeignFloats) -> ForeignFloats:
    return table.reshape(len(table), -1)


def _blocks(table: ForeignFloats, count: int) -> ForeignFloats:
    """Return rows [N, count * k] of `count` blocks, from numbers of `count` parts each [N, k, count]."""
    if table.ndim != 3 or table.shape[-1] != count:
        raise ValueError(f"expected numbers of {count} parts, found an array of shape {table.shape}")
    return _flat(np.moveaxis(table, -1, 1))


_INTERACTIONS: dict[str, Callable[[_Pickled], _Tables]] = {
    "TransEInteraction": _transe,
    "DistMultInteraction": _distmult,
    "ComplExInteraction": _complex,
    "RotatEInteraction": _rotate,
    "SimplEInteraction": _simple,
    "CPInteraction": _cp,
    "RESCALInteraction": _rescal,
    "MuREInteraction": _mure,
    "QuatEInteraction": _quate,
    "TuckERInteraction": _tucker,
}
_REFUSED = {
    "TransHInteraction": "its normals have no unit length, and its translation is not projected",
    "ConvEInteraction": "it normalises over batches and adds entity biases; conve here does neither",
    "HolEInteraction": "there is no circular correlation here",
    "UMInteraction": "it has no relations",
}


# --- Labels and triples --------------------------------------------------------------------------------


def _read_labels(path: Path) -> list[str]:
    """Return labels by id, as text: "NA", "null" and "007" are labels like others."""
    text = _unzipped(path)
    header = re.match(r"id\tlabel(\r?\n)", text)
    if header is None:
        raise DataError(f"{path}: expected a header, id and label")
    end = re.escape(header[1])
    entry = re.compile(rf'(\d{{1,18}})\t(?:"((?:[^"]|"")*)"|([^"\n][^\n]*?|))(?:{end}|\Z)')
    labels: dict[int, str] = {}
    position = header.end()
    while position < len(text):
        found = entry.match(text, position)
        if found is None or int(found[1]) in labels:
            line = text.count("\n", 0, position) + 1
            raise DataError(f"{path}:{line}: expected an id of its own, TAB and a label")
        labels[int(found[1])] = found[3] if found[2] is None else found[2].replace('""', '"')
        position = found.end()
    return in_order(labels, path)


def _unzipped(path: Path) -> str:
    if not path.is_file():
        raise DataError(
            f"{path}: missing; labels are needed, so save the results of a labelled TriplesFactory"
        )
    try:
        with gzip.open(path) as file:
            return file.read().decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: truncated or corrupt: {error}") from error


def read_id_triples(
    path: Path, num_entities: int, num_relations: int, *, columns: Sequence[str] | None = None
) -> npt.NDArray[np.int64]:
    """Return int64[n, 3]: the triples of a file of ids between TABs.

    Args:
        path: The file, gzipped if its name ends in .gz.
        num_entities: Ids of heads and tails are below.
        num_relations: Ids of relations are below.
        columns: Names of the columns head, relation and tail in its header; without it, the file has no
            header, and they are the first three.

    Raises:
        DataError: It is no such file.
    """
    names = list(columns or ("f0", "f1", "f2"))
    try:
        table = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(autogenerate_column_names=columns is None),
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.int64()), include_columns=names, null_values=[]
            ),
        )
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{path}: no triples of ids: {' '.join(str(error).split())}") from error
    triples = np.stack([table[name].to_numpy() for name in names], axis=1)
    if not ((triples >= 0) & (triples < np.array([num_entities, num_relations, num_entities]))).all():
        raise DataError(f"{path}: names an id beyond {num_entities} entities and {num_relations} relations")
    return triples


PYKEEN = Importer("pykeen", f"{_MODEL} and {_TRIPLES}/", _recognises, _read)
