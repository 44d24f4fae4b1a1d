"""From settings to the objects of a training, on one rank. Settings end here: classes take plain values."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kgshard.config import TrainConfig
from kgshard.data.dataset import Triples
from kgshard.distributed import choose_device
from kgshard.errors import ConfigError
from kgshard.exchange import Exchange
from kgshard.initialise import fill_initial_rows, initial_shared
from kgshard.launch import num_local_ranks
from kgshard.mapped import check_room, mapped_zeros
from kgshard.models.link import LinkModel
from kgshard.models.scoring import Columns, Init
from kgshard.optim import OPTIMIZERS, RowOptimizer
from kgshard.optim.base import MakeZeros, zeros_in_memory
from kgshard.partition import RowPartition
from kgshard.planning.stored import held_tables
from kgshard.table import ShardedTable, held_rows
from kgshard.training.batches import Cut, QuestionSampler, Sampler, TripleSampler
from kgshard.training.full_losses import FULL_LOSSES, FullLoss
from kgshard.training.losses import SampledLoss, sampled_loss
from kgshard.training.negatives import NegativeSampler
from kgshard.training.regularisers import Regulariser
from kgshard.training.schedule import learning_rate_factor
from kgshard.training.trainer import Objective, Optimizers, Parameters, Trainer


def build_sampler(exchange: Exchange, model: LinkModel, triples: Triples, config: TrainConfig) -> Sampler:
    """Return what cuts train triples into this rank's parts of batches."""
    cut = Cut(
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        seed=config.seed,
        rank=exchange.rank,
        world_size=exchange.world_size,
        device=exchange.device,
    )
    if config.train_type == "kvsall":
        return QuestionSampler(model, triples, cut)
    if config.train_type == "1vsall":
        return TripleSampler(model, triples, cut)
    negatives = NegativeSampler(
        model,
        triples,
        count=config.negatives,
        source=config.negatives_from,  # type: ignore[arg-type]  # TrainConfig checks it.
        chunk_size=config.chunk_size,
        filtered=config.filter_negatives,
        seed=config.seed,
    )
    return TripleSampler(model, triples, cut, negatives)


def build_trainer(
    exchange: Exchange, model: LinkModel, config: TrainConfig, *, num_updates: int, folder: Path | None = None
) -> Trainer:
    """Return a trainer with fresh parameters, for `num_updates` optimizer updates.

    Args:
        exchange: The other ranks.
        model: The formula.
        config: All else.
        num_updates: What a decay ends with.
        folder: On whose disk tables lie that are mapped.
    """
    make_zeros = _maker_of_tables(exchange, model, config, folder)
    parameters = initial_parameters(exchange, model, config, make_zeros)
    learning_rate = partial(_learning_rate, config, num_updates)
    learning_rate(0)  # A warm-up longer than the run is refused before it begins.
    return Trainer(
        model,
        parameters,
        _optimizers(parameters, config, make_zeros),
        Objective(
            loss=_loss(model, config),
            regulariser=Regulariser(n3=config.n3, l2=config.l2, l3=config.l3),
            relation_prediction=config.relation_prediction,
            dropout=config.dropout,
            seed=config.seed,
            move=config.move if config.can_move_queries else "rows",  # type: ignore[arg-type]
        ),
        learning_rate=learning_rate,
        clip_norm=config.clip_norm,
        max_norm=config.max_norm,
    )


def _learning_rate(config: TrainConfig, num_updates: int, update: int) -> float:
    try:
        factor = learning_rate_factor(
            update,
            num_steps=num_updates,
            warmup_steps=config.warmup,
            decay=config.decay,
            final=config.final_lr,
        )
    except ConfigError as error:
        raise ConfigError(f"--warmup {config.warmup}, --decay {config.decay}: {error}") from None
    return config.lr * factor


