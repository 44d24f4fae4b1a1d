"""Every scoring function is what its paper says, asked from either end, alone or in a crowd."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cases import BOTH_WAYS, NAMES, QUESTIONS, arrays, ask, draw, score, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from papers import PAPER, as_complex

from kgshard.errors import ConfigError
from kgshard.models import SCORING, find_scoring
from kgshard.models.scoring import Side

WITH_RELATION_QUERIES = [name for name in NAMES if find_scoring(name).has_relation_queries]


def test_every_model_is_checked_against_its_paper() -> None:
    assert set(SCORING) <= set(PAPER)
    assert {name.partition(":")[0] for name in PAPER} == set(SCORING)


def test_the_paper_formulas_differ_from_each_other() -> None:
    # A control: were two of them the same, a model under the wrong name would pass.
    scores = {}
    for name in set(SCORING) - {"ckeci"}:  # Which in Cl(0, 1) is complex.
        case = draw(name, 3, 1, 24)
        h, r, t = np.random.default_rng(4).standard_normal((3, 24 * 24))
        scores[name] = round(PAPER[name](h[:24], r[: case.relations.shape[1]], t[:24], case.shared), 6)
    assert len(set(scores.values())) == len(scores)


@pytest.mark.parametrize(("name", "side"), QUESTIONS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), at_least=st.integers(1, 24), num_rows=st.integers(1, 4))
def test_matches_the_paper_from_both_ends(
    name: str, side: Side, seed: int, at_least: int, num_rows: int
) -> None:
    case = draw(name, seed, num_rows, at_least)
    np.testing.assert_allclose(case.scores(side), case.paper_scores(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", WITH_RELATION_QUERIES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), at_least=st.integers(1, 24))
def test_the_inner_product_of_a_relation_query_with_the_relations_row_is_the_score(
    name: str, seed: int, at_least: int
) -> None:
    case = draw(name, seed, 3, at_least)
    queries = case.scoring.query_relations(case.heads, case.tails)
    assert queries.shape == case.relations.shape
    found = (queries * case.relations).sum(-1)
    np.testing.assert_allclose(found, case.paper_scores(), rtol=1e-9, atol=1e-9)


def test_relations_can_be_asked_for_where_the_score_is_linear_in_their_rows() -> None:
    linear = {"distmult", "cp", "simple", "rescal", "tucker", "complex", "qmult", "omult", "keci", "ckeci"}
    assert {name.partition(":")[0] for name in WITH_RELATION_QUERIES} == linear
    for name in set(NAMES) - set(WITH_RELATION_QUERIES):
        case = draw(name, 1, 1, 8)
        with pytest.raises(ConfigError, match="has no query for relations"):
            case.scoring.query_relations(case.heads, case.tails)


def test_only_the_neural_network_cannot_ask_for_heads() -> None:
    assert {name.partition(":")[0] for name in set(NAMES) - set(BOTH_WAYS)} == {"conve"}
    case = draw("conve", 1, 1, 8)
    with pytest.raises(ConfigError, match="has no query for heads; use reciprocal relations"):
        case.scoring.query_heads(case.tails, case.relations)


@pytest.mark.parametrize(("name", "side"), QUESTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_and_torch_ask_the_same_queries(name: str, side: Side, dtype: npt.DTypeLike) -> None:
    case = draw(name, 5, 7, 10)
    rows = [part.astype(dtype) for part in (case.heads, case.relations, case.tails)]
    shared = arrays(case.shared, dtype)
    in_numpy, in_torch = (
        find_scoring(name).bind(values)
        for values in (shared, {key: torch.from_numpy(value) for key, value in shared.items()})
    )
    ours, answers = ask(in_numpy, side, *rows)
    theirs, same_answers = ask(in_torch, side, *map(torch.from_numpy, rows))
    pairs = [(ours, theirs), (in_numpy.candidates(side, answers), in_torch.candidates(side, same_answers))]
    if in_numpy.has_relation_queries:
        both = [values.query_relations for values in (in_numpy, in_torch)]
        pairs.append((both[0](rows[0], rows[2]), both[1](*map(torch.from_numpy, rows[::2]))))
    tolerance = 2e-5 if dtype == np.float32 else 1e-12
    for mine, other in pairs:
        assert mine.shape == tuple(other.shape)
        assert mine.dtype == other.numpy().dtype == dtype
        np.testing.assert_allclose(mine, other.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "side"), QUESTIONS)
def test_one_relation_row_serves_many_anchors(name: str, side: Side) -> None:
    case = draw(name, 6, 5, 8)
    together, _ = ask(case.scoring, side, case.heads, case.relations[0], case.tails)
    alone = [
        ask(case.scoring, side, h, case.relations[0], t)[0]
        for h, t in zip(case.heads, case.tails, strict=True)
    ]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "side"), QUESTIONS)
def test_one_anchor_serves_many_relations(name: str, side: Side) -> None:
    case = draw(name, 7, 5, 8)
    together, _ = ask(case.scoring, side, case.heads[0], case.relations, case.tails[0])
    alone = [ask(case.scoring, side, case.heads[0], r, case.tails[0])[0] for r in case.relations]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "side"), QUESTIONS)
@pytest.mark.parametrize("size", [96, 95])
def test_a_triple_scores_the_same_alone_and_in_any_company(name: str, side: Side, size: int) -> None:
    """Batch = entities = dim = 96: a product over the wrong axis would go unnoticed there (B33)."""
    case, metric = draw(name, size, size, size), find_scoring(name).metric
    scoring = find_scoring(name).bind(tensors(case.shared, torch.float32))
    random = np.random.default_rng(size)
    entities, relations = (torch.tensor(part * 0.3).float() for part in (case.heads, case.relations))
    head_ids, tail_ids = torch.tensor(random.integers(0, size, (2, size)))
    heads, tails = entities[head_ids], entities[tail_ids]
    case.heads, case.relations, case.tails = (part.double().numpy() for part in (heads, relations, tails))
    expected = case.paper_scores()
    tolerance = 1e-5 * (1 + np.abs(expected).max())

    queries, answers = ask(scoring, side, heads, relations, tails)
    candidates = scoring.candidates(side, entities)
    batch = metric.score_pairs(queries, scoring.candidates(side, answers))
    assert batch.shape == (size,)
    alone = torch.stack([score(scoring, side, *row) for row in zip(heads, relations, tails, strict=True)])
    everyone = metric.score_all(queries, candidates)
    assert everyone.shape == (size, size)
    sample = torch.tensor(random.integers(0, size, 40))
    sampled = metric.score_all(queries, candidates[sample], exact=False)
    assert sampled.shape == (size, 40)
    one_by_one = metric.score_all(queries[:1], candidates)
    right = everyone[torch.arange(size), tail_ids if side == "tail" else head_ids]
    for scores in (batch, alone, right):
        np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=tolerance)
    np.testing.assert_allclose(one_by_one[0], everyone[0], rtol=1e-5, atol=tolerance)
    far = everyone[:, sample].abs() > 0.5  # The matmul form is loose for close pairs, as documented.
    np.testing.assert_allclose(sampled[far], everyone[:, sample][far], rtol=1e-5, atol=tolerance)


def test_magnitudes_are_absolute_values_or_the_sizes_of_larger_numbers() -> None:
    """What the N3 regulariser cubes (Lacroix et al., 2018, for real and complex factorisations)."""
    rows = draw("complex", 10, 3, 24).heads
    np.testing.assert_allclose(find_scoring("distmult").magnitudes(rows), np.abs(rows), rtol=1e-12)
    moduli = np.stack([np.abs(as_complex(row)) for row in rows])
    for name in ("complex", "keci", "ckeci"):
        np.testing.assert_allclose(find_scoring(name).magnitudes(rows), moduli, rtol=1e-12)
    for name, size in (("qmult", 4), ("quate", 4), ("omult", 8), ("duale", 8), ("keci:2,3", 6)):
        sizes = np.linalg.norm(rows.reshape(3, size, -1), axis=1)
        np.testing.assert_allclose(find_scoring(name).magnitudes(rows), sizes, rtol=1e-12)


def test_factors_are_the_sizes_of_what_the_score_multiplies() -> None:
    for name, wanted in (("complex", 3), ("qmult", 3), ("duale", 3), ("quate", 2)):
        case = draw(name, 11, 3, 24)
        assert len(case.scoring.factors(case.heads, case.relations, case.tails)) == wanted
    case = draw("cp", 11, 3, 24)
    parts = case.scoring.factors(case.heads, case.relations, case.tails)
    for part, row in zip(parts, (case.heads[:, :12], case.relations, case.tails[:, 12:]), strict=True):
        np.testing.assert_allclose(part, np.abs(row))
    case = draw("mure", 11, 3, 24)
    parts = case.scoring.factors(case.heads, case.relations, case.tails)
    for part, row in zip(
        parts, (case.heads[:, :22], case.relations[:, 22:], case.tails[:, :22]), strict=True
    ):
        np.testing.assert_allclose(part, np.abs(row))


@pytest.mark.parametrize("name", ["quate", "duale"])
def test_what_a_unit_relation_leaves_out_is_not_regularised(name: str) -> None:
    case = draw(name, 12, 3, 24)
    longer = case.relations.copy()
    longer[:, : 24 if name == "quate" else 12] *= 7.0
    before = case.scoring.factors(case.heads, case.relations, case.tails)
    after = case.scoring.factors(case.heads, longer, case.tails)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    scores = case.scores("tail")
    case.relations = longer
    np.testing.assert_allclose(case.scores("tail"), scores, rtol=1e-10)


def test_transe_and_rotate_measure_lengths_of_differences_not_their_squares() -> None:
    far, near = np.array([[3.0, 4.0]]), np.array([[0.0, 0.0]])
    assert find_scoring("transe").metric.score_pairs(far, near) == pytest.approx([-5.0])
    assert find_scoring("transe-l1").metric.score_pairs(far, near) == pytest.approx([-7.0])
    assert find_scoring("rotate-moduli").metric.score_pairs(far, near) == pytest.approx([-5.0])


def test_only_distmult_cannot_tell_a_triple_from_its_reverse() -> None:
    symmetric = []
    for name in SCORING:
        case = draw(name, 11, 4, 8)
        there = case.scores("tail")
        case.heads, case.tails = case.tails, case.heads
        symmetric += [name] if np.allclose(there, case.scores("tail")) else []
    assert symmetric == ["distmult"]
