"""Parquet, for pandas, polars, DuckDB, LanceDB and whatever reads Arrow.

    entities.parquet             id int64, label string, degree int64, vector fixed_size_list<float32>[dim]
    relations.parquet            the same, vectors of relation_dim; degree: train triples of the relation
    inverse_relations.parquet    the same, only with reciprocal relations: (?, r, t) is (t, r', ?)
    shared.safetensors           the parameters that all rows share, if there are any
    config.json                  score function, dimensions, layout of complex numbers

Row i is label i and has id i. The schema carries config.json's content under the key "kgshard".
"""

from __future__ import annotations

import json
from pathlib import Path

from kgshard.files import replacing
from kgshard_tools.export.format import Format
from kgshard_tools.export.parquet_file import write_parquet
from kgshard_tools.export.tables import TABLES, Export
from kgshard_tools.rows import Values, write_safetensors


def fill(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    metadata = {"kgshard": json.dumps(what.stored.config())}
    for name, rows in what.tables.items():
        with replacing(folder / f"{name}.parquet") as temporary, temporary.open("wb") as file:
            write_parquet(rows, file, metadata)
    if what.shared:
        with replacing(folder / "shared.safetensors") as temporary:
            shared = {name: Values(values) for name, values in what.shared.items()}
            write_safetensors(temporary, shared)
    what.note(f"in DuckDB cast a vector first: vector::FLOAT[{what.entities.dim}]")
    return [
        "import pyarrow.parquet",
        'entities = pyarrow.parquet.read_table("entities.parquet", memory_map=True)',
        'vectors = entities["vector"].combine_chunks().flatten().to_numpy().reshape(len(entities), -1)',
    ]


FORMAT = Format(
    "Parquet tables of id, label, degree and vector: pandas, polars, DuckDB, LanceDB",
    fill,
    (*(f"{table}.parquet" for table in TABLES), "shared.safetensors"),
    dtypes=("float32", "float16"),
)
