"""What runs on a rank in tests of training. Every function takes an Exchange first.

All are module-level, so threads and gloo processes run the same ones; arguments and results can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rank_functions import Floats, Ints, gathered, sharded
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kgshard.config import TrainConfig
from kgshard.exchange import Exchange
from kgshard.models.link import LinkModel
from kgshard.models.metric import Metric
from kgshard.optim import RowOptimizer
from kgshard.routing import RowGradient
from kgshard.runs import open_run
from kgshard.table import ShardedTable, held_rows
from kgshard.training.assemble import build_sampler, build_trainer
from kgshard.training.batches import Labels, Sampler
from kgshard.training.full_losses import Candidates, FullLoss, FullSoftmax
from kgshard.training.tasks import _Training
from kgshard.training.trainer import Optimizers, Trainer

SMALL: dict[str, Any] = {"dim": 8, "batch_size": 16, "seed": 3, "device": "cpu"}
"""Settings of a small training."""
FEW_NEGATIVES = {"negatives": 8}


@dataclass(frozen=True)
class Job:
    """A small training on given triples."""

    triples: Ints
    """int64[n, 3]."""
    num_entities: int
    num_relations: int
    settings: dict[str, Any]
    """What differs from SMALL, by the names of TrainConfig."""
    num_steps: int = 50

    @property
    def config(self) -> TrainConfig:
        is_sampled = self.settings.get("train_type", "negative-sampling") == "negative-sampling"
        return TrainConfig(**SMALL | (FEW_NEGATIVES if is_sampled else {}) | self.settings)

    @property
    def link_model(self) -> LinkModel:
        return self.config.link_model(num_entities=self.num_entities, num_relations=self.num_relations)

    def but(self, **settings: Any) -> Job:
        """Return the same with other settings."""
        return replace(self, settings=self.settings | settings)


def random_job(
    number: int = 75,
    num_entities: int = 40,
    num_relations: int = 3,
    *,
    num_steps: int = 50,
    seed: int = 0,
    **settings: Any,
) -> Job:
    """Return a training on distinct random triples. 75 in batches of 16: an epoch's last batch has 11."""
    shape = (num_entities, num_relations, num_entities)
    chosen = np.random.default_rng(seed).choice(np.prod(shape), number, replace=False)
    triples = np.stack(np.unravel_index(chosen, shape), axis=1).astype(np.int64)
    return Job(triples, num_entities, num_relations, settings, num_steps)


@dataclass(frozen=True)
class Tables:
    """All values that are trained, or all gradients; whole tables, float64."""

    entities: Floats
    relations: Floats
    shared: dict[str, Floats]

    def flat(self) -> Floats:
        """Return all values in one vector."""
        parts = [self.entities, self.relations, *(self.shared[name] for name in sorted(self.shared))]
        return np.concatenate([part.reshape(-1) for part in parts])


@dataclass(frozen=True)
class Trained:
    """What came of a Job, on every rank the same."""

    losses: list[float]
    """One for each step."""
    tables: Tables


