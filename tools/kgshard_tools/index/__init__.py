"""FAISS indexes of a run: built from its shards, opened by what their sidecar says.

    RUN/index/
        links.faiss        what the model's queries are compared with, under the model's metric: entity rows,
                           or what the model makes of them; answers (h, r, ?) and (?, r, t)
        links-head.faiss, links-tail.faiss    instead, where the model makes something else of the candidates
                           for heads than of those for tails
        neighbors.faiss    entity rows of length 1 under inner product: cosine
        index.json         format "kgshard.index/1"; one entry a file: type, metric, transform, rows, dim,
                           longest row, run, step, vocabulary hash, bytes, SHA-256

An index answers only for the checkpoint and vocabulary it was built from; others refuse it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kgshard.errors import ConfigError, NonFiniteError, RunError
from kgshard.files import AnyPath, check_seal, file_sha256, read_json, replacing, write_json
from kgshard.models.link import SIDES, Side
from kgshard.models.metric import DOT, Metric
from kgshard.records import IndexFile, IndexInfo
from kgshard.runs import is_file_name, open_run
from kgshard.shards import Floats, first_non_finite
from kgshard_tools.lifts import UNIT_LENGTH, Lift, link_lift
from kgshard_tools.search import CandidateSource, Scan
from kgshard_tools.stored import Stored
from kgshard_tools.written import Written

SIDECAR = "index.json"
TYPES = ("auto", "flat")

Purpose = Literal["links", "neighbors"]
PURPOSES: tuple[Purpose, Purpose] = ("links", "neighbors")


@dataclass(frozen=True, slots=True)
class Contents:
    """What an index holds, and how it compares."""

    name: str
    """Its key in index.json; its file is name.faiss."""
    metric: Metric
    lift: Lift
    """What is made of entity rows before they are added."""


def neighbor_contents() -> Contents:
    """Return what answers which entities are most like another."""
    return Contents("neighbors", DOT, UNIT_LENGTH)


def link_contents(stored: Stored, side: Side) -> Contents:
    """Return what answers questions for one side of a link; mostly one index answers for both."""
    model = stored.model
    name = f"links-{side}" if model.sides_differ else "links"
    return Contents(name, model.metric, link_lift(model, side))


def build_index(run: AnyPath, purpose: str = "both", *, type: str = "auto") -> Written:
    """Build the indexes of a run's checkpoint, block by block: memory is that of the index.

    Args:
        run: A run.
        purpose: "links", "neighbors" or "both".
        type: "flat", which is exact; "auto" chooses flat.

    Raises:
        ConfigError: An unknown purpose or type; or "links" where FAISS does not know the model's metric
            ("both" builds neighbors then, and says so).
        NonFiniteError: An entity's row is NaN or infinite; FAISS would lose it silently.
    """
    began = time.monotonic()
    if purpose not in (*PURPOSES, "both"):
        raise ConfigError(f"--for: unknown value {purpose!r} (known: {', '.join(PURPOSES)}, both)")
    if type not in TYPES:
        raise ConfigError(f"--type: unknown value {type!r} (known: {', '.join(TYPES)})")
    opened = open_run(run)
    stored = Stored(opened, opened.checkpoint)
    wanted, notes = _wanted(stored, purpose)
    folder = opened.folder / "index"
    folder.mkdir(exist_ok=True)
    indexes = _other_indexes(folder) | {each.name: _build(stored, each, folder) for each in wanted}
    write_json(folder / SIDECAR, IndexFile(indexes=indexes))
    files = [str(folder / indexes[each.name].file) for each in wanted]
    size = sum(indexes[each.name].bytes for each in wanted)
    seconds = time.monotonic() - began
    return Written([*files, str(folder / SIDECAR)], stored.model.num_entities, size, seconds, notes)


def _wanted(stored: Stored, purpose: str) -> tuple[list[Contents], list[str]]:
    """Return the indexes to build, and what to say of those that cannot be."""
    from kgshard_tools.index.flat import is_searchable

    metric = stored.model.metric
    links = [] if purpose == "neighbors" else [link_contents(stored, side) for side in SIDES]
    distinct = list({contents.name: contents for contents in links}.values())
    neighbors = [] if purpose == "links" else [neighbor_contents()]
    if is_searchable(metric) or not links:
        return [*distinct, *neighbors], []
    words = f"FAISS has no metric {metric.name!r}, which {stored.model.name} is compared by"
    if not neighbors:
        raise ConfigError(f"--for links: {words}; predict scans the shards, exactly, without an index")
    return neighbors, [f"no index for links: {words}; predict scans the shards, exactly"]


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
        check_seal(path)
        indexes = read_json(path, IndexFile).indexes
        for info in indexes.values():
            if not is_file_name(info.file):
                raise ValueError(f"{info.file!r} is no name of a file in this folder")
        return indexes
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}; remove it and run kgshard index again") from error


def _build(stored: Stored, contents: Contents, folder: Path) -> IndexInfo:
    from kgshard_tools.index.flat import new_index, write_index

    width, longest = contents.lift.width(stored.model.dim), 0.0
    index = new_index(contents.metric, width)
    for vectors in _vectors(stored, contents.lift):
        index.add(np.ascontiguousarray(vectors, np.float32))
        longest = max(longest, float(np.linalg.norm(vectors.astype(np.float64), axis=1).max()))
    path = folder / f"{contents.name}.faiss"
    with replacing(path) as temporary:
        write_index(index, temporary)
    return IndexInfo(
        file=path.name,
        type="flat",
        exact=True,
        rows=stored.model.num_entities,
        dim=width,
        longest=longest,
        model=stored.model.name,
        **_identity(stored, contents),
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )


def _vectors(stored: Stored, lift: Lift) -> Iterator[Floats]:
    """Yield what an index holds, float32[n, width], block by block."""
    for block, rows in stored.checkpoint.entities.blocks():
        _check_finite(stored, block, rows)
        vectors = lift.rounded(rows)
        _check_finite(stored, block, vectors)
        yield vectors


def _check_finite(stored: Stored, block: range, values: Floats) -> None:
    bad = first_non_finite(values)
    if bad is not None:
        entity = block.start + bad
        label = stored.dataset.entities[entity]
        raise NonFiniteError(f"{stored.run.folder}: entity {entity} ({label!r}) is not finite")


def _identity(stored: Stored, contents: Contents) -> dict[str, Any]:
    """Return what an index must say of itself to answer."""
    return {
        "metric": contents.metric.name,
        "transform": contents.lift.name,
        "run_id": stored.run.info.id,
        "step": stored.checkpoint.step,
        "vocabulary_sha256": stored.dataset.vocabulary_sha256,
    }


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index file that answers for a checkpoint; its SHA-256 was checked."""

    path: Path
    contents: Contents
    longest: float
    """The largest 2-norm in it."""


