"""What the benchmarks share: seconds and memory of a command or a function, and one JSON line out."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("KGSHARD_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


@dataclass(frozen=True)
class Cost:
    """What one command took."""

    seconds: float
    cpu_seconds: float
    """User and system, all its processes."""
    peak_mib: float
    """The largest resident set of one of its processes."""


def run_command(command: Sequence[str], **environment: str) -> tuple[Cost, str]:
    """Run a command; return its cost and its stdout. Raises where it fails."""
    timer = (
        "import json,resource,subprocess,sys,time;b=time.monotonic();"
        "p=subprocess.run(sys.argv[1:],stdout=subprocess.PIPE);s=time.monotonic()-b;"
        "u=resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(json.dumps([s,u.ru_utime+u.ru_stime,u.ru_maxrss/1024]),file=sys.stderr);"
        "sys.stdout.buffer.write(p.stdout);sys.exit(p.returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", timer, *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    seconds, cpu_seconds, peak_mib = json.loads(done.stderr.strip().splitlines()[-1])
    return Cost(seconds, cpu_seconds, peak_mib), done.stdout


def time_function(function: Callable[[], Any], repeats: int = 5) -> float:
    """Return the median seconds of a few calls, after one that does not count."""
    function()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def forget(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, so that the next reader waits for the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def cpu_seconds() -> float:
    """Return user and system seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def emit(claim: str, **figures: Any) -> None:
    """Print one JSON line: the claim, its figures, and the machine."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
    }
    print(json.dumps({"claim": claim, **rounded, **machine}), flush=True)


def real_graph(name: str) -> Path:
    """Return the folder of a real graph, or end saying that it is absent."""
    folder = DATA / name
    if not folder.is_dir():
        raise SystemExit(f"no graph at {folder}; set KGSHARD_TEST_DATA")
    return folder
