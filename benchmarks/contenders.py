"""Which programs are compared at which work, and what is told of it; benchmarks/peers.py runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
"""What `kgshard.memory.keep_freed_memory` tells glibc, for any program."""


@dataclass(frozen=True)
class Contender:
    """A program at some work."""

    work: str
    """What is compared: the same for all that do the same."""
    peer: str
    """Whose driver, and whose environment."""
    name: str
    given: dict[str, Any]
    """What the driver is told."""
    threads: int = 1
    """Of each of its processes."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A sub-command."""

    contenders: Callable[[Path], Iterator[Contender]]
    """What is run, given the graph's ids."""
    costs: Sequence[str]
    """Figures of which `times` is the ratio."""
    columns: dict[str, str]
    """The table's columns after work and program: heading and figure."""


def _training(graph: Path) -> Iterator[Contender]:
    base = {"task": "training", "graph": str(graph), "dim": 200}
    few = base | {"batch_size": 1024, "negatives": 100, "warm_up": 2, "steps": 5}
    many = base | {"batch_size": 1024, "negatives": 50, "warm_up": 100, "steps": 600}
    epochs = base | {"batch_size": 1000, "negatives": 50, "warm_up": 1, "steps": 2}
    work, more = "100 negatives a positive", "200 negatives a positive"
    yield Contender(work, "dicee", "dicee NegSample, Adam", few | {"technique": "NegSample"}, threads=2)
    yield Contender(work, "kgshard", "kgshard, 1 rank, Adagrad", many | {"optimizer": "adagrad"}, threads=2)
    yield Contender(work, "pykeen", "PyKEEN sLCWA, Adam", few, threads=2)
    yield Contender(work, "kgshard", "kgshard, 1 rank, Adam", many | {"optimizer": "adam"}, threads=2)
    yield Contender(work, "pbg", "PyTorch-BigGraph, 25 + 25 a side, row-wise Adagrad", epochs)
    for optimizer, name in (
        ("adagrad-rowwise", "row-wise Adagrad"),
        ("adagrad", "Adagrad"),
        ("adam", "Adam"),
    ):
        yield Contender(
            work, "kgshard", f"kgshard, 2 ranks, {name}", many | {"optimizer": optimizer, "ranks": 2}
        )
    yield Contender(work, "libkge", "LibKGE", base)
    yield Contender(
        more, "pbg", "PyTorch-BigGraph, 50 + 50 a side, row-wise Adagrad", epochs | {"negatives": 100}
    )
    rowwise = many | {"negatives": 100, "optimizer": "adagrad-rowwise"}
    yield Contender(more, "kgshard", "kgshard, 1 rank, row-wise Adagrad", rowwise, threads=2)
    yield Contender(more, "kgshard", "kgshard, 2 ranks, row-wise Adagrad", rowwise | {"ranks": 2})


def _growth(_: Path) -> Iterator[Contender]:
    for entities in (100_000, 1_000_000):
        work = f"{entities:,} entities"
        base = {"task": "training", "entities": entities, "dim": 200, "batch_size": 1024}
        few = base | {"negatives": 100, "warm_up": 2, "steps": 3, "technique": "NegSample"}
        many = base | {"negatives": 50, "warm_up": 100, "steps": 300, "optimizer": "adam"}
        yield Contender(work, "dicee", "dicee NegSample, Adam", few, threads=2)
        yield Contender(work, "kgshard", "kgshard, 1 rank, Adam", many, threads=2)
        yield Contender(work, "pykeen", "PyKEEN sLCWA, Adam", few, threads=2)


def _lookup(_: Path) -> Iterator[Contender]:
    base = {"task": "lookup", "entities": 1_000_000, "dim": 128, "ids": 8192, "warm_up": 40, "steps": 200}
    adam, rowwise = base | {"optimizer": "adam"}, base | {"optimizer": "adagrad-rowwise"}
    for memory, variables in (("as it comes", {}), ("freed memory kept", _KEPT)):
        for threads in (1, 2):
            work = f"1 process, {threads} thread{'s' * (threads > 1)}, Adam, {memory}"
            yield Contender(work, "torch", "torch Embedding, SparseAdam", adam, threads, variables)
            yield Contender(work, "kgshard", "kgshard", adam, threads, variables)
        work, two = f"2 ranks, Adam, {memory}", {"ranks": 2}
        yield Contender(work, "dicee", "dicee, float32", adam, environment=variables)
        yield Contender(work, "kgshard", "kgshard, shared memory", adam | two, environment=variables)
        over_gloo = adam | two | {"transport": "torch"}
        yield Contender(work, "kgshard", "kgshard, gloo", over_gloo, environment=variables)
        work = f"2 ranks, row-wise Adagrad, {memory}"
        yield Contender(work, "torchrec", "torchrec ROW_WISE, fused", rowwise, environment=variables)
        yield Contender(work, "kgshard", "kgshard, shared memory", rowwise | two, environment=variables)


def _evaluation(graph: Path) -> Iterator[Contender]:
    base = {"task": "evaluation", "graph": str(graph), "dim": 200, "warm_up": 0, "steps": 1}
    work, ours = "filtered ranks", base | {"batch_size": 1024, "negatives": 50}
    negsample, kvsall = base | {"technique": "NegSample"}, base | {"technique": "KvsAll"}
    yield Contender(work, "dicee", "dicee NegSample", negsample | {"triples": 128}, threads=2)
    yield Contender(work, "kgshard", "kgshard", ours, threads=2)
    yield Contender(work, "dicee", "dicee KvsAll", kvsall | {"triples": 2048}, threads=2)
    yield Contender(work, "pykeen", "PyKEEN", base | {"triples": 1024}, threads=2)


def _traffic(_: Path) -> Iterator[Contender]:
    base = {"task": "traffic", "entities": 1_000_000, "dim": 200, "batch_size": 1024, "steps": 20}
    for dtype in ("float32", "bfloat16"):
        for technique in ("NegSample", "FSDP1vsSample"):
            given = base | {"dtype": dtype, "technique": technique, "negatives": 100}
            yield Contender(dtype, "dicee", f"dicee {technique}", given)
        yield Contender(dtype, "kgshard", "kgshard", base | {"dtype": dtype, "negatives": 50})


_COSTS = ("cpu_us", "wall_us")
CLAIMS = {
    "training": Claim(
        _training,
        _COSTS,
        {"positives a CPU second": "per_cpu_second", "a second": "per_second", "peak MiB": "peak_mib"},
    ),
    "growth": Claim(
        _growth, _COSTS, {"CPU ms a step": "cpu_ms", "ms a step": "wall_ms", "peak MiB": "peak_mib"}
    ),
    "lookup": Claim(
        _lookup, _COSTS, {"CPU ms a step": "cpu_ms", "ms a step": "wall_ms", "peak MiB": "peak_mib"}
    ),
    "evaluation": Claim(
        _evaluation,
        _COSTS,
        {
            "queries": "items",
            "queries a CPU second": "per_cpu_second",
            "a second": "per_second",
            "MiB above the model's": "above_mib",
        },
    ),
    "traffic": Claim(
        _traffic,
        ("bytes",),
        {
            "ids": "ids",
            "rows": "rows",
            "gradients": "gradients",
            "relations' gradients": "sum",
            "bytes a positive": "bytes",
        },
    ),
}
