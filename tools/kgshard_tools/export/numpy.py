"""numpy arrays, the way get_embeddings returns them.

    entities.npy             float32 [num_entities, dim]
    relations.npy            float32 [num_relations, relation_dim]
    inverse_relations.npy    the same shape, only with reciprocal relations: (?, r, t) is (t, r', ?)
    shared-NAME.npy          float32, one for each parameter that all rows share, if there are any
    entities.txt             one label a line, row i on line i; newline is written \\n, backslash \\\\
    relations.txt            the same
    entities.parquet, relations.parquet    id, label, kind, degree
    config.json              score function, dimensions, layout of complex numbers

Arrays are C-order, little-endian, and load with mmap_mode="r". numpy has no bfloat16: such tables are
widened to float32, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kgshard.files import link_or_copy, replacing
from kgshard.shards import StoredTable
from kgshard.vocabulary import read_labels
from kgshard_tools.merge import copy_rows
from kgshard_tools.stored import Stored

_VOCABULARIES = ("entities", "relations")
NAMES = (
    *(f"{name}.{ending}" for name in _VOCABULARIES for ending in ("npy", "txt", "parquet")),
    *("inverse_relations.npy", "shared-*.npy"),
)
"""Patterns of all names this format writes."""


def write_numpy(stored: Stored, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    entities, relations = stored.checkpoint.entities, stored.checkpoint.relations
    num_relations = stored.model.num_relations
    _write_rows(entities, range(entities.num_rows), folder / "entities.npy")
    _write_rows(relations, range(num_relations), folder / "relations.npy")
    if stored.model.reciprocal:
        inverses = range(num_relations, stored.model.num_relation_rows)
        _write_rows(relations, inverses, folder / "inverse_relations.npy")
    for name, values in stored.checkpoint.shared.items():
        with replacing(folder / f"shared-{name}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, values)
    for name in _VOCABULARIES:
        vocabulary = stored.dataset.folder / f"{name}.parquet"
        _write_labels(read_labels(vocabulary), folder / f"{name}.txt")
        link_or_copy(vocabulary, folder / f"{name}.parquet")
    return _how_to_load(stored)


def _how_to_load(stored: Stored) -> list[str]:
    dtype, shared = stored.checkpoint.entities.dtype, list(stored.checkpoint.shared)
    lines = [
        "import numpy, pyarrow.parquet",
        'entities = numpy.load("entities.npy", mmap_mode="r")',
        'relations = numpy.load("relations.npy", mmap_mode="r")',
        'labels = pyarrow.parquet.read_table("entities.parquet")["label"].to_pylist()',
    ]
    if shared:
        lines.append(f'shared = {{name: numpy.load(f"shared-{{name}}.npy") for name in {shared}}}')
    if dtype != "F32":
        lines.append(f"{dtype} was widened to float32, exactly; numpy has no such dtype")
    return lines


def _write_rows(table: StoredTable, rows: range, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(rows), table.dim)}
        np.lib.format.write_array_header_1_0(file, header)
        if table.dtype == "F32":
            copy_rows(table, rows, file)
        else:
            _write_widened(table, rows, file)


def _write_widened(table: StoredTable, rows: range, file: BinaryIO) -> None:
    for _, values in table.blocks(rows):
        file.write(np.ascontiguousarray(values, "<f4").data)


def _write_labels(blocks: Iterable[list[str]], path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        for labels in blocks:
            for label in labels:
                file.write(label.replace("\\", "\\\\").replace("\n", "\\n").encode() + b"\n")