def _maker_of_tables(
    exchange: Exchange, model: LinkModel, config: TrainConfig, folder: Path | None
) -> MakeZeros:
    """Return what makes the entity table and its optimizer's state."""
    if config.table_storage == "ram":
        return zeros_in_memory
    if exchange.device.type != "cpu" or config.optimizer_device not in ("auto", "cpu"):
        raise ConfigError("--table-storage mmap: only a CPU maps files; pass --device cpu")
    assert folder is not None
    entities, *_ = held_tables(model, config, exchange.world_size)
    check_room(folder, num_local_ranks() * (entities.num_bytes + entities.state_bytes(config)))
    return lambda shape, dtype, device: mapped_zeros(folder, shape, dtype)


def initial_parameters(
    exchange: Exchange, model: LinkModel, config: TrainConfig, make_zeros: MakeZeros = zeros_in_memory
) -> Parameters:
    """Return the parameters as they are before the first step; row r is the same at any world size."""
    partition = RowPartition(model.num_entities, exchange.world_size)
    rows = partition.rows_of(exchange.rank)
    dtype = getattr(torch, config.dtype)
    entities = make_zeros((len(rows), model.dim), dtype, exchange.device)
    relation_partition = RowPartition(model.num_relation_rows, exchange.world_size)
    is_sharded = config.shards_relations(model)
    held = relation_partition.rows_of(exchange.rank) if is_sharded else range(model.num_relation_rows)
    relations = torch.empty(len(held), model.relation_dim, device=exchange.device, dtype=dtype)
    scoring, seed = model.scoring, config.seed
    _fill(entities, scoring.entity_init(model.dim), "entity", rows, config)
    _fill(relations, scoring.relation_init(model.dim), "relation", held, config)
    shared = initial_shared(scoring.shared_init(model.dim), seed=seed)
    sharded = partial(ShardedTable, exchange=exchange, exchange_dtype=getattr(torch, config.exchange_dtype))
    return Parameters(
        sharded(entities, partition),
        sharded(relations, relation_partition) if is_sharded else relations,
        {name: values.to(exchange.device) for name, values in shared.items()},
    )


def _fill(weight: Tensor, init: Init | Columns, table: str, rows: range, config: TrainConfig) -> None:
    columns = ((weight.shape[1], init),) if isinstance(init, Init) else init
    scaled = tuple((width, how.scaled(config.init_scale)) for width, how in columns)
    fill_initial_rows(weight, scaled, seed=config.seed, table=table, rows=rows)


def _optimizers(parameters: Parameters, config: TrainConfig, make_zeros: MakeZeros) -> Optimizers:
    kind, table = OPTIMIZERS[config.optimizer], parameters.entities
    own = table.exchange.device
    device = own if config.optimizer_device == "auto" else choose_device(config.optimizer_device)

    def optimizer(
        weight: Tensor,
        first_row: int = 0,
        purpose: str = "relation",
        make_zeros: MakeZeros = zeros_in_memory,
    ) -> RowOptimizer:
        return kind(
            weight,
            lr=config.lr,
            device=device,
            state_dtype=weight.dtype,
            rounding=config.rounding,  # type: ignore[arg-type]  # TrainConfig checks it.
            seed=config.seed,
            table=purpose,
            first_row=first_row,
            make_zeros=make_zeros,
        )

    relations = parameters.relations
    first_relation = relations.rows.start if isinstance(relations, ShardedTable) else 0
    return Optimizers(
        optimizer(table.weight, table.rows.start, "entity", make_zeros),
        optimizer(held_rows(relations), first_relation),
        {name: optimizer(values, purpose=name) for name, values in parameters.shared.items()},
    )


def _loss(model: LinkModel, config: TrainConfig) -> SampledLoss | FullLoss:
    if config.train_type != "negative-sampling":
        return FULL_LOSSES[config.loss](config.label_smoothing)
    return sampled_loss(
        config.loss,  # type: ignore[arg-type]  # TrainConfig checks it.
        margin=config.margin,
        temperature=config.adversarial_temperature,
        smoothing=config.label_smoothing,
        num_candidates=model.num_entities,
    )
