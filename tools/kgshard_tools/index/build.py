"""Building the indexes of a run: straight from its shards, block by block, so memory is that of the index."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError, NonFiniteError, RunError
from kgshard.files import AnyPath, replacing, write_json
from kgshard.records import FileInfo, IndexFile, IndexInfo, IndexPart, RecallInfo, describe_file
from kgshard.runs import open_run
from kgshard.shards import Floats, first_non_finite
from kgshard.start import locked
from kgshard_tools.index import tuned_class
from kgshard_tools.index.contents import PURPOSES, Contents, contents_of, identity
from kgshard_tools.index.kinds import KINDS, Kind, Search, find_kind, is_too_small, num_lists
from kgshard_tools.index.sidecar import FOLDER, SIDECAR, read_sidecar
from kgshard_tools.index.tuned import IndexPartFile
from kgshard_tools.labels import labels_path
from kgshard_tools.labels.build import build_labels
from kgshard_tools.lifts import UNIT_LENGTH, squares
from kgshard_tools.search import Ids
from kgshard_tools.stored import Stored
from kgshard_tools.written import Written

_ROWS_TO_TRAIN_ON = 64
"""For each list; beyond that centroids hardly become better."""
_LEAST_TO_TRAIN_ON = 1024
"""Lists' worth of rows: scalar and product quantisers must see enough of them too."""
_GATHERED_ROWS = 16384
_MOST_SQUARED = 1e37
_WORTHWHILE = 2.0
"""Times an exact scan: what gives up exactness must be faster than that."""
_SMALL_SHARE = 1 / 16
"""Of all rows: where so few of the longest hold the answers, looking at just these is fastest."""


def build_index(
    run: AnyPath,
    purpose: str = "both",
    *,
    type: str = "auto",
    recall: float = 0.95,
    per_shard: bool = False,
    num_queries: int = 500,
    seed: int = 0,
    with_labels: bool = True,
) -> Written:
    """Build the indexes of a run's checkpoint.

    Args:
        run: A run.
        purpose: "links", "neighbors" or "both".
        type: A name of `kgshard_tools.index.kinds.KINDS`; "auto" chooses flat, which is exact, for tables
            that are scanned in milliseconds; else norm-top where few long rows hold the answers, or ivf.
        recall: The recall at 10 that an approximate index must reach, in (0, 1].
        per_shard: Build one file for each shard; they are searched together.
        num_queries: Queries for each side that choose how to search, and as many that measure the recall.
        seed: Fixes what is drawn.
        with_labels: Also build labels.sqlite, which names are searched in.

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
    settings = _Settings(type, recall, num_queries, seed, per_shard=per_shard)
    wanted, notes = _wanted(stored, purpose, settings)
    folder = opened.folder / FOLDER
    folder.mkdir(exist_ok=True)
    with locked(folder):
        before = _before(folder)
        with ExitStack() as stack:  # No file comes to its name before all are built and measured.
            built, told = _all_built(stored, wanted, folder, settings, stack)
        notes += told
        labels = _labels(stored, before) if with_labels else before.labels
        asked = {contents.name for contents, _ in wanted}
        kept = {name: info for name, info in before.indexes.items() if name not in asked}
        write_json(folder / SIDECAR, IndexFile(indexes=kept | built, labels=labels))
        _remove_unused(folder, before, kept | built)
    for name, info in built.items():
        notes += _measured(name, info)
    files = [str(folder / part.file) for info in built.values() for part in info.parts]
    size = sum(info.bytes for info in built.values())
    if with_labels and labels is not None:
        files, size = [*files, str(labels_path(opened.folder))], size + labels.bytes
    seconds = time.monotonic() - began
    return Written([*files, str(folder / SIDECAR)], stored.model.num_entities, size, seconds, notes)


def _all_built(
    stored: Stored, wanted: list[tuple[Contents, Kind]], folder: Path, settings: _Settings, stack: ExitStack
) -> tuple[dict[str, IndexInfo], list[str]]:
    """Build indexes, whose files come to their names when `stack` ends; return them, and what to say."""
    built: dict[str, IndexInfo] = {}
    notes = []
    for contents, kind in wanted:
        try:
            built[contents.name] = _Builder(stored, contents, kind, folder, settings).build(stack)
        except _NotWorthwhileError:
            exact = KINDS["norm" if _norms_tell(contents) and not settings.per_shard else "flat"]
            slow = (
                f"{contents.name}: {kind.name} with this recall is hardly faster than looking at every row; "
            )
            if exact.searched_by(contents.metric) is None:
                notes.append(f"{slow}built none, predict scans the shards, exactly")
                continue
            notes.append(f"{slow}built {exact.name}, which is exact")
            built[contents.name] = _Builder(stored, contents, exact, folder, settings).build(stack)
    return built, notes


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the caller of `build_index` wants."""

    type: str
    recall: float
    num_queries: int
    seed: int
    per_shard: bool


