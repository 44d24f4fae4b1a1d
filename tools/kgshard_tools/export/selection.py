"""Which entities are exported: all, those that a file names, or those of the highest degree."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kgshard.data.dataset import Dataset
from kgshard.errors import ConfigError, UnknownNameError
from kgshard.vocabulary import Vocabulary
from kgshard_tools.rows import Ids


def select_entities(dataset: Dataset, entities: Path | None, top_degree: int | None) -> Ids:
    """Return rows of the entity table: in the file's order, or by degree (of equals the lower row first).

    Args:
        dataset: Whose entities.
        entities: A file with one entity a line: a label, or #123 for row 123.
        top_degree: How many of the highest degree in train.

    Raises:
        ConfigError: Both are given, top_degree is below 1, or the file cannot be read, names no entity, or
            names one twice.
    """
    if entities is not None and top_degree is not None:
        raise ConfigError("--entities and --top-degree: choose one of them")
    if top_degree is not None and top_degree < 1:
        raise ConfigError(f"--top-degree must be >= 1, got {top_degree}")
    if entities is not None:
        return _named_in(entities, dataset.entities)
    if top_degree is not None:
        degrees = dataset.entities.degrees
        return np.argsort(-degrees, kind="stable")[:top_degree].astype(np.int64)
    return range(dataset.num_entities)


def _named_in(path: Path, vocabulary: Vocabulary) -> Ids:
    ids: dict[int, int] = {}
    for number, name in enumerate(_lines(path), start=1):
        if not name and vocabulary.find(name) is None:
            continue
        try:
            found = vocabulary.id_of(name)
        except UnknownNameError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if found in ids:
            raise ConfigError(f"{path}:{number}: names {name!r} again, as line {ids[found]} does; remove it")
        ids[found] = number
    if not ids:
        raise ConfigError(f"{path}: names no entity")
    return np.fromiter(ids, np.int64, len(ids))


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error
    lines = text.removeprefix("\ufeff").split("\n")
    return [line.removesuffix("\r") for line in lines[: -1 if not lines[-1] else None]]
