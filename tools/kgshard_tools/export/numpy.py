"""numpy arrays, the way get_embeddings returns them.

    entities.npy             [num_entities, dim]
    relations.npy            [num_relations, relation_dim]
    inverse_relations.npy    the same shape, only with reciprocal relations: (?, r, t) is (t, r', ?)
    shared-NAME.npy          float32, one for each parameter that all rows share, if there are any
    entities.txt             one label a line, row i on line i; newline is written \\n, backslash \\\\
    relations.txt            the same
    entities.parquet, relations.parquet    id, label, kind, degree; row i is label i
    config.json              score function, dimensions, layout of complex numbers

Arrays are C-order, little-endian float32 or float16, and load with mmap_mode="r".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kgshard.files import replacing
from kgshard.shards import TABLE_DTYPES
from kgshard_tools.export.format import Format
from kgshard_tools.export.labels import write_label_lines, write_vocabularies
from kgshard_tools.export.tables import Export, Rows


def write_numpy(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    for table, rows in what.tables.items():
        _write_rows(rows, folder / f"{table}.npy")
    for name, values in what.shared.items():
        with replacing(folder / f"shared-{name}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, values)
    for name, rows in (("entities", what.entities), ("relations", what.relations)):
        write_label_lines(rows, folder / f"{name}.txt")
    write_vocabularies(what, folder)
    loaded = ", ".join(f'numpy.load("{name}.npy", mmap_mode="r")' for name in ("entities", "relations"))
    lines = [
        "import numpy, pyarrow.parquet",
        f"entities, relations = {loaded}",
        'labels = pyarrow.parquet.read_table("entities.parquet")["label"].to_pylist()',
    ]
    if what.shared:
        names = list(what.shared)
        lines.append(f'shared = {{name: numpy.load(f"shared-{{name}}.npy") for name in {names}}}')
    return lines


def _write_rows(rows: Rows, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        header = {"descr": TABLE_DTYPES[rows.dtype][0], "fortran_order": False, "shape": rows.shape}
        np.lib.format.write_array_header_1_0(file, header)
        rows.write(file)


FORMAT = Format(
    "numpy arrays with labels as text and Parquet",
    write_numpy,
    (
        *(f"{name}.{ending}" for name in ("entities", "relations") for ending in ("npy", "txt", "parquet")),
        *("inverse_relations.npy", "shared-*.npy"),
    ),
    dtypes=("float32", "float16"),
)
