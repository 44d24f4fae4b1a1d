"""Ranking metrics against exact fractions; intervals against all samples there are."""

from __future__ import annotations

import statistics
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgshard.ranking.metrics import NORMAL_95, TIES, Ranks, metric_intervals, ranking_metrics

Place = tuple[int, int, int]
"""Candidates that score higher, the same, and lower."""
places_lists = st.lists(st.tuples(*[st.integers(0, 60)] * 3), min_size=1, max_size=50)
SHARES = {"realistic": Fraction(1, 2), "optimistic": Fraction(0), "pessimistic": Fraction(1)}


def ranks_of(places: list[Place]) -> Ranks:
    higher, ties, lower = np.array(places, np.int64).T
    return Ranks(higher, ties, higher + ties + lower + 1)


@pytest.mark.parametrize("ties", TIES)
@given(places_lists)
def test_equal_the_fractions(ties: str, places: list[Place]) -> None:
    metrics = ranking_metrics(ranks_of(places), ties)
    ranks, count = [1 + higher + SHARES[ties] * same for higher, same, _ in places], len(places)
    expected = {"mrr": sum(1 / rank for rank in ranks) / count, "mr": sum(ranks) / count}
    expected |= {f"hits@{k}": Fraction(sum(rank <= k for rank in ranks), count) for k in (1, 3, 10)}
    chance = sum(Fraction(sum(place) + 2, 2) for place in places) / count
    expected["amr"] = expected["mr"] / chance
    expected["amri"] = 1 - (expected["mr"] - 1) / (chance - 1) if chance > 1 else Fraction(0)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-12, abs=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 9))
def test_a_rank_among_ties_is_the_mean_over_all_orders(others: list[int], mine: int) -> None:
    """With h higher and t tied candidates, the true one may stand anywhere from h + 1 to h + t + 1."""
    higher, ties = sum(o > mine for o in others), sum(o == mine for o in others)
    places = range(higher + 1, higher + ties + 2)
    ranks = ranks_of([(higher, ties, len(others) - higher - ties)])
    assert Fraction(float(ranks.under("realistic")[0])) == Fraction(sum(places), len(places))
    assert [ranks.under(rule)[0] for rule in ("optimistic", "pessimistic")] == [min(places), max(places)]


def test_a_tie_for_the_first_place_is_no_hit_at_1() -> None:
    ranks = ranks_of([(0, 1, 5), (0, 0, 6)])
    assert ranks.under().tolist() == [1.5, 1.0]
    assert [ranking_metrics(ranks, rule)["hits@1"] for rule in TIES] == [0.5, 1.0, 0.5]


def test_worked_example() -> None:
    metrics = ranking_metrics(ranks_of([(0, 0, 19), (1, 0, 18), (3, 0, 16), (19, 0, 0)]))
    assert metrics == {
        "mrr": 0.45,
        "mr": 6.75,
        "hits@1": 0.25,
        "hits@3": 0.5,
        "hits@10": 0.75,
        "amr": 6.75 / 10.5,
        "amri": (10.5 - 6.75) / 9.5,
    }


