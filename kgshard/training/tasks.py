"""What every rank runs: a run folder in, a trained run or its metrics out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kgshard.api import check_memory, with_paths
from kgshard.checkpoint import OptimizerState, save_checkpoint
from kgshard.config import TrainConfig
from kgshard.distributed import choose_device, joined_exchange
from kgshard.errors import ConfigError, KgshardError
from kgshard.exchange import Exchange
from kgshard.launch import num_local_ranks, num_threads
from kgshard.memory import keep_freed_memory
from kgshard.ranking.evaluation import ValidEvaluator, evaluate_on_ranks
from kgshard.ranking.protocol import valid_mrr
from kgshard.runs import Run, open_run
from kgshard.stages import Stage, measured, stage
from kgshard.start import started_run, tell_data
from kgshard.training.assemble import build_sampler, build_trainer
from kgshard.training.batches import Batch, Sampler
from kgshard.training.metrics_log import MetricsLog, check_tensorboard
from kgshard.training.profile import measure_limits, profile_of, settle
from kgshard.training.progress import training_progress


def train_rank(run: str, **how: bool) -> dict[str, Any]:
    """Train a run that `started_run` made, as one of the ranks; the same result on every rank.

    Args:
        run: Its folder.
        **how: quiet, tensorboard, profile; see `kgshard.train`.
    """
    opened = open_run(run)
    config = TrainConfig.from_dict(opened.info.config)
    with joined_ranks(config.device, config.transport) as exchange:
        return _Training(exchange, opened, config, **how).train()


def start_and_train_rank(
    data: str,
    out: Path,
    config: TrainConfig,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    tensorboard: bool = False,
    profile: bool = False,
) -> dict[str, Any] | None:
    """Do all of `kgshard.train` as one of the ranks that torchrun started; rank 0 prepares the data.

    Returns:
        What `train_rank` returns, on rank 0; None elsewhere.
    """
    if tensorboard:
        check_tensorboard()
    with joined_ranks(config.device, config.transport) as exchange, ExitStack() as stack:
        folder = ""
        with exchange.patiently(), exchange.sharing_failure(KgshardError, OSError):
            if exchange.rank == 0:
                started = stack.enter_context(started_run(data, out, config, overwrite=overwrite))
                folder = str(started.folder)
                check_memory(config, started.dataset, num_local_ranks(), exchange.world_size)
                if not quiet:
                    tell_data(started)
        folder = exchange.gather_bytes(folder.encode())[0].decode()
        run = open_run(folder)
        exchange.share_failure(_disagreement(exchange.rank, config, run))
        how = {"quiet": quiet, "tensorboard": tensorboard, "profile": profile}
        result = _Training(exchange, run, config, **how).train()
    return with_paths(result, out) if exchange.rank == 0 else None


def _disagreement(rank: int, config: TrainConfig, run: Run) -> ConfigError | None:
    """Return the error of a rank that was given other settings than rank 0, whose run it is."""
    mine, chosen = config.to_dict(), run.info.config
    for name in mine.keys() - {"device", "optimizer_device"}:
        if mine[name] != chosen[name]:
            return ConfigError(f"rank {rank}: {name} is {mine[name]!r}, but rank 0 has {chosen[name]!r}")
    return None


def evaluate_rank(
    run: str, *, device: str = "auto", checkpoint: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Evaluate a run, as one of the ranks; see `kgshard.ranking.evaluation.evaluate_on_ranks`."""
    opened = open_run(run)
    with joined_ranks(device) as exchange:
        return evaluate_on_ranks(exchange, opened, checkpoint, **settings)


@contextmanager
def joined_ranks(device_name: str, transport: str = "auto") -> Iterator[Exchange]:
    """Join the other ranks, as every task does: with this rank's share of the cores."""
    keep_freed_memory()
    torch.set_num_threads(num_threads(num_local_ranks()))
    torch.set_flush_denormal(True)  # Second moments that fade away slow CPUs badly.
    with joined_exchange(choose_device(device_name), transport) as exchange:
        yield exchange


