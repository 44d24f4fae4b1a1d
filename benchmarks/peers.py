"""kgshard beside its peers: the same work on the same data, in turns, in one run.

    python benchmarks/peers.py training growth lookup evaluation traffic
        [--data FOLDER] [--rounds 3] [--venvs FOLDER] [--without PEER ...] [--timeout 900] [--markdown]

FOLDER holds the train, valid and test files of FB15k-237. Peers are installed into environments of their own,
once. Programs take turns, round by round; each run is a process of its own (benchmarks/drivers) in which
only steady steps are measured: seconds, CPU seconds of all its processes, and their memory (PSS) meanwhile.
One JSON line for each program and work: medians over rounds, and `times`, its costs an item over those of the
cheapest kgshard at the same work. A peer that cannot be installed or run has a line with the reason. With
--markdown the same figures follow as a table for docs/benchmarks.md.

    training    ComplEx of 200 floats on FB15k-237, about 1,024 positives a step: CPU and seconds a positive
    growth      the same steps at 100,000 and a million entities, drawn evenly
    lookup      8,192 Zipf ids a rank, of a million rows of 128 floats: lookup, loss, backward, update
    evaluation  filtered ranks of test on both sides: all of it, or the part that a slow peer is given
    traffic     bytes between two ranks for each positive, a million entities drawn evenly
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import emit, median, real_graph
from drivers.measuring import RESULT, memory_mib
from environments import VENVS, UnavailableError, environment

from kgshard.data.dataset import SPLITS
from kgshard.start import ingest

_DRIVERS = Path(__file__).resolve().parent / "drivers"
_HERE = ("kgshard", "torch")
"""What runs in this environment."""
_EVERY_SECONDS = 0.3
"""Between two looks at memory."""
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
_CLAIMS = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("claims", nargs="+", choices=_CLAIMS, metavar="CLAIM")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venvs", type=Path, default=VENVS)
    parser.add_argument("--without", nargs="*", default=[], metavar="PEER")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    tables = []
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
        graph = Path(folder) / "ids.npz"
        if {"training", "evaluation"} & set(options.claims):
            _write_ids(options.data or real_graph("FB15k-237"), graph)
        for name in options.claims:
            contenders = [
                each for each in _CLAIMS[name].contenders(graph) if each.peer not in options.without
            ]
            found = _take_turns(contenders, options)
            _report(name, contenders, found)
            tables.append(_table(_CLAIMS[name], contenders, found))
    if options.markdown:
        print("\n\n".join(tables))


def _write_ids(data: Path, path: Path) -> None:
    """Give every program the same ids."""
    dataset = ingest(data, path.with_suffix(""))
    sizes = {"num_entities": dataset.num_entities, "num_relations": dataset.num_relations}
    np.savez(path, **sizes, **{split: dataset.triples(split) for split in SPLITS})


def _take_turns(contenders: Sequence[Contender], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all, round by round; return each one's medians, or {"failed": why}."""
    runs: list[list[dict[str, Any]]] = [[] for _ in contenders]
    failed: dict[int, str] = {}
    for _ in range(options.rounds):
        for number, contender in enumerate(contenders):
            if number in failed:
                continue
            try:
                runs[number].append(_derived(_run(contender, options)))
            except UnavailableError as error:
                failed[number] = str(error)
            print(f"{contender.work}: {contender.name}: {failed.get(number, 'done')}", file=sys.stderr)
    found = [
        {"failed": failed[number]} if number in failed else _medians(runs[number])
        for number in range(len(contenders))
    ]
    _compare(contenders, found)
    return found


