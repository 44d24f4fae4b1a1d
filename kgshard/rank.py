"""`python -m kgshard.rank JOB`: one rank of a task that `kgshard.launch` started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kgshard.errors import KgshardError, wants_traceback
from kgshard.files import read_json, write_json


def main(folder: Path) -> int:
    """Do this rank's part of the job in `folder`; return the exit code."""
    _end_with_parent()
    rank = int(os.environ["RANK"])
    job = read_json(folder / "job.json")
    try:
        result = run_task(job["task"], job["arguments"])
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        words = {
            "kind": type(error).__name__,
            "message": str(error) if isinstance(error, KgshardError) else f"rank {rank}: {_one_line(error)}",
            "exit_code": getattr(error, "exit_code", 1),
        }
        write_json(folder / f"error-{rank}.json", words)
        if wants_traceback():
            traceback.print_exc()
        return 1
    if rank == 0:
        write_json(folder / "result.json", result)
    return 0


def run_task(task: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a task by name on this rank; return its result, which is the same on every rank."""
    from kgshard.training.probe import probe_rank  # torch: only once the job was read
    from kgshard.training.tasks import evaluate_rank, train_rank

    tasks: dict[str, Callable[..., dict[str, Any]]] = {
        "train": train_rank,
        "evaluate": evaluate_rank,
        "probe": probe_rank,
    }
    return tasks[task](**arguments)


def _end_with_parent() -> None:
    """Ask Linux for SIGTERM when the launcher dies, so that no rank outlives it."""
    pr_set_pdeathsig = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _one_line(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
