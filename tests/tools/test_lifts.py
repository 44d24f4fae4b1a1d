"""Rows that are compared as what a question makes of them: as exact as rows that are compared as they are."""

from __future__ import annotations

from fractions import Fraction
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
    best_of,
    every_source,
    fractions,
    guarded,
    open_source,
    order_value,
    search_one,
)
from graphs import stored_table
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.lifts import AS_STORED, UNIT_LENGTH, Lift, link_lift
from kgshard_tools.search import Scan

from kgshard.errors import NonFiniteError
from kgshard.models import SCORING
from kgshard.models.link import SIDES, LinkModel, Side
from kgshard.models.metric import METRICS, Metric


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


class Cubed(Lift):
    """[x^3 | sum x^2 | 1]: wider than the row, and far from linear in it."""

    name = "candidates"

    def __call__(self, rows: Wide) -> Wide:
        return np.concatenate([rows**3, (rows * rows).sum(-1)[:, None], np.ones((len(rows), 1))], axis=1)

    def rounded(self, rows: Rows) -> Rows:
        return self(rows.astype(np.float64)).astype(np.float32)

    def exact(self, row: npt.NDArray[Any]) -> list[Fraction]:
        numbers = fractions(row)
        return [*(x**3 for x in numbers), sum((x * x for x in numbers), Fraction(0)), Fraction(1)]


@every_source
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_rows_are_compared_as_what_is_made_of_them(
    folder: Path, metric: Metric, kind: Kind, data: st.DataObject
) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dim = 2 * data.draw(st.integers(1, 3))
    scale = data.draw(st.sampled_from([1e-2, 1.0, 100.0]))
    rows = (scale * draw.standard_normal((150, dim))).astype(np.float32)
    query = asked(metric, scale**3 * draw.standard_normal(dim + 2))
    excluded = set(draw.permutation(150)[:20].tolist())
    values = {
        i: order_value(metric, fractions(query), Cubed().exact(row))
        for i, row in enumerate(rows)
        if i not in excluded
    }
    source = guarded(open_source(folder, rows, metric, kind, Cubed()))
    ids, scores = search_one(source, query, 5, np.array(sorted(excluded)))
    wanted_ids, wanted_scores = best_of(metric, values, 5)
    assert ids.tolist() == wanted_ids
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-9)


@every_source
def test_what_leaves_float32_is_compared_in_float64(folder: Path, metric: Metric, kind: Kind) -> None:
    """Rows fit float32, their cubes do not."""
    rows = (1e15 * np.random.default_rng(1).standard_normal((100, 2))).astype(np.float32)
    query = asked(metric, np.array([1.0, -2.0, 0.5, 0.25]) * 1e20)
    values = {i: order_value(metric, fractions(query), Cubed().exact(row)) for i, row in enumerate(rows)}
    with np.errstate(all="ignore"):
        ids, _ = search_one(guarded(open_source(folder, rows, metric, kind, Cubed())), query, 5, NOBODY)
    assert ids.tolist() == best_of(metric, values, 5)[0]


