"""Merged models and exports: files by their hashes where config.json has them, else header and rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kgshard.errors import ShardError
from kgshard.shards import ENTITIES, RELATIONS, read_header
from kgshard.vocabulary import read_labels
from kgshard_tools.artefacts import read_config, read_listing
from kgshard_tools.headers import file_kind, read_array_header
from kgshard_tools.merge import MODEL_FILE
from kgshard_tools.stored import CONFIG_FILE
from kgshard_tools.verify.data import VOCABULARIES, check_labels, check_num_labels
from kgshard_tools.verify.hashes import Checks, Way, check_hash
from kgshard_tools.verify.values import RowName, check_file, plain_row

_OPENED = ("safetensors", "npy", "parquet", "faiss")


def model_files(folder: Path, *, deep: bool) -> Checks:
    """Yield the files of a merged model or an export that are right; see `verify_files`."""
    config, listed = read_config(folder), read_listing(folder / CONFIG_FILE)
    yield folder / CONFIG_FILE, "structure"
    names = dict.fromkeys([*_names(folder), *listed])
    for name in names:
        path = folder / name
        if name in listed:
            check_hash(path, listed[name], CONFIG_FILE)
        way = _check_structure(path, deep)
        _check_rows(path, config)
        yield path, "SHA-256" if name in listed and listed[name].sha256 else way
    if deep and set(VOCABULARIES) <= set(names) and _is_whole(config):
        check_labels(folder, str(config.get("vocab_sha256")), CONFIG_FILE)


def _names(folder: Path) -> Iterator[str]:
    """Yield the paths of a folder's files below it, but config.json, in their order."""
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and path.name != CONFIG_FILE:
            yield str(path.relative_to(folder))


def _check_structure(path: Path, deep: bool) -> Way:
    if not path.is_file():
        raise ShardError(f"{path}: is no ordinary file", file=str(path))
    kind = file_kind(path)
    if kind not in _OPENED:
        return "presence"
    check_file(kind, path, deep=deep, row_name=_names_beside(path))
    return "structure"


def _names_beside(path: Path) -> RowName:
    """Return what names rows of a table by the labels that lie beside it."""

    def name(tensor: str, row: int) -> str:
        labels = path.with_name(VOCABULARIES[0])
        if tensor in (ENTITIES, "entities") and labels.is_file():
            return f"entity {row} ({_label(labels, row)!r})"
        return plain_row(tensor, row)

    return name


def _label(path: Path, row: int) -> str | None:
    for labels in read_labels(path):
        if row < len(labels):
            return labels[row]
        row -= len(labels)
    return None


def _is_whole(config: dict[str, Any]) -> bool:
    return bool(config.get("merged")) or config.get("rows") == config.get("num_entities")


def _check_rows(path: Path, config: dict[str, Any]) -> None:
    """Raise ShardError where a table or its labels have another number of rows than config.json says."""
    if path.name == MODEL_FILE:
        _check_tables(path, config)
    if config.get("export_format", "numpy") != "numpy":
        return  # What other programs' files are called is no sign of what is in them.
    rows = {"entities": "num_entities" if config.get("merged") else "rows", "relations": "num_relations"}
    key = rows.get(path.stem.removeprefix("inverse_"))
    if key is None or path.suffix not in (".npy", ".parquet", ".txt"):
        return
    expected = _number(path, config, key)
    if path.suffix == ".parquet":
        check_num_labels(path, expected, CONFIG_FILE)
        return
    found = read_array_header(path).shape[0] if path.suffix == ".npy" else _num_lines(path)
    _check_number(path, "rows" if path.suffix == ".npy" else "lines", found, expected)


def _check_tables(path: Path, config: dict[str, Any]) -> None:
    tensors, _ = read_header(path)
    num_relations = _number(path, config, "num_relations") * (2 if config.get("reciprocal") else 1)
    expected = {
        ENTITIES: (_number(path, config, "num_entities"), _number(path, config, "embedding_dim")),
        RELATIONS: (num_relations, _number(path, config, "relation_dim")),
    }
    for name, shape in expected.items():
        found = list(tensors[name].shape) if name in tensors else None
        if found != list(shape):
            raise ShardError(
                f"{path}: {name} is {found}, but {CONFIG_FILE} says {list(shape)}", file=str(path)
            )


def _check_number(path: Path, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ShardError(f"{path}: {found:,} {what}, but {CONFIG_FILE} says {expected:,}", file=str(path))


def _number(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int:
        record = path.with_name(CONFIG_FILE)
        raise ShardError(f"{record}: {key} is {value!r}, expected a whole number", file=str(record))
    return value


def _num_lines(path: Path) -> int:
    count = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
    return count
