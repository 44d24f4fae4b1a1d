"""The composition root, on every rank: a run folder in, a trained run or its metrics out.

Settings end here: what this module calls takes plain arguments.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from kgshard.api import with_paths
from kgshard.checkpoint import save_checkpoint
from kgshard.config import TrainConfig
from kgshard.data.dataset import Triples
from kgshard.distributed import choose_device, joined_exchange
from kgshard.errors import KgshardError
from kgshard.evaluation import evaluate_on_ranks
from kgshard.exchange import Exchange
from kgshard.initialise import fill_initial_rows
from kgshard.launch import num_threads
from kgshard.models.link import LinkModel
from kgshard.optim import OPTIMIZERS
from kgshard.partition import RowPartition
from kgshard.progress import Progress, training_progress
from kgshard.runs import METRICS_FILE, Run, open_run
from kgshard.sampling import epoch_batches, num_batches
from kgshard.start import started_run
from kgshard.table import ShardedTable
from kgshard.trainer import Trainer


def train_rank(run: str, *, quiet: bool = False) -> dict[str, Any]:
    """Train a run that `started_run` made, as one of the ranks; the same result on every rank."""
    opened = open_run(run)
    config = TrainConfig.from_dict(opened.info.config)
    with _joined(config.device) as exchange:
        return _train(exchange, opened, config, quiet=quiet)


def start_and_train_rank(
    data: str, out: Path, config: TrainConfig, *, overwrite: bool = False, quiet: bool = False
) -> dict[str, Any] | None:
    """Do all of `kgshard.train` as one of the ranks that torchrun started; rank 0 prepares the data.

    Returns:
        What `train_rank` returns, on rank 0; None elsewhere.
    """
    with _joined(config.device) as exchange, ExitStack() as stack:
        folder = ""
        with exchange.patiently(), exchange.sharing_failure(KgshardError, OSError):
            if exchange.rank == 0:
                run = stack.enter_context(started_run(data, out, config, overwrite=overwrite))
                folder = str(run.folder)
        folder = exchange.gather_bytes(folder.encode())[0].decode()
        result = _train(exchange, open_run(folder), config, quiet=quiet)
    return with_paths(result, out) if exchange.rank == 0 else None


def evaluate_rank(
    run: str,
    *,
    split: str = "test",
    filtered: bool = True,
    device: str = "auto",
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Evaluate a run, as one of the ranks; see `kgshard.evaluation.evaluate_on_ranks`."""
    opened = open_run(run)
    with _joined(device) as exchange:
        return evaluate_on_ranks(exchange, opened, checkpoint, split=split, filtered=filtered)


@contextmanager
def _joined(device_name: str) -> Iterator[Exchange]:
    torch.set_num_threads(num_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.set_flush_denormal(True)  # Second moments that fade away slow CPUs badly.
    with joined_exchange(choose_device(device_name)) as exchange:
        yield exchange


def _train(exchange: Exchange, run: Run, config: TrainConfig, *, quiet: bool) -> dict[str, Any]:
    trainer = _build_trainer(exchange, run.model, config)
    triples = run.dataset.triples("train")
    began, loss, seconds = time.monotonic(), float("nan"), 0.0
    num_steps = config.epochs * num_batches(len(triples), config.batch_size)
    with closing(_progress(exchange, config, triples, quiet=quiet)) as progress:
        for epoch in range(1, config.epochs + 1):
            loss = _train_epoch(trainer, triples, config, epoch, progress)
            seconds = time.monotonic() - began
            if exchange.rank == 0:
                _log(run, epoch=epoch, step=epoch * num_steps // config.epochs, loss=loss, seconds=seconds)
    folder = save_checkpoint(run, trainer.table, trainer.relations, step=num_steps, epoch=config.epochs)
    return {
        "run": str(run.folder),
        "checkpoint": str(folder),
        "epochs": config.epochs,
        "seconds": seconds,
        "metrics": {"loss": loss, "triples_per_second": config.epochs * len(triples) / max(seconds, 1e-9)},
    }


def _progress(exchange: Exchange, config: TrainConfig, triples: Triples, *, quiet: bool) -> Progress:
    return training_progress(
        num_epochs=config.epochs, num_triples=len(triples), quiet=quiet or exchange.rank != 0
    )


def _train_epoch(
    trainer: Trainer, triples: Triples, config: TrainConfig, epoch: int, progress: Progress
) -> float:
    """Do an epoch, counted from 1; return its mean loss a query."""
    exchange, total = trainer.table.exchange, 0.0
    for batch in epoch_batches(
        triples,
        num_entities=trainer.model.num_entities,
        batch_size=config.batch_size,
        num_negatives=config.negatives,
        seed=config.seed,
        epoch=epoch - 1,
        rank=exchange.rank,
        world_size=exchange.world_size,
        device=exchange.device,
    ):
        loss = trainer.step(batch)
        total += loss * batch.global_size
        progress.step(epoch=epoch, loss=loss, num_triples=batch.global_size)
    return total / len(triples)


def _build_trainer(exchange: Exchange, model: LinkModel, config: TrainConfig) -> Trainer:
    partition = RowPartition(model.num_entities, exchange.world_size)
    rows = partition.rows_of(exchange.rank)
    entities = torch.empty(len(rows), model.dim, device=exchange.device)
    relations = torch.empty(model.num_relation_rows, model.relation_dim, device=exchange.device)
    scoring = model.scoring
    fill_initial_rows(entities, scoring.entity_init(model.dim), seed=config.seed, table="entity", rows=rows)
    fill_initial_rows(
        relations,
        scoring.relation_init(model.dim),
        seed=config.seed,
        table="relation",
        rows=range(model.num_relation_rows),
    )
    optimizer = OPTIMIZERS[config.optimizer]
    moments = exchange.device if config.optimizer_device == "auto" else choose_device(config.optimizer_device)
    return Trainer(
        model,
        ShardedTable(entities, partition, exchange),
        relations,
        entity_optimizer=optimizer(entities, lr=config.lr, device=moments),
        relation_optimizer=optimizer(relations, lr=config.lr, device=moments),
        n3_weight=config.n3,
    )


def _log(run: Run, **values: float) -> None:
    """Append one line to metrics.jsonl."""
    with (run.folder / METRICS_FILE).open("a") as file:
        file.write(json.dumps(values) + "\n")
