"""Ranking metrics against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgshard.metrics import ranking_metrics, realistic_ranks

halves = st.integers(2, 400).map(lambda doubled: Fraction(doubled, 2))


@given(st.lists(halves, min_size=1, max_size=50))
def test_equal_the_fractions(ranks: list[Fraction]) -> None:
    metrics = ranking_metrics(np.array([float(rank) for rank in ranks]))
    count = len(ranks)
    expected = {"mrr": sum(1 / rank for rank in ranks) / count, "mr": sum(ranks) / Fraction(count)}
    expected |= {f"hits@{k}": Fraction(sum(rank <= k for rank in ranks), count) for k in (1, 3, 10)}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 9))
def test_a_rank_among_ties_is_the_mean_over_all_orders(others: list[int], mine: int) -> None:
    """With h higher and t tied candidates, the true one may stand anywhere from h + 1 to h + t + 1."""
    higher, ties = sum(o > mine for o in others), sum(o == mine for o in others)
    places = range(higher + 1, higher + ties + 2)
    expected = Fraction(sum(places), len(places))
    [rank] = realistic_ranks(np.array([higher]), np.array([ties]))
    assert Fraction(float(rank)) == expected


def test_a_tie_for_the_first_place_is_no_hit_at_1() -> None:
    ranks = realistic_ranks(np.array([0, 0]), np.array([1, 0]))
    assert ranks.tolist() == [1.5, 1.0]
    assert ranking_metrics(ranks)["hits@1"] == 0.5


def test_worked_example() -> None:
    metrics = ranking_metrics(np.array([1.0, 2.0, 4.0, 20.0]))
    assert metrics == {"mrr": 0.45, "mr": 6.75, "hits@1": 0.25, "hits@3": 0.5, "hits@10": 0.75}


def test_no_ranks_give_no_number() -> None:
    metrics = ranking_metrics(np.empty(0))
    assert sorted(metrics) == ["hits@1", "hits@10", "hits@3", "mr", "mrr"]
    assert all(math.isnan(value) for value in metrics.values())
