"""What a training step costs at 100,000, 1 million and 10 million entities, with the same batch.

    python benchmarks/scale.py [--entities 100000 1000000 10000000] [--dim 200] [--steps 400]
    python benchmarks/scale.py --entities 13000000 --dim 128 --optimizer adam [--table-storage mmap]

One JSON line. Heads and tails are drawn evenly, the worst case: hardly a row is touched twice. Each size is
trained in a process of its own, by one rank with two threads; a row that is touched for the first time costs
a page of memory, so the first quarter of the steps is not counted. `ratio` is the CPU seconds of a step over
those at the smallest table; `begin_seconds` is what initial rows take. Mapped tables lie in a temporary
folder (TMPDIR).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import cpu_seconds, emit, median, run_command

from kgshard.config import TrainConfig
from kgshard.exchange import SingleExchange
from kgshard.memory import keep_freed_memory
from kgshard.training.assemble import build_sampler, build_trainer

_NUM_RELATIONS = 100
_AT_ONCE = 25
"""Steps that are timed together."""


def measure(num_entities: int, num_steps: int, folder: Path, **settings: Any) -> dict[str, float]:
    """Train some steps; return milliseconds of a step, of CPU and wall, and the peak memory in MiB."""
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    source = np.random.default_rng(0)
    limits = [num_entities, _NUM_RELATIONS, num_entities]
    config = TrainConfig(epochs=1, **settings)
    triples = source.integers(limits, size=(num_steps * config.batch_size, 3), dtype=np.int32)
    model = config.link_model(num_entities=num_entities, num_relations=_NUM_RELATIONS)
    sampler = build_sampler(SingleExchange(), model, triples, config)
    began = time.perf_counter()
    trainer = build_trainer(SingleExchange(), model, config, num_updates=len(sampler), folder=folder)
    begin_seconds = time.perf_counter() - began
    used, taken = [], []
    batches = iter(sampler.epoch(0))
    for _ in range(num_steps // _AT_ONCE):
        cpu, wall = cpu_seconds(), time.perf_counter()
        for _ in range(_AT_ONCE):
            trainer.step(next(batches))
        used.append((cpu_seconds() - cpu) / _AT_ONCE * 1000)
        taken.append((time.perf_counter() - wall) / _AT_ONCE * 1000)
    first = len(used) // 4
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "cpu_ms": median(used[first:]),
        "wall_ms": median(taken[first:]),
        "begin_seconds": begin_seconds,
        "peak_mib": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entities", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--dim", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--negatives", type=int, default=50)
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--table-storage", default="ram")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help="measure this size here, and print what it took")
    options = parser.parse_args()
    names = ("dim", "batch_size", "negatives", "optimizer", "table_storage")
    settings = {name: getattr(options, name) for name in names}
    if options.one:
        with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
            print(json.dumps(measure(options.one, options.steps, Path(folder), **settings)))
        return
    found: dict[int, list[dict[str, float]]] = {size: [] for size in options.entities}
    again = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    for _ in range(options.repeats):
        for size, runs in found.items():
            command = [sys.executable, __file__, f"--one={size}", f"--steps={options.steps}", *again]
            runs.append(json.loads(run_command(command)[1]))
    medians = {
        size: {name: round(median([run[name] for run in runs]), 2) for name in runs[0]}
        for size, runs in found.items()
    }
    smallest = medians[min(medians)]["cpu_ms"]
    emit(
        "the cost of a step does not grow with the table",
        **settings,
        step=medians,
        ratio={size: round(values["cpu_ms"] / smallest, 2) for size, values in medians.items()},
    )


if __name__ == "__main__":
    main()
