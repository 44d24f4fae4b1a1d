"""The k best rows are exactly those of exact arithmetic, whatever fetched the candidates."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from graphs import stored_table
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.index import FoundIndex
from kgshard_tools.index.flat import FlatIndex, new_index, write_index
from kgshard_tools.search import CandidateSource, Scan, search

from kgshard.models.metric import Metric

METRICS: tuple[Metric, ...] = ("dot", "l2", "l1")
Kind = Literal["scan", "index"]
KINDS: tuple[Kind, ...] = ("scan", "index")
Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def open_source(
    folder: Path, rows: npt.ArrayLike, metric: Metric, kind: Kind, *, normalized: bool = False
) -> CandidateSource:
    table = stored_table(folder, rows, num_pieces=2)
    if kind == "scan":
        return Scan(table, metric, normalized=normalized)
    values = table.read(range(table.num_rows)).astype(np.float64)
    lengths = np.sqrt((values * values).sum(1))
    if normalized:
        values = values / np.where(lengths > 0, lengths, 1)[:, None]
        lengths = np.ones(len(values))
    index = new_index(metric, table.dim)
    index.add(values.astype(np.float32))
    path = table.pieces[0].path.with_suffix(".faiss")
    write_index(index, path)
    transform = "unit length" if normalized else "none"
    info: Any = SimpleNamespace(metric=metric, transform=transform, longest=float(lengths.max()))
    return FlatIndex(FoundIndex(path, info), table)


def exact_order_value(metric: Metric, query: npt.NDArray[Any], row: npt.NDArray[Any]) -> Fraction:
    """Return what a score is ordered by, without rounding: the score, or minus the squared distance."""
    q, e = [Fraction(float(x)) for x in query], [Fraction(float(x)) for x in row]
    if metric == "dot":
        return sum((a * b for a, b in zip(q, e, strict=True)), Fraction(0))
    differences = [abs(a - b) for a, b in zip(q, e, strict=True)]
    return -sum((d if metric == "l1" else d * d for d in differences), Fraction(0))


def exact_best(
    metric: Metric, query: npt.NDArray[Any], rows: Rows, k: int, excluded: set[int]
) -> tuple[list[int], list[float]]:
    values = {i: exact_order_value(metric, query, row) for i, row in enumerate(rows) if i not in excluded}
    best = sorted(values, key=lambda i: (-values[i], i))[:k]
    scores = [-math.sqrt(-values[i]) if metric == "l2" else float(values[i]) for i in best]
    return best, scores


def assert_exact(
    source: CandidateSource, query: npt.NDArray[Any], rows: Rows, k: int, excluded: set[int]
) -> None:
    ids, scores = search(source, query, k, np.array(sorted(excluded), np.int64))
    wanted_ids, wanted_scores = exact_best(source.metric, query, rows, k, excluded)
    assert ids.tolist() == wanted_ids
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-12, atol=0)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_small_tables_of_small_numbers(folder: Path, metric: Metric, kind: Kind, data: st.DataObject) -> None:
    """Few distinct values: ties everywhere, and every sum is exact."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    num_rows, dim = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 4))
    draw = np.random.default_rng(seed)
    rows = draw.integers(-2, 3, (num_rows, dim)).astype(np.float32)
    query = draw.integers(-2, 3, dim).astype(np.float64)
    excluded = set(draw.permutation(num_rows)[: data.draw(st.integers(0, num_rows))].tolist())
    k = data.draw(st.integers(1, num_rows + 5))
    assert_exact(open_source(folder, rows, metric, kind), query, rows, k, excluded)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far from zero"])
