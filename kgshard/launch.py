"""Starting ranks on this machine and hearing how they end. No torch here.

`run_on_ranks` starts one process a rank (`python -m kgshard.rank JOB`), which meet through a file,
not a port, so that two launches on one machine cannot join each other. The first rank that fails ends
the others; its own words are passed on.

    JOB/
        job.json        task, arguments, world size
        rendezvous      made by torch.distributed
        result.json     what the task returned on rank 0
        error-R.json    what rank R said when it failed
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kgshard.errors import (
    ConfigError,
    DataError,
    ExchangeMismatchError,
    KgshardError,
    NonFiniteError,
    RankFailureError,
    RunError,
    ShardError,
)
from kgshard.files import read_json, write_json

_STDERR = 2
_ERRORS: dict[str, type[KgshardError]] = {
    kind.__name__: kind
    for kind in (ConfigError, DataError, RunError, ShardError, ExchangeMismatchError, NonFiniteError)
}
"""Errors that keep their type on the way from a rank to its launcher."""
_POLL_SECONDS = 0.02
_WORDS_SECONDS = 2.0
_GRACE_SECONDS = 5.0
"""From a polite end to SIGKILL."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def num_local_ranks() -> int:
    """Return how many ranks a launcher started on this machine; 1 where there was none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def num_threads(num_local_ranks: int) -> int:
    """Return the threads of one of several ranks on this machine: its share of the cores."""
    return max(1, num_cores() // num_local_ranks)


def is_rank() -> bool:
    """Whether a launcher (ours or torchrun) started this process as one rank of several."""
    launched = "KGSHARD_RENDEZVOUS" in os.environ or "MASTER_ADDR" in os.environ
    return launched and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_nproc(nproc: int) -> None:
    """Raise ConfigError where ranks cannot be that many."""
    if not isinstance(nproc, int) or isinstance(nproc, bool):
        raise ConfigError(f"--nproc-per-node must be a whole number, got {nproc!r}")
    if nproc < 1:
        raise ConfigError(f"--nproc-per-node must be >= 1, got {nproc}")


def run_on_ranks(task: str, arguments: dict[str, Any], nproc: int) -> dict[str, Any]:
    """Run a task of kgshard.rank on `nproc` ranks of this machine; return rank 0's result.

    Raises:
        KgshardError: A rank failed; with its message and exit code.
        RankFailureError: A rank died without a word; names rank, pid and how it ended.
    """
    check_nproc(nproc)
    with tempfile.TemporaryDirectory(prefix="kgshard-") as name:
        folder = Path(name)
        write_json(folder / "job.json", {"task": task, "arguments": arguments, "world_size": nproc})
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(nproc):
                ranks.append(_start(folder, rank, nproc))
            failed = _wait(ranks)
            if failed:
                _let_speak(ranks)
            ended = [process.poll() for process in ranks]
        finally:
            _end(ranks)
        if failed:
            raise _failure(folder, ranks, ended)
        if not (folder / "result.json").is_file():
            raise RankFailureError(_how_it_ended(0, ranks[0].pid, ended[0]))
        result: dict[str, Any] = read_json(folder / "result.json")
        return result


def _start(folder: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "KGSHARD_RENDEZVOUS": str(folder / "rendezvous"),
        "OMP_NUM_THREADS": str(num_threads(world_size)),
        # Ranks of one machine talk over the loopback interface, whatever its host name resolves to.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Ranks run in another folder: what is found from here must be found from there.
        "PYTHONPATH": _absolute(os.environ.get("PYTHONPATH", "")),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    # -P, and a folder of its own: a numpy.py beside the user's data must not be imported.
    command = [sys.executable, "-P", "-m", "kgshard.rank", str(folder)]
    return subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=_STDERR)


def _absolute(search_path: str) -> str:
    return os.pathsep.join(os.path.abspath(part) for part in search_path.split(os.pathsep) if part)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Wait for all to end well, or for one to fail; return whether one failed."""
    codes: list[int | None] = [None] * len(ranks)
    while None in codes:
        time.sleep(_POLL_SECONDS)
        codes = [process.poll() for process in ranks]
        if any(codes):
            return True
    return False


def _let_speak(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Give the others a moment: a rank may lose its peer before that peer has said why it failed."""
    deadline = time.monotonic() + _WORDS_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Leave no rank behind."""
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(folder: Path, ranks: list[subprocess.Popen[bytes]], ended: list[int | None]) -> KgshardError:
    """Return what to tell of a failure: its cause, rather than what it did to the other ranks.

    Args:
        folder: Where ranks left their words.
        ranks: The processes.
        ended: How they ended of themselves; None for those that had to be stopped.
    """
    said = {rank: path for rank in range(len(ranks)) if (path := folder / f"error-{rank}.json").is_file()}
    words = [read_json(path) for path in said.values()]
    causes = [each for each in words if each["kind"] != RankFailureError.__name__]
    # A rank that left early without an error is the cause of what the others say about it.
    silent = [rank for rank, code in enumerate(ended) if code is not None and rank not in said]
    silent.sort(key=lambda rank: ended[rank] == 0)
    if silent and not causes:
        return RankFailureError(_how_it_ended(silent[0], ranks[silent[0]].pid, ended[silent[0]]))
    told = [*causes, *words][0]
    error = _ERRORS.get(told["kind"], KgshardError)(told["message"])
    error.exit_code = told["exit_code"]
    return error


def _how_it_ended(rank: int, pid: int, code: int | None) -> str:
    how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    return f"rank {rank} (pid {pid}) ended by {how}, with no message"
