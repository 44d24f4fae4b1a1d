"""Building the indexes of a run: straight from its shards, block by block, so memory is that of the index."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError, NonFiniteError, RunError
from kgshard.files import AnyPath, replacing, write_json
from kgshard.records import IndexFile, IndexInfo, IndexPart, RecallInfo, describe_file
from kgshard.runs import open_run
from kgshard.shards import Floats, first_non_finite
from kgshard_tools.index.contents import PURPOSES, Contents, contents_of, identity
from kgshard_tools.index.kinds import Kind, find_kind, num_lists
from kgshard_tools.index.sidecar import FOLDER, SIDECAR, read_sidecar
from kgshard_tools.lifts import Lift, squares
from kgshard_tools.stored import Stored
from kgshard_tools.written import Written

_ROWS_TO_TRAIN_ON = 64
"""For each list; beyond that centroids hardly become better."""
_LEAST_TO_TRAIN_ON = 1024
"""Lists' worth of rows: scalar and product quantisers must see enough of them too."""


def build_index(
    run: AnyPath,
    purpose: str = "both",
    *,
    type: str = "auto",
    recall: float = 0.95,
    per_shard: bool = False,
    num_queries: int = 500,
    seed: int = 0,
) -> Written:
    """Build the indexes of a run's checkpoint.

    Args:
        run: A run.
        purpose: "links", "neighbors" or "both".
        type: A name of `kgshard_tools.index.kinds.KINDS`; "auto" chooses flat, which is exact, for tables
            that are scanned in milliseconds, else ivf.
        recall: The recall at 10 that an approximate index must reach, in (0, 1].
        per_shard: Build one file for each shard; they are searched together.
        num_queries: Queries for each side that choose how to search, and as many that measure the recall.
        seed: Fixes what is drawn.

    Raises:
        ConfigError: An unknown purpose or type; the recall cannot be reached; or "links" where FAISS does not
            know the model's metric ("both" builds neighbors then, and says so). What was there stays.
        NonFiniteError: An entity's row is NaN or infinite; FAISS would lose it silently.
    """
    began = time.monotonic()
    if purpose not in (*PURPOSES, "both"):
        raise ConfigError(f"--for: unknown value {purpose!r} (known: {', '.join(PURPOSES)}, both)")
    if not 0 < recall <= 1:
        raise ConfigError(f"--recall must be above 0 and at most 1, got {recall}")
    if num_queries < 1:
        raise ConfigError(f"--queries must be >= 1, got {num_queries}")
    opened = open_run(run)
    stored = Stored(opened, opened.checkpoint)
    kind, note = find_kind(type, num_rows=stored.model.num_entities)
    wanted, notes = _wanted(stored, purpose, kind)
    folder = opened.folder / FOLDER
    folder.mkdir(exist_ok=True)
    builder = _Builder(stored, kind, folder, recall, num_queries, seed, per_shard=per_shard)
    before = _before(folder)
    indexes = before.indexes | {each.name: builder.build(each) for each in wanted}
    write_json(folder / SIDECAR, IndexFile(indexes=indexes, labels=before.labels))
    built = [indexes[each.name] for each in wanted]
    files = [str(folder / part.file) for info in built for part in info.parts]
    notes = [*([note] if note else []), *notes]
    for contents, info in zip(wanted, built, strict=True):
        notes += _measured(contents.name, info)
    size, seconds = sum(info.bytes for info in built), time.monotonic() - began
    return Written([*files, str(folder / SIDECAR)], stored.model.num_entities, size, seconds, notes)


def _wanted(stored: Stored, purpose: str, kind: Kind) -> tuple[list[Contents], list[str]]:
    """Return the indexes to build, and what to say of those that cannot be."""
    purposes = PURPOSES if purpose == "both" else [each for each in PURPOSES if each == purpose]
    metric = stored.model.metric
    if "links" not in purposes or kind.searched_by(metric):
        return [contents for each in purposes for contents in contents_of(stored, each)], []
    words = f"FAISS has no metric {metric.name!r}, which {stored.model.name} is compared by"
    if purpose == "links":
        raise ConfigError(f"--for links: {words}; predict scans the shards, exactly, without an index")
    return contents_of(stored, "neighbors"), [
        f"no index for links: {words}; predict scans the shards, exactly"
    ]


