"""What all drivers share, in any environment: the measured window, ranks, data, and the line they print.

A driver is run as `python run_PEER.py '{"task": ..., ...}'` and does one task with one program; what it
prints after RESULT is read by benchmarks/peers.py. No kgshard here: a peer's environment does not have it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

Task = Callable[[dict[str, Any]], dict[str, Any]]
"""From what a driver is told to its figures."""

RESULT = "RESULT"
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def main(tasks: Mapping[str, Task], *packages: str) -> None:
    """Do the task that argv[1] asks for; print its figures and the versions of some packages."""
    given = json.loads(sys.argv[1])
    figures = tasks[given["task"]](given)
    figures["versions"] = {package: metadata.version(package) for package in packages}
    print(RESULT + json.dumps(figures), flush=True)


class Window:
    """The measured steps of a run, which begin after some that are not: seconds and CPU seconds."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._warm_up, self._steps = given["warm_up"], given["steps"]
        self._done = 0

    def begin(self) -> None:
        self._level = memory_mib(os.getpid())
        self._cpu, self._began = cpu_seconds(), time.monotonic()

    def step(self) -> bool:
        """Note that a step ended; return whether it was the last one."""
        self._done += 1
        if self._done == self._warm_up + self._steps:
            self._ended, self._cpu = time.monotonic(), cpu_seconds() - self._cpu
            return True
        if self._done == self._warm_up:
            self.begin()
        return False

    def figures(self, *, items_a_step: float) -> dict[str, Any]:
        """Return what the steps took; items are positives, queries or ids."""
        return {
            "steps": self._steps,
            "items": self._steps * items_a_step,
            "seconds": self._ended - self._began,
            "cpu_seconds": self._cpu,
            "level_mib": self._level,
            "began": self._began,
            "ended": self._ended,
        }


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of ranks that did the same steps: CPU and items summed."""
    summed = ("items", "cpu_seconds", "level_mib")
    return ranks[0] | {name: sum(rank[name] for rank in ranks) for name in summed}


def cpu_seconds() -> float:
    """Return user and system seconds of this process, all it started, and all they started."""
    ended = os.times()
    here = time.process_time() + ended.children_user + ended.children_system
    return here + sum(_ticks(pid) for pid in _descendants(os.getpid())) / _TICK


def memory_mib(pid: int) -> float:
    """Return the memory of a process and its descendants: PSS, or RSS where that cannot be read."""
    return sum(_memory_mib(each) for each in (pid, *_descendants(pid)))


def _memory_mib(pid: int) -> float:
    folder = Path("/proc", str(pid))
    try:
        for line in (folder / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    try:
        return int((folder / "statm").read_text().split()[1]) * _PAGE_MIB
    except OSError:  # It has ended.
        return 0.0


def _descendants(pid: int) -> list[int]:
    parents = {int(path.name): _stat(path) for path in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for each in found:
        found += [child for child, stat in parents.items() if stat and int(stat[1]) == each]
    return found[1:]


def _ticks(pid: int) -> int:
    """Return the ticks of a process and of those it waited for."""
    stat = _stat(Path("/proc", str(pid)))
    return sum(int(number) for number in stat[11:15])


def _stat(folder: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; none where the process has ended."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def on_ranks(function: Callable[..., Any], *arguments: Any, world_size: int = 2) -> list[Any]:
    """Return what a function returns on each of some ranks that find each other as torchrun's do."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, results, function, arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    answers = {}
    for _ in ranks:
        rank, failure, answers[rank] = results.get()
        if failure:
            for process in ranks:
                process.kill()
            raise SystemExit(failure)
    for process in ranks:
        process.join()
    return [answers[rank] for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    try:
        results.put((rank, "", function(*arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def zipf_batches(given: dict[str, Any], rank: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield int64[ids] of `entities` rows for ever, the same 20 batches; rank k of N is drawn as 1 / k."""
    rows, source = given["entities"], np.random.default_rng(rank)
    places = np.random.default_rng(99).permutation(rows)
    ranks = np.exp(source.random((20, given["ids"])) * np.log(rows + 1)).astype(np.int64) - 1
    return cycle(places[np.minimum(ranks, rows - 1)])


def triples_of(given: dict[str, Any]) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return train triples int64[n, 3], and how many entities and relations: of a graph, or drawn evenly."""
    if "graph" in given:
        with np.load(given["graph"]) as graph:
            return graph["train"], int(graph["num_entities"]), int(graph["num_relations"])
    entities, relations = given["entities"], 100
    source = np.random.default_rng(0)
    return source.integers([entities, relations, entities], size=(500_000, 3)), entities, relations
