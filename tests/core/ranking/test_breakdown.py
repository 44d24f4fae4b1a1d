"""Groups of queries hold what their names say, and their figures are those of their queries."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranking_functions import begin_run

from kgshard.data.dataset import Dataset
from kgshard.models.link import SIDES, Side
from kgshard.ranking.breakdown import CARDINALITIES, Queries, break_down, cardinalities, num_digits
from kgshard.ranking.metrics import Ranks, ranking_metrics
from kgshard.ranking.protocol import GROUPINGS

Triple = tuple[str, str, str]


@pytest.mark.parametrize("number", [0, 1, 9, 10, 99, 100, 999_999, 10**6, 10**18, 2**63 - 1])
def test_digits_are_counted(number: int) -> None:
    expected = len(str(number)) if number else 0
    assert num_digits(np.array([number, 1], np.int64)).tolist() == [expected, 1]


triples_lists = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=40, unique=True
)


@given(triples_lists)
def test_cardinalities_are_those_of_mean_answers(triples: list[tuple[int, int, int]]) -> None:
    found = cardinalities(np.array(triples, np.int32), 4)
    for relation in range(4):
        links = [(h, t) for h, r, t in triples if r == relation]
        if not links:
            assert CARDINALITIES[found[relation]] == "unseen in train"
            continue
        tails_a_head = Fraction(len(links), len({h for h, _ in links}))
        heads_a_tail = Fraction(len(links), len({t for _, t in links}))
        many = ["N" if mean >= Fraction(3, 2) else "1" for mean in (heads_a_tail, tails_a_head)]
        assert CARDINALITIES[found[relation]] == "-".join(many)


def test_exactly_one_and_a_half_answers_are_many() -> None:
    """Two heads with one and two tails: 1.5 tails a head, 1 head a tail."""
    assert CARDINALITIES[cardinalities(np.array([[0, 0, 1], [2, 0, 3], [2, 0, 4]]), 1)[0]] == "1-N"


TRAIN: list[Triple] = [
    *((f"p{i}", "lives in", "city") for i in range(12)),  # N-1
    *(("country", "has", f"p{i}") for i in range(4)),  # 1-N
    ("p0", "married", "p1"),  # 1-1
    *((f"p{i}", "knows", f"p{j}") for i in range(3) for j in range(3) if i != j),  # N-N
]
TEST: list[Triple] = [
    ("p12", "lives in", "city"),
    ("p0", "lives in", "country"),
    ("country", "has", "p5"),
    ("p2", "married", "p3"),
    ("p0", "knows", "p4"),
    ("p1", "dislikes", "p0"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return begin_run(tmp_path_factory.mktemp("broken-down"), train=TRAIN, test=TEST).dataset


def queries_of(dataset: Dataset, sides: tuple[Side, ...] = SIDES, num_triples: int | None = None) -> Queries:
    """Return queries whose ranks are drawn, for all test triples."""
    triples = dataset.triples("test")
    random, count = np.random.default_rng(0), len(triples) * len(sides)
    ranks = Ranks(random.integers(0, 5, count), random.integers(0, 3, count), random.integers(8, 15, count))
    return Queries(triples, sides, ranks, num_triples or len(triples))


def expected_group(by: str, side: Side, triple: Triple) -> str:
    """Return the label of a query's group, from the text of the graph."""
    if by in ("relation", "side"):
        return triple[1] if by == "relation" else side
    if by == "degree":
        answer = triple[0] if side == "head" else triple[2]
        degree = sum((h == answer) + (t == answer) for h, _, t in TRAIN)
        return "0" if degree == 0 else "1-9" if degree < 10 else "10-99"
    relations = {"lives in": "N-1", "has": "1-N", "married": "1-1", "knows": "N-N"}
    return relations.get(triple[1], "unseen in train")


def named(dataset: Dataset) -> list[Triple]:
    """Return the test triples by name, in the order of their rows."""
    return [
        (dataset.entities[h], dataset.relations[r], dataset.entities[t])
        for h, r, t in dataset.triples("test").tolist()
    ]


@pytest.mark.parametrize("sides", [SIDES, ("tail",), ("head",)])
@pytest.mark.parametrize("by", GROUPINGS)
def test_every_group_has_the_figures_of_its_queries(
    dataset: Dataset, by: str, sides: tuple[Side, ...]
) -> None:
    queries = queries_of(dataset, sides)
    labels = [(expected_group(by, side, triple), side) for side in sides for triple in named(dataset)]
    groups = {group["label"]: group for group in break_down(queries, dataset, by, "realistic")}
    assert groups.keys() == {label for label, _ in labels}
    for label, group in groups.items():
        mine = [i for i, (found, _) in enumerate(labels) if found == label]
        assert group["queries"] == len(mine)
        assert group["triples"] == len({i % len(TEST) for i in mine})
        check_figures(group, queries.ranks, mine, [labels[i][1] for i in mine], "realistic")


def check_figures(found: dict[str, Any], ranks: Ranks, mine: list[int], sides: list[Side], ties: str) -> None:
    for part in ("metrics", *SIDES):
        which = [i for i, side in zip(mine, sides, strict=True) if part in ("metrics", side)]
        for rule, values in [(ties, found[part]), *((r, f.get(part, f)) for r, f in found["ties"].items())]:
            expected = ranking_metrics(ranks.take(np.array(which)), rule) if which else None
            if values is None or expected is None:
                assert values is expected
            else:
                assert expected.items() <= values.items()


def test_relations_come_by_falling_number_of_triples(dataset: Dataset) -> None:
    counts = [group["triples"] for group in break_down(queries_of(dataset), dataset, "relation", "realistic")]
    assert counts == sorted(Counter(r for _, r, _ in TEST).values(), reverse=True)


def test_other_groups_come_in_their_own_order(dataset: Dataset) -> None:
    orders = {
        by: [g["label"] for g in break_down(queries_of(dataset), dataset, by, "realistic")]
        for by in GROUPINGS
    }
    assert orders["cardinality"] == list(CARDINALITIES)
    assert orders["side"] == list(SIDES)
    assert orders["degree"] == ["0", "1-9", "10-99"]


@pytest.mark.parametrize("ties", ["optimistic", "pessimistic"])
def test_the_figures_are_under_the_tie_rule_that_was_asked_for(dataset: Dataset, ties: str) -> None:
    queries = queries_of(dataset)
    figures = queries.figures(np.arange(len(queries.ranks)), ties)
    check_figures(figures, queries.ranks, list(range(12)), [s for s in SIDES for _ in TEST], ties)
    assert "intervals" not in figures


def test_groups_of_an_estimate_have_intervals_where_there_are_two_triples(dataset: Dataset) -> None:
    groups = break_down(queries_of(dataset, num_triples=50), dataset, "relation", "realistic")
    for group in groups:
        assert (group["intervals"]["metrics"] is None) == (group["triples"] < 2)
    low, high = groups[0]["intervals"]["tail"]["mrr"]
    assert low < groups[0]["tail"]["mrr"] < high


def test_degrees_are_those_of_train_alone(dataset: Dataset, tmp_path: Path) -> None:
    """p12 is in test only: it is unseen, and stays in the ranking."""
    groups = break_down(queries_of(dataset, ("head",)), dataset, "degree", "realistic")
    assert {group["label"]: group["triples"] for group in groups}["0"] == 1
