"""The k best rows are exactly those of exact arithmetic, whatever fetched the candidates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from exact_search import (
    NOBODY,
    Kind,
    Rows,
    Wide,
    asked,
    every_source,
    exact_best,
    exact_order_value,
    guarded,
    open_source,
    search_one,
)
from graphs import stored_table
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.lifts import UNIT_LENGTH
from kgshard_tools.search import CandidateSource, Exclusions, Scan

from kgshard.errors import NonFiniteError
from kgshard.models.metric import DOT, METRICS, Metric


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def assert_exact(
    source: CandidateSource,
    query: npt.NDArray[Any],
    rows: Rows,
    k: int,
    excluded: set[int],
    *,
    rtol: float = 1e-12,
) -> None:
    ids, scores = search_one(source, query, k, np.array(sorted(excluded), np.int64))
    wanted_ids, wanted_scores = exact_best(source.metric, query, rows, k, excluded)
    assert ids.tolist() == wanted_ids
    atol = 1e-14 if source.metric.name == "moduli" else 0.0  # A modulus of 0 counts as 1e-15.
    np.testing.assert_allclose(scores, wanted_scores, rtol=rtol, atol=atol)


@every_source
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_small_tables_of_small_numbers(folder: Path, metric: Metric, kind: Kind, data: st.DataObject) -> None:
    """Few distinct values: ties everywhere, and every sum is exact."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    num_rows, dim = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 4))
    draw = np.random.default_rng(seed)
    rows = draw.integers(-2, 3, (num_rows, dim)).astype(np.float32)
    point = draw.integers(-2, 3, dim).astype(np.float64)
    if metric.name == "moduli":
        # Multiples of 3 + 4 i: every modulus is a whole number, too large for 1e-15 to show.
        rows, point = (1024 * np.concatenate([3 * x, 4 * x], axis=-1) for x in (rows, point))
    query = asked(metric, point, np.eye(dim)[seed % dim])
    excluded = set(draw.permutation(num_rows)[: data.draw(st.integers(0, num_rows))].tolist())
    k = data.draw(st.integers(1, num_rows + 5))
    assert_exact(open_source(folder, rows, metric, kind), query, rows, k, excluded)


def last_bits(metric: Metric, offset: float) -> tuple[Rows, Wide]:
    """Return 2,000 rows that differ in their last bits, and a query between them."""
    draw = np.random.default_rng(5)
    base = (draw.standard_normal(16) + offset).astype(np.float32)
    rows = (base + draw.integers(-3, 4, (2000, 16)) * np.spacing(np.abs(base))).astype(np.float32)
    near = base.astype(np.float64) + np.spacing(np.abs(base)) * draw.standard_normal(16)
    return rows, asked(metric, draw.standard_normal(16) if metric.name == "dot" else near)


@every_source
@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far from zero"])
def test_rows_that_differ_in_their_last_bits(folder: Path, metric: Metric, kind: Kind, offset: float) -> None:
    """Float32 alone cannot order these; 2,000 rows are many more than are fetched at first."""
    rows, query = last_bits(metric, offset)
    # Projecting rows of length 4,000 costs float64 some digits of differences of 1e-4.
    rtol = 1e-8 if metric.name == "hyperplane" else 1e-12
    assert_exact(open_source(folder, rows, metric, kind), query, rows, 10, {3, 7, 1999}, rtol=rtol)


@every_source
def test_float32_would_get_these_wrong(folder: Path, metric: Metric, kind: Kind) -> None:
    """The negative control of the test above: what is fetched first does not hold the ten best."""
    rows, query = last_bits(metric, 1000.0)
    fetched = open_source(folder, rows, metric, kind).fetch(query[None], 10, Exclusions.none(1))
    assert sorted(fetched.ids[0].tolist()) != sorted(exact_best(metric, query, rows, 10, set())[0])


@every_source
def test_equal_rows_come_in_row_order(folder: Path, metric: Metric, kind: Kind) -> None:
    rows = np.full((500, 4), 0.1, np.float32)
    source = open_source(folder, rows, metric, kind)
    query = asked(metric, np.array([0.3, 0.7, -0.2, 0.4]))
    ids, scores = search_one(source, query, 10, np.array([0, 4]))
    assert ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert len(set(scores.tolist())) == 1


def ten_rows() -> Rows:
    return np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)


@every_source
def test_k_beyond_the_rows_returns_all_of_them(folder: Path, metric: Metric, kind: Kind) -> None:
    source, query = open_source(folder, ten_rows(), metric, kind), asked(metric, np.ones(4))
    ids, scores = search_one(source, query, 20, NOBODY)
    assert sorted(ids.tolist()) == list(range(10))
    assert np.abs(scores).max() < 100
    ids, scores = search_one(source, query, 20, np.arange(10))
    assert len(ids) == len(scores) == 0


@every_source
def test_excluding_the_same_row_twice_is_excluding_it(folder: Path, metric: Metric, kind: Kind) -> None:
    source = open_source(folder, ten_rows(), metric, kind)
    ids, _ = search_one(source, asked(metric, np.ones(4)), 10, np.array([2, 2, 5]))
    assert sorted(ids.tolist()) == [0, 1, 3, 4, 6, 7, 8, 9]


@every_source
def test_rows_far_apart_are_fetched_once(folder: Path, metric: Metric, kind: Kind) -> None:
    """Where float32 can tell, nothing more is read: a search does not cost the whole table."""
    rows = np.random.default_rng(0).standard_normal((2000, 4)).astype(np.float32)
    source = guarded(open_source(folder, rows, metric, kind), calls=1)
    assert_exact(source, asked(metric, np.array([0.5, -1.5, 0.25, 1.0])), rows, 10, {1, 2})