def _run(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    """Run a driver; return what it printed, and the peak of its memory while it measured.

    Raises:
        UnavailableError: It cannot be run; says why.
    """
    ours = contender.peer in _HERE
    python = sys.executable if ours else environment(contender.peer, options.venvs)
    script = _DRIVERS / f"run_{contender.peer}.py"
    threads = {name: str(contender.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    # Threads that spin while they wait would count as work, the more so the busier the machine is.
    variables = os.environ | threads | {"OMP_WAIT_POLICY": "PASSIVE"} | contender.environment
    if not ours:
        variables.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python), str(script), json.dumps(contender.given)],
            env=variables,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        samples = _watch(process, options.timeout)
        out.seek(0)
        errors.seek(0)
        printed, said = out.read().rpartition(RESULT)[2], errors.read().split("\n")
    if process.returncode:
        raise UnavailableError(next((line for line in reversed(said) if line.strip()), "no word"))
    figures: dict[str, Any] = json.loads(printed)
    if "began" in figures:
        measured = [mib for when, mib in samples if figures["began"] <= when <= figures["ended"]]
        figures["peak_mib"] = max([*measured, figures["level_mib"]])
    return figures


def _watch(process: subprocess.Popen[bytes], timeout: float) -> list[tuple[float, float]]:
    """Wait for a process; return when its and its descendants' memory was how much.

    Raises:
        UnavailableError: It took too long, and was ended.
    """
    samples, deadline = [], time.monotonic() + timeout
    while process.poll() is None:
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise UnavailableError(f"not done within {timeout:g} s")
        samples.append((time.monotonic(), memory_mib(process.pid)))
        time.sleep(_EVERY_SECONDS)
    return samples


def _derived(figures: dict[str, Any]) -> dict[str, Any]:
    """Return what is told of a run."""
    told = {name: figures[name] for name in ("versions", "steps")}
    if "bytes" in figures:
        return told | figures["bytes"] | {"bytes": sum(figures["bytes"].values())}
    cpu, wall, steps, items = (figures[name] for name in ("cpu_seconds", "seconds", "steps", "items"))
    return told | {
        "items": items,
        "seconds": wall,
        "cpu_seconds": cpu,
        "per_second": items / wall,
        "per_cpu_second": items / cpu,
        "wall_us": 1e6 * wall / items,
        "cpu_us": 1e6 * cpu / items,
        "wall_ms": 1e3 * wall / steps,
        "cpu_ms": 1e3 * cpu / steps,
        "peak_mib": figures["peak_mib"],
        "above_mib": figures["peak_mib"] - figures["level_mib"],
    }


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each figure's median over rounds, and how many rounds."""
    values = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        name: median(each) if isinstance(each[0], float) else each[0] for name, each in values.items()
    } | {"rounds": len(runs)}


def _compare(contenders: Sequence[Contender], found: list[dict[str, Any]]) -> None:
    """Add to each the ratios of its costs to the least of ours at the same work."""
    for cost in ("cpu_us", "wall_us", "bytes"):
        for contender, figures in zip(contenders, found, strict=True):
            ours = [
                other[cost]
                for rival, other in zip(contenders, found, strict=True)
                if (rival.work, rival.peer) == (contender.work, "kgshard") and cost in other
            ]
            if ours and cost in figures:
                figures.setdefault("times", {})[cost] = round(figures[cost] / min(ours), 2)


def _report(claim: str, contenders: Sequence[Contender], found: list[dict[str, Any]]) -> None:
    for contender, figures in zip(contenders, found, strict=True):
        asked = {name: value for name, value in contender.given.items() if name not in ("task", "graph")}
        emit(
            f"{claim} beside peers",
            work=contender.work,
            program=contender.name,
            settings=asked,
            threads=contender.threads,
            **figures,
        )


def _table(claim: Claim, contenders: Sequence[Contender], found: list[dict[str, Any]]) -> str:
    """Return Markdown."""
    told = {"cpu_us": "times kgshard's CPU", "wall_us": "times its seconds", "bytes": "times kgshard's"}
    headings = ["steps", *claim.columns, *(told[cost] for cost in claim.costs)]
    lines = [f"| work | program | {' | '.join(headings)} |", f"|---|---|{'---:|' * len(headings)}"]
    for contender, figures in zip(contenders, found, strict=True):
        if "failed" in figures:
            cells = [f"not measured: {figures['failed']}", *[""] * (len(headings) - 1)]
        else:
            names = ["steps", *claim.columns.values()]
            cells = [_shown(figures.get(name, 0)) for name in names]
            cells += [_shown(figures["times"][cost]) if "times" in figures else "" for cost in claim.costs]
        lines.append(f"| {contender.work} | {contender.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


if __name__ == "__main__":
    main()
