"""How fast steps are: a few seconds of training, of which nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kgshard.config import TrainConfig
from kgshard.data.dataset import Triples, open_dataset
from kgshard.exchange import Exchange
from kgshard.training.assemble import build_sampler, build_trainer
from kgshard.training.batches import Batch, Sampler
from kgshard.training.tasks import joined_ranks

_NUM_TRIPLES = 1 << 20
"""Triples that are trained on, at most."""


def probe_rank(
    config: dict[str, Any], data: str | None, num_entities: int, num_relations: int, seconds: float
) -> dict[str, Any]:
    """Train for some seconds, as one of the ranks; the same result on every rank.

    Args:
        config: The settings; see `TrainConfig`.
        data: A prepared dataset whose triples are trained on, ids wrapped round the tables; None draws some
            evenly, the slowest case.
        num_entities: Rows of the entity table.
        num_relations: The same of relations, inverses not counted.
        seconds: How long, about; two steps are done in any case.

    Returns:
        {"triples_per_second", "steps"}: of the later half, when memory has been taken.
    """
    # No value matters here, and none may become infinite.
    harmless = {"lr": 1e-6, "warmup": 0, "decay": "constant", "final_lr": 0.0, "table_storage": "ram"}
    settings = TrainConfig.from_dict(config | harmless)
    model = settings.link_model(num_entities=num_entities, num_relations=num_relations)
    triples = _triples(data, [num_entities, num_relations, num_entities])
    with joined_ranks(settings.device, settings.transport) as exchange:
        sampler = build_sampler(exchange, model, triples, settings)
        trainer = build_trainer(exchange, model, settings, num_updates=1)
        batches, num_steps, total = _batches(sampler), 1, 0.0
        trainer.step(next(batches))
        while True:
            began, trained = time.monotonic(), 0
            for batch in islice(batches, num_steps):
                trainer.step(batch)
                trained += batch.num_triples
            taken = _mean(exchange, time.monotonic() - began)
            total += taken
            if 2 * total >= seconds:
                return {"triples_per_second": trained / taken, "steps": num_steps}
            num_steps *= 2


def _triples(data: str | None, limits: list[int]) -> Triples:
    """Return int[n, 3] triples of a graph whose tables are cut to `limits`."""
    if data is None:
        return np.random.default_rng(0).integers(limits, size=(_NUM_TRIPLES, 3))
    triples = open_dataset(Path(data)).triples("train")
    some: Triples = triples[:: -(-len(triples) // _NUM_TRIPLES)] % np.array(limits)
    return some


def _batches(sampler: Sampler) -> Iterator[Batch]:
    for epoch in count():
        yield from sampler.epoch(epoch)


def _mean(exchange: Exchange, seconds: float) -> float:
    """Return the mean over ranks, so that all decide alike."""
    own = torch.tensor([seconds], dtype=torch.float64, device=exchange.device)
    return float(exchange.all_reduce(own)) / exchange.world_size