class Divided(Lift):
    """Something divided by x: finite rows that hold a 0 do not survive it."""

    def __init__(self, dividend: float) -> None:
        self.dividend = dividend

    def __call__(self, rows: Wide) -> Wide:
        with np.errstate(divide="ignore", invalid="ignore"):
            return rows + self.dividend / rows

    def rounded(self, rows: Rows) -> Rows:
        return self(rows.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize("dividend", [0.0, 1.0], ids=["nan", "inf"])
@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_a_row_of_which_nothing_finite_can_be_made_is_named(
    folder: Path, metric: Metric, dividend: float
) -> None:
    """Not in the first block: what was seen before would do for an answer."""
    rows = 1 + np.random.default_rng(3).random((20_000, 4), np.float32)
    rows[17_321, 2] = 0
    table = stored_table(folder, rows)
    source = Scan(table, metric, Divided(dividend), labels=[f"e{i}" for i in range(20_000)])
    with pytest.raises(NonFiniteError, match=r"entity 17321 \('e17321'\) is not finite"):
        search_one(guarded(source), asked(metric, np.arange(4.0)), 3, NOBODY)


def exact_mure(side: Side, anchor: Wide, relation: Wide, row: npt.NDArray[Any]) -> Fraction:
    """Return -|R h + tau - t|^2 + b_h + b_t in rational arithmetic, for rows [vector | b_h | b_t]."""
    given_row, other, r = fractions(anchor), fractions(row), fractions(relation)
    h, t = (given_row, other) if side == "tail" else (other, given_row)
    n = len(r) // 2
    distances = (r[i] * h[i] + r[n + i] - t[i] for i in range(n))
    return -sum((d * d for d in distances), Fraction(0)) + h[n] + t[n + 1]


def exact_cp(side: Side, anchor: Wide, relation: Wide, row: npt.NDArray[Any]) -> Fraction:
    """Return sum_i h_i r_i t_i in rational arithmetic, for rows [as head | as tail]."""
    given_row, other, r = fractions(anchor), fractions(row), fractions(relation)
    h, t = (given_row, other) if side == "tail" else (other, given_row)
    return sum((h[i] * r[i] * t[len(r) + i] for i in range(len(r))), Fraction(0))


LIFTED = {"mure": exact_mure, "cp": exact_cp}


@pytest.mark.parametrize("kind", ["scan", "index"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", LIFTED)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_models_that_lift_rows_answer_as_rational_arithmetic_does(
    folder: Path, name: str, side: Side, kind: Kind, data: st.DataObject
) -> None:
    """Small whole numbers, so that ties are exact; the formula is asked, not the lift."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    model = LinkModel(name=name, dim=6, num_entities=120, num_relations=1, reciprocal=False)
    rows = draw.integers(-2, 3, (120, 6)).astype(np.float32)
    anchor, relation = (draw.integers(-2, 3, width).astype(np.float64) for width in (6, model.relation_dim))
    excluded = set(draw.permutation(120)[: data.draw(st.integers(0, 100))].tolist())
    values = {i: LIFTED[name](side, anchor, relation, row) for i, row in enumerate(rows) if i not in excluded}
    source = open_source(folder, rows, model.metric, kind, link_lift(model, side))
    query = model.queries(side, anchor, relation)
    ids, scores = search_one(guarded(source), query, 7, np.array(sorted(excluded), np.int64))
    wanted_ids, wanted_scores = best_of(model.metric, values, 7)
    assert ids.tolist() == wanted_ids
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_angles_are_compared_as_points_of_a_circle(folder: Path, side: Side) -> None:
    """-2 sum_i |sin((h_i + r_i - t_i) / 2)| in extended precision."""
    draw = np.random.default_rng(4)
    model = LinkModel(name="protate", dim=5, num_entities=900, num_relations=1, reciprocal=False)
    rows = draw.uniform(-4, 4, (900, 5)).astype(np.float32)
    anchor, relation = draw.uniform(-4, 4, (2, 5))
    turned = anchor + relation if side == "tail" else anchor - relation
    wanted = -2 * np.abs(np.sin((turned.astype(np.longdouble) - rows) / 2)).sum(1)
    source = guarded(open_source(folder, rows, model.metric, "scan", link_lift(model, side)), calls=1)
    ids, scores = search_one(source, model.queries(side, anchor, relation), 10, NOBODY)
    assert ids.tolist() == np.argsort(-wanted)[:10].tolist()
    np.testing.assert_allclose(scores, wanted[ids].astype(np.float64), rtol=1e-12)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", sorted(SCORING))
def test_a_lift_is_what_the_model_compares_with(name: str, reciprocal: bool) -> None:
    """For every model, on both sides; in float32 off by rounding alone."""
    if not (reciprocal or SCORING[name].has_head_queries):
        pytest.skip("has no query for heads of its own")
    model = LinkModel(name=name, dim=16, num_entities=9, num_relations=1, reciprocal=reciprocal)
    rows = np.random.default_rng(1).standard_normal((9, 16)).astype(np.float32)
    for side in SIDES:
        lift, wanted = link_lift(model, side), model.candidates(side, rows.astype(np.float64))
        np.testing.assert_array_equal(lift(rows.astype(np.float64)), wanted)
        assert lift.width(16) == wanted.shape[1]
        assert lift.rounded(rows).dtype == np.float32
        np.testing.assert_array_equal(lift.rounded(rows), wanted.astype(np.float32))
        assert (lift is AS_STORED) == (wanted.shape == rows.shape and bool((wanted == rows).all()))


@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 300), exponent=st.integers(-30, 30))
@settings(max_examples=60, deadline=None)
def test_rows_of_length_one_are_off_by_less_than_slack_allows(seed: int, dim: int, exponent: int) -> None:
    rows = (np.random.default_rng(seed).standard_normal((5, dim)) * 10.0**exponent).astype(np.float32)
    rows[2] = 0
    wide = rows.astype(np.float64)
    lengths = np.sqrt((wide * wide).sum(1, keepdims=True))
    wanted = wide / np.where(lengths > 0, lengths, 1)
    np.testing.assert_allclose(UNIT_LENGTH(wide), wanted, rtol=1e-14, atol=0)
    off = np.abs(UNIT_LENGTH.rounded(rows) - wanted)
    # With dim / 2 + 3 units for the length and the division, slack still has as many for the product.
    assert (off <= np.abs(wanted) * (dim / 2 + 3) * 2.0**-24).all()
