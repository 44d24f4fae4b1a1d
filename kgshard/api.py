"""`kgshard.train` and `kgshard.evaluate`: start ranks on this machine and wait for them. No torch here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kgshard.config import TrainConfig
from kgshard.devices import check_device
from kgshard.errors import DataError
from kgshard.files import AnyPath, write_json
from kgshard.launch import check_nproc, run_on_ranks
from kgshard.ranking.protocol import EvaluationSettings
from kgshard.runs import Run, open_run
from kgshard.start import started_run, tell_data
from kgshard.stderr import tell
from kgshard.training.metrics_log import check_tensorboard


def train(
    data: AnyPath,
    *,
    out: AnyPath,
    nproc_per_node: int = 1,
    overwrite: bool = False,
    quiet: bool = False,
    tensorboard: bool = False,
    **settings: Any,
) -> Run:
    """Train embeddings of `data` on `nproc_per_node` ranks of this machine.

    Args:
        data: A prepared dataset, a folder with train, valid and test files, or a bundled graph's name.
        out: The run folder to make.
        nproc_per_node: Ranks. The result does not depend on it, but for float rounding.
        overwrite: Replace a finished run that is at `out`, once the new one is finished.
        quiet: Print no progress.
        tensorboard: Write TensorBoard's events into the run as well.
        **settings: See `kgshard.config.TrainConfig`.

    Raises:
        ConfigError, DataError, RunError: Something about the call; nothing was written.
        KgshardError: Training failed.
    """
    config = TrainConfig.from_dict(settings)
    config.check_applies(settings)
    train_config(data, out, config, nproc_per_node, overwrite=overwrite, quiet=quiet, tensorboard=tensorboard)
    return open_run(out)


def train_config(
    data: AnyPath,
    out: AnyPath,
    config: TrainConfig,
    nproc_per_node: int = 1,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    tensorboard: bool = False,
    profile: bool = False,
) -> dict[str, Any]:
    """Train as `train` does; return {"run", "checkpoint", "epochs", "seconds", "metrics"}.

    With `profile` the result has "profile" too; see `kgshard.training.profile.profile_of`.
    """
    check_nproc(nproc_per_node)
    if tensorboard:
        check_tensorboard()
    with started_run(data, out, config, overwrite=overwrite) as run:
        if not quiet:
            tell_data(run)
        how = {"quiet": quiet, "tensorboard": tensorboard, "profile": profile}
        arguments = {"run": str(run.folder), **how}
        result = run_on_ranks("train", arguments, nproc_per_node)
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
    sides: str = "both",
    ties: str = "realistic",
    by: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
    nproc_per_node: int = 1,
    device: str = "auto",
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Rank a split's triples among all entities, on `nproc_per_node` ranks of this machine.

    Args:
        run: A run folder.
        split: "train", "valid" or "test".
        filtered: Known triples other than the ranked one are no candidates.
        sides: Which ends are asked for: "both", "tail" or "head".
        ties: How candidates of equal score count in the figures: "realistic" (half), "optimistic" or
            "pessimistic". The result holds all three under "ties".
        by: Break the figures down: any of "relation", "side", "degree", "cardinality".
        sample: Rank only so many triples, drawn without replacement; the figures are estimates then.
        seed: Fixes the sample.
        nproc_per_node: Ranks, whatever the run was trained on.
        device: auto, cpu or cuda.
        checkpoint: "best", "latest" or a checkpoint's name; by default the best where there is one, else
            the newest.

    Returns:
        {"protocol": ..., "metrics": {"mrr", "mr", "hits@1", "hits@3", "hits@10", "amr", "amri"}, "head": ...,
        "tail": ..., "ties": ...}, see docs/evaluation.md; also written to RUN/eval/ where that can be.

    Raises:
        ConfigError: A setting is unknown or out of range.
        DataError: The split is empty or unknown.
        RunError: `run` is no run, or has no such checkpoint.
        NonFiniteError: A number in a table, or a score, is NaN or infinite.
    """
    check_nproc(nproc_per_node)
    check_device("--device", device)
    settings = EvaluationSettings(
        split=split, filtered=filtered, sides=sides, ties=ties, by=by, sample=sample, seed=seed
    )
    opened = open_run(run)
    if len(opened.dataset.triples(split)) == 0:
        raise DataError(f"{opened.folder}: split {split!r} holds no triples")
    arguments = {
        "run": str(opened.folder.absolute()),
        "device": device,
        # Decided here, once: what "best" means may change before the last rank has looked.
        "checkpoint": opened.open_checkpoint(checkpoint).folder.name,
    }
    result = run_on_ranks("evaluate", arguments | asdict(settings), nproc_per_node)
    is_estimate = result["protocol"]["split_triples"] is not None
    _keep(opened.folder / "eval" / settings.file_name(is_estimate=is_estimate, checkpoint=checkpoint), result)
    return result


def _keep(path: Path, result: dict[str, Any]) -> None:
    """Write a result beside its run; a run that cannot be written is no reason to lose it."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    except OSError as error:
        tell(f"Warning: {path} was not written: {error.strerror}")
