"""`kgshard.train` and `kgshard.evaluate`: start ranks on this machine and wait for them. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kgshard.config import TrainConfig
from kgshard.files import write_json
from kgshard.launch import check_nproc, run_on_ranks
from kgshard.runs import Run, open_run
from kgshard.start import start_run


def train(
    data: str | Path,
    *,
    out: str | Path,
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
        overwrite: Replace a run that is at `out` already.
        quiet: Print no progress.
        **settings: See `kgshard.config.TrainConfig`.

    Raises:
        ConfigError, DataError, RunError: Something about the call; nothing was written.
        KgshardError: Training failed.
    """
    run, _ = train_with_result(
        data, out=out, nproc_per_node=nproc_per_node, overwrite=overwrite, quiet=quiet, **settings
    )
    return run


def train_with_result(
    data: str | Path,
    *,
    out: str | Path,
    nproc_per_node: int = 1,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> tuple[Run, dict[str, Any]]:
    """Train as `train` does; also return {"run", "checkpoint", "epochs", "seconds", "metrics"}."""
    check_nproc(nproc_per_node)
    run = start_run(data, out, TrainConfig.from_dict(settings), overwrite=overwrite)
    return run, run_on_ranks("train", {"run": str(run.folder), "quiet": quiet}, nproc_per_node)


def evaluate(
    run: str | Path,
    *,
    split: str = "test",
    filtered: bool = True,
    nproc_per_node: int = 1,
    device: str = "auto",
) -> dict[str, Any]:
    """Rank a split's triples among all entities, on `nproc_per_node` ranks of this machine.

    Returns:
        {"protocol": ..., "metrics": {"mrr", "mr", "hits@1", "hits@3", "hits@10"}, "head": ..., "tail": ...};
        also written to RUN/eval/.
    """
    check_nproc(nproc_per_node)
    opened = open_run(run)
    opened.checkpoint  # noqa: B018 - refused here, before ranks start
    arguments = {"run": str(opened.folder), "split": split, "filtered": filtered, "device": device}
    result = run_on_ranks("evaluate", arguments, nproc_per_node)
    folder = opened.folder / "eval"
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{split}-full-{'filtered' if filtered else 'raw'}.json", result)
    return result