def _wanted(
    stored: Stored, purpose: str, settings: _Settings
) -> tuple[list[tuple[Contents, Kind]], list[str]]:
    """Return the indexes to build, each with its kind, and what to say of those that cannot be."""
    num_rows, type = stored.model.num_entities, settings.type
    wanted, notes = [], []
    for each in PURPOSES if purpose == "both" else [each for each in PURPOSES if each == purpose]:
        for contents in contents_of(stored, each):
            kind = find_kind(type, num_rows=num_rows) or _fitting(stored, contents, settings)
            if kind.searched_by(contents.metric):
                wanted.append((contents, kind))
            if settings.per_shard and kind.is_by_norm:
                raise ConfigError(f"--per-shard: {kind.name} puts the rows of the whole table in order")
    if is_too_small(type, num_rows):
        few = f"--type {type} needs {KINDS[type].least_rows} rows, this table has {num_rows}"
        notes.append(f"{few}; built flat, which is exact")
    if purpose != "neighbors" and not any(contents.sides for contents, _ in wanted):
        words = f"{_cannot(type)} {stored.model.metric.name!r}, which {stored.model.name} is compared by"
        if purpose == "links":
            raise ConfigError(f"--for links: {words}; predict scans the shards, exactly, without an index")
        notes.append(f"no index for links: {words}; predict scans the shards, exactly")
    return wanted, notes


def _fitting(stored: Stored, contents: Contents, settings: _Settings) -> Kind:
    """Return the kind that suits a large table: the longest rows where they are enough, else lists."""
    if not _norms_tell(contents) or settings.per_shard:
        return KINDS["ivf"]
    from kgshard_tools.index.tuning import share_of_longest

    share = share_of_longest(
        stored, contents, target=settings.recall, num_queries=settings.num_queries, seed=settings.seed
    )
    return KINDS["norm-top" if share <= _SMALL_SHARE else "ivf"]


def _norms_tell(contents: Contents) -> bool:
    """Whether long candidates are better answers than short ones."""
    return contents.metric.name == "dot" and contents.lift is not UNIT_LENGTH


def _cannot(type: str) -> str:
    is_by_norm = type in KINDS and KINDS[type].is_by_norm
    return f"{type} is for inner products, not for metric" if is_by_norm else "FAISS has no metric"


def _labels(stored: Stored, before: IndexFile) -> FileInfo:
    """Return what index.json says of labels.sqlite, which is built unless it is there already."""
    path = labels_path(stored.run.folder)
    if before.labels is None or not path.is_file() or describe_file(path) != before.labels:
        build_labels(stored.dataset, path)
    return describe_file(path)


def _remove_unused(folder: Path, before: IndexFile, after: dict[str, IndexInfo]) -> None:
    """Remove files of indexes that were replaced by ones with other files."""
    used = {part.file for info in after.values() for part in info.parts}
    for part in (part for info in before.indexes.values() for part in info.parts):
        if part.file not in used:
            (folder / part.file).unlink(missing_ok=True)


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


class _NotWorthwhileError(Exception):
    """An index that "auto" chose turned out not to be fast."""