def test_the_adjusted_index_is_one_for_perfect_and_zero_for_random_and_less_for_worse() -> None:
    """Over all places of the true answer, as a random scorer takes them, the index is 0 in the mean."""
    sizes = [2, 7, 30]
    every_place = [(place, 0, size - place - 1) for size in sizes for place in range(size)]
    weights = np.concatenate([np.full(size, 210 // size) for size in sizes])  # each size as often: 210 times
    random = ranks_of(every_place).take(np.repeat(np.arange(len(every_place)), weights))
    assert ranking_metrics(random)["amri"] == pytest.approx(0, abs=1e-12)
    assert ranking_metrics(random)["amr"] == pytest.approx(1)
    perfect, worst = ranks_of([(0, 0, size) for size in sizes]), ranks_of([(size, 0, 0) for size in sizes])
    assert ranking_metrics(perfect)["amri"] == 1
    assert ranking_metrics(worst)["amri"] == pytest.approx(-1)


def test_without_a_second_candidate_nothing_differs_from_chance() -> None:
    metrics = ranking_metrics(ranks_of([(0, 0, 0), (0, 0, 0)]))
    assert (metrics["mrr"], metrics["amr"], metrics["amri"]) == (1.0, 1.0, 0.0)


def test_no_ranks_give_no_number() -> None:
    with pytest.raises(ValueError, match="no ranks"):
        ranking_metrics(Ranks.join([]))


@given(places_lists, places_lists)
def test_joined_ranks_are_those_of_the_parts(first: list[Place], second: list[Place]) -> None:
    joined = Ranks.join([ranks_of(first), ranks_of(second)])
    assert len(joined) == len(first) + len(second)
    back = joined.take(np.arange(len(first), len(joined)))
    np.testing.assert_array_equal(back.under("pessimistic"), ranks_of(second).under("pessimistic"))
    np.testing.assert_array_equal(back.candidates, ranks_of(second).candidates)


def population(num_triples: int, seed: int) -> Ranks:
    """Return the ranks of two queries a triple, the second worse, hard triples being hard from both ends."""
    random = np.random.default_rng(seed)
    candidates = random.integers(20, 400, 2 * num_triples)
    hardness = np.tile(random.random(num_triples), 2) * np.repeat([0.05, 0.3], num_triples)
    higher = random.binomial(candidates - 1, hardness)
    return Ranks(higher, np.minimum(candidates - 1 - higher, random.integers(0, 3, len(higher))), candidates)


def drawn(ranks: Ranks, triples: np.ndarray) -> tuple[Ranks, np.ndarray]:
    """Return the ranks of both queries of some triples, and which of the triples each is about."""
    num_triples = len(ranks) // 2
    return ranks.take(np.concatenate([triples, triples + num_triples])), np.tile(np.arange(len(triples)), 2)


def test_estimates_and_their_variances_are_unbiased_over_all_samples() -> None:
    """Every sample of 3 of 7 triples: means are right in the mean, and so are squared standard errors."""
    ranks = population(7, seed=1)
    whole = ranking_metrics(ranks)
    estimates, variances = [], []
    for sample in combinations(range(7), 3):
        some, triples = drawn(ranks, np.array(sample))
        estimates.append(ranking_metrics(some))
        intervals = metric_intervals(some, "realistic", triples, num_drawn=3, num_triples=7)
        variances.append(
            {name: ((high - low) / 2 / NORMAL_95) ** 2 for name, (low, high) in intervals.items()}
        )
    for name in ("mrr", "mr", "hits@1", "hits@3", "hits@10"):
        values = [estimate[name] for estimate in estimates]
        assert statistics.mean(values) == pytest.approx(whole[name])
        assert statistics.mean(v[name] for v in variances) == pytest.approx(statistics.pvariance(values))


def test_a_sample_of_all_triples_has_intervals_of_no_width() -> None:
    ranks = population(20, seed=2)
    some, triples = drawn(ranks, np.arange(20))
    for name, (low, high) in metric_intervals(
        some, "optimistic", triples, num_drawn=20, num_triples=20
    ).items():
        assert low == high == ranking_metrics(ranks, "optimistic")[name]


@pytest.mark.parametrize("queries", ["all", "one side", "a group"])
def test_intervals_cover_the_truth_as_often_as_they_say(queries: str) -> None:
    """400 samples of 150 among 1,000 triples: about 95 % of all intervals hold the full figure.

    Were queries taken for independent draws, they would be too narrow: a triple's two are alike here.
    """
    ranks, random = population(1000, seed=3), np.random.default_rng(4)
    belongs = {
        "all": np.ones(2000, bool),
        "one side": np.arange(2000) < 1000,
        "a group": np.random.default_rng(5).random(2000) < 0.6,
    }[queries]
    whole, covered = (
        ranking_metrics(ranks.take(belongs.nonzero()[0])),
        dict.fromkeys(ranking_metrics(ranks), 0),
    )
    for _ in range(400):
        sample = random.choice(1000, 150, replace=False)
        which = np.concatenate([sample, sample + 1000])
        triples = np.tile(np.arange(150), 2)[belongs[which]]
        intervals = metric_intervals(
            ranks.take(which[belongs[which]]), "realistic", triples, num_drawn=150, num_triples=1000
        )
        for name, (low, high) in intervals.items():
            covered[name] += low <= whole[name] <= high
    # Three standard errors of 400 trials at 95 % are 3.3 %; normal theory itself is off by a little.
    assert all(0.90 < count / 400 < 0.985 for count in covered.values()), covered
