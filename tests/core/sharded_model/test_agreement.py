"""Ranks that ask for different tables or optimizers all stop, with the same words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_models import Stranger
from worlds import ThreadWorld

from kgshard import optim
from kgshard.exchange import Exchange
from kgshard.sharded_model.lifecycle import create_fsdp_sharded_model_class


class Noted(optim.SGD):
    """Takes a setting whose words hold its address in memory, another one in each process."""

    def __init__(self, weight: torch.Tensor, *, lr: float, note: object, **storage: Any) -> None:
        super().__init__(weight, lr=lr, **storage)


def set_up(exchange: Exchange, first: dict[str, Any], last: dict[str, Any]) -> str:
    """Set up a model with `last` on the last rank and `first` elsewhere; return the refusal."""
    asked = {"lr": 0.1, **(last if exchange.rank == exchange.world_size - 1 else first)}
    sizes = {name: asked.pop(name) for name in ("num_entities", "dim") if name in asked}
    model: Any = create_fsdp_sharded_model_class(Stranger)(**sizes).to(asked.pop("dtype", torch.float32))
    try:
        model.setup_fsdp_training("cpu", exchange=exchange, **asked)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "entities": ({}, {"num_entities": 8}, "num_embeddings is 7 on rank 0 and 8 on rank {}"),
    "dim": ({}, {"dim": 5}, "embedding_dim is 4 on rank 0 and 5 on rank {}"),
    "dtype": ({}, {"dtype": torch.float64}, "dtype is torch.float32 on rank 0 and torch.float64 on rank {}"),
    "lr": ({}, {"lr": 0.2}, "lr is 0.1 on rank 0 and 0.2 on rank {}"),
    "seed": ({"seed": 1}, {"seed": 2}, "seed is 1 on rank 0 and 2 on rank {}"),
    "seed on one": ({}, {"seed": 2}, "seed is None on rank 0 and 2 on rank {}"),
    "optimizer": (
        {},
        {"optimizer_cls": optim.SGD},
        "optimizer_cls is <class 'kgshard.optim.adam.SparseAdam'> on rank 0 and"
        " <class 'kgshard.optim.sgd.SGD'> on rank {}",
    ),
    "setting": (
        {"optimizer_kwargs": {"eps": 1e-8}},
        {"optimizer_kwargs": {"eps": 1e-6}},
        "eps is 1e-08 on rank 0 and 1e-06 on rank {}",
    ),
    "setting on one": (
        {},
        {"optimizer_kwargs": {"eps": 1e-6}},
        "eps is not set on rank 0 and 1e-06 on rank {}",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_ask_for_different_things_are_all_refused(name: str, world_size: int) -> None:
    first, last, words = REQUESTS[name]
    refusal = (
        f"ConfigError: setup_fsdp_training: {words.format(world_size - 1)};"
        " all ranks must ask for the same table and optimizer"
    )
    assert ThreadWorld(world_size).run(set_up, first, last) == [refusal] * world_size


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({}, {"optimizer_cls": torch.optim.SparseAdam}),
        ({"lr": 1}, {"lr": 1.0}),
        ({}, {"optimizer_kwargs": {"lr": 0.1}}),
        (
            {"optimizer_kwargs": {"eps": 1.0, "betas": (0.5, 0.5)}},
            {"optimizer_kwargs": {"betas": (0.5, 0.5), "eps": 1.0}},
        ),
        ({"adam_device": "cpu"}, {}),
        (
            {"optimizer_cls": Noted, "optimizer_kwargs": {"note": object()}},
            {"optimizer_cls": Noted, "optimizer_kwargs": {"note": object()}},
        ),
    ],
)
def test_the_same_in_other_words_is_the_same(first: dict[str, Any], last: dict[str, Any]) -> None:
    assert ThreadWorld(2).run(set_up, first, last) == ["accepted"] * 2


def test_what_one_rank_may_not_ask_for_stops_all() -> None:
    own = "ConfigError: lr must be > 0, got -1.0"
    assert ThreadWorld(2).run(set_up, {}, {"lr": -1.0}) == [f"RankFailureError: rank 1: {own}", own]
