"""Every scoring function is what its paper says, asked from either end, alone or in a crowd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard.errors import ConfigError
from kgshard.models import SCORING
from kgshard.models.link import SIDES, LinkModel
from kgshard.models.metric import score_all, score_pairs
from kgshard.models.scoring import ComplexScoring

Row = npt.NDArray[np.float64]


def as_complex(row: Row) -> npt.NDArray[np.complex128]:
    middle = len(row) // 2
    return row[:middle] + 1j * row[middle:]


PAPER: dict[str, Callable[[Row, Row, Row], float]] = {
    "distmult": lambda h, r, t: float(np.sum(h * r * t)),
    "complex": lambda h, r, t: float(np.real(np.sum(as_complex(h) * as_complex(r) * np.conj(as_complex(t))))),
    "transe": lambda h, r, t: -float(np.sqrt(np.sum((h + r - t) ** 2))),
    "transe-l1": lambda h, r, t: -float(np.sum(np.abs(h + r - t))),
    "rotate": lambda h, r, t: (
        -float(np.sqrt(np.sum(np.abs(as_complex(h) * np.exp(1j * r) - as_complex(t)) ** 2)))
    ),
}
"""One triple's score, as published, in float64. `r` are angles for rotate."""

NAMES = sorted(SCORING)
COMPLEX = sorted(name for name, scoring in SCORING.items() if isinstance(scoring, ComplexScoring))


def draw(name: str, seed: int, num_rows: int, dim: int) -> tuple[Row, Row, Row]:
    """Return heads, relations and tails, float64[num_rows, ...]."""
    random = np.random.default_rng(seed)
    relation_dim = SCORING[name].relation_dim(dim)
    heads, tails = random.standard_normal((2, num_rows, dim))
    return heads, random.standard_normal((num_rows, relation_dim)), tails


def paper_scores(name: str, heads: Row, relations: Row, tails: Row) -> Row:
    return np.array([PAPER[name](h, r, t) for h, r, t in zip(heads, relations, tails, strict=True)])


def test_every_model_is_checked_against_its_paper() -> None:
    assert set(PAPER) == set(SCORING)


def test_the_paper_formulas_differ_from_each_other() -> None:
    # A control: were two of them the same, a model under the wrong name would pass.
    heads, _, tails = draw("distmult", 3, 1, 8)
    relation = np.random.default_rng(4).standard_normal(8)
    angles = relation[:4]
    scores = [
        PAPER[name](heads[0], angles if name == "rotate" else relation, tails[0]) for name in sorted(PAPER)
    ]
    assert len({round(score, 6) for score in scores}) == len(PAPER)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), half=st.integers(1, 12), num_rows=st.integers(1, 5))
def test_matches_the_paper_from_both_ends(name: str, seed: int, half: int, num_rows: int) -> None:
    heads, relations, tails = draw(name, seed, num_rows, 2 * half)
    scoring = SCORING[name]
    expected = paper_scores(name, heads, relations, tails)
    forwards = score_pairs(scoring.metric, scoring.query_tails(heads, relations), tails)
    backwards = score_pairs(scoring.metric, scoring.query_heads(tails, relations), heads)
    np.testing.assert_allclose(forwards, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(backwards, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_and_torch_ask_the_same_queries(name: str, dtype: npt.DTypeLike) -> None:
    heads, relations, tails = (part.astype(dtype) for part in draw(name, 5, 7, 10))
    scoring = SCORING[name]
    tolerance = 1e-6 if dtype == np.float32 else 1e-14
    for method, anchors in ((scoring.query_tails, heads), (scoring.query_heads, tails)):
        ours = method(anchors, relations)
        theirs = method(torch.from_numpy(anchors), torch.from_numpy(relations))
        assert ours.shape == tuple(theirs.shape) == (7, 10)
        assert ours.dtype == theirs.numpy().dtype == dtype
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_one_relation_row_serves_many_heads(name: str) -> None:
    heads, relations, _ = draw(name, 6, 5, 8)
    together = SCORING[name].query_tails(heads, relations[0])
    alone = [SCORING[name].query_tails(head, relations[0]) for head in heads]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [96, 95])
def test_a_triple_scores_the_same_alone_and_in_any_company(name: str, size: int) -> None:
    """Batch = entities = dim = 96: a product over the wrong axis would go unnoticed there (B33)."""
    dim = size if name not in COMPLEX or size % 2 == 0 else size + 1
    scoring, metric = SCORING[name], SCORING[name].metric
    random = np.random.default_rng(size)
    entities = torch.tensor(random.standard_normal((size, dim)) * 0.3, dtype=torch.float32)
    relations = torch.tensor(
        random.standard_normal((size, scoring.relation_dim(dim))) * 0.3, dtype=torch.float32
    )
    head_ids, tail_ids = torch.tensor(random.integers(0, size, (2, size)))
    heads, tails = entities[head_ids], entities[tail_ids]
    expected = paper_scores(name, *(part.double().numpy() for part in (heads, relations, tails)))

    for side in SIDES:
        if side == "tail":
            queries, answers, answer_ids = scoring.query_tails(heads, relations), tails, tail_ids
        else:
            queries, answers, answer_ids = scoring.query_heads(tails, relations), heads, head_ids
        batch = score_pairs(metric, queries, answers)
        assert batch.shape == (size,)
        alone = torch.stack([score_pairs(metric, q, a) for q, a in zip(queries, answers, strict=True)])
        everyone = score_all(metric, queries, entities)
        assert everyone.shape == (size, size)
        sample = torch.tensor(random.integers(0, size, 40))
        sampled = score_all(metric, queries, entities[sample], exact=False)
        assert sampled.shape == (size, 40)
        one_by_one = score_all(metric, queries[:1], entities)
        for scores in (batch, alone, everyone[torch.arange(size), answer_ids]):
            np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one_by_one[0], everyone[0], rtol=1e-5, atol=1e-5)
        far = everyone[:, sample].abs() > 0.5  # The matmul form is loose for close pairs, as documented.
        np.testing.assert_allclose(sampled[far], everyone[:, sample][far], rtol=1e-5, atol=1e-5)


