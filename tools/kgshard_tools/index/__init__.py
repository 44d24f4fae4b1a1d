"""FAISS indexes of a run: built from its shards, opened by what their sidecar says.

    RUN/index/
        links.faiss        entity rows under the model's metric: answers (h, r, ?) and (?, r, t)
        neighbors.faiss    entity rows of length 1 under inner product: cosine
        index.json         format "kgshard.index/1"; one entry a file: type, metric, transform, rows, dim,
                           longest row, run, step, vocabulary hash, bytes, SHA-256

An index answers only for the checkpoint and vocabulary it was built from; others refuse it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kgshard.errors import ConfigError, NonFiniteError, RunError
from kgshard.files import AnyPath, file_sha256, read_json, replacing, write_json
from kgshard.models.metric import Metric
from kgshard.records import IndexFile, IndexInfo
from kgshard.runs import open_run
from kgshard.shards import first_non_finite
from kgshard_tools.search import unit_rows
from kgshard_tools.stored import Stored
from kgshard_tools.written import Written

SIDECAR = "index.json"
TYPES = ("auto", "flat")

Purpose = Literal["links", "neighbors"]
PURPOSES: tuple[Purpose, Purpose] = ("links", "neighbors")


def build_index(run: AnyPath, purpose: str = "both", *, type: str = "auto") -> Written:
    """Build the indexes of a run's newest checkpoint, block by block: memory is that of the index.

    Args:
        run: A run.
        purpose: "links", "neighbors" or "both".
        type: "flat", which is exact; "auto" chooses flat.

    Raises:
        ConfigError: An unknown purpose or type.
        NonFiniteError: An entity's row is NaN or infinite; FAISS would lose it silently.
    """
    began = time.monotonic()
    purposes = PURPOSES if purpose == "both" else tuple(known for known in PURPOSES if known == purpose)
    if not purposes:
        raise ConfigError(f"--for: unknown value {purpose!r} (known: {', '.join(PURPOSES)}, both)")
    if type not in TYPES:
        raise ConfigError(f"--type: unknown value {type!r} (known: {', '.join(TYPES)})")
    opened = open_run(run)
    stored = Stored(opened, opened.checkpoint)
    folder = opened.folder / "index"
    folder.mkdir(exist_ok=True)
    indexes = _other_indexes(folder)
    for each in purposes:
        indexes[each] = _build(stored, each, folder)
    write_json(folder / SIDECAR, IndexFile(indexes=indexes))
    files = [str(folder / indexes[each].file) for each in purposes]
    size = sum(indexes[each].bytes for each in purposes)
    return Written([*files, str(folder / SIDECAR)], stored.model.num_entities, size, time.monotonic() - began)


def _other_indexes(folder: Path) -> dict[str, IndexInfo]:
    """Return what is indexed already; a damaged sidecar is about to be replaced, so nothing of it."""
    try:
        return dict(_indexes(folder))
    except RunError:
        return {}


def _indexes(folder: Path) -> dict[str, IndexInfo]:
    path = folder / SIDECAR
    if not path.is_file():
        return {}
    try:
        return read_json(path, IndexFile).indexes
    except ValueError as error:
        raise RunError(f"{path}: {error}; remove it and run kgshard index again") from error


def _build(stored: Stored, purpose: Purpose, folder: Path) -> IndexInfo:
    from kgshard_tools.index.flat import new_index, write_index

    table = stored.checkpoint.entities
    metric: Metric = stored.model.metric if purpose == "links" else "dot"
    index, longest = new_index(metric, table.dim), 0.0
    for block, rows in table.blocks():
        bad = first_non_finite(rows)
        if bad is not None:
            entity = block.start + bad
            label = stored.dataset.entities[entity]
            raise NonFiniteError(f"{stored.run.folder}: entity {entity} ({label!r}) is not finite")
        if purpose == "neighbors":
            rows = unit_rows(rows.astype(np.float64)).astype(np.float32)
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        index.add(np.ascontiguousarray(rows, np.float32))
        longest = max(longest, float(lengths.max()))
    path = folder / f"{purpose}.faiss"
    with replacing(path) as temporary:
        write_index(index, temporary)
    return IndexInfo(
        file=path.name,
        type="flat",
        exact=True,
        metric=metric,
        transform="unit length" if purpose == "neighbors" else "none",
        rows=table.num_rows,
        dim=table.dim,
        longest=longest,
        model=stored.model.name,
        **_belongs_to(stored),
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )


def _belongs_to(stored: Stored) -> dict[str, Any]:
    return {
        "run_id": stored.run.info.id,
        "step": stored.checkpoint.step,
        "vocabulary_sha256": stored.dataset.vocabulary_sha256,
    }


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index file that answers for a checkpoint; its SHA-256 was checked."""

    path: Path
    info: IndexInfo


def find_index(stored: Stored, purpose: Purpose) -> FoundIndex | None:
    """Return an index that answers for `stored`, or None where none was built.

    Raises:
        RunError: There is one, but of another checkpoint or vocabulary, or its file was changed.
    """
    folder = stored.run.folder / "index"
    info = _indexes(folder).get(purpose)
    if info is None:
        return None
    path = folder / info.file
    for key, value in _belongs_to(stored).items():
        if getattr(info, key) != value:
            raise RunError(
                f"{path}: {key} is {getattr(info, key)}, but the checkpoint's is {value}; "
                "run kgshard index again"
            )
    if not path.is_file() or path.stat().st_size != info.bytes or file_sha256(path) != info.sha256:
        raise RunError(f"{path}: is not the file that {SIDECAR} describes; run kgshard index again")
    return FoundIndex(path, info)
