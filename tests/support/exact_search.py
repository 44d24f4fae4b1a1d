"""Tables to search, and the k best of their rows in exact arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from graphs import stored_table
from kgshard_tools.index import Contents, FoundIndex
from kgshard_tools.index.faiss_files import add, new_index, write_index
from kgshard_tools.index.flat import FlatIndex
from kgshard_tools.index.kinds import KINDS, Search
from kgshard_tools.index.norm import NormIndex
from kgshard_tools.index.tuned import IndexPartFile
from kgshard_tools.lifts import AS_STORED, Lift
from kgshard_tools.search import CandidateSource, Exclusions, Ids, Scan, Scores, search

from kgshard.models.metric import METRICS, Metric
from kgshard.records import IndexInfo, IndexPart

Kind = Literal["scan", "index", "norm"]
Rows = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
FLAT, NORM = KINDS["flat"], KINDS["norm"]
CASES: list[tuple[Metric, Kind]] = [
    *((metric, "scan") for metric in METRICS.values()),
    *((metric, "index") for metric in METRICS.values() if FLAT.searched_by(metric)),
    *((metric, "norm") for metric in METRICS.values() if NORM.searched_by(metric)),
]
every_source = pytest.mark.parametrize(
    ("metric", "kind"), CASES, ids=[f"{metric.name}-{kind}" for metric, kind in CASES]
)
NOBODY = np.empty(0, np.int64)


def open_source(
    folder: Path, rows: npt.ArrayLike, metric: Metric, kind: Kind, lift: Lift = AS_STORED
) -> CandidateSource:
    table = stored_table(folder, rows, num_pieces=2)
    if kind == "scan":
        return Scan(table, metric, lift)
    vectors = lift(table.read(range(table.num_rows)).astype(np.float64))
    built = NORM if kind == "norm" else FLAT
    searched_by = built.searched_by(metric)
    assert searched_by is not None
    index = new_index(built, searched_by, vectors.shape[1])
    order = np.argsort(-np.linalg.norm(vectors, axis=1), kind="stable")
    ids = order if kind == "norm" else np.arange(table.num_rows)
    add(index, vectors[ids].astype(np.float32), ids if kind == "norm" else None)
    path = table.pieces[0].path.with_suffix(".faiss")
    write_index(index, path)
    longest = math.sqrt(float((vectors * vectors).sum(1).max()))
    contents = Contents("links", metric, lift)
    if kind == "norm":
        file, search = IndexPartFile(path, range(table.num_rows)), Search(table.num_rows, 1)
        return NormIndex([file], contents, NORM, table, search, longest=longest)
    info = IndexInfo(
        type="flat",
        exact=True,
        metric=metric.name,  # type: ignore[arg-type]
        transform="none",
        rows=table.num_rows,
        dim=vectors.shape[1],
        longest=longest,
        model="complex",
        run_id="",
        step=1,
        vocabulary_sha256="",
        parts=[IndexPart(path.name, (0, table.num_rows), path.stat().st_size, "")],
    )
    return FlatIndex(FoundIndex(path.parent, contents, info), table)


def search_one(source: CandidateSource, query: Wide, k: int, excluded: npt.ArrayLike) -> tuple[Ids, Scores]:
    """Return the best rows and scores for one query float64[Q]."""
    return search(source, np.asarray(query)[None], k, Exclusions.of_one(excluded, num_rows=len(source))).of(0)


def asked(metric: Metric, point: npt.NDArray[Any], normal: npt.NDArray[Any] | None = None) -> Wide:
    """Return the query for a point: itself, or its projection and the normal of a hyperplane."""
    point = np.asarray(point, np.float64)
    if metric.name != "hyperplane":
        return point
    if normal is None:
        normal = np.random.default_rng(len(point)).standard_normal(len(point))
    normal = normal / np.sqrt((normal * normal).sum())
    return np.concatenate([point - (point * normal).sum() * normal, normal])


def fractions(values: npt.NDArray[Any]) -> list[Fraction]:
    return [Fraction(float(value)) for value in values]


def exact_order_value(metric: Metric, query: npt.NDArray[Any], row: npt.NDArray[Any]) -> Fraction:
    """Return what a score is ordered by, without rounding: the score, or minus the squared distance."""
    return order_value(metric, fractions(query), fractions(row))


def order_value(metric: Metric, q: list[Fraction], e: list[Fraction]) -> Fraction:
    if metric.name == "dot":
        return sum((a * b for a, b in zip(q, e, strict=True)), Fraction(0))
    if metric.name == "hyperplane":
        w = q[len(e) :]
        height = sum((a * b for a, b in zip(w, e, strict=True)), Fraction(0))
        e = [a - height * b for a, b in zip(e, w, strict=True)]
    differences = [a - b for a, b in zip(q[: len(e)], e, strict=True)]
    if metric.name == "moduli":
        half = len(e) // 2
        return -sum(map(root_of_squares, differences[:half], differences[half:]), Fraction(0))
    return -sum((abs(d) if metric.name == "l1" else d * d for d in differences), Fraction(0))


def root_of_squares(a: Fraction, b: Fraction) -> Fraction:
    """Return sqrt(a^2 + b^2) to 60 digits, which no two sums of moduli in these tests agree to."""
    with localcontext() as context:
        context.prec = 60
        square = a * a + b * b
        return Fraction((Decimal(square.numerator) / Decimal(square.denominator)).sqrt())


def exact_best(
    metric: Metric, query: npt.NDArray[Any], rows: npt.NDArray[Any], k: int, excluded: set[int]
) -> tuple[list[int], list[float]]:
    values = {i: exact_order_value(metric, query, row) for i, row in enumerate(rows) if i not in excluded}
    return best_of(metric, values, k)


def best_of(metric: Metric, values: dict[int, Fraction], k: int) -> tuple[list[int], list[float]]:
    best = sorted(values, key=lambda i: (-values[i], i))[:k]
    squared = metric.name in ("l2", "hyperplane")
    return best, [-math.sqrt(-values[i]) if squared else float(values[i]) for i in best]


def guarded(source: CandidateSource, *, calls: int = 20) -> CandidateSource:
    """Make a search that fetches more often fail, instead of hanging the tests."""
    fetch, numbers = source.fetch, iter(range(calls))

    def counted(*arguments: Any) -> Any:
        assert next(numbers, None) is not None, "search keeps fetching"
        return fetch(*arguments)

    source.fetch = counted  # type: ignore[assignment, method-assign]
    return source
