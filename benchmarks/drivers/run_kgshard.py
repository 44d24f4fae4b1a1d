"""kgshard: the trainer of `kgshard train`, its ranker, and `RowWiseShardedEmbedding` with its optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from measuring import Task, Window, main, on_ranks, together, triples_of, zipf_batches
from torch import Tensor

from kgshard.config import TrainConfig
from kgshard.distributed import joined_exchange
from kgshard.embedding import RowWiseShardedEmbedding
from kgshard.exchange import Exchange, SingleExchange
from kgshard.known import KnownLinks
from kgshard.memory import keep_freed_memory
from kgshard.models.link import SIDES
from kgshard.optim import OPTIMIZERS
from kgshard.ranking.metrics import Ranks, ranking_metrics
from kgshard.ranking.ranker import Ranker
from kgshard.sharded_model.entity_optimizer import EntityOptimizer
from kgshard.training.assemble import build_sampler, build_trainer
from kgshard.training.batches import Batch
from kgshard.training.trainer import Trainer

_CPU = torch.device("cpu")


def training(given: dict[str, Any]) -> dict[str, Any]:
    """Train ComplEx, `negatives` a side that a batch shares."""
    return _on_ranks(_training, given)


def _training(given: dict[str, Any]) -> dict[str, Any]:
    with joined_exchange(_CPU) as exchange:
        trainer, batches = _trainer(exchange, given)
        window = Window(given)
        for batch in batches:
            trainer.step(batch)
            if window.step():
                break
    return window.figures(items_a_step=given["batch_size"] / exchange.world_size)


def _trainer(exchange: Exchange, given: dict[str, Any]) -> tuple[Trainer, Iterator[Batch]]:
    """Return a trainer as `kgshard train` sets it up, and batches for ever."""
    keep_freed_memory()
    torch.set_flush_denormal(True)
    triples, num_entities, num_relations = triples_of(given)
    names = ("dim", "batch_size", "negatives", "optimizer", "dtype")
    config = TrainConfig(**{name: given[name] for name in names if name in given})
    model = config.link_model(num_entities=num_entities, num_relations=num_relations)
    sampler = build_sampler(exchange, model, triples, config)
    trainer = build_trainer(exchange, model, config, num_updates=len(sampler))
    return trainer, (batch for epoch in count() for batch in sampler.epoch(epoch))


def evaluation(given: dict[str, Any]) -> dict[str, Any]:
    """Train an epoch, then rank all test triples on both sides, filtered by all splits; a call is a step."""
    with np.load(given["graph"]) as graph:
        train, valid, test = (graph[name] for name in ("train", "valid", "test"))
        num_relations = int(graph["num_relations"])
    known = np.concatenate([train, valid, test])
    trainer, batches = _trainer(SingleExchange(), given)
    for _ in range(-(-len(train) // given["batch_size"])):
        trainer.step(next(batches))
    parameters, window = trainer.parameters, Window(given)
    window.begin()
    while True:
        links = {side: KnownLinks(known, side, num_relations=num_relations) for side in SIDES}
        ranker = Ranker(trainer.model, parameters.entities, parameters.relations)
        ranking_metrics(Ranks.join([ranker.rank(side, test, links[side]) for side in SIDES]))
        if window.step():
            return window.figures(items_a_step=2 * len(test))


def lookup(given: dict[str, Any]) -> dict[str, Any]:
    """Look rows up, square their distance from a target, and update them; see run_torch."""
    return _on_ranks(_lookup, given)


def _lookup(given: dict[str, Any]) -> dict[str, Any]:
    with joined_exchange(_CPU, given.get("transport", "auto")) as exchange:
        rank, ranks, rows = exchange.rank, exchange.world_size, given["entities"]
        table = RowWiseShardedEmbedding(
            rows, given["dim"], rank, ranks, _CPU, torch.float32, exchange=exchange
        )
        rule = OPTIMIZERS[given["optimizer"]](table.weight.data, lr=0.01)
        optimizer = EntityOptimizer(table.weight, rule)
        target, window = torch.randn(given["ids"], given["dim"]), Window(given)
        for ids in zipf_batches(given, rank):
            optimizer.zero_grad()
            (table(torch.from_numpy(ids)) - target).square().mean().backward()
            optimizer.step()
            if window.step():
                break
    return window.figures(items_a_step=given["ids"])


def traffic(given: dict[str, Any]) -> dict[str, Any]:
    """Count the bytes that leave a rank for another in training steps, announcements left out."""
    ranks = on_ranks(_traffic, given)
    positives = given["batch_size"] * given["steps"]
    kinds = sorted(set().union(*ranks))
    sent = {kind: sum(rank[kind] for rank in ranks) / positives for kind in kinds}
    return {"bytes": sent, "steps": given["steps"]}


def _traffic(given: dict[str, Any]) -> Counter[str]:
    with joined_exchange(_CPU) as exchange:
        trainer, batches = _trainer(exchange, given)
        sent = _counted(exchange)
        for _ in range(given["steps"]):
            trainer.step(next(batches))
    return sent


def _counted(exchange: Exchange) -> Counter[str]:
    """Return what will count the bytes that an exchange sends to others, by their kind."""
    sent: Counter[str] = Counter()
    swap, all_reduce = exchange.swap, exchange.all_reduce

    def counted_swap(rows: Tensor, sends: Sequence[int], *more: Any, **named: Any) -> Any:
        elsewhere = len(rows) - sends[exchange.rank]
        sent[named["kind"]] += elsewhere * rows[:1].numel() * rows.element_size()
        return swap(rows, sends, *more, **named)

    def counted_all_reduce(tensor: Tensor) -> Tensor:
        sent["sum"] += tensor.nbytes * (exchange.world_size - 1)
        return all_reduce(tensor)

    exchange.swap, exchange.all_reduce = counted_swap, counted_all_reduce  # type: ignore[method-assign]
    return sent


def _on_ranks(function: Task, given: dict[str, Any]) -> dict[str, Any]:
    ranks = given.get("ranks", 1)
    return function(given) if ranks == 1 else together(on_ranks(function, given, world_size=ranks))


if __name__ == "__main__":
    tasks = {"training": training, "evaluation": evaluation, "lookup": lookup, "traffic": traffic}
    main(tasks, "kgshard", "torch", "numpy")
