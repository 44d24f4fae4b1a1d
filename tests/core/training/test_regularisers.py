"""Penalties are the sums their papers write, over the rows that a question uses, each in its role."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_functions import Floats
from torch import Tensor

from kgshard.models.link import SIDES, LinkModel, Side
from kgshard.training.regularisers import Regulariser, UsedRows


def model(name: str = "complex", *, reciprocal: bool = True) -> LinkModel:
    return LinkModel(name, 6, num_entities=9, num_relations=2, reciprocal=reciprocal)


def draw(shape: LinkModel, number: int = 4) -> tuple[Floats, Floats, Floats]:
    """Return anchors, relations and answers, float64[number, ...]."""
    source = np.random.default_rng(7)
    dims = (shape.dim, shape.relation_dim, shape.dim)
    anchors, relations, answers = (source.normal(size=(number, dim)) for dim in dims)
    return anchors, relations, answers


def penalty(
    regulariser: Regulariser, shape: LinkModel, side: Side, rows: tuple[Floats, ...], *, answered: bool = True
) -> float:
    anchors, relations, answers = (torch.tensor(part) for part in rows)
    return regulariser(shape, side, *used(anchors, relations, answers, answered=answered)).item()


def used(
    anchors: Tensor, relations: Tensor, answers: Tensor, *, answered: bool = True
) -> tuple[UsedRows, UsedRows]:
    """Return rows that were each used once."""
    first, second = torch.arange(len(anchors)), torch.arange(len(answers)) + len(anchors)
    entities = UsedRows.of(torch.cat([anchors, answers]), first, second[: len(second) * answered])
    return entities, UsedRows.of(relations, torch.arange(len(relations)))


def moduli(row: Floats) -> Floats:
    return np.abs(row[..., :3] + 1j * row[..., 3:])


@pytest.mark.parametrize("side", SIDES)
def test_n3_sums_the_cubed_moduli_of_complex_rows(side: Side) -> None:
    rows = draw(model())
    expected = 0.3 * sum(float((moduli(part) ** 3).sum()) for part in rows)
    assert penalty(Regulariser(n3=0.3), model(), side, rows) == pytest.approx(expected, rel=1e-12)


def test_n3_sums_cubed_absolute_values_of_real_rows() -> None:
    rows = draw(model("distmult"))
    expected = sum(float((np.abs(part) ** 3).sum()) for part in rows)
    assert penalty(Regulariser(n3=1.0), model("distmult"), "tail", rows) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_l2_and_l3_sum_squares_and_absolute_cubes_of_all_coordinates(side: Side) -> None:
    rows = draw(model())
    squares = sum(float((part**2).sum()) for part in rows)
    cubes = sum(float((np.abs(part) ** 3).sum()) for part in rows)
    assert penalty(Regulariser(l2=0.2), model(), side, rows) == pytest.approx(0.2 * squares, rel=1e-12)
    assert penalty(Regulariser(l3=0.1), model(), side, rows) == pytest.approx(0.1 * cubes, rel=1e-12)


def test_penalties_add_up() -> None:
    rows = draw(model())
    parts = [Regulariser(n3=0.3), Regulariser(l2=0.2), Regulariser(l3=0.1)]
    together = penalty(Regulariser(n3=0.3, l2=0.2, l3=0.1), model(), "head", rows)
    expected = sum(penalty(part, model(), "head", rows) for part in parts)
    assert together == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("side", "reciprocal", "anchor_is_head"),
    [("tail", True, True), ("tail", False, True), ("head", True, True), ("head", False, False)],
)
def test_only_the_roles_that_rows_play_are_penalised(
    side: Side, reciprocal: bool, anchor_is_head: bool
) -> None:
    """CP rows have a half for each role. An inverse relation makes the given tail its head."""
    shape = model("cp", reciprocal=reciprocal)
    anchors, relations, answers = draw(shape)
    as_head, as_tail = slice(0, 3), slice(3, 6)
    mine, other = (as_head, as_tail) if anchor_is_head else (as_tail, as_head)
    sizes = (anchors[:, mine], relations, answers[:, other])
    expected = sum(float((np.abs(part) ** 3).sum()) for part in sizes)
    found = penalty(Regulariser(n3=1.0), shape, side, (anchors, relations, answers))
    assert found == pytest.approx(expected, rel=1e-12)
    without = penalty(Regulariser(n3=1.0), shape, side, (anchors, relations, answers), answered=False)
    assert without == pytest.approx(expected - float((np.abs(sizes[2]) ** 3).sum()), rel=1e-12)


def test_without_an_answer_of_its_own_a_question_has_two_rows() -> None:
    anchors, relations, answers = draw(model())
    regulariser = Regulariser(n3=0.3, l2=0.2, l3=0.1)
    found = penalty(regulariser, model(), "tail", (anchors, relations, answers), answered=False)
    expected = sum(
        0.3 * float((moduli(part) ** 3).sum())
        + 0.2 * float((part**2).sum())
        + 0.1 * float((np.abs(part) ** 3).sum())
        for part in (anchors, relations)
    )
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["complex", "cp", "mure"])
@pytest.mark.parametrize("side", SIDES)
def test_a_row_that_several_questions_use_counts_as_often(name: str, side: Side) -> None:
    shape = model(name, reciprocal=False)
    anchors, relations, answers = (torch.tensor(part) for part in draw(shape))
    entities = torch.cat([anchors, answers])
    asked, found, by = torch.tensor([[0, 0, 7, 3], [7, 5, 0, 3], [1, 1, 1, 2]])
    regulariser = Regulariser(n3=0.3, l2=0.2, l3=0.1)
    together = regulariser(shape, side, UsedRows.of(entities, asked, found), UsedRows.of(relations, by))
    rows = (entities[asked].numpy(), relations[by].numpy(), entities[found].numpy())
    assert together.item() == pytest.approx(penalty(regulariser, shape, side, rows), rel=1e-12)


@pytest.mark.parametrize("answered", [True, False])
def test_no_questions_cost_nothing(answered: bool) -> None:
    rows = draw(model(), number=0)
    assert penalty(Regulariser(n3=1, l2=1, l3=1), model(), "head", rows, answered=answered) == 0.0


def test_gradients_at_zero_are_zero() -> None:
    """A cube has a derivative there, though the absolute value in it has none."""
    parts: list[Tensor] = [torch.zeros(2, 6, requires_grad=True) for _ in range(3)]
    Regulariser(n3=1, l2=1, l3=1)(model(), "tail", *used(*parts)).backward()  # type: ignore[no-untyped-call]
    assert all(part.grad is not None and bool((part.grad == 0).all()) for part in parts)


def test_a_regulariser_is_true_where_it_does_something() -> None:
    assert not Regulariser()
    assert all(map(bool, (Regulariser(n3=1e-9), Regulariser(l2=1e-9), Regulariser(l3=1e-9))))