class _Builder:
    """Builds one index, and measures it before its files come to their names."""

    def __init__(
        self, stored: Stored, contents: Contents, kind: Kind, folder: Path, settings: _Settings
    ) -> None:
        self._stored, self._contents, self._kind, self._folder = stored, contents, kind, folder
        self._settings = settings
        self._table = table = stored.checkpoint.entities
        every = [range(table.num_rows)]
        self._ranges = (
            [piece.rows for piece in table.pieces if len(piece.rows)] if settings.per_shard else every
        )

    def build(self, stack: ExitStack) -> IndexInfo:
        """Build, measure and describe the index; its files come to their names when `stack` ends.

        Raises:
            _NotWorthwhileError: "auto" found it hardly faster than an exact scan; nothing of it is left.
        """
        from kgshard_tools.index import faiss_files

        kind, ranges = self._kind, self._ranges
        lists = num_lists(min(map(len, ranges))) if kind.parameter == "nprobe" else 0
        lengths = np.empty(0) if kind.name == "flat" else self._lengths()
        longest = float(lengths.max(initial=0.0))
        empty, built_with = self._trained(lists, longest)
        with ExitStack() as own:
            files = []
            for number, rows in enumerate(ranges, start=1):
                of_all = f"-{number:05}-of-{len(ranges):05}" if len(ranges) > 1 else ""
                path = self._folder / f"{self._contents.name}{of_all}.faiss"
                temporary = own.enter_context(replacing(path))
                files.append((path.name, temporary, rows))
                order = np.argsort(-lengths, kind="stable") if kind.is_by_norm else None
                index = faiss_files.copy_without_vectors(empty)
                longest = max(longest, self._fill(index, rows, longest, order))
                faiss_files.write_index(index, temporary)
            search, recall = ({}, None) if kind.is_exact else self._measured(files, longest)
            if recall is None and not kind.is_exact:
                raise _NotWorthwhileError
            info = self._described(files, longest, built_with, search, recall)
            stack.push(own.pop_all())
        return info

    def _trained(self, lists: int, longest: float) -> tuple[Any, dict[str, int]]:
        """Return an index without vectors that knows what it must of them, and what index.json says of it."""
        from kgshard_tools.index import faiss_files

        kind, metric = self._kind, self._contents.metric
        width = self._contents.lift.width(self._table.dim)
        width = faiss_files.padded_width(kind, width) + kind.lengthens(metric)
        searched_by = kind.searched_by(metric)
        assert searched_by is not None  # Whoever chose the kind asked.
        if not kind.is_by_norm and longest * longest * width > _MOST_SQUARED:
            raise ConfigError(
                f"--type {kind.name}: squares of vectors as long as {longest:.3g} leave float32, which FAISS "
                "computes in; use --type flat, which decides in float64"
            )
        index = faiss_files.new_index(kind, searched_by, width, lists)
        built_with = faiss_files.built_with(kind, lists)
        if not faiss_files.is_trained(index):
            count = min(self._table.num_rows, _ROWS_TO_TRAIN_ON * max(lists, _LEAST_TO_TRAIN_ON))
            draw = np.random.default_rng(self._settings.seed)
            chosen = np.sort(draw.choice(self._table.num_rows, count, replace=False))
            sample = np.concatenate([vectors for _, vectors in self._gathered(chosen)])
            faiss_files.train(index, self._as_added(sample, longest, width), seed=self._settings.seed)
            built_with |= {"trained_on": count, "seed": self._settings.seed}
        return index, built_with

    def _lengths(self) -> npt.NDArray[np.float64]:
        """Return the 2-norms, float64[N], of all that the index will hold."""
        return np.concatenate(
            [_lengths(vectors) for _, vectors in self._vectors(range(self._table.num_rows))]
        )

    def _fill(self, index: Any, rows: range, longest: float, order: Ids | None) -> float:
        """Add some rows to an index, or all of them in some order; return the largest 2-norm among them."""
        from kgshard_tools.index import faiss_files

        width, found = faiss_files.size_of(index)[1], 0.0
        for ids, vectors in self._vectors(rows) if order is None else self._gathered(order):
            named = None if isinstance(ids, range) else ids
            faiss_files.add(index, self._as_added(vectors, longest, width), named)
            found = max(found, float(_lengths(vectors).max(initial=0.0)))
        return found

    def _vectors(self, rows: range) -> Iterator[tuple[range, Floats]]:
        """Yield what an index holds of some rows, float32[n, E], block by block."""
        for block, stored in self._table.blocks(rows):
            yield block, self._lifted(block, stored)

    def _gathered(self, ids: Ids) -> Iterator[tuple[Ids, Floats]]:
        """Yield the same of rows int64[n] in their order."""
        for start in range(0, len(ids), _GATHERED_ROWS):
            part = ids[start : start + _GATHERED_ROWS]
            yield part, self._lifted(part, self._table.gather(part))

    def _lifted(self, ids: range | Ids, stored: Floats) -> Floats:
        self._check_finite(ids, stored)
        vectors = self._contents.lift.rounded(stored)
        self._check_finite(ids, vectors)
        return vectors

    def _as_added(self, vectors: Floats, longest: float, width: int) -> Floats:
        """Return vectors float32[n, width] as FAISS gets them: padded with zeros, lengthened for graphs."""
        added = np.zeros((len(vectors), width), np.float32)
        added[:, : vectors.shape[1]] = vectors
        if self._kind.lengthens(self._contents.metric):
            missing = longest * longest - squares(vectors.astype(np.float64))
            added[:, -1] = np.sqrt(np.maximum(missing, 0.0))
        return added

    def _check_finite(self, ids: range | Ids, values: Floats) -> None:
        bad = first_non_finite(values)
        if bad is not None:
            entity = int(ids[bad])
            label = self._stored.dataset.entities[entity]
            raise NonFiniteError(f"{self._stored.run.folder}: entity {entity} ({label!r}) is not finite")

    def _measured(
        self, files: list[tuple[str, Path, range]], longest: float
    ) -> tuple[dict[str, int], RecallInfo | None]:
        """Choose how an approximate index is searched; return that, and the recall."""
        from kgshard_tools.index.tuning import tune

        parts = [IndexPartFile(path, rows) for _, path, rows in files]
        source = tuned_class(self._kind)(
            parts, self._contents, self._kind, self._table, Search(1, 1), longest=longest
        )
        recall = tune(
            self._stored,
            self._contents,
            source,
            target=self._settings.recall,
            num_queries=self._settings.num_queries,
            seed=self._settings.seed,
            worthwhile=_WORTHWHILE if self._settings.type == "auto" else 0.0,
        )
        return {self._kind.parameter: source.search.setting, "depth": source.search.depth}, recall

    def _described(
        self,
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
            dim=self._contents.lift.width(self._table.dim),
            longest=longest,
            model=self._stored.model.name,
            **identity(self._stored, self._contents),
            parts=[
                IndexPart(name, (rows.start, rows.stop), file.bytes, file.sha256)
                for name, rows, file in described
            ],
            built_with=built_with,
            search=search,
            recall=recall,
        )


def _lengths(vectors: Floats) -> npt.NDArray[np.float64]:
    lengths: npt.NDArray[np.float64] = np.sqrt(squares(vectors.astype(np.float64)))
    return lengths