def plain_score(name: str, h: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return the paper's score of one triple in torch's own complex numbers, for its autograd."""
    if name == "distmult":
        return torch.einsum("i,i,i->", h, r, t)
    if name == "transe":
        return -torch.sqrt(torch.sum((h + r - t) ** 2))
    if name == "transe-l1":
        return -torch.sum(torch.abs(h + r - t))
    pairs = [torch.complex(*part.chunk(2)) for part in (h, t)]
    if name == "complex":
        return torch.sum(pairs[0] * torch.complex(*r.chunk(2)) * pairs[1].conj()).real
    turned = pairs[0] * torch.polar(torch.ones_like(r), r)
    return -torch.sqrt(torch.sum(torch.abs(turned - pairs[1]) ** 2))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_plain_formula(name: str, side: str) -> None:
    scoring = SCORING[name]
    h, r, t = (torch.tensor(part[0], requires_grad=True) for part in draw(name, 8, 1, 12))
    query, answer = (scoring.query_tails(h, r), t) if side == "tail" else (scoring.query_heads(t, r), h)
    ours = torch.autograd.grad(score_pairs(scoring.metric, query, answer), (h, r, t))
    plain = torch.autograd.grad(plain_score(name, h, r, t), (h, r, t))
    for mine, theirs in zip(ours, plain, strict=True):
        assert float(theirs.abs().max()) > 1e-3
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_finite_differences_of_the_paper(name: str) -> None:
    scoring = SCORING[name]
    rows = [part[0] for part in draw(name, 9, 1, 6)]
    leaves = [torch.tensor(row, requires_grad=True) for row in rows]
    score = score_all(scoring.metric, scoring.query_tails(leaves[0], leaves[1])[None], leaves[2][None])
    gradients = torch.autograd.grad(score.sum(), leaves)
    step = 1e-6
    for which, gradient in enumerate(gradients):
        for index in range(len(rows[which])):
            ends = []
            for sign in (1, -1):
                moved = [row.copy() for row in rows]
                moved[which][index] += sign * step
                ends.append(PAPER[name](*moved))
            assert float(gradient[index]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_have_finite_gradients(name: str, exact: bool) -> None:
    """A dead row must be able to come back: sqrt has an infinite slope at 0."""
    scoring = SCORING[name]
    heads = torch.zeros(2, 8, requires_grad=True)
    relations = torch.zeros(2, scoring.relation_dim(8), requires_grad=True)
    queries = scoring.query_tails(heads, relations)
    pairs = score_pairs(scoring.metric, queries, torch.zeros(2, 8))
    crowd = score_all(scoring.metric, queries, torch.zeros(3, 8), exact=exact)
    total = pairs.sum() + crowd.sum() + scoring.magnitudes(heads).pow(3).sum()
    for gradient in torch.autograd.grad(total, (heads, relations)):
        assert bool(torch.isfinite(gradient).all())


def test_magnitudes_are_absolute_values_or_moduli() -> None:
    """What the N3 regulariser cubes (Lacroix et al., 2018, for real and complex factorisations)."""
    rows, _, _ = draw("complex", 10, 3, 8)
    np.testing.assert_allclose(SCORING["distmult"].magnitudes(rows), np.abs(rows), rtol=1e-12)
    moduli = np.stack([np.abs(as_complex(row)) for row in rows])
    np.testing.assert_allclose(SCORING["complex"].magnitudes(rows), moduli, rtol=1e-12)


def test_transe_and_rotate_measure_lengths_of_differences_not_their_squares() -> None:
    far, near = np.array([[3.0, 4.0]]), np.array([[0.0, 0.0]])
    assert score_pairs("l2", far, near) == pytest.approx([-5.0])
    assert score_pairs("l1", far, near) == pytest.approx([-7.0])


def test_distmult_cannot_tell_a_triple_from_its_reverse_but_complex_can() -> None:
    for name, symmetric in (("distmult", True), ("complex", False)):
        heads, relations, tails = draw(name, 11, 4, 8)
        scoring = SCORING[name]
        there = score_pairs("dot", scoring.query_tails(heads, relations), tails)
        back = score_pairs("dot", scoring.query_tails(tails, relations), heads)
        assert np.allclose(there, back) is symmetric


@pytest.mark.parametrize("name", NAMES)
def test_relation_rows_are_as_wide_as_the_model_says(name: str) -> None:
    assert SCORING[name].relation_dim(12) == (6 if name == "rotate" else 12)


@pytest.mark.parametrize("dim", [0, -2])
@pytest.mark.parametrize("name", NAMES)
def test_a_dim_below_one_is_refused(name: str, dim: int) -> None:
    with pytest.raises(ConfigError, match=f"dim must be >= 1, got {dim}"):
        SCORING[name].check_dim(dim)


def test_odd_dims_are_refused_for_complex_rows_only() -> None:
    assert COMPLEX == ["complex", "rotate"]
    for name in NAMES:
        if name in COMPLEX:
            with pytest.raises(ConfigError, match="dim must be even for complex embeddings, got 7"):
                SCORING[name].check_dim(7)
        else:
            SCORING[name].check_dim(7)
        SCORING[name].check_dim(8)


@pytest.mark.parametrize("name", NAMES)
def test_initial_scales_are_usable(name: str) -> None:
    for init in (SCORING[name].entity_init(50), SCORING[name].relation_init(50)):
        assert init.scale > 0
        assert np.isfinite(init.scale)


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


@pytest.mark.parametrize("name", NAMES)
def test_either_way_the_score_of_a_link_is_the_papers(name: str) -> None:
    heads, relations, tails = draw(name, 12, 6, 8)
    inverse = np.random.default_rng(13).standard_normal(relations.shape)
    plain = LinkModel(name=name, dim=8, num_entities=6, num_relations=6, reciprocal=False)
    reciprocal = replace(plain, reciprocal=True)
    table = np.concatenate([relations, inverse])
    ids = np.arange(6)

    def scores(model: LinkModel, side: Any, anchors: Row, answers: Row) -> Row:
        queries = model.queries(side, anchors, table[model.relation_row(side, ids)])
        return score_pairs(model.metric, queries, answers)

    truth = paper_scores(name, heads, relations, tails)
    turned = paper_scores(name, tails, inverse, heads)
    np.testing.assert_allclose(scores(plain, "tail", heads, tails), truth, rtol=1e-10)
    np.testing.assert_allclose(scores(plain, "head", tails, heads), truth, rtol=1e-10)
    np.testing.assert_allclose(scores(reciprocal, "tail", heads, tails), truth, rtol=1e-10)
    np.testing.assert_allclose(scores(reciprocal, "head", tails, heads), turned, rtol=1e-10)
    assert not np.allclose(truth, turned)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_link_model_survives_its_json_form(name: str, reciprocal: bool) -> None:
    model = LinkModel(name=name, dim=6, num_entities=3, num_relations=2, reciprocal=reciprocal)
    stored = model.to_dict()
    assert LinkModel.from_dict(stored) == model
    assert stored["relation_dim"] == (3 if name == "rotate" else 6)
    assert stored["metric"] == {"transe": "l2", "rotate": "l2", "transe-l1": "l1"}.get(name, "dot")


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown scoring function 'conve' \(known: .*complex"):
        replace(LINK, name="conve")
    with pytest.raises(ConfigError, match="dim must be even"):
        replace(LINK, dim=5)