def assembled(exchange: Exchange, job: Job) -> tuple[Sampler, Trainer]:
    """Return what `kgshard train` makes of a job's settings."""
    sampler = build_sampler(exchange, job.link_model, job.triples, job.config)
    num_epochs = -(-max(1, job.num_steps) // len(sampler))
    return sampler, build_trainer(
        exchange, job.link_model, job.config, num_updates=num_epochs * sampler.num_updates
    )


def first_tables(exchange: Exchange, job: Job) -> Tables:
    """Return what training begins with, whole, on every rank."""
    return tables_of(assembled(exchange, job)[1])


def run_steps(sampler: Sampler, trainer: Trainer, num_steps: int) -> list[float]:
    """Make so many steps, over as many epochs as they take; return their losses."""
    epochs = (batch for epoch in range(num_steps) for batch in sampler.epoch(epoch))
    return [trainer.step(batch) for batch in islice(epochs, num_steps)]


def train(exchange: Exchange, job: Job) -> Trained:
    """Train as `kgshard train` does, for so many steps."""
    sampler, trainer = assembled(exchange, job)
    return Trained(run_steps(sampler, trainer, job.num_steps), tables_of(trainer))


def exchanged_bytes(exchange: Exchange, job: Job) -> int:
    """Train so many steps; return what this rank sent to others, but for what is summed."""
    total, swap = 0, exchange.swap

    def counting(rows: Tensor, sends: Sequence[int], *rest: Any, **named: Any) -> tuple[Tensor, list[int]]:
        nonlocal total
        total += (sum(sends) - sends[exchange.rank]) * rows.nbytes // max(1, len(rows))
        return swap(rows, sends, *rest, **named)

    exchange.swap = counting  # type: ignore[method-assign]
    sampler, trainer = assembled(exchange, job)
    run_steps(sampler, trainer, job.num_steps)
    return total


def tables_of(trainer: Trainer) -> Tables:
    """Return what was trained, whole, on every rank."""
    parameters = trainer.parameters
    return Tables(
        gathered(parameters.entities),
        _whole(parameters.relations),
        {name: values.double().numpy().copy() for name, values in parameters.shared.items()},
    )


def _whole(table: ShardedTable | Tensor) -> Floats:
    return gathered(table) if isinstance(table, ShardedTable) else table.double().numpy().copy()


def random_tables(job: Job, *, seed: int = 2, scale: float = 1.0) -> Tables:
    """Return normal values for all that is trained, exact in float32."""
    model, source = job.link_model, np.random.default_rng(seed)

    def draw(*shape: int) -> Floats:
        values = source.normal(scale=scale, size=shape)
        return values.astype(np.float32).astype(np.float64)

    shared = model.scoring.shared_init(model.dim)
    return Tables(
        draw(model.num_entities, model.dim),
        draw(model.num_relation_rows, model.relation_dim),
        {name: draw(*how.shape) for name, how in shared.items()},
    )


@torch.no_grad()
def set_tables(trainer: Trainer, tables: Tables) -> None:
    """Overwrite what is trained."""
    parameters = trainer.parameters
    for table, whole in ((parameters.entities, tables.entities), (parameters.relations, tables.relations)):
        held_rows(table).copy_(torch.from_numpy(whole[_held(table)]))
    for name, values in parameters.shared.items():
        values.copy_(torch.from_numpy(tables.shared[name]))


def _held(table: ShardedTable | Tensor) -> slice:
    """Return which rows of a table this rank holds."""
    return slice(table.rows.start, table.rows.stop) if isinstance(table, ShardedTable) else slice(None)


class Recorder(RowOptimizer):
    """Changes nothing; keeps what it is given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, lr=1.0)
        self.total = torch.zeros(weight.shape, dtype=torch.float64)
        self.rates: list[float] = []
        """The learning rate at each step."""

    def step(self, gradient: RowGradient) -> None:
        assert gradient.rows.tolist() == sorted(set(gradient.rows.tolist()))
        self.total.index_add_(0, gradient.rows, gradient.values.double())
        self.rates.append(self.lr)

    def step_dense(self, gradient: Tensor) -> None:
        self.total += gradient.double()
        self.rates.append(self.lr)

    def _update(self, rows: Any, gradients: Tensor) -> Tensor:
        raise AssertionError("a step was made")


def record(trainer: Trainer) -> tuple[Recorder, Recorder, dict[str, Recorder]]:
    """Put recorders in the place of a trainer's optimizers; return them."""
    parameters = trainer.parameters
    shared = {name: Recorder(values) for name, values in parameters.shared.items()}
    entities, relations = Recorder(parameters.entities.weight), Recorder(held_rows(parameters.relations))
    trainer.optimizers = Optimizers(entities, relations, shared)
    return entities, relations, shared


@dataclass(frozen=True)
class Recorded:
    """What optimizers were given, on every rank the same."""

    losses: list[float]
    gradients: Tables
    """Added up over the steps."""
    rates: list[list[float]]
    """The learning rates of each optimizer's steps."""


def record_gradients(exchange: Exchange, job: Job, tables: Tables) -> Recorded:
    """Do job.num_steps steps from given tables, and change nothing; return the gradients."""
    sampler, trainer = assembled(exchange, job)
    set_tables(trainer, tables)
    entities, relations, shared = record(trainer)
    losses = run_steps(sampler, trainer, job.num_steps)
    gradients = Tables(
        _over_ranks(exchange, trainer.parameters.entities, entities.total, tables.entities.shape),
        _over_ranks(exchange, trainer.parameters.relations, relations.total, tables.relations.shape),
        {name: recorder.total.numpy() for name, recorder in shared.items()},
    )
    return Recorded(
        losses, gradients, [entities.rates, relations.rates, *(kept.rates for kept in shared.values())]
    )


def _over_ranks(
    exchange: Exchange, table: ShardedTable | Tensor, total: Tensor, shape: tuple[int, ...]
) -> Floats:
    """Return what was recorded for all rows of a table."""
    if isinstance(table, Tensor):
        return np.asarray(total)
    whole = torch.zeros(shape, dtype=torch.float64)
    whole[_held(table)] = total
    return exchange.all_reduce(whole).numpy()


def peak_of_a_step(exchange: Exchange, job: Job) -> int:
    """Return the most bytes that torch holds at once of what the second step of a training makes."""
    sampler, trainer = assembled(exchange, job)
    first, second = islice(sampler.epoch(0), 2)
    trainer.step(first)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.step(second)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = most = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


def record_in_blocks(
    exchange: Exchange, job: Job, tables: Tables, block_numbers: int, kept_numbers: int
) -> Recorded:
    """Do as `record_gradients`, in a process of its own, with other budgets for losses over all rows."""
    with (
        patch("kgshard.training.full_losses.BLOCK_NUMBERS", block_numbers),
        patch("kgshard.training.full_losses.KEPT_NUMBERS", kept_numbers),
    ):
        return record_gradients(exchange, job, tables)


@dataclass(frozen=True)
class FullLossCase:
    """Queries of every rank, whole rows, and who answers what."""

    loss: FullLoss
    metric: Metric
    queries: list[Floats]
    """float64[q, E] of each rank."""
    rows: Floats
    """float64[N, E]."""
    labels: Ints
    """int64[M, 2]: question (counted over all ranks) and row."""
    scale: float = 1.0


@dataclass(frozen=True)
class FullLossResult:
    """What one rank saw of a loss over all rows."""

    loss: float
    """Its own share."""
    queries_gradient: Floats
    rows_gradient: Floats
    """Of the rows owned here."""
    num_lifts: int
    """Blocks that were made candidates, one that is made again counted again."""
    largest: int
    """Numbers in the largest tensor that was made."""


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, tuple | list) else [made]:
            if isinstance(part, Tensor):
                self.seen = max(self.seen, part.numel())
        return made


