"""safetensors with the labels beside it: numpy, torch, JAX and whatever else reads it.

    model.safetensors       entities [num_entities, dim], relations [num_relations, relation_dim],
                            inverse_relations (only with reciprocal relations: (?, r, t) is (t, r', ?)),
                            shared.NAME for each parameter that all rows share
    entities.parquet, relations.parquet    id, label, kind, degree; row i is label i
    config.json             score function, dimensions, layout of complex numbers

`merge-shards` writes the same tables under the names that training has for them.
"""

from __future__ import annotations

from pathlib import Path

from kgshard.files import replacing
from kgshard_tools.export.format import Format
from kgshard_tools.export.labels import write_vocabularies
from kgshard_tools.export.tables import Export
from kgshard_tools.rows import Part, shared_parts, write_safetensors


def fill(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    parts: dict[str, Part] = {**what.tables}
    parts |= shared_parts(what.shared)
    with replacing(folder / "model.safetensors") as temporary:
        write_safetensors(temporary, parts)
    write_vocabularies(what, folder)
    return [
        "import pyarrow.parquet, safetensors.torch",
        'tables = safetensors.torch.load_file("model.safetensors")',
        'labels = pyarrow.parquet.read_table("entities.parquet")["label"].to_pylist()',
    ]


FORMAT = Format(
    "one safetensors file with labels as Parquet",
    fill,
    ("model.safetensors", "entities.parquet", "relations.parquet"),
    dtypes=("float32", "float16", "bfloat16"),
)
