"""A folder for a Hugging Face hub, to be pushed as it is.

model.safetensors       entity_embedding.weight, relation_embedding.weight (inverses behind), shared.NAME;
                        beyond 5 GB model-00001-of-0000N.safetensors, whole tensors, with an index
config.json             score function, dimensions, layout of complex numbers
README.md               model card with the figures of the test split
entities.parquet, relations.parquet    id, label, kind, degree; row i is label i
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kgshard.files import write_text
from kgshard.shards import ENTITIES, RELATIONS, TABLE_DTYPES
from kgshard_tools.card import loading, model_card
from kgshard_tools.export.format import Format
from kgshard_tools.export.labels import write_vocabularies
from kgshard_tools.export.tables import Export
from kgshard_tools.merge import CARD_FILE, INDEX_FILE, MODEL_FILE, MODEL_FILES, write_model
from kgshard_tools.rows import Part, shared_parts

_LARGEST = 5 * 10**9
"""What the hub recommends."""


def fill(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    rows = what.relations
    both = replace(rows, ids=range(rows.table.num_rows)) if what.inverses is not None else rows
    parts: dict[str, Part] = {ENTITIES: what.entities, RELATIONS: both}
    parts |= shared_parts(what.shared)
    names = write_model(parts, folder, _LARGEST)
    write_text(
        folder / CARD_FILE, model_card(what.stored, files=names, dtype=TABLE_DTYPES[what.entities.dtype][1])
    )
    write_vocabularies(what, folder)
    return loading(names)


FORMAT = Format(
    "a Hugging Face model folder with a card",
    fill,
    (MODEL_FILE, MODEL_FILES, INDEX_FILE, CARD_FILE, "entities.parquet", "relations.parquet"),
    dtypes=("float32", "float16", "bfloat16"),
    whole=True,
)
