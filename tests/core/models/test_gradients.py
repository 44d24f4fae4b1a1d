"""Gradients of every scoring function: right, finite on dead rows, and alive at the start."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import NAMES, QUESTIONS, Case, ask, draw, score, tensors
from papers import PAPER

from kgshard.initialise import fill_initial_rows, initial_shared
from kgshard.models import find_scoring
from kgshard.models.scoring import Side

Leaves = tuple[torch.Tensor, ...]


def plain_score(name: str, h: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Write one triple's score in torch's own operations, for models that have a short formula."""
    middle, half = len(h) // 2, len(r) // 2
    if name == "distmult":
        return torch.sum(h * r * t)
    if name == "cp":
        return torch.sum(h[:middle] * r * t[middle:])
    if name == "simple":
        both = h[:middle] * r[:middle] * t[middle:] + t[:middle] * r[middle:] * h[middle:]
        return torch.sum(both) / 2
    if name == "rescal":
        return torch.einsum("i,ij,j->", h, r.view(len(h), len(t)), t)
    if name == "transe":
        return -torch.sqrt(torch.sum((h + r - t) ** 2))
    if name == "transe-l1":
        return -torch.sum(torch.abs(h + r - t))
    if name == "transh":
        difference, normal = h + r[:half] - t, torch.nn.functional.normalize(r[half:], dim=0)
        return -torch.sqrt(torch.sum((difference - torch.dot(difference, normal) * normal) ** 2))
    if name == "mure":
        return -torch.sum((r[:half] * h[:-2] + r[half:] - t[:-2]) ** 2) + h[-2] + t[-1]
    if name == "protate":
        return -2 * torch.sum(torch.abs(torch.sin((h + r - t) / 2)))
    x, z = (torch.complex(*part.chunk(2)) for part in (h, t))
    if name == "complex":
        return torch.sum(x * torch.complex(*r.chunk(2)) * z.conj()).real
    moduli = torch.abs(x * torch.polar(torch.ones_like(r), r) - z)
    return -torch.sqrt(torch.sum(moduli**2)) if name == "rotate" else -torch.sum(moduli)


PLAIN = [
    *("distmult", "cp", "simple", "rescal", "complex", "transe", "transe-l1", "transh", "mure"),
    *("rotate", "rotate-moduli", "protate"),
]


def leaves_of(case: Case) -> Leaves:
    """Return the rows of one triple as tensors that want gradients."""
    rows = (case.heads[0], case.relations[0], case.tails[0])
    return tuple(torch.tensor(row, requires_grad=True) for row in rows)


@pytest.mark.parametrize(("name", "side"), [pair for pair in QUESTIONS if pair[0] in PLAIN])
def test_gradients_are_those_of_the_plain_formula(name: str, side: Side) -> None:
    leaves = leaves_of(draw(name, 8, 1, 12))
    ours = torch.autograd.grad(score(find_scoring(name), side, *leaves), leaves)
    plain = torch.autograd.grad(plain_score(name, *leaves), leaves)
    for mine, theirs in zip(ours, plain, strict=True):
        assert float(theirs.abs().max()) > 1e-3
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "side"), QUESTIONS)
def test_gradients_equal_finite_differences_of_the_paper(name: str, side: Side) -> None:
    """Along random directions, in rows and in shared parameters."""
    case = draw(name, 9, 1, 6)
    leaves, shared = leaves_of(case), tensors(case.shared)
    for value in shared.values():
        value.requires_grad_()
    found = score(find_scoring(name).bind(shared), side, *leaves)
    every = (*leaves, *shared.values())
    gradients = torch.autograd.grad(found, every)
    values = [leaf.detach().numpy() for leaf in every]
    random, step = np.random.default_rng(10), 1e-6
    for which, gradient in enumerate(gradients):
        for _ in range(8):
            direction = random.standard_normal(values[which].shape)
            ends = []
            for sign in (1, -1):
                moved = [*values[:which], values[which] + sign * step * direction, *values[which + 1 :]]
                ends.append(PAPER[name](*moved[:3], dict(zip(shared, moved[3:], strict=True))))
            slope = float((gradient.numpy() * direction).sum())
            assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("name", "side"), QUESTIONS)
def test_rows_of_zeros_have_finite_gradients(name: str, side: Side, exact: bool) -> None:
    """A dead row must be able to come back: sqrt has an infinite slope at 0."""
    case = draw(name, 11, 2, 8)
    shared = {key: value.requires_grad_() for key, value in tensors(case.shared, torch.float32).items()}
    scoring = find_scoring(name).bind(shared)
    zeros = [torch.zeros(rows.shape, requires_grad=True) for rows in (case.heads, case.relations, case.tails)]
    drawn = [torch.tensor(rows).float() for rows in (case.heads, case.relations, case.tails)]
    for heads, relations, tails in (zeros, [zeros[0], *drawn[1:]], [*drawn[:2], zeros[2]]):
        queries, answers = ask(scoring, side, heads, relations, tails)
        candidates = scoring.candidates(side, answers)
        total = scoring.metric.score_pairs(queries, candidates).sum()
        total = total + scoring.metric.score_all(queries, candidates, exact=exact).sum()
        total = total + sum(size.pow(3).sum() for size in scoring.factors(heads, relations, tails))
        wanted = [leaf for leaf in (heads, relations, tails, *shared.values()) if leaf.requires_grad]
        for gradient in torch.autograd.grad(total, wanted, allow_unused=True):
            assert gradient is None or bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize(("name", "side"), QUESTIONS)
def test_rows_of_zeros_have_the_same_finite_score_in_numpy(name: str, side: Side) -> None:
    case = draw(name, 13, 2, 8)
    rows = [np.zeros_like(part) for part in (case.heads, case.relations, case.tails)]
    ours = score(case.scoring, side, *rows)
    theirs = score(find_scoring(name).bind(tensors(case.shared)), side, *map(torch.from_numpy, rows))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-12)
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("name", NAMES)
def test_training_moves_everything_from_the_start(name: str) -> None:
    """A product of factors that start at 0 would have no slope, and stay what it is."""
    case = draw(name, 12, 60, 24)
    scoring, rows = find_scoring(name), {}
    for table, width in (("entity", case.dim), ("relation", case.relations.shape[1])):
        init = scoring.entity_init(case.dim) if table == "entity" else scoring.relation_init(case.dim)
        rows[table] = torch.empty(60, width)
        fill_initial_rows(rows[table], init, seed=1, table=table, rows=range(60))
        rows[table].requires_grad_()
    shared = {
        key: value.requires_grad_()
        for key, value in initial_shared(scoring.shared_init(case.dim), seed=1).items()
    }
    heads, tails = rows["entity"], rows["entity"].roll(1, 0)
    bound = scoring.bind(shared)
    queries = bound.query_tails(heads, rows["relation"])
    scores = bound.metric.score_all(queries, bound.candidates("tail", tails))
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(60))
    for value in (*rows.values(), *shared.values()):
        (gradient,) = torch.autograd.grad(loss, value, retain_graph=True)
        assert float((gradient.abs() > 1e-12).double().mean()) > 0.5