def test_rows_that_differ_in_their_last_bits(folder: Path, metric: Metric, kind: Kind, offset: float) -> None:
    """Float32 alone cannot order these; 2,000 rows are many more than are fetched at first."""
    draw = np.random.default_rng(5)
    base = (draw.standard_normal(16) + offset).astype(np.float32)
    ulps = draw.integers(-3, 4, (2000, 16))
    rows = (base + ulps * np.spacing(np.abs(base))).astype(np.float32)
    query = base.astype(np.float64) + np.spacing(np.abs(base)) * draw.standard_normal(16)
    if metric == "dot":
        query = draw.standard_normal(16)
    source = open_source(folder, rows, metric, kind)
    assert_exact(source, query, rows, 10, {3, 7, 1999})


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_would_get_these_wrong(folder: Path, metric: Metric, kind: Kind) -> None:
    """The negative control of the test above: what is fetched first does not hold the ten best."""
    draw = np.random.default_rng(5)
    base = (draw.standard_normal(16) + 1000).astype(np.float32)
    rows = (base + draw.integers(-3, 4, (2000, 16)) * np.spacing(base)).astype(np.float32)
    query = base.astype(np.float64) + np.spacing(base) * draw.standard_normal(16)
    if metric == "dot":
        query = draw.standard_normal(16)
    fetched = open_source(folder, rows, metric, kind).fetch(
        query.astype(np.float32), 10, np.empty(0, np.int64)
    )
    assert sorted(fetched.ids.tolist()) != sorted(exact_best(metric, query, rows, 10, set())[0])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_come_in_row_order(folder: Path, metric: Metric, kind: Kind) -> None:
    rows = np.full((500, 3), 0.1, np.float32)
    source = open_source(folder, rows, metric, kind)
    ids, scores = search(source, np.array([0.3, 0.7, -0.2]), 10, np.array([0, 4]))
    assert ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert len(set(scores.tolist())) == 1


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_k_beyond_the_rows_returns_all_of_them(folder: Path, metric: Metric, kind: Kind) -> None:
    rows = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    source = open_source(folder, rows, metric, kind)
    ids, scores = search(source, np.ones(4), 20, np.empty(0, np.int64))
    assert sorted(ids.tolist()) == list(range(10))
    assert np.abs(scores).max() < 100
    ids, scores = search(source, np.ones(4), 20, np.arange(10))
    assert len(ids) == len(scores) == 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_excluding_the_same_row_twice_is_excluding_it(folder: Path, metric: Metric, kind: Kind) -> None:
    rows = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    ids, _ = search(open_source(folder, rows, metric, kind), np.ones(4), 10, np.array([2, 2, 5]))
    assert sorted(ids.tolist()) == [0, 1, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_far_apart_are_fetched_once(folder: Path, metric: Metric, kind: Kind) -> None:
    """Where float32 can tell, nothing more is read: a search does not cost the whole table."""
    rows = np.random.default_rng(0).standard_normal((2000, 4)).astype(np.float32)
    source = guarded(open_source(folder, rows, metric, kind), calls=1)
    assert_exact(source, np.array([0.5, -1.5, 0.25, 1.0]), rows, 10, {1, 2})


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_fetched_rows_exist_and_are_not_excluded(folder: Path, metric: Metric, kind: Kind) -> None:
    """Asked for more than there are, FAISS answers with row -1."""
    rows = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    fetched = open_source(folder, rows, metric, kind).fetch(np.ones(4, np.float32), 20, np.array([3]))
    assert sorted(fetched.ids.tolist()) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("metric", METRICS)
def test_many_blocks_are_scanned_as_one(folder: Path, metric: Metric) -> None:
    """More rows than a block holds, the best of them on both sides of its edge."""
    draw = np.random.default_rng(2)
    rows = draw.standard_normal((40_000, 3)).astype(np.float32)
    query = 10 * draw.standard_normal(3)
    best = rows[:5] * 0 + (query if metric != "dot" else query * 5)
    rows[[16_383, 16_384, 32_767, 32_768, 39_999]] = best
    source = Scan(stored_table(folder, rows), metric)
    ids, _ = search(source, query, 5, np.empty(0, np.int64))
    assert ids.tolist() == [16_383, 16_384, 32_767, 32_768, 39_999]
    ids, _ = search(source, query, 3, np.array([16_384, 39_999]))
    assert ids.tolist() == [16_383, 32_767, 32_768]


@pytest.mark.parametrize("kind", KINDS)
def test_cosine_of_integer_rows(folder: Path, kind: Kind) -> None:
    draw = np.random.default_rng(9)
    rows = draw.integers(-3, 4, (300, 3)).astype(np.float32)
    rows[10] = 0
    query = np.array([0.6, 0.0, 0.8])
    ids, scores = search(
        open_source(folder, rows, "dot", kind, normalized=True), query, 300, np.empty(0, np.int64)
    )
    wanted = [
        math.fsum(a * b for a, b in zip(query, row, strict=True)) / (math.hypot(*row.tolist()) or 1.0)
        for row in rows
    ]
    assert sorted(ids.tolist()) == list(range(300))
    np.testing.assert_allclose(scores, sorted(wanted, reverse=True), atol=1e-15)
    np.testing.assert_allclose(scores, np.array(wanted)[ids], atol=1e-15)


MAGNITUDES = (1e-25, 1e20, 1e30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", MAGNITUDES)
def test_very_small_and_very_large_rows(folder: Path, metric: Metric, kind: Kind, scale: float) -> None:
    """Products of these leave the range of float32, but float64 holds them."""
    draw = np.random.default_rng(1)
    rows = (draw.standard_normal((100, 4)) * scale).astype(np.float32)
    query = (draw.standard_normal(4) * scale).astype(np.float32).astype(np.float64)
    source = guarded(open_source(folder, rows, metric, kind))
    with np.errstate(all="ignore"):
        assert_exact(source, query, rows, 5, set())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", MAGNITUDES)
def test_the_cosine_does_not_depend_on_the_magnitude(folder: Path, kind: Kind, scale: float) -> None:
    draw = np.random.default_rng(1)
    rows = (draw.standard_normal((100, 4)) * scale).astype(np.float32)
    query = np.array([0.5, -0.5, 0.5, 0.5])
    exact = rows.astype(np.float64)
    cosines = exact @ query / np.sqrt((exact * exact).sum(1))
    source = guarded(open_source(folder, rows, "dot", kind, normalized=True))
    with np.errstate(all="ignore"):
        ids, scores = search(source, query, 5, np.empty(0, np.int64))
    assert ids.tolist() == np.argsort(-cosines)[:5].tolist()
    np.testing.assert_allclose(scores, cosines[ids], rtol=1e-12)


def guarded(source: CandidateSource, *, calls: int = 20) -> CandidateSource:
    """Make a search that fetches more often fail, instead of hanging the tests."""
    fetch, numbers = source.fetch, iter(range(calls))

    def counted(*arguments: Any) -> Any:
        assert next(numbers, None) is not None, "search keeps fetching"
        return fetch(*arguments)

    source.fetch = counted  # type: ignore[assignment, method-assign]
    return source