@every_source
def test_fetched_rows_exist_and_are_not_excluded(folder: Path, metric: Metric, kind: Kind) -> None:
    """Asked for more than there are, what is missing is no row."""
    source = open_source(folder, ten_rows(), metric, kind)
    fetched = source.fetch(asked(metric, np.ones(4))[None], 20, Exclusions.of_one([3], num_rows=10))
    assert sorted(fetched.ids[0].tolist()) == [-1] * 11 + [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert (fetched.values[fetched.ids < 0] == -np.inf).all()


@every_source
def test_what_was_not_fetched_is_no_better_than_the_worst_says(
    folder: Path, metric: Metric, kind: Kind
) -> None:
    """`worst` is a whole comparison value, with what a matrix product leaves out."""
    rows = np.random.default_rng(3).standard_normal((300, 4)).astype(np.float32)
    query = asked(metric, np.array([2.0, -1.5, 0.25, 1.0]))
    fetched = open_source(folder, rows, metric, kind).fetch(query[None], 20, Exclusions.none(1))
    values = sorted((float(exact_order_value(metric, query, row)) for row in rows), reverse=True)
    assert fetched.worst == pytest.approx(values[19], rel=1e-5)
    longest = max(math.hypot(*row.tolist()) for row in rows)
    assert longest <= fetched.longest * (1 + 1e-12) <= longest * 1.001


@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_many_blocks_are_scanned_as_one(folder: Path, metric: Metric) -> None:
    """More rows than a block holds, the best of them on both sides of its edge."""
    draw = np.random.default_rng(2)
    rows = draw.standard_normal((40_000, 4)).astype(np.float32)
    query = asked(metric, 10 * draw.standard_normal(4))
    rows[[16_383, 16_384, 32_767, 32_768, 39_999]] = query[:4] * (5 if metric is DOT else 1)
    source = Scan(stored_table(folder, rows), metric)
    ids, _ = search_one(source, query, 5, NOBODY)
    assert ids.tolist() == [16_383, 16_384, 32_767, 32_768, 39_999]
    ids, _ = search_one(source, query, 3, np.array([16_384, 39_999]))
    assert ids.tolist() == [16_383, 32_767, 32_768]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_a_row_that_is_not_finite_is_named_wherever_it_lies(
    folder: Path, metric: Metric, value: float
) -> None:
    """Not in the first block: what was seen before would do for an answer."""
    rows = np.random.default_rng(2).standard_normal((20_000, 4)).astype(np.float32)
    rows[17_321, 2] = value
    source = Scan(stored_table(folder, rows), metric, labels=[f"e{i}" for i in range(20_000)])
    with pytest.raises(NonFiniteError, match=r"entity 17321 \('e17321'\) is not finite"):
        search_one(guarded(source), asked(metric, np.arange(4.0)), 3, NOBODY)


@pytest.mark.parametrize("kind", ["scan", "index"])
def test_cosine_of_integer_rows(folder: Path, kind: Kind) -> None:
    draw = np.random.default_rng(9)
    rows = draw.integers(-3, 4, (300, 3)).astype(np.float32)
    rows[10] = 0
    query = np.array([0.6, 0.0, 0.8])
    ids, scores = search_one(open_source(folder, rows, DOT, kind, UNIT_LENGTH), query, 300, NOBODY)
    wanted = [
        math.fsum(a * b for a, b in zip(query, row, strict=True)) / (math.hypot(*row.tolist()) or 1.0)
        for row in rows
    ]
    assert sorted(ids.tolist()) == list(range(300))
    np.testing.assert_allclose(scores, sorted(wanted, reverse=True), atol=1e-15)
    np.testing.assert_allclose(scores, np.array(wanted)[ids], atol=1e-15)


MAGNITUDES = (1e-25, 1e20, 1e30)


@every_source
@pytest.mark.parametrize("scale", MAGNITUDES)
def test_very_small_and_very_large_rows(folder: Path, metric: Metric, kind: Kind, scale: float) -> None:
    """Products of these leave the range of float32, but float64 holds them."""
    if (metric.name, scale) == ("moduli", 1e-25):
        pytest.skip("a modulus below 1e-15 counts as 1e-15")
    draw = np.random.default_rng(1)
    rows = (draw.standard_normal((100, 4)) * scale).astype(np.float32)
    query = asked(metric, (draw.standard_normal(4) * scale).astype(np.float32))
    source = guarded(open_source(folder, rows, metric, kind))
    with np.errstate(all="ignore"):
        assert_exact(source, query, rows, 5, set())


@pytest.mark.parametrize("kind", ["scan", "index"])
@pytest.mark.parametrize("scale", MAGNITUDES)
def test_the_cosine_does_not_depend_on_the_magnitude(folder: Path, kind: Kind, scale: float) -> None:
    draw = np.random.default_rng(1)
    rows = (draw.standard_normal((100, 4)) * scale).astype(np.float32)
    query = np.array([0.5, -0.5, 0.5, 0.5])
    exact = rows.astype(np.float64)
    cosines = exact @ query / np.sqrt((exact * exact).sum(1))
    source = guarded(open_source(folder, rows, DOT, kind, UNIT_LENGTH))
    with np.errstate(all="ignore"):
        ids, scores = search_one(source, query, 5, NOBODY)
    assert ids.tolist() == np.argsort(-cosines)[:5].tolist()
    np.testing.assert_allclose(scores, cosines[ids], rtol=1e-12)