def full_loss(exchange: Exchange, case: FullLossCase) -> FullLossResult:
    """Evaluate a loss over all rows of a sharded table, and its gradients."""
    table = sharded(exchange, torch.from_numpy(case.rows).float())
    queries = torch.tensor(case.queries[exchange.rank], dtype=torch.float32, requires_grad=True)
    questions, answers = torch.from_numpy(case.labels).unbind(1)
    labels = Labels(questions, answers, [len(part) for part in case.queries])
    num_lifts = 0

    def lift(rows: Tensor) -> Tensor:
        nonlocal num_lifts
        num_lifts += 1
        return rows

    with _Largest() as largest:
        loss, gradient = case.loss(queries, labels, Candidates(table, case.metric, lift), scale=case.scale)
        loss.backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    return FullLossResult(
        loss.item(), queries.grad.double().numpy(), gradient.double().numpy(), num_lifts, largest.seen
    )


def step_from_nan(exchange: Exchange, job: Job, bad_row: int) -> tuple[str, bool]:
    """Make a step with NaN in one entity row.

    Returns:
        The kind and words of the error, and whether this rank's rows and relations are as before.
    """
    sampler, trainer = assembled(exchange, job)
    tables = random_tables(job)
    tables.entities[bad_row] = np.nan
    set_tables(trainer, tables)
    before = tables_of(trainer).flat()
    words = "went on"
    try:
        run_steps(sampler, trainer, 1)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    return words, np.array_equal(tables_of(trainer).flat(), before, equal_nan=True)


def largest_difference(one: Mapping[str, Floats], other: Mapping[str, Floats]) -> float:
    """Return the largest absolute difference of arrays by name."""
    assert set(one) == set(other)
    return max((float(np.abs(one[name] - other[name]).max(initial=0.0)) for name in one), default=0.0)


class Watched(FullSoftmax):
    """Keeps the queries that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Floats] = []

    def __call__(
        self, queries: Tensor, labels: Labels, candidates: Candidates, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.queries.append(queries.detach().double().numpy())
        return super().__call__(queries, labels, candidates, scale=scale)


def queries_by_place(exchange: Exchange, job: Job, tables: Tables) -> list[dict[int, Floats]]:
    """Return, for each step from given tables, this rank's queries by their place in the global batch."""
    sampler, trainer = assembled(exchange, job)
    set_tables(trainer, tables)
    record(trainer)
    watched = Watched()
    trainer.objective = replace(trainer.objective, loss=watched)
    places = []
    for batch in islice(sampler.epoch(0), job.num_steps):
        trainer.step(batch)
        places.append(batch.mine.places.tolist())
    return [dict(zip(*both, strict=True)) for both in zip(places, watched.queries, strict=True)]


def one_step_from(exchange: Exchange, job: Job, tables: Tables) -> tuple[float, Tables]:
    """Make a step from given tables; return its loss, and what became of them."""
    sampler, trainer = assembled(exchange, job)
    set_tables(trainer, tables)
    [loss] = run_steps(sampler, trainer, 1)
    return loss, tables_of(trainer)


def train_run(exchange: Exchange, folder: str) -> dict[str, Any]:
    """Train a run that was begun; return the result of this rank."""
    run = open_run(folder)
    config = TrainConfig.from_dict(run.info.config)
    return _Training(exchange, run, config, quiet=True, tensorboard=False).train()
