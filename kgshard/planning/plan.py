"""Whether a training fits a machine, and what would. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from kgshard.config import option
from kgshard.errors import ConfigError
from kgshard.models import find_scoring
from kgshard.planning.training import Machine, Need, RankBytes, Speed, Training

_MOST_ENTITIES, _MOST_MACHINES = 1 << 44, 1 << 20
"""Where searches end."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Something else that fits where this training does not: memory, or the disk."""

    change: str
    """Options, or how many machines."""
    need: Need


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training would take here."""

    training: Training
    machine: Machine
    need: Need
    rank: RankBytes
    checkpoint: int
    """Bytes."""
    fits: bool
    largest: int
    """Entities that fit at these settings, all else as it is."""
    suggestions: list[Suggestion]
    """What fits instead; none where this does."""
    speed: Speed | None = None
    """None where nothing was timed."""

    def to_dict(self) -> dict[str, Any]:
        config, size = self.training.config, self.training.size
        return {
            "graph": asdict(size),
            "settings": config.to_dict(),
            "nproc_per_node": self.training.nproc_per_node,
            "rank": asdict(self.rank) | {"total": self.rank.total},
            "checkpoint": self.checkpoint,
            "memory": {"needed": self.need.memory, "available": self.machine.memory},
            "gpu": {"needed": self.need.gpu, "available": min(gpus)} if (gpus := self.machine.gpus) else None,
            "disk": {"needed": self.need.disk, "available": self.machine.disk},
            "fits": self.fits,
            "largest": self.largest,
            "suggestions": [{"change": each.change} | asdict(each.need) for each in self.suggestions],
            "speed": asdict(self.speed) if self.speed else None,
        }


def plan_training(training: Training, machine: Machine) -> Plan:
    """Count what a training takes on a machine, and look for what fits if it does not."""
    fits = training.fits(machine)
    return Plan(
        training=training,
        machine=machine,
        need=training.need(len(machine.gpus)),
        rank=training.rank_bytes(),
        checkpoint=training.checkpoint_bytes(),
        fits=fits,
        largest=largest_that_fits(partial(_fits_with, training, machine), _MOST_ENTITIES),
        suggestions=[] if fits else list(_suggestions(training, machine)),
    )


def largest_that_fits(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to a limit that fits, or 0; whatever is below it fits too."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits_with(training: Training, machine: Machine, entities: int) -> bool:
    return replace(training, size=replace(training.size, entities=entities)).fits(machine)


def _suggestions(training: Training, machine: Machine) -> Iterator[Suggestion]:
    """Yield what fits instead, all of it counted."""
    if not training.fits_memory(machine):
        for change, other in _smaller(training, machine):
            need = other.need(len(machine.gpus))
            if need.fits_memory(machine):
                yield Suggestion(change, need)
    without = replace(training, config=replace(training.config, save_optimizer=False))
    if training.fits_memory(machine) and without.fits(machine):
        yield Suggestion("--no-save-optimizer", without.need(len(machine.gpus)))


def _smaller(training: Training, machine: Machine) -> Iterator[tuple[str, Training]]:
    """Yield other settings one by one, and two together; fewer floats; other ranks, and more machines."""
    config = training.config
    wanted = {"optimizer": "adagrad-rowwise", "dtype": "bfloat16"}
    cheaper: list[dict[str, Any]] = [{k: v} for k, v in wanted.items() if getattr(config, k) != v]
    for change in [*cheaper, *([wanted] if len(cheaper) == 2 else [])]:
        words = " ".join(f"{option(name)} {value}" for name, value in change.items())
        yield words, replace(training, config=replace(config, **change))
    if not machine.gpus and config.table_storage == "ram":
        yield "--table-storage mmap", replace(training, config=replace(config, table_storage="mmap"))
    if machine.gpus and config.optimizer != "sgd":  # CUDA
        yield (
            "--optimizer-device cpu",
            replace(training, config=replace(config, optimizer_device="cpu")),
        )
    dim = largest_that_fits(lambda dim: _narrower(training, dim, machine) is not None, config.dim - 1)
    narrower = _narrower(training, dim, machine) if dim else None
    if narrower is not None:
        yield f"--dim {narrower.config.dim}", narrower
    ranks = max(1, len(machine.gpus))
    if ranks != training.nproc_per_node:
        yield f"--nproc-per-node {ranks}", replace(training, nproc_per_node=ranks)
    too_few = largest_that_fits(
        lambda number: not replace(training, machines=number).fits_memory(machine), _MOST_MACHINES
    )
    words = f"{too_few + 1} machines like this one, --nproc-per-node {training.nproc_per_node} on each"
    yield words, replace(training, machines=too_few + 1)


def _narrower(training: Training, dim: int, machine: Machine) -> Training | None:
    """Return the training with so many floats, or the next fewer that its model takes, if that fits."""
    scoring = find_scoring(training.config.model)
    for each in range(dim, 0, -1):
        try:
            scoring.check_dim(each)
        except ConfigError:
            continue
        other = replace(training, config=replace(training.config, dim=each))
        return other if other.fits_memory(machine) else None
    return None
