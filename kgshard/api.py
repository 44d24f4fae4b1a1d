"""`kgshard.train` and `kgshard.evaluate`: start ranks on this machine and wait for them. No torch here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from kgshard.config import TrainConfig
from kgshard.devices import check_device
from kgshard.errors import DataError
from kgshard.files import AnyPath, write_json
from kgshard.launch import check_nproc, run_on_ranks
from kgshard.runs import Run, open_run
from kgshard.start import started_run


def train(
    data: AnyPath,
    *,
    out: AnyPath,
    nproc_per_node: int = 1,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train embeddings of `data` on `nproc_per_node` ranks of this machine.

    Args:
        data: A prepared dataset, a folder with train, valid and test files, or a bundled graph's name.
        out: The run folder to make.
        nproc_per_node: Ranks. The result does not depend on it, but for float rounding.
        overwrite: Replace a finished run that is at `out`, once the new one is finished.
        quiet: Print no progress.
        **settings: See `kgshard.config.TrainConfig`.

    Raises:
        ConfigError, DataError, RunError: Something about the call; nothing was written.
        KgshardError: Training failed.
    """
    train_config(data, out, TrainConfig.from_dict(settings), nproc_per_node, overwrite=overwrite, quiet=quiet)
    return open_run(out)


def train_config(
    data: AnyPath,
    out: AnyPath,
    config: TrainConfig,
    nproc_per_node: int = 1,
    *,
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train as `train` does; return {"run", "checkpoint", "epochs", "seconds", "metrics"}."""
    check_nproc(nproc_per_node)
    with started_run(data, out, config, overwrite=overwrite) as run:
        if not quiet:
            for line in run.dataset.info.lines():
                print(line, file=sys.stderr)
        result = run_on_ranks("train", {"run": str(run.folder), "quiet": quiet}, nproc_per_node)
    return with_paths(result, out)


def with_paths(result: dict[str, Any], out: AnyPath) -> dict[str, Any]:
    """Name the run in a result as the caller does; it may have been trained under another name."""
    checkpoint = Path(out) / "checkpoints" / Path(result["checkpoint"]).name
    return result | {"run": os.fspath(out), "checkpoint": str(checkpoint)}


def evaluate(
    run: AnyPath,
    *,
    split: str = "test",
    filtered: bool = True,
    nproc_per_node: int = 1,
    device: str = "auto",
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Rank a split's triples among all entities, on `nproc_per_node` ranks of this machine.

    Args:
        run: A run folder.
        split: "train", "valid" or "test".
        filtered: Known triples other than the ranked one are no candidates.
        nproc_per_node: Ranks, whatever the run was trained on.
        device: auto, cpu or cuda.
        checkpoint: Name of a checkpoint; by default the newest.

    Returns:
        {"protocol": ..., "metrics": {"mrr", "mr", "hits@1", "hits@3", "hits@10"}, "head": ..., "tail": ...};
        also written to RUN/eval/ where that can be.

    Raises:
        DataError: The split is empty or unknown.
        RunError: `run` is no run, or has no such checkpoint.
        NonFiniteError: A row of a table is NaN or infinite.
    """
    check_nproc(nproc_per_node)
    check_device("--device", device)
    opened = open_run(run)
    opened.open_checkpoint(checkpoint)
    if len(opened.dataset.triples(split)) == 0:
        raise DataError(f"{opened.folder}: split {split!r} holds no triples")
    arguments = {
        "run": str(opened.folder.absolute()),
        "split": split,
        "filtered": filtered,
        "device": device,
        "checkpoint": checkpoint,
    }
    result = run_on_ranks("evaluate", arguments, nproc_per_node)
    _keep(opened.folder / "eval" / f"{split}-full-{'filtered' if filtered else 'raw'}.json", result)
    return result


def _keep(path: Path, result: dict[str, Any]) -> None:
    """Write a result beside its run; a run that cannot be written is no reason to lose it."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    except OSError as error:
        print(f"Warning: {path} was not written: {error.strerror}", file=sys.stderr)
