"""Merge shards into one safetensors file, or a few, from file to file.

The kernel copies byte ranges in row order; memory does not grow with the table, and no row passes
through this process unless its dtype is to change. What dicee's gather_entity_embeddings_on_rank_zero is
for, without its memory.

    FOLDER/
        model.safetensors               all tables; or, where files have a largest size,
        model-00001-of-00003.safetensors ...    whole tensors, as on a Hugging Face hub, and
        model.safetensors.index.json            which file holds which
        optimizer.safetensors           its state: NAME.PART, such as entity_embedding.weight.sum
        README.md                       model card
        config.json                     score function, dimensions, step, hashes where they were asked for
        entities.parquet, relations.parquet     labels; row i is label i
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from kgshard.errors import ConfigError, RunError, ShardError
from kgshard.files import (
    AnyPath,
    check_replaceable,
    copy_file,
    file_sha256,
    replacing,
    replacing_directory,
    write_json,
    write_text,
)
from kgshard.runs import SHARED_OPTIMIZER_FILE, Run
from kgshard.shards import ENTITIES, RELATIONS, TABLE_DTYPES, read_header
from kgshard_tools.card import model_card
from kgshard_tools.rows import (
    DTYPES,
    METADATA,
    Advance,
    Part,
    StoredRows,
    StoredTensor,
    as_stored,
    no_progress,
    num_bytes,
    shared_parts,
    write_safetensors,
)
from kgshard_tools.sizes import parse_size
from kgshard_tools.stored import CONFIG_FILE, Stored, check_outside, is_ours, open_stored
from kgshard_tools.written import Written, describe_folder, list_files

MODEL_FILE = "model.safetensors"
MODEL_FILES = "model-*-of-*.safetensors"
"""Pattern of their names where there are several."""
INDEX_FILE = "model.safetensors.index.json"
OPTIMIZER_FILE = "optimizer.safetensors"
CARD_FILE = "README.md"
INCLUDABLE = ("optimizer",)
_LABEL_FILES = ("entities.parquet", "relations.parquet")
_NAMES = (
    *(MODEL_FILE, MODEL_FILES, INDEX_FILE, OPTIMIZER_FILE, CONFIG_FILE, CARD_FILE),
    *_LABEL_FILES,
)


def merge_shards(
    source: AnyPath,
    out: AnyPath | None = None,
    *,
    dtype: str | None = None,
    max_file_size: int | str | None = None,
    include: Collection[str] = (),
    verify: bool = False,
    advance: Advance = no_progress,
) -> Written:
    """Write the tables of a checkpoint to safetensors, entities and relations in row order.

    Parameters that all rows share are in it as `shared.NAME`, float32.

    Args:
        source: A run, or one of its checkpoint folders.
        out: A file that ends in .safetensors, or a folder for model.safetensors with config.json and
            the labels beside it; by default RUN/model. What is there is replaced.
        dtype: float32, float16 or bfloat16; by default as stored.
        max_file_size: Cut the model into files of at most so many bytes ("5GB"); a tensor is never cut, so a
            larger one is a file of its own.
        include: "optimizer" adds the optimizer's state, as stored.
        verify: First compare every shard, label and triple with its SHA-256; then write down that of every
            merged file.
        advance: Told how many bytes more are written.

    Raises:
        ConfigError: A setting is unknown or cannot apply, or a value is beyond what `dtype` holds.
        RunError: `source` is no run or has no optimizer state, or `out` is a folder of something else.
        ShardError: A shard is missing, damaged or of another run.
    """
    began = time.monotonic()
    stored = open_stored(source)
    notes = _notes(stored, dtype)
    model = _model_parts(stored, dtype, advance)
    optimizer = _optimizer_parts(stored, advance, notes) if _includes_optimizer(include) else {}
    largest = parse_size("--max-file-size", max_file_size) if max_file_size is not None else None
    out = Path(out) if out is not None else stored.run.folder / "model"
    place = Path(os.path.realpath(out))
    if out.suffix == ".safetensors":
        _check_file(out, place, largest, stored.run)
    else:
        check_replaceable(out, ours=is_ours(out, "merged", True), names=_NAMES, what="a merged model")
    if verify:
        stored.verify()
    rows = stored.model.num_entities
    if out.suffix == ".safetensors":
        with replacing(place) as temporary:
            write_safetensors(temporary, {**model, **optimizer})
        if verify:
            notes.append(f"SHA-256 {file_sha256(place)}")
        seconds = time.monotonic() - began
        return Written([str(out)], rows, place.stat().st_size, seconds, notes, _python(out.name))
    with replacing_directory(place) as temporary:
        names = write_model(model, temporary, largest)
        if len(names) > 1:
            notes.append(f"{len(names)} files; {INDEX_FILE} says which holds what")
        if optimizer:
            write_safetensors(temporary / OPTIMIZER_FILE, optimizer)
        for name in _LABEL_FILES:
            copy_file(stored.dataset.folder / name, temporary / name)
        write_text(temporary / CARD_FILE, model_card(stored, files=names, dtype=dtype))
        config = _config(stored, dtype, with_optimizer=bool(include))
        write_json(temporary / CONFIG_FILE, {**config, "files": list_files(temporary, hashes=verify)})
    return describe_folder(out, place, rows, began, notes, _python(names[0]))


def write_model(parts: Mapping[str, Part], folder: Path, largest: int | None) -> list[str]:
    """Write tensors as a Hugging Face hub has them, into an empty folder; return the files' names.

    Args:
        parts: The tensors.
        folder: Where.
        largest: Bytes of a file at most, where there is more than one tensor for it.
    """
    files = _cut(parts, largest)
    for name, held in files.items():
        with replacing(folder / name) as temporary:
            write_safetensors(temporary, held)
    if len(files) > 1:
        write_json(folder / INDEX_FILE, _index(files))
    return list(files)


def _includes_optimizer(include: Collection[str]) -> bool:
    for name in include:
        if name not in INCLUDABLE:
            raise ConfigError(f"--include: unknown value {name!r} (known: {', '.join(INCLUDABLE)})")
    return bool(include)


def _check_file(out: Path, place: Path, largest: int | None, run: Run) -> None:
    """Refuse to write a file where that makes no sense, or where something would be lost.

    Args:
        out: As the caller names it.
        place: What it stands for, links resolved.
        largest: Bytes of a file, if there is a limit.
        run: Where the tables come from.
    """
    if largest is not None:
        raise ConfigError(f"--max-file-size makes several files, but {out} is one; name a folder")
    if place.is_dir():
        raise RunError(f"{out}: is a folder; a name that ends in .safetensors is for a file")
    check_outside(out, run)
    if place.exists() and not _is_merged(place):
        raise RunError(f"{out}: exists and is not a merged model; choose another name")


def _is_merged(path: Path) -> bool:
    """Whether a file holds both tables whole, as `merge_shards` writes them."""
    try:
        tensors, metadata = read_header(path)
    except ShardError:
        return False
    return {ENTITIES, RELATIONS} <= set(tensors) and metadata == METADATA


def _model_parts(stored: Stored, dtype: str | None, advance: Advance) -> dict[str, Part]:
    """Return the model's tensors by name."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: unknown value {dtype!r} (known: {', '.join(DTYPES)})")
    parts: dict[str, Part] = {
        table.name: StoredRows(
            table=table,
            ids=range(table.num_rows),
            dtype=DTYPES[dtype] if dtype is not None else table.dtype,
            row_name=stored.row_namer(table),
            advance=advance,
        )
        for table in (stored.checkpoint.entities, stored.checkpoint.relations)
    }
    return parts | shared_parts(stored.checkpoint.shared)


