"""Merge shards into one safetensors file, from file to file.

The kernel copies byte ranges in row order; memory does not grow with the table, and no row passes
through this process. What dicee's gather_entity_embeddings_on_rank_zero is for, without its memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from safetensors import safe_open

from kgshard.errors import RunError, ShardError
from kgshard.files import (
    AnyPath,
    check_replaceable,
    copy_bytes,
    link_or_copy,
    replacing,
    replacing_directory,
    write_json,
)
from kgshard.runs import MANIFEST_FILE
from kgshard.shards import ITEM_BYTES, StoredTable, header_bytes
from kgshard_tools.stored import CONFIG_FILE, Stored, is_ours, open_stored
from kgshard_tools.written import Written, describe_folder

MODEL_FILE = "model.safetensors"
_LABEL_FILES = ("entities.parquet", "relations.parquet")
_NAMES = (MODEL_FILE, CONFIG_FILE, *_LABEL_FILES)


def merge_shards(source: AnyPath, out: AnyPath | None = None, *, verify: bool = False) -> Written:
    """Write the tables of a checkpoint to one safetensors file, entities and relations in row order.

    Parameters that all rows share are in it as `shared.NAME`, float32.

    Args:
        source: A run, or one of its checkpoint folders.
        out: A file that ends in .safetensors, or a folder for model.safetensors with config.json and
            the labels beside it; by default RUN/model. What is there is replaced.
        verify: First compare every shard with its SHA-256.

    Raises:
        RunError: `source` is no run, or `out` is a folder of something else.
        ShardError: A shard is missing, damaged or of another run.
    """
    began = time.monotonic()
    stored = open_stored(source)
    if verify:
        for _ in stored.checkpoint.verify():
            pass
    out = Path(out) if out is not None else stored.run.folder / "model"
    rows = stored.model.num_entities
    if out.suffix == ".safetensors":
        _check_file(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as temporary:
            _write_model(stored, temporary)
    else:
        check_replaceable(out, ours=is_ours(out, "merged", True), names=_NAMES, what="a merged model")
        place = Path(os.path.realpath(out))
        with replacing_directory(place) as temporary:
            _write_folder(stored, temporary)
        return describe_folder(out, place, rows, began)
    return Written([str(out)], rows, out.stat().st_size, time.monotonic() - began)


def _check_file(out: Path) -> None:
    if out.is_dir():
        raise RunError(f"{out}: is a folder; a name that ends in .safetensors is for a file")
    if (out.parent / MANIFEST_FILE).is_file():
        raise RunError(f"{out}: lies in a checkpoint, whose shards it could replace; choose another folder")


def _write_folder(stored: Stored, folder: Path) -> None:
    _write_model(stored, folder / MODEL_FILE)
    write_json(folder / CONFIG_FILE, {**stored.config(), "merged": True})
    for name in _LABEL_FILES:
        link_or_copy(stored.dataset.folder / name, folder / name)


def _write_model(stored: Stored, path: Path) -> None:
    tables = {table.name: table for table in (stored.checkpoint.entities, stored.checkpoint.relations)}
    shared = {f"shared.{name}": values for name, values in stored.checkpoint.shared.items()}
    tensors: dict[str, tuple[str, Sequence[int]]] = {
        **{name: (table.dtype, table.shape) for name, table in tables.items()},
        **{name: ("F32", values.shape) for name, values in shared.items()},
    }
    # Wide numbers first, as the safetensors package has it: so all lie where they can be mapped.
    tensors = dict(sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]))
    with path.open("wb") as file:
        file.write(header_bytes(tensors, {"format": "pt"}))
        for name in tensors:
            if name in tables:
                copy_rows(tables[name], range(tables[name].num_rows), file)
            else:
                file.write(shared[name].astype("<f4").tobytes())
    _check_readable(path, tensors)


def _check_readable(path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Let the safetensors package, which users will read the file with, confirm what is in it."""
    with safe_open(path, framework="numpy") as file:
        for name, (_, shape) in tensors.items():
            if tuple(file.get_slice(name).get_shape()) != tuple(shape):
                raise ShardError(f"{path}: safetensors does not read {name} as {list(shape)}")


def copy_rows(table: StoredTable, rows: range, target: BinaryIO) -> None:
    """Append the stored bytes of `rows` to an open file, without loading them."""
    for path, offset, length in table.byte_ranges(rows):
        with path.open("rb") as source:
            copy_bytes(source, offset, length, target)
