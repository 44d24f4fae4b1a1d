"""Quaternions, octonions and Clifford algebras multiply as their tables say."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from cases import draw
from papers import PAPER, Row, blade_product, clifford_product, octonion_product, quaternion_product

from kgshard.models import find_scoring
from kgshard.models.hypercomplex import conjugate, multiply

PRODUCTS = {4: quaternion_product, 8: octonion_product}
SIZES = (2, 4, 8)


def times(x: Row, y: Row) -> Row:
    return np.array(multiply(list(x), list(y)))


def bar(x: Row) -> Row:
    return np.array(conjugate(list(x)))


@pytest.mark.parametrize("size", PRODUCTS)
def test_basis_elements_multiply_as_in_hamiltons_and_cayleys_tables(size: int) -> None:
    for x, y in product(np.eye(size), repeat=2):
        assert times(x, y).tolist() == PRODUCTS[size](x, y).tolist()


def test_with_two_parts_the_product_is_that_of_complex_numbers() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 2))
    expected = complex(*a) * complex(*b)
    np.testing.assert_allclose(times(a, b), [expected.real, expected.imag], rtol=1e-14)


@pytest.mark.parametrize("size", SIZES)
def test_lengths_multiply(size: int) -> None:
    """What makes these the algebras where a unit only turns."""
    for x, y in np.random.default_rng(2).standard_normal((20, 2, size)):
        assert np.linalg.norm(times(x, y)) == pytest.approx(np.linalg.norm(x) * np.linalg.norm(y))


@pytest.mark.parametrize("size", SIZES)
def test_multiplying_by_the_conjugate_is_the_adjoint_from_either_side(size: int) -> None:
    for h, r, t in np.random.default_rng(3).standard_normal((20, 3, size)):
        assert times(h, r) @ t == pytest.approx(times(t, bar(r)) @ h)
        assert times(h, r) @ t == pytest.approx(times(bar(h), t) @ r)


def test_quaternions_do_not_commute_and_octonions_do_not_associate() -> None:
    x, y, z = np.random.default_rng(4).standard_normal((3, 8))
    assert not np.allclose(times(x[:4], y[:4]), times(y[:4], x[:4]))
    assert np.allclose(times(times(x[:4], y[:4]), z[:4]), times(x[:4], times(y[:4], z[:4])))
    assert not np.allclose(times(times(x, y), z), times(x, times(y, z)))
    assert np.allclose(times(times(x, x), y), times(x, times(x, y)))  # They are alternative.


@pytest.mark.parametrize(("p", "q"), [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 3), (3, 1)])
def test_the_oracles_blades_obey_the_laws_of_a_clifford_algebra(p: int, q: int) -> None:
    for i, j in product(range(p + q), repeat=2):
        forwards, backwards = blade_product(1 << i, 1 << j, p), blade_product(1 << j, 1 << i, p)
        if i == j:
            assert forwards == (1 if i < p else -1, 0)
        else:
            assert forwards == (-backwards[0], backwards[1]) == (forwards[0], 1 << i | 1 << j)
    for a, b, c in product(range(1 << (p + q)), repeat=3):
        (s, ab), (t, bc) = blade_product(a, b, p), blade_product(b, c, p)
        (u, left), (v, right) = blade_product(ab, c, p), blade_product(a, bc, p)
        assert (s * u, left) == (t * v, right)


@pytest.mark.parametrize("algebra", ["0,0", "1,0", "0,1", "2,0", "1,1", "0,2", "2,3", "3,1"])
@pytest.mark.parametrize("family", ["keci", "ckeci"])
def test_keci_multiplies_in_any_clifford_algebra(family: str, algebra: str) -> None:
    p, q = map(int, algebra.split(","))
    random, name = np.random.default_rng(5), f"{family}:{algebra}"
    scoring = find_scoring(name)
    h, r, t = random.standard_normal((3, 4, 1 + p + q))
    weights = np.ones(p + q)
    if scoring.shared_init(4 * (1 + p + q)):
        weights = random.standard_normal(p + q)
        scoring = scoring.bind({"coefficients": weights})
    blades = [0, *(1 << i for i in range(p + q))]
    scale = np.array([1, *weights])
    expected = 0.0
    for x, y, z in zip(h, r, t, strict=True):
        found = clifford_product(
            dict(zip(blades, scale * x, strict=True)), dict(zip(blades, scale * y, strict=True)), p
        )
        # The inner product with t leaves out the bivectors, of which t has none.
        expected += sum(found[blade] * value for blade, value in zip(blades, z, strict=True))
    heads, relations, tails = (part.T.ravel() for part in (h, r, t))
    for queries, answers in (
        (scoring.query_tails(heads, relations), tails),
        (scoring.query_heads(tails, relations), heads),
        (scoring.query_relations(heads, tails), relations),
    ):
        assert queries @ answers == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("one", "other"), [("ckeci:0,1", "complex"), ("ckeci:0,0", "distmult")])
def test_small_clifford_algebras_are_models_one_knows(one: str, other: str) -> None:
    case = draw(one, 6, 5, 8)
    triples = zip(case.heads, case.relations, case.tails, strict=True)
    np.testing.assert_allclose(
        case.scores("tail"), [PAPER[other](*triple, {}) for triple in triples], rtol=1e-12
    )


def test_keci_without_learned_values_starts_as_ckeci() -> None:
    (how,) = find_scoring("keci:2,1").shared_init(8).values()
    assert (how.shape, how.init.scale, how.init.center) == ((3,), 0.0, 1.0)
    assert find_scoring("ckeci:2,1").shared_init(8) == {}
    assert find_scoring("keci:0,0").shared_init(8) == {}


@pytest.mark.parametrize("name", ["quate", "duale"])
def test_a_unit_relation_keeps_the_length_of_what_it_turns(name: str) -> None:
    case = draw(name, 7, 6, 24)
    turned = case.scoring.query_tails(case.heads, case.relations)
    width = case.dim if name == "quate" else case.dim // 2  # DualE shifts the dual part.
    np.testing.assert_allclose(
        np.linalg.norm(turned[:, :width], axis=1), np.linalg.norm(case.heads[:, :width], axis=1), rtol=1e-12
    )
