"""Labels beside exported rows, as text and as Parquet. Row i is label i."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kgshard.files import copy_file, replacing
from kgshard_tools.export.spread import spread
from kgshard_tools.export.tables import Export, Rows


def write_label_lines(rows: Rows, path: Path) -> None:
    """Write one label a line; a newline in it is written \\n, a backslash \\\\."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for columns in rows.columns(["label"]):
            file.write(label_lines(columns.column("label")))


def label_lines(labels: pa.Array) -> bytes:
    """Return labels as lines of text; see `write_label_lines`.

    Example:
        >>> label_lines(pa.array(["a", "b\\n", "\\\\"]))
        b'a\\nb\\\\n\\n\\\\\\\\\\n'
    """
    lines = pc.replace_substring(pc.replace_substring(labels, "\\", "\\\\"), "\n", "\\n")
    buffer, places = spread(lines, after=1)
    buffer[np.append(places[1:], len(buffer)) - 1] = ord("\n")
    return buffer.tobytes()


def write_vocabularies(what: Export, folder: Path) -> None:
    """Write entities.parquet and relations.parquet; see `write_vocabulary`."""
    for name, rows in (("entities", what.entities), ("relations", what.relations)):
        write_vocabulary(rows, folder / f"{name}.parquet")


def write_vocabulary(rows: Rows, path: Path) -> None:
    """Write a Parquet file of id (the position among the exported rows), label, kind and degree."""
    if rows.all_labels:
        with replacing(path) as temporary:
            copy_file(rows.vocabulary, temporary)
        return
    with replacing(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA, compression="zstd") as writer:
        position = 0
        for batch in rows.columns(["label", "kind", "degree"]):
            ids = pa.array(np.arange(position, position + len(batch)))
            columns = [ids, *(batch.column(name) for name in ("label", "kind", "degree"))]
            writer.write_table(pa.table(columns, names=["id", "label", "kind", "degree"]).cast(_SCHEMA))
            position += len(batch)


_SCHEMA = pa.schema(
    [("id", pa.int64()), ("label", pa.large_string()), ("kind", pa.string()), ("degree", pa.int64())]
)