class _Training:
    """One training, from fresh parameters to its last checkpoint."""

    def __init__(
        self,
        exchange: Exchange,
        run: Run,
        config: TrainConfig,
        *,
        quiet: bool = False,
        tensorboard: bool = False,
        profile: bool = False,
    ) -> None:
        self.exchange = exchange
        self.run = run
        self.config = config
        self.triples = run.dataset.triples("train")
        self.sampler = build_sampler(exchange, run.model, self.triples, config)
        self.num_steps = config.steps or config.epochs * len(self.sampler)
        self.num_epochs = -(-self.num_steps // len(self.sampler))
        num_updates = self.sampler.updates_in(self.num_steps)
        self.trainer = build_trainer(exchange, run.model, config, num_updates=num_updates, folder=run.folder)
        self.evaluator = _evaluator(run, config) if config.evaluates else None
        self.best: dict[str, Any] = {}
        """Epoch, step and figures of the best evaluation; see `ValidEvaluator.figures`."""
        self.best_mrr = -1.0
        self.num_triples = 0
        """Trained on so far, repeats counted."""
        self.evaluations_since_best = 0
        self.evaluated_step = self.saved_step = self.step = 0
        self.checkpoint: Path | None = None
        self.training_seconds = 0.0
        self.progress = training_progress(
            num_epochs=self.num_epochs,
            num_triples=self.num_steps * len(self.triples) // len(self.sampler),
            quiet=quiet or exchange.rank != 0,
        )
        self.log = MetricsLog(run.folder, tensorboard=tensorboard) if exchange.rank == 0 else None
        self.limits = measure_limits(exchange) if profile else None
        self.began = time.monotonic()

    def train(self) -> dict[str, Any]:
        """Train to the end, or until patience is lost; return what `kgshard train --json` prints."""
        loss, epoch = float("nan"), 0
        measuring: AbstractContextManager[dict[str, Stage]] = (
            measured(partial(settle, self.exchange.device)) if self.limits else nullcontext({})
        )
        with closing(self.progress), closing(self.log) if self.log else nullcontext(), measuring as stages:
            if self.evaluator:
                self.progress.say(self.evaluator.protocol)
            for epoch in range(1, self.num_epochs + 1):
                loss = self._epoch(epoch)
                if self._out_of_patience:
                    break
        if self.step != self.saved_step:
            self._save(epoch, best=False)
        rate = self.num_triples / max(self.training_seconds, 1e-9)
        result = {
            "run": str(self.run.folder),
            "checkpoint": str(self.checkpoint),
            "epochs": epoch,
            "seconds": time.monotonic() - self.began,
            "metrics": {"loss": loss, "triples_per_second": rate, **self.best},
        }
        if self.limits:
            limits = self.limits.best(measure_limits(self.exchange))
            result["profile"] = profile_of(stages, limits, seconds=self.training_seconds, num_steps=self.step)
        return result

    def _epoch(self, epoch: int) -> float:
        """Do an epoch, counted from 1; return its mean loss a question."""
        total, asked, began = 0.0, 0, time.monotonic()
        for batch in _sampled(self.sampler, epoch - 1):
            loss = self.trainer.step(batch)
            total, asked = total + loss * batch.num_questions, asked + batch.num_questions
            self.progress.step(epoch=epoch, loss=loss, num_triples=batch.num_triples)
            self.step = batch.step + 1
            self.num_triples += batch.num_triples
            if batch.is_last and self._steps_are_due():
                self.training_seconds += time.monotonic() - began
                self._evaluate(epoch)
                began = time.monotonic()
                if self._out_of_patience:
                    break
            if batch.is_last and self.step >= self.num_steps:
                break
        self.training_seconds += time.monotonic() - began
        if self.log:
            self.log.epoch(epoch=epoch, step=self.step, loss=total / asked)
        if self._is_due(epoch) and self.evaluated_step != self.step:
            self._evaluate(epoch)
        return total / asked

    def _steps_are_due(self) -> bool:
        """Whether an evaluation by steps was due since the last one; it waits for an update."""
        every = self.config.eval_steps
        return self.config.evaluates and bool(every) and self.step // every > self.evaluated_step // every

    def _is_due(self, epoch: int) -> bool:
        """Whether an epoch ends with an evaluation; the last does, however often there is one."""
        every = self.config.eval_every
        return self.config.evaluates and (epoch == self.num_epochs or bool(every and epoch % every == 0))

    def _evaluate(self, epoch: int) -> None:
        """Rank valid triples where the rows lie; keep the parameters if they never did better."""
        assert self.evaluator is not None
        parameters = self.trainer.parameters
        figures = self.evaluator.figures(parameters.entities, parameters.relations, parameters.shared)
        if self.log:
            self.log.evaluation(epoch=epoch, step=self.step, figures=figures)
        self.progress.say(f"epoch {epoch}/{self.num_epochs}  {valid_mrr(figures)}")
        self.evaluated_step = self.step
        self.evaluations_since_best += 1
        if figures["valid"]["mrr"] > self.best_mrr:
            self.best_mrr = figures["valid"]["mrr"]
            self.best = figures | {"valid": {"epoch": epoch, "step": self.step, **figures["valid"]}}
            self.best["protocol"] = self.evaluator.protocol
            self.evaluations_since_best = 0
            self._save(epoch, best=True)

    @property
    def _out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.evaluations_since_best

    def _save(self, epoch: int, *, best: bool) -> None:
        parameters = self.trainer.parameters
        finished = epoch if self.step == epoch * len(self.sampler) else epoch - 1
        folder = save_checkpoint(
            self.run,
            parameters.entities,
            parameters.relations,
            parameters.shared,
            optimizer=self._optimizer_state() if self.config.save_optimizer else None,
            step=self.step,
            epoch=finished,
            best=best,
        )
        self.saved_step = self.step
        # What opens the run opens its best checkpoint.
        if best or not self.best:
            self.checkpoint = folder

    def _optimizer_state(self) -> OptimizerState:
        optimizers = self.trainer.optimizers
        return OptimizerState(
            name=self.config.optimizer,
            num_steps=optimizers.entities.num_steps,
            entities=optimizers.entities.state(),
            relations=optimizers.relations.state(),
            shared={name: optimizer.state() for name, optimizer in optimizers.shared.items()},
        )


def _sampled(sampler: Sampler, epoch: int) -> Iterator[Batch]:
    batches = sampler.epoch(epoch)
    while True:
        with stage("sampling"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _evaluator(run: Run, config: TrainConfig) -> ValidEvaluator:
    sample = config.eval_sample if config.eval == "sampled" else None
    return ValidEvaluator(run.model, run.dataset, sample=sample, seed=config.seed)
