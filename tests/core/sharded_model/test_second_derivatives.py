"""Where a gradient of the sharded table would lack a part of its own gradient, torch says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_models import Stranger, sharded
from worlds import ThreadWorld

from kgshard.exchange import Exchange

WORDS = "marked with @once_differentiable"


def penalise_lookups(exchange: Exchange) -> None:
    """Train a factor by how large the gradient of looked-up rows is."""
    table = sharded(exchange, Stranger()).entity_embeddings
    factor = torch.ones(4, requires_grad=True)
    loss = (factor * table(torch.tensor([1, 1])).square()).sum()
    (gradient,) = torch.autograd.grad(loss, table.weight, create_graph=True)
    gradient.to_dense().square().sum().backward()


def penalise_scores(exchange: Exchange) -> None:
    """Train relations by how large the gradient of layers behind all scores is."""
    model = sharded(exchange, Stranger())
    loss = model.forward_k_vs_all(torch.tensor([[0, 1]])).square().sum()
    (gradient,) = torch.autograd.grad(loss, model.out.weight, create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize(
    ("world_size", "call"), [(1, penalise_lookups), (2, penalise_lookups), (2, penalise_scores)]
)
def test_a_second_derivative_through_the_table_is_refused(world_size: int, call: Any) -> None:
    def refused(exchange: Exchange) -> None:
        with pytest.raises(RuntimeError, match=WORDS):
            call(exchange)

    ThreadWorld(world_size).run(refused)


def test_other_gradients_have_gradients_of_their_own() -> None:
    """What a layer after the lookup learns from its own gradient needs the rows alone."""

    def penalised(exchange: Exchange) -> torch.Tensor:
        torch.manual_seed(0)
        plain = Stranger()
        outcomes = []
        for model in (plain, sharded(exchange, plain)):
            for name in ("relation_embeddings", "mix", "out"):
                getattr(model, name).load_state_dict(getattr(plain, name).state_dict())
            loss = model(torch.tensor([[0, 1, 2]])).square().sum()
            (gradient,) = torch.autograd.grad(loss, model.out.weight, create_graph=True)
            outcomes.append(torch.autograd.grad(gradient.square().sum(), model.mix.weight)[0])
        return torch.stack(outcomes)

    truth, ours = ThreadWorld(1).run(penalised)[0]
    assert float(truth.abs().max()) > 0
    torch.testing.assert_close(ours, truth)
