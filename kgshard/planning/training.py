"""What a training takes of a machine. No torch.

All is counted for the rank that holds most rows, and taken for every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from kgshard.config import TrainConfig
from kgshard.errors import ConfigError
from kgshard.models.link import LinkModel
from kgshard.planning.step import StepBytes, index_bytes, ranking_bytes
from kgshard.planning.stored import GraphSize, held_tables

_PROCESS_BYTES = 220_000_000
"""Memory of a rank with hardly a table in it: 168 MB were measured; the rest is for what allocators keep."""
_MACHINE_BYTES = 210_000_000
"""What comes once: the process that starts ranks, and the libraries they share; 199 MiB were measured."""
_TIMED_NUMBERS, _TIMED_TRIPLES = 1 << 25, 1 << 20
"""Numbers of a table with which steps are timed, and triples."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What the fullest rank holds, in bytes."""

    entities: int
    """Its rows of the entity table."""
    relations: int
    """Its rows of the relation table, or all of them, and the parameters that all rows share."""
    optimizer: int
    triples: int
    """Orders and indexes of train triples; the triples themselves are mapped and may be dropped."""
    activations: int
    """What a step makes, or an evaluation if that makes more; a bound."""
    exchange: int
    """Rows and gradients on their way to and from other ranks; a bound."""
    process: int
    """Python and torch."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to have, in bytes."""

    memory: int
    disk: int
    gpus: tuple[int, ...] = ()
    """Of each GPU that ranks would use; none where they train on the CPU."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one machine needs, in bytes."""

    memory: int
    gpu: int
    """On the fullest GPU."""
    disk: int
    """For the checkpoints of a run that exist at once, and its dataset, which may be linked to another."""

    def fits_memory(self, machine: Machine) -> bool:
        return self.memory <= machine.memory and self.gpu <= min(machine.gpus, default=0)

    def fits_disk(self, machine: Machine) -> bool:
        return self.disk <= machine.disk


@dataclass(frozen=True, slots=True)
class Speed:
    """What steps on real ranks took, with a table of a part of the entities."""

    triples_per_second: float
    entities: int
    """How many rows that table had."""
    steps: int
    """How many steps were timed."""
    epoch_seconds: float
    """Of the whole graph, evaluations not counted."""
    training_seconds: float


@dataclass(frozen=True, slots=True)
class Training:
    """One training on machines that are alike."""

    config: TrainConfig
    size: GraphSize
    nproc_per_node: int = 1
    machines: int = 1

    @property
    def model(self) -> LinkModel:
        return self.config.link_model(num_entities=self.size.entities, num_relations=self.size.relations)

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.machines

    def rank_bytes(self) -> RankBytes:
        config, model = self.config, self.model
        entities, *others = held_tables(model, config, self.world_size)
        step = StepBytes(config, model, self.world_size)
        ranking = ranking_bytes(model, config) if config.evaluates else 0
        return RankBytes(
            entities=entities.num_bytes,
            relations=sum(table.num_bytes for table in others),
            optimizer=sum(table.state_bytes(config) for table in (entities, *others)),
            triples=index_bytes(config, self.size),
            activations=max(step.activation_bytes(), ranking),
            exchange=step.exchange_bytes() if self.world_size > 1 else 0,
            process=_PROCESS_BYTES,
        )

    def mapped_bytes(self) -> int:
        """Return what of a rank's tables lies in files."""
        if self.config.table_storage == "ram":
            return 0
        entities, *_ = held_tables(self.model, self.config, self.world_size)
        return entities.num_bytes + entities.state_bytes(self.config)

    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint's files, less their headers."""
        tables = held_tables(self.model, self.config, 1)
        state = sum(table.state_bytes(self.config) for table in tables) if self.config.save_optimizer else 0
        return sum(table.num_bytes for table in tables) + state

    def need(self, num_gpus: int = 0) -> Need:
        """Return what each machine needs, on which there are so many GPUs to train on."""
        rank = self.rank_bytes()
        memory, gpu = _where(rank, self.config, on_gpu=num_gpus > 0)
        mapped = self.mapped_bytes()
        ranks_a_gpu = -(-self.nproc_per_node // num_gpus) if num_gpus else 0
        # The best one stays until a better one is complete, and beside the newest.
        num_checkpoints = 2 if self.config.evaluates else 1
        return Need(
            memory=_MACHINE_BYTES + self.nproc_per_node * (memory - mapped),
            gpu=ranks_a_gpu * gpu,
            disk=self.size.dataset_bytes
            + num_checkpoints * self.checkpoint_bytes()
            + self.nproc_per_node * mapped,
        )

    def fits(self, machine: Machine) -> bool:
        return self.fits_memory(machine) and self.need().fits_disk(machine)

    def fits_memory(self, machine: Machine) -> bool:
        return self.need(len(machine.gpus)).fits_memory(machine)

    def cut(self) -> Training:
        """Return the same with tables that are soon made: what a step takes does not depend on their size."""
        model, size = self.model, self.size
        entities = min(size.entities, max(1, _TIMED_NUMBERS // model.dim))
        relations = min(size.relations, max(1, _TIMED_NUMBERS // model.relation_dim))
        return replace(self, size=GraphSize(entities, relations, min(size.triples, _TIMED_TRIPLES)))

    def _epochs(self) -> float:
        """Return how many there are; not always whole ones, where steps are counted."""
        questions = self.config.train_type == "kvsall"  # Their number is not known; at most two a triple.
        epoch_steps = -(-self.size.triples * (1 + questions) // self.config.batch_size)
        return self.config.steps / epoch_steps if self.config.steps else self.config.epochs

    def speed(self, part: Training, *, triples_per_second: float, steps: int) -> Speed:
        """Say how long this takes, if steps of a part of it, which `cut` chose, were timed."""
        seconds = self.size.triples / triples_per_second
        if self.config.train_type != "negative-sampling":
            seconds *= self.size.entities / part.size.entities  # All rows are scored.
        return Speed(
            triples_per_second=self.size.triples / seconds,
            entities=part.size.entities,
            steps=steps,
            epoch_seconds=seconds,
            training_seconds=seconds * self._epochs(),
        )


def _where(rank: RankBytes, config: TrainConfig, *, on_gpu: bool) -> tuple[int, int]:
    """Return how many of a rank's bytes lie in memory, mapped ones included, and how many on its GPU."""
    if not on_gpu:
        return rank.total, 0
    on_device = rank.entities + rank.relations + rank.activations + rank.exchange
    if config.optimizer_device != "cpu":
        on_device += rank.optimizer
    return rank.total - on_device, on_device


def check_tables(training: Training, total_memory: int) -> None:
    """Refuse a training whose tables alone cannot be in the memory of a machine.

    Raises:
        ConfigError: The entity table, relations and optimizer state of its ranks are more than all there is.
    """
    rank = training.rank_bytes()
    held = rank.entities + rank.relations + rank.optimizer - training.mapped_bytes()
    needed = training.nproc_per_node * held
    if needed > total_memory:
        raise ConfigError(
            f"tables and optimizer state need {size_words(needed)} of memory, but this machine has"
            f" {size_words(total_memory)}; kgshard plan says what fits"
        )


def size_words(num_bytes: int) -> str:
    """Return a size as people write it: 5,312,000,000 bytes are "5.3 GB"."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