def _measured(name: str, info: IndexInfo) -> Iterator[str]:
    """Say what was measured of an approximate index."""
    if info.recall is not None:
        sides = ", ".join(f"{side} {value:.3f}" for side, value in info.recall.measured.items())
        way = ", ".join(f"{key} {value}" for key, value in info.search.items())
        speed = info.recall.queries_per_second
        factor = speed / info.recall.flat_queries_per_second
        yield (
            f"{name}: recall@{info.recall.at} {sides} ({info.recall.queries} queries each) with {way}; "
            f"{speed:,.0f} queries/s, {factor:.1f} times an exact scan"
        )
        if factor < 1:
            yield f"{name}: slower than an exact scan; --type flat suits this table better"


def _before(folder: Path) -> IndexFile:
    """Return what is indexed already; a damaged sidecar is about to be replaced, so nothing of it."""
    try:
        return read_sidecar(folder)
    except RunError:
        return IndexFile()


class _Builder:
    """Builds indexes of one kind; each is measured before its files come to their names."""

    def __init__(
        self,
        stored: Stored,
        kind: Kind,
        folder: Path,
        recall: float,
        num_queries: int,
        seed: int,
        *,
        per_shard: bool,
    ) -> None:
        self._stored, self._kind, self._folder = stored, kind, folder
        self._recall, self._num_queries, self._seed = recall, num_queries, seed
        table = stored.checkpoint.entities
        self._table = table
        every = range(table.num_rows)
        self._ranges = [piece.rows for piece in table.pieces if len(piece.rows)] if per_shard else [every]

    def build(self, contents: Contents) -> IndexInfo:
        """Build, measure and write the index of some contents."""
        kind, ranges = self._kind, self._ranges
        lists = num_lists(min(map(len, ranges))) if kind.parameter == "nprobe" else 0
        longest = self._longest(contents) if kind.lengthens(contents.metric) else 0.0
        empty, built_with = self._trained(contents, lists, longest)
        with ExitStack() as stack:
            files = []
            for number, rows in enumerate(ranges, start=1):
                of_all = f"-{number:05}-of-{len(ranges):05}" if len(ranges) > 1 else ""
                path = self._folder / f"{contents.name}{of_all}.faiss"
                temporary = stack.enter_context(replacing(path))
                files.append((path.name, temporary, rows))
                longest = max(longest, self._fill(empty, contents, rows, longest, temporary))
            search, measured = self._measure(contents, files, longest)
            return self._described(contents, files, longest, built_with, search, measured)

    def _trained(self, contents: Contents, lists: int, longest: float) -> tuple[Any, dict[str, int]]:
        """Return an index without vectors that knows what it must of them, and what index.json says of it."""
        from kgshard_tools.index import faiss_files

        kind, metric = self._kind, contents.metric
        width = contents.lift.width(self._table.dim)
        width = faiss_files.padded_width(kind, width) + kind.lengthens(metric)
        searched_by = kind.searched_by(metric)
        assert searched_by is not None  # `_wanted` asked.
        index = faiss_files.new_index(kind, searched_by, width, lists)
        built_with = faiss_files.built_with(kind, lists)
        if not faiss_files.is_trained(index):
            count = min(self._table.num_rows, _ROWS_TO_TRAIN_ON * max(lists, _LEAST_TO_TRAIN_ON))
            draw = np.random.default_rng(self._seed)
            chosen = np.sort(draw.choice(self._table.num_rows, count, replace=False))
            rows = np.concatenate(
                [self._table.gather(part) for part in np.array_split(chosen, -(-count // 65536))]
            )
            self._check_finite(chosen, rows)
            faiss_files.train(index, self._as_added(contents, rows, longest, width), seed=self._seed)
            built_with |= {"trained_on": count, "seed": self._seed}
        return index, built_with

    def _longest(self, contents: Contents) -> float:
        """Return the largest 2-norm of what the index will hold."""
        return max(
            _longest(vectors) for _, vectors in self._vectors(contents.lift, range(self._table.num_rows))
        )

    def _fill(self, empty: Any, contents: Contents, rows: range, longest: float, path: Path) -> float:
        """Add some rows to a copy of an index and write it; return the largest 2-norm among them."""
        from kgshard_tools.index import faiss_files

        index, found = faiss_files.copy_without_vectors(empty), 0.0
        width = faiss_files.size_of(index)[1]
        for _, vectors in self._vectors(contents.lift, rows):
            faiss_files.add(index, self._as_added(contents, vectors, longest, width))
            found = max(found, _longest(vectors))
        faiss_files.write_index(index, path)
        return found

    def _vectors(self, lift: Lift, rows: range) -> Iterator[tuple[range, Floats]]:
        """Yield what an index holds, float32[n, E], block by block."""
        for block, stored in self._table.blocks(rows):
            self._check_finite(block, stored)
            vectors = lift.rounded(stored)
            self._check_finite(block, vectors)
            yield block, vectors

    def _as_added(self, contents: Contents, vectors: Floats, longest: float, width: int) -> Floats:
        """Return vectors float32[n, width] as FAISS gets them: padded with zeros, lengthened for graphs."""
        added = np.zeros((len(vectors), width), np.float32)
        added[:, : vectors.shape[1]] = vectors
        if self._kind.lengthens(contents.metric):
            missing = longest * longest - squares(vectors.astype(np.float64))
            added[:, -1] = np.sqrt(np.maximum(missing, 0.0))
        return added

    def _check_finite(self, ids: range | npt.NDArray[np.int64], values: Floats) -> None:
        bad = first_non_finite(values)
        if bad is not None:
            entity = int(ids[bad])
            label = self._stored.dataset.entities[entity]
            raise NonFiniteError(f"{self._stored.run.folder}: entity {entity} ({label!r}) is not finite")

    def _measure(
        self, contents: Contents, files: list[tuple[str, Path, range]], longest: float
    ) -> tuple[dict[str, int], RecallInfo | None]:
        """Choose how an approximate index is searched; return that, and the recall."""
        if self._kind.is_exact:
            return {}, None
        from kgshard_tools.index.approximate import ApproximateIndex, IndexPartFile, Search
        from kgshard_tools.index.tuning import tune

        parts = [IndexPartFile(path, rows) for _, path, rows in files]
        source = ApproximateIndex(parts, contents, self._kind, self._table, Search(1, 1), longest=longest)
        recall = tune(
            self._stored,
            contents,
            source,
            target=self._recall,
            num_queries=self._num_queries,
            seed=self._seed,
        )
        return {self._kind.parameter: source.search.setting, "depth": source.search.depth}, recall

    def _described(
        self,
        contents: Contents,
        files: list[tuple[str, Path, range]],
        longest: float,
        built_with: dict[str, int],
        search: dict[str, int],
        recall: RecallInfo | None,
    ) -> IndexInfo:
        described = ((name, rows, describe_file(path)) for name, path, rows in files)
        return IndexInfo(
            type=self._kind.name,
            exact=self._kind.is_exact,
            rows=self._table.num_rows,
            dim=contents.lift.width(self._table.dim),
            longest=longest,
            model=self._stored.model.name,
            **identity(self._stored, contents),
            parts=[
                IndexPart(name, (rows.start, rows.stop), file.bytes, file.sha256)
                for name, rows, file in described
            ],
            built_with=built_with,
            search=search,
            recall=recall,
        )


def _longest(vectors: Floats) -> float:
    return float(np.sqrt(squares(vectors.astype(np.float64)).max(initial=0.0)))
