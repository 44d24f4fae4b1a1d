"""What runs on a rank of the nightly tests with dicee, in an environment that has dicee and no pytest.

    RANK=0 WORLD_SIZE=2 KGSHARD_RENDEZVOUS=/tmp/meeting python dicee_ranks.py ComplEx report.json

Rank 0 writes what it saw to the report.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from kgshard.distributed import joined_exchange
from kgshard.exchange import Exchange
from kgshard.partition import RowPartition
from kgshard.sharded_model.lifecycle import create_fsdp_sharded_model_class

NUM_ENTITIES, NUM_RELATIONS, NUM_EPOCHS, LR = 41, 4, 20, 0.1


def arguments(name: str) -> dict[str, Any]:
    """Return the settings that dicee's models are made from."""
    return {
        "model": name,
        "embedding_dim": 24,
        "num_entities": NUM_ENTITIES,
        "num_relations": NUM_RELATIONS,
        "learning_rate": LR,
        "optim": "Adagrad",
        "scoring_technique": "NegSample",
        "init_param": "xavier_normal",
        # With p > 0, dicee's Keci sums over all tails of a batch ('brp, erp -> b'): a score depends on the
        # batch's other triples, and no split of a batch trains as the whole.
        "p": 0,
        "q": 1,
    }


def labelled_triples() -> tuple[Tensor, Tensor]:
    """Return int64[n, 3] triples and float[n] labels: relation r leads r + 1 entities on."""
    heads = torch.arange(NUM_ENTITIES).repeat_interleave(NUM_RELATIONS)
    relations = torch.arange(NUM_RELATIONS).repeat(NUM_ENTITIES)
    tails = (heads + relations + 1) % NUM_ENTITIES
    draws = torch.Generator().manual_seed(0)
    wrong = (tails + torch.randint(1, NUM_ENTITIES, tails.shape, generator=draws)) % NUM_ENTITIES
    triples = torch.cat([torch.stack([heads, relations, end], dim=1) for end in (tails, wrong)])
    labels = torch.cat([torch.ones(len(tails)), torch.zeros(len(tails))])
    order = torch.randperm(len(triples), generator=draws)
    return triples[order], labels[order]


def batches() -> list[tuple[Tensor, Tensor]]:
    triples, labels = labelled_triples()
    return list(zip(triples.split(64), labels.split(64), strict=True)) * NUM_EPOCHS


def train_plain(model: Any) -> list[float]:
    """Train dicee's own class alone, with its own optimizer; return the losses."""
    optimizer, losses = model.configure_optimizers(), []
    for triples, labels in batches():
        optimizer.zero_grad()
        loss = model.loss_function(model(triples), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_sharded(model: Any, exchange: Exchange) -> None:
    """Train the sharded variant on the same global batches, each rank its part."""
    model.setup_fsdp_training(exchange.device, LR, optimizer_cls=torch.optim.Adagrad)
    optimizer = model.configure_optimizers(parameters=model.dense_parameters())
    for triples, labels in batches():
        optimizer.zero_grad()
        model.entity_optimizer.zero_grad()
        part = RowPartition(len(triples), exchange.world_size).rows_of(exchange.rank)
        mine = slice(part.start, part.stop)
        loss = model.loss_function(model(triples[mine]), labels[mine])
        (loss * len(part) / len(triples)).backward()
        model.sync_dense_gradients()
        optimizer.step()
        model.entity_optimizer.step()


def train_with_dicees_trainer(model: Any, exchange: Exchange) -> list[float]:
    """Train with the steps of dicee's TorchFSDPTrainer, dense parameters in FSDP; return this rank's losses.

    The trainer is made without its __init__ and its wrapping of dense parameters, both of which need CUDA.
    """
    trainer_class = import_module("dicee.trainer.torch_trainer_fsdp").TorchFSDPTrainer
    trainer: Any = trainer_class.__new__(trainer_class)
    trainer.device, trainer.raw_model = exchange.device, model
    trainer.ctx = torch.amp.autocast("cpu", enabled=False)
    trainer.scaler = torch.amp.GradScaler("cuda", enabled=False)
    trainer.gradient_clip_val, trainer._adam_thread = None, None
    trainer.raw_model.to(trainer.device)
    trainer.model = FullyShardedDataParallel(model, device_id=trainer.device, use_orig_params=True)
    model.setup_fsdp_training(device=trainer.device, lr=LR, adam_device=torch.device("cpu"))
    trainer.loss_func = model.loss
    trainer.optimizer = model.configure_optimizers(parameters=trainer._collect_dense_params())
    losses = []
    for triples, labels in batches():
        mine = slice(exchange.rank, None, exchange.world_size)
        losses.append(trainer._run_batch(triples[mine], labels[mine]))
    trainer._adam_thread.join()
    return losses


def report_on(name: str, exchange: Exchange) -> dict[str, Any]:
    """Train one class plain, sharded, and with dicee's trainer; compare."""
    plain_class = getattr(import_module("dicee.models"), name)
    sharded_class = create_fsdp_sharded_model_class(plain_class)
    torch.manual_seed(1)
    plain = plain_class(arguments(name))
    model, other = (sharded_class(arguments(name)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    started = [deferred.entity_embeddings.num_embeddings for deferred in (model, other)]
    train_sharded(model, exchange)
    losses = train_plain(plain)
    pairs = labelled_triples()[0][:9, :2]
    scores = model(pairs).detach()
    entities, relations = model.get_embeddings()
    trainer_losses = train_with_dicees_trainer(other, exchange)
    table = other.gather_entity_embeddings_on_rank_zero()
    if entities is None:
        return {}
    truth = {key: value.detach() for key, value in plain.named_parameters()}
    return {
        "class": type(model).__name__,
        "started": started,
        "losses": [losses[0], losses[-1]],
        "entity gap": gap(torch.from_numpy(entities), truth["entity_embeddings.weight"]),
        "relation gap": gap(torch.from_numpy(relations), truth["relation_embeddings.weight"]),
        "score gap": gap(scores, plain(pairs).detach()),
        "trainer losses": [trainer_losses[0], trainer_losses[-1]],
        "gathered": list(table.weight.shape),
    }


def gap(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    return float((found - truth).abs().max())


def main() -> None:
    name, path = sys.argv[1:]
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with joined_exchange(torch.device("cpu")) as exchange:
        report = report_on(name, exchange)
    if report:
        Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
