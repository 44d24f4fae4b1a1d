"""Tables for other programs. A new format is one file and one line here.

A format fills a folder that appears only when it is complete. Row i is label i, always, and config.json
beside the files says so.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kgshard.errors import ConfigError
from kgshard.files import AnyPath, check_replaceable, replacing_directory, write_json
from kgshard.shards import TABLE_DTYPES, StoredTable
from kgshard_tools.export import (
    dglke,
    hf,
    libkge,
    neo4j,
    numpy,
    openke,
    parquet,
    pbg,
    projector,
    pykeen,
    safetensors,
    spreadsheet,
    tsv,
    word2vec,
)
from kgshard_tools.export.format import Format
from kgshard_tools.export.selection import select_entities
from kgshard_tools.export.tables import Export, LabelEscape, Rows
from kgshard_tools.rows import Advance, Ids, no_progress
from kgshard_tools.stored import CONFIG_FILE, Stored, is_ours, open_stored
from kgshard_tools.written import Written, describe_folder, list_files

FORMATS: dict[str, Format] = {
    "numpy": numpy.FORMAT,
    "safetensors": safetensors.FORMAT,
    "parquet": parquet.FORMAT,
    "hf": hf.FORMAT,
    "word2vec": word2vec.TEXT,
    "word2vec-bin": word2vec.BINARY,
    "tsv": tsv.FORMAT,
    "csv": spreadsheet.FORMAT,
    "projector": projector.FORMAT,
    "neo4j": neo4j.FORMAT,
    "pykeen": pykeen.FORMAT,
    "dglke": dglke.FORMAT,
    "pbg": pbg.FORMAT,
    "libkge": libkge.FORMAT,
    "openke": openke.FORMAT,
}
"""Every format by the name that `--format` takes."""

LABEL_ESCAPES: tuple[LabelEscape, ...] = ("refuse", "percent", "underscore")


def export(
    source: AnyPath,
    format: str = "numpy",
    out: AnyPath | None = None,
    *,
    entities: AnyPath | None = None,
    top_degree: int | None = None,
    dtype: str | None = None,
    normalize: bool = False,
    label_escape: LabelEscape = "refuse",
    verify: bool = False,
    advance: Advance = no_progress,
) -> Written:
    """Write a run's tables and labels in another program's format, straight from the shards.

    Args:
        source: A run, or one of its checkpoint folders.
        format: A name in FORMATS.
        out: The folder to write; by default RUN/export-FORMAT. An earlier export there is replaced.
        entities: A file that names the entities to export, one a line, in their order.
        top_degree: Export only so many entities, those of the highest degree in train.
        dtype: float32, float16 or bfloat16; by default as stored, where the format can say it.
        normalize: Scale entity rows to a 2-norm of 1.
        label_escape: What becomes of a label that the format cannot say: it is refused, written with
            percent escapes, or with underscores.
        verify: First compare every shard, label and triple with its SHA-256.
        advance: Told how many bytes more are written.

    Raises:
        ConfigError: The format is unknown, or cannot say what was asked for.
        RunError: `source` is no run, or `out` is a folder of something else.
        ShardError: A shard is missing, damaged or of another run.
        NonFiniteError: A row holds NaN or infinity, in a format that does not copy bytes as they are.
    """
    began = time.monotonic()
    if format not in FORMATS:
        raise ConfigError(f"--format: unknown value {format!r} (known: {', '.join(FORMATS)})")
    if label_escape not in LABEL_ESCAPES:
        raise ConfigError(
            f"--label-escape: unknown value {label_escape!r} (known: {', '.join(LABEL_ESCAPES)})"
        )
    chosen = FORMATS[format]
    chosen.check_takes(
        format,
        selection=entities is not None or top_degree is not None,
        normalize=normalize,
        escape=label_escape,
    )
    stored = open_stored(source)
    out = Path(out) if out is not None else stored.run.folder / f"export-{format}"
    ours = is_ours(out, "export_format", format)
    check_replaceable(out, ours=ours, names=(CONFIG_FILE, *chosen.names), what=f"an export to {format}")
    ids = select_entities(stored.dataset, None if entities is None else Path(entities), top_degree)
    if verify:
        stored.verify()
    what = _tables(stored, ids, chosen, dtype, normalize=normalize, advance=advance)
    what.label_escape = label_escape
    place = Path(os.path.realpath(out))
    with replacing_directory(place) as temporary:
        python = chosen.fill(what, temporary)
        files = list_files(temporary, hashes=verify)
        write_json(temporary / CONFIG_FILE, {**_config(what, format), **what.config, "files": files})
    return describe_folder(out, place, len(ids), began, what.notes, python)


def _tables(
    stored: Stored, ids: Ids, chosen: Format, dtype: str | None, *, normalize: bool, advance: Advance
) -> Export:
    """Return what is exported; say where its dtype is not the stored one."""
    model, folder = stored.model, stored.dataset.folder
    num_relations, notes = model.num_relations, list[str]()

    def rows(table: StoredTable, ids: Ids, label_ids: Ids, name: str) -> Rows:
        return Rows(
            table=table,
            ids=ids,
            vocabulary=folder / f"{name}.parquet",
            label_ids=label_ids,
            row_name=stored.row_namer(table),
            dtype=chosen.written_dtype(table.dtype, dtype, notes),
            normalize=normalize and name == "entities",
            advance=advance,
        )

    table, graphs = stored.checkpoint.relations, range(num_relations)
    behind = range(num_relations, model.num_relation_rows)
    return Export(
        stored,
        rows(stored.checkpoint.entities, ids, ids, "entities"),
        rows(table, graphs, graphs, "relations"),
        rows(table, behind, graphs, "relations") if model.reciprocal else None,
        notes=notes,
    )


def _config(what: Export, format: str) -> dict[str, Any]:
    """Return what config.json says beside every export."""
    return {
        **what.stored.config(),
        "torch_dtype": TABLE_DTYPES[what.entities.dtype][1],
        "export_format": format,
        "row_is_label": True,
        "rows": len(what.entities),
        "normalized": what.entities.normalize,
    }
