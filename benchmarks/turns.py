"""Runs of programs in turns: each a process of its own, watched from outside, and medians over rounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import median
from contenders import Contender
from drivers.measuring import RESULT, memory_mib
from environments import UnavailableError, environment

_DRIVERS = Path(__file__).resolve().parent / "drivers"
_HERE = ("kgshard", "torch")
"""What runs in this environment."""
_EVERY_SECONDS = 0.3
"""Between two looks at memory."""


def take_turns(
    contenders: Sequence[Contender], *, rounds: int, venvs: Path, timeout: float
) -> list[dict[str, Any]]:
    """Run all, round by round; return each one's medians, or {"failed": why}."""
    runs: list[list[dict[str, Any]]] = [[] for _ in contenders]
    failed: dict[int, str] = {}
    for _ in range(rounds):
        for number, contender in enumerate(contenders):
            if number in failed:
                continue
            try:
                runs[number].append(_derived(_run(contender, venvs, timeout)))
            except UnavailableError as error:
                failed[number] = str(error)
            print(f"{contender.work}: {contender.name}: {failed.get(number, 'done')}", file=sys.stderr)
    found = [
        {"failed": failed[number]} if number in failed else _medians(runs[number])
        for number in range(len(contenders))
    ]
    _compare(contenders, found)
    return found


def _run(contender: Contender, venvs: Path, timeout: float) -> dict[str, Any]:
    """Run a driver; return what it printed, and the peak of its memory while it measured.

    Raises:
        UnavailableError: It cannot be run; says why.
    """
    ours = contender.peer in _HERE
    python = sys.executable if ours else environment(contender.peer, venvs)
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
        samples = _watch(process, timeout)
        out.seek(0)
        errors.seek(0)
        [printed, *_] = out.read().rpartition(RESULT)[2].split("\n")
        said = errors.read().split("\n")
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
        UnavailableError: It took too long, and was ended with all that it started.
    """
    samples, deadline = [], time.monotonic() + timeout
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise UnavailableError(f"not done within {timeout:g} s")
            samples.append((time.monotonic(), memory_mib(process.pid)))
            time.sleep(_EVERY_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return samples


def _derived(figures: dict[str, Any]) -> dict[str, Any]:
    """Return what is told of a run."""
    told: dict[str, Any] = {name: figures[name] for name in ("versions", "steps")}
    if "bytes" in figures:
        told |= figures["bytes"] | {"bytes": sum(figures["bytes"].values())}
        return told
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
