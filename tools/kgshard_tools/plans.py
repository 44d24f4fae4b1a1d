"""What `kgshard plan` finds, in lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from kgshard.planning.plan import Plan
from kgshard.planning.training import RankBytes, size_words

_BOUNDS = ("activations", "exchange")


def plan_lines(plan: Plan) -> list[str]:
    """Say in aligned lines what a training takes, whether that fits, and what would."""
    config, size, ranks = plan.training.config, plan.training.size, plan.training.nproc_per_node
    return [
        f"{size.entities:,} entities, {size.relations:,} relations, {size.triples:,} triples; {config.model},"
        f" dim {config.dim}, {config.dtype}, {config.optimizer}; {ranks} rank{'s' * (ranks > 1)}",
        *_aligned([*_rank_rows(plan), *_machine_rows(plan)]),
        *_verdict(plan),
        *_times(plan),
    ]


def _rank_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    for part in fields(RankBytes):
        size = getattr(plan.rank, part.name)
        yield part.name, ("at most " if part.name in _BOUNDS and size else "") + size_words(size)
    yield "each rank", size_words(plan.rank.total)


def _machine_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    need, machine = plan.need, plan.machine
    yield "memory", f"{size_words(need.memory)} of {size_words(machine.memory)} that are free"
    if machine.gpus:  # CUDA
        yield "GPU", f"{size_words(need.gpu)} of {size_words(min(machine.gpus))} that are free"
    yield (
        "disk",
        f"{size_words(need.disk)} of {size_words(machine.disk)} that are free;"
        f" a checkpoint is {size_words(plan.checkpoint)}",
    )


def _aligned(rows: list[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    return (f"{name:<{width}}  {words}" for name, words in rows)


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.fits:
        yield f"fits; up to {plan.largest:,} entities would"
        return
    short = [
        *([] if plan.need.fits_memory(plan.machine) else ["memory"]),
        *([] if plan.need.fits_disk(plan.machine) else ["disk"]),
    ]
    largest = f"; up to {plan.largest:,} entities would" if plan.largest else ""
    yield f"does not fit (too little {' and '.join(short)}){largest}"
    for each in plan.suggestions:
        gpu = f", {size_words(each.need.gpu)} of each GPU" if plan.machine.gpus else ""
        sizes = f"{size_words(each.need.memory)} of memory{gpu}, {size_words(each.need.disk)} of disk"
        yield f"{short[0]} is enough with {each.change}: {sizes}"


def _times(plan: Plan) -> Iterator[str]:
    speed, config = plan.speed, plan.training.config
    if speed is None:
        return
    length = f"{config.steps:,} steps" if config.steps else f"{config.epochs}"
    yield (
        f"{speed.triples_per_second:,.0f} triples/s: {_duration(speed.epoch_seconds)} an epoch,"
        f" {_duration(speed.training_seconds)} for {length}, evaluations apart"
        f" (timed with {speed.entities:,} entities)"
    )


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes / 60:.1f} h" if minutes < 100 * 60 else f"{minutes / 60 / 24:,.1f} days"