def _optimizer_parts(stored: Stored, advance: Advance, notes: list[str]) -> dict[str, Part]:
    """Return the optimizer's state by name, as it is stored."""
    checkpoint = stored.checkpoint
    saved = checkpoint.manifest.optimizer
    if saved is None:
        raise RunError(
            f"{checkpoint.folder}: holds no optimizer state; it was trained with --no-save-optimizer, "
            "imported, or is of an earlier kgshard"
        )
    parts: dict[str, Part] = {
        name: as_stored(table, advance=advance) for name, table in checkpoint.optimizer_tables.items()
    }
    path = checkpoint.folder / SHARED_OPTIMIZER_FILE
    parts |= {
        f"shared.{name}": StoredTensor(path, info) for name, info in checkpoint.optimizer_shared.items()
    }
    if not parts:
        notes.append(f"{saved.name} keeps no state but its {saved.num_steps:,} steps")
    return parts


def _cut(parts: Mapping[str, Part], largest: int | None) -> dict[str, dict[str, Part]]:
    """Return the files by name, and what is in each: whole tensors, in their order, as many as fit."""
    groups: list[dict[str, Part]] = [{}]
    room = largest or sum(map(num_bytes, parts.values()))
    for name, part in parts.items():
        if groups[-1] and num_bytes(part) > room:
            groups.append({})
            room = largest or 0
        groups[-1][name] = part
        room -= num_bytes(part)
    if len(groups) == 1:
        return {MODEL_FILE: groups[0]}
    return {
        f"model-{index:05d}-of-{len(groups):05d}.safetensors": group
        for index, group in enumerate(groups, start=1)
    }


def _index(files: Mapping[str, Mapping[str, Part]]) -> dict[str, object]:
    """Return what a Hugging Face hub expects beside a model of several files."""
    total = sum(num_bytes(part) for parts in files.values() for part in parts.values())
    weight_map = {name: file for file, parts in files.items() for name in parts}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _config(stored: Stored, dtype: str | None, *, with_optimizer: bool) -> dict[str, object]:
    """Return what config.json says beside a merged model."""
    config = {**stored.config(), "merged": True}
    if dtype is not None:
        config["torch_dtype"] = dtype
    saved = stored.checkpoint.manifest.optimizer
    if with_optimizer and saved is not None:
        config["optimizer"] = {"name": saved.name, "num_steps": saved.num_steps}
    return config


def _notes(stored: Stored, dtype: str | None) -> list[str]:
    kept = TABLE_DTYPES[stored.checkpoint.entities.dtype][1]
    if dtype in (None, kept):
        return []
    change = (
        "widened to float32, exactly" if dtype == "float32" else f"rounded to {dtype}, nearest, ties to even"
    )
    return [f"{kept} was {change}"]


def _python(name: str) -> list[str]:
    return [
        "from safetensors import safe_open",
        f'file = safe_open("{name}", framework="pt")',
        f'row = file.get_slice("{ENTITIES}")[0:1]',
    ]
