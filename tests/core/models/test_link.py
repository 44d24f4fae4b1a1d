"""Links asked from both ends, with and without reciprocal relations, for every scoring function."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import BOTH_WAYS, NAMES, Case, draw
from papers import Row

from kgshard.errors import ConfigError
from kgshard.models import find_scoring
from kgshard.models.link import SIDES, LinkModel, Side

LINK = LinkModel(name="complex", dim=4, num_entities=9, num_relations=5, reciprocal=True)


def test_with_reciprocal_relations_heads_are_asked_by_the_inverse_row() -> None:
    assert LINK.num_relation_rows == 10
    ids = np.array([0, 4])
    assert LINK.relation_row("tail", ids).tolist() == [0, 4]
    assert LINK.relation_row("head", ids).tolist() == [5, 9]
    assert LINK.relation_row("head", 3) == 8
    assert LINK.relation_row("head", torch.tensor([2])).tolist() == [7]


def test_without_them_heads_are_asked_by_the_relation_itself() -> None:
    plain = replace(LINK, reciprocal=False)
    assert plain.num_relation_rows == 5
    for side in SIDES:
        assert plain.relation_row(side, np.array([0, 4])).tolist() == [0, 4]


def link_of(case: Case, *, reciprocal: bool) -> LinkModel:
    return LinkModel(
        name=case.name, dim=case.dim, num_entities=6, num_relations=len(case.heads), reciprocal=reciprocal
    )


def anchors_and_answers(case: Case, side: Side) -> tuple[Row, Row]:
    return (case.heads, case.tails) if side == "tail" else (case.tails, case.heads)


def scores_of(model: LinkModel, case: Case, side: Side, table: Row) -> Row:
    anchors, answers = anchors_and_answers(case, side)
    relations = table[model.relation_row(side, np.arange(len(anchors)))]
    queries = model.queries(side, anchors, relations, case.shared)
    candidates = model.candidates(side, answers)
    assert model.metric.score_all(queries, candidates).shape == (len(anchors), len(answers))
    return model.metric.score_pairs(queries, candidates)


@pytest.mark.parametrize("name", NAMES)
def test_with_reciprocal_relations_the_score_is_that_of_the_turned_triple(name: str) -> None:
    case = draw(name, 12, 6, 24)
    inverse = np.random.default_rng(13).standard_normal(case.relations.shape)
    model, table = link_of(case, reciprocal=True), np.concatenate([case.relations, inverse])
    turned = Case(name, case.tails, inverse, case.heads, case.shared).paper_scores()
    np.testing.assert_allclose(scores_of(model, case, "tail", table), case.paper_scores(), rtol=1e-9)
    np.testing.assert_allclose(scores_of(model, case, "head", table), turned, rtol=1e-9)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_without_them_both_ends_give_the_same_score(name: str) -> None:
    case = draw(name, 14, 6, 24)
    model = link_of(case, reciprocal=False)
    for side in SIDES:
        scores = scores_of(model, case, side, case.relations)
        np.testing.assert_allclose(scores, case.paper_scores(), rtol=1e-9)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(BOTH_WAYS)))
def test_a_model_without_head_queries_needs_reciprocal_relations(name: str) -> None:
    case = draw(name, 15, 2, 24)
    with pytest.raises(ConfigError, match=f"{name} has no query for heads; it needs reciprocal relations"):
        link_of(case, reciprocal=False)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if find_scoring(name).has_relation_queries])
def test_relations_are_asked_for_in_the_direction_of_the_side(name: str, reciprocal: bool) -> None:
    case = draw(name, 16, 6, 24)
    inverse = np.random.default_rng(17).standard_normal(case.relations.shape)
    model, table = link_of(case, reciprocal=reciprocal), np.concatenate([case.relations, inverse])
    for side in SIDES:
        rows = table[model.relation_row(side, np.arange(6))]
        queries = model.relation_queries(side, *anchors_and_answers(case, side), case.shared)
        expected = scores_of(model, case, side, table)
        np.testing.assert_allclose((queries * rows).sum(-1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_factors_are_those_of_the_triple_that_is_scored(name: str) -> None:
    case = draw(name, 18, 6, 24)
    forwards = case.scoring.factors(case.heads, case.relations, case.tails)
    backwards = case.scoring.factors(case.tails, case.relations, case.heads)
    for reciprocal in (True, False) if name in BOTH_WAYS else (True,):
        model = link_of(case, reciprocal=reciprocal)
        for side in SIDES:
            anchors, answers = anchors_and_answers(case, side)
            found = model.factors(side, anchors, case.relations, answers)
            expected = backwards if reciprocal and side == "head" else forwards
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


METRIC_NAMES = {
    "transe": "l2",
    "transe-l1": "l1",
    "transh": "hyperplane",
    "rotate": "l2",
    "rotate-moduli": "moduli",
    "protate": "moduli",
}


@pytest.mark.parametrize(
    ("name", "reciprocal"), [(name, True) for name in NAMES] + [(name, False) for name in BOTH_WAYS]
)
def test_a_link_model_survives_its_json_form(name: str, reciprocal: bool) -> None:
    model = LinkModel(name=name, dim=24, num_entities=3, num_relations=2, reciprocal=reciprocal)
    stored = model.to_dict()
    assert LinkModel.from_dict(stored) == model
    assert stored["score_function"] == name
    assert stored["relation_dim"] == find_scoring(name).relation_dim(24)
    assert stored["metric"] == METRIC_NAMES.get(name, "dot")


def test_arguments_come_back_with_the_model() -> None:
    model = LinkModel(name="tucker:5", dim=24, num_entities=3, num_relations=2, reciprocal=True)
    again = LinkModel.from_dict(model.to_dict())
    assert (again.name, again.relation_dim) == ("tucker:5", 5)
    assert again.scoring.shared_init(24)["core"].shape == (5, 24, 24)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown scoring function 'nosuch' \(known: .*complex"):
        replace(LINK, name="nosuch")
    with pytest.raises(ConfigError, match="dim must be even"):
        replace(LINK, dim=5)