def find_index(stored: Stored, contents: Contents) -> FoundIndex | None:
    """Return the index of some contents that answers for `stored`, or None where none was built.

    Raises:
        RunError: There is one, but of another checkpoint or vocabulary, or its file was changed.
    """
    folder = stored.run.folder / "index"
    info = _indexes(folder).get(contents.name)
    if info is None:
        return None
    if info.step != stored.checkpoint.step and stored.checkpoint.folder != stored.run.checkpoint.folder:
        return None  # Somebody asks another checkpoint than the one that indexes are built of.
    path = folder / info.file
    for key, value in _identity(stored, contents).items():
        if getattr(info, key) != value:
            raise RunError(
                f"{path}: {key} is {getattr(info, key)}, but the checkpoint's is {value}; "
                "run kgshard index again"
            )
    if not path.is_file() or path.stat().st_size != info.bytes or file_sha256(path) != info.sha256:
        raise RunError(f"{path}: is not the file that {SIDECAR} describes; run kgshard index again")
    return FoundIndex(path, contents, info.longest)


def open_source(stored: Stored, contents: Contents) -> CandidateSource:
    """Return the index of some contents, or a scan over the shards where none was built; see `find_index`."""
    table, labels = stored.checkpoint.entities, stored.dataset.entities
    found = find_index(stored, contents)
    if found is None:
        return Scan(table, contents.metric, contents.lift, labels=labels)
    from kgshard_tools.index.flat import FlatIndex  # faiss: only where an index was built

    return FlatIndex(found, table, labels=labels)
