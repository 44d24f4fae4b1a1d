"""PyTorch-BigGraph: entities, edges and a checkpoint, as its training leaves them.

    entity_path/
        entity_count_all_0.txt, entity_names_all_0.json
        dynamic_rel_count.txt, dynamic_rel_names.json
    edges/train/edges_0_0.h5, edges/valid/..., edges/test/...    lhs, rel, rhs: int64
    checkpoint_path/
        checkpoint_version.txt, config.json
        embeddings_all_0.v1.h5    embeddings: float32
        model.v1.h5               model/relations/0/operator/{lhs,rhs}/PARAMETER: float32
    config.json                   ours

With dynamic relations PBG has two operators for each relation: that of the left side makes the query for
tails, that of the right side the query for heads. So it says what reciprocal relations say, and without
them the right side's operator undoes the left side's, as `query_heads` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kgshard.data.dataset import SPLITS
from kgshard.errors import ConfigError
from kgshard.files import replacing, write_json, write_text
from kgshard.shards import Floats
from kgshard_tools.export.format import Format
from kgshard_tools.export.graph import (
    Derived,
    entity_tensor,
    find_layout,
    note_offset,
    tensor_of,
    triple_blocks,
    write_text_blocks,
)
from kgshard_tools.export.layouts import (
    Make,
    as_they_are,
    part,
    square_matrices,
)
from kgshard_tools.export.tables import Export, Rows

_PROGRAM = "PyTorch-BigGraph"
_ENTITIES, _EDGES, _CHECKPOINT = "entity_path", "edges", "checkpoint_path"
_TYPE, _RELATIONS = "all", "all_edges"
_VERSION = 1
_FORMAT_VERSION = 1
_EDGE_FILE = "edges_0_0.h5"


@dataclass(frozen=True)
class _Layout:
    """How PBG has a model. Operators are what makes their parameters, by name, of relation rows."""

    operator: str
    comparator: str
    tails: dict[str, Make]
    """Makes queries for tails."""
    heads: dict[str, Make]
    """Makes queries for heads, of the same row."""


def _negative(make: Make) -> Make:
    return lambda rows: -make(rows)


def _cosines(angles: Floats) -> Any:
    return np.cos(angles.astype(np.float64))


def _sines(angles: Floats) -> Any:
    return np.sin(angles.astype(np.float64))


def _complex_diagonal(comparator: str, real: Make, imaginary: Make) -> _Layout:
    return _Layout(
        "complex_diagonal",
        comparator,
        {"real": real, "imag": imaginary},
        {"real": real, "imag": _negative(imaginary)},
    )


_LAYOUTS = {
    "distmult": _Layout("diagonal", "dot", {"diagonals": as_they_are}, {"diagonals": as_they_are}),
    "rescal": _Layout(
        "linear",
        "dot",
        {"linear_transformations": lambda rows: square_matrices(rows).swapaxes(1, 2)},
        {"linear_transformations": square_matrices},
    ),
    "complex": _complex_diagonal("dot", part(0, 2), part(1, 2)),
    "transe": _Layout(
        "translation", "l2", {"translations": as_they_are}, {"translations": _negative(as_they_are)}
    ),
    "rotate": _complex_diagonal("l2", _cosines, _sines),
}
_REASONS = {
    "transe-l1": "it compares by products and 2-norms only",
    "rotate-moduli": "it compares by products and 2-norms only",
}


def write_pbg(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    layout = find_layout(what, _PROGRAM, _LAYOUTS, _REASONS)
    hdf5 = _hdf5()
    note_offset(what, _PROGRAM)
    _write_names(what, folder / _ENTITIES)
    for split in SPLITS:
        (folder / _EDGES / split).mkdir(parents=True)
        _write_edges(what, split, folder / _EDGES / split / _EDGE_FILE, hdf5)
    checkpoint = folder / _CHECKPOINT
    checkpoint.mkdir()
    entities = entity_tensor(what, as_they_are)
    _write_tensors(checkpoint / f"embeddings_{_TYPE}_0.v{_VERSION}.h5", {"embeddings": entities}, hdf5)
    _write_tensors(checkpoint / f"model.v{_VERSION}.h5", _operators(what, layout), hdf5)
    write_json(checkpoint / "config.json", _config(what, layout))
    write_text(checkpoint / "checkpoint_version.txt", f"{_VERSION}\n")
    return [
        "import json; from torchbiggraph.config import ConfigSchema",
        'config = ConfigSchema.from_dict(json.load(open("checkpoint_path/config.json")))',
        "from torchbiggraph.checkpoint_manager import CheckpointManager; "
        "from torchbiggraph.model import make_model",
        "model, checkpoint = make_model(config), CheckpointManager(config.checkpoint_path)",
        "model.load_state_dict(checkpoint.read_model()[0], strict=False)",
        f'embeddings, _ = checkpoint.read("{_TYPE}", 0)',
    ]


def _hdf5() -> Any:
    """Return h5py.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return import_module("h5py")
    except ImportError as error:
        raise ConfigError(f"--format pbg needs h5py: pip install 'kgshard[pbg]' ({error})") from error


def _write_names(what: Export, folder: Path) -> None:
    folder.mkdir()
    for count, names, rows in (
        (f"entity_count_{_TYPE}_0.txt", f"entity_names_{_TYPE}_0.json", what.entities),
        ("dynamic_rel_count.txt", "dynamic_rel_names.json", what.relations),
    ):
        write_text(folder / count, f"{len(rows)}\n")
        write_text_blocks(folder / names, chain([b"["], _json_names(rows), [b"]\n"]))


def _json_names(rows: Rows) -> Any:
    first = True
    for labels in rows.labels():
        # Without its brackets, so that all blocks are one list.
        yield (b"" if first else b",") + msgspec.json.encode(labels)[1:-1]
        first = False


def _write_edges(what: Export, split: str, path: Path, hdf5: Any) -> None:
    size = len(what.stored.dataset.triples(split))
    with replacing(path) as temporary, hdf5.File(temporary, "w") as file:
        file.attrs["format_version"] = _FORMAT_VERSION
        columns = [file.create_dataset(name, (size,), "<i8") for name in ("lhs", "rel", "rhs")]
        start = 0
        for block in triple_blocks(what, split):
            for column, ids in zip(columns, block.T, strict=True):
                column[start : start + len(block)] = ids
            start += len(block)


def _operators(what: Export, layout: _Layout) -> dict[str, Derived]:
    """Return the parameters of both sides' operators by their names in the file."""
    back = layout.heads if what.inverses is None else layout.tails
    sides: tuple[tuple[str, Rows, dict[str, Make]], ...] = (
        ("lhs", what.relations, layout.tails),
        ("rhs", what.inverses or what.relations, back),
    )
    return {
        f"model/relations/0/operator/{side}/{name}": tensor_of(rows, make)
        for side, rows, makes in sides
        for name, make in makes.items()
    }


def _write_tensors(path: Path, tensors: dict[str, Derived], hdf5: Any) -> None:
    with replacing(path) as temporary, hdf5.File(temporary, "w") as file:
        file.attrs["format_version"] = _FORMAT_VERSION
        for name, tensor in tensors.items():
            dataset, start = file.create_dataset(name, tensor.shape, "<f4"), 0
            if name.startswith("model/"):
                dataset.attrs["state_dict_key"] = _state_key(name)
            for values in tensor.blocks():
                dataset[start : start + len(values)] = values
                start += len(values)


def _state_key(name: str) -> str:
    """Return what a parameter is called in the state_dict: lhs_operators.0.translations."""
    *_, side, parameter = name.split("/")
    return f"{side}_operators.0.{parameter}"


def _config(what: Export, layout: _Layout) -> dict[str, Any]:
    return {
        "entities": {_TYPE: {"num_partitions": 1}},
        "relations": [{"name": _RELATIONS, "lhs": _TYPE, "rhs": _TYPE, "operator": layout.operator}],
        "dynamic_relations": True,
        "dimension": what.stored.model.dim,
        "comparator": layout.comparator,
        "bias": False,
        "global_emb": False,
        "loss_fn": "softmax",
        "entity_path": _ENTITIES,
        "edge_paths": [f"{_EDGES}/train"],
        "checkpoint_path": _CHECKPOINT,
    }


FORMAT = Format(
    "PyTorch-BigGraph's entities, edges and checkpoint",
    write_pbg,
    (
        *(f"{_ENTITIES}/{name}" for name in ("entity_count_*.txt", "entity_names_*.json")),
        *(f"{_ENTITIES}/dynamic_rel_{name}" for name in ("count.txt", "names.json")),
        *(f"{_EDGES}/{split}/{_EDGE_FILE}" for split in SPLITS),
        *(f"{_CHECKPOINT}/{name}" for name in ("config.json", "checkpoint_version.txt", "*.v1.h5")),
    ),
    whole=True,
)
