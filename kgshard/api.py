"""`kgshard.plan`, `train` and `evaluate`: start ranks on this machine and wait for them. No torch here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kgshard.config import TrainConfig
from kgshard.data.dataset import Dataset
from kgshard.devices import check_device, num_cuda_devices
from kgshard.errors import ConfigError, DataError
from kgshard.files import AnyPath, write_json
from kgshard.launch import check_nproc, run_on_ranks
from kgshard.machine import available_memory, free_disk, total_memory
from kgshard.planning.plan import Plan, plan_training
from kgshard.planning.stored import GraphSize
from kgshard.planning.training import Machine, Training, check_tables
from kgshard.ranking.protocol import EvaluationSettings
from kgshard.runs import Run, open_run
from kgshard.start import opened_data, started_run, tell_data
from kgshard.stderr import tell
from kgshard.training.metrics_log import check_tensorboard

PROBE_SECONDS = 5.0
"""How long `plan` trains to see how fast steps are."""


def plan(
    data: AnyPath | None = None,
    *,
    num_entities: int | None = None,
    num_relations: int | None = None,
    num_triples: int | None = None,
    out: AnyPath = ".",
    nproc_per_node: int = 1,
    probe: float = PROBE_SECONDS,
    **settings: Any,
) -> Plan:
    """Say what a training would take, whether it fits this machine, and what would. Nothing is written.

    Args:
        data: As `train` takes it; text is read and prepared in a temporary folder.
        num_entities: In place of data, with the other two.
        num_relations: The same, inverses not counted.
        num_triples: The same, of train.
        out: Where the run would be, for the disk.
        nproc_per_node: Ranks.
        probe: Seconds to train, on as many ranks, with tables cut to what is small, to see how fast that is;
            0 does not.
        **settings: See `kgshard.config.TrainConfig`.

    Raises:
        ConfigError, DataError: Something about the call or the data.
        KgshardError: A rank that was timed failed.
    """
    config = TrainConfig.from_dict(settings)
    config.check_applies(settings)
    return plan_config(
        data,
        config,
        nproc_per_node,
        num_entities=num_entities,
        num_relations=num_relations,
        num_triples=num_triples,
        out=out,
        probe=probe,
    )


def plan_config(
    data: AnyPath | None,
    config: TrainConfig,
    nproc_per_node: int = 1,
    *,
    num_entities: int | None = None,
    num_relations: int | None = None,
    num_triples: int | None = None,
    out: AnyPath = ".",
    probe: float = PROBE_SECONDS,
) -> Plan:
    """Plan as `plan` does."""
    check_nproc(nproc_per_node)
    if not 0 <= probe < float("inf"):
        raise ConfigError(f"--probe must be a number of seconds >= 0, got {probe}")
    numbers = (num_entities, num_relations, num_triples)
    if data is not None and numbers != (None, None, None):
        raise ConfigError(
            "--num-entities, --num-relations and --num-triples stand in place of DATA; drop one"
        )
    if data is not None:
        with opened_data(data) as dataset:
            training = Training(config, _size_of(dataset), nproc_per_node)
            return _planned(training, out, str(dataset.folder.absolute()), probe)
    if num_entities is None or num_relations is None or num_triples is None:
        raise ConfigError("give DATA, or all of --num-entities, --num-relations and --num-triples")
    size = GraphSize(num_entities, num_relations, num_triples)
    return _planned(Training(config, size, nproc_per_node), out, None, probe)


def _planned(training: Training, out: AnyPath, data: str | None, probe: float) -> Plan:
    """Plan, and time steps on the triples of a prepared dataset, or on such as are drawn."""
    machine = Machine(available_memory(), free_disk(Path(out)), _free_on_gpus(training.config))
    planned, part = plan_training(training, machine), training.cut()
    if not probe or not part.fits_memory(machine):
        return planned
    arguments = {
        "config": training.config.to_dict(),
        "data": data,
        "num_entities": part.size.entities,
        "num_relations": part.size.relations,
        "seconds": probe,
    }
    timed = run_on_ranks("probe", arguments, training.nproc_per_node)
    return replace(planned, speed=training.speed(part, **timed))


def _trains_on_gpus(config: TrainConfig) -> bool:
    return config.device != "cpu" and num_cuda_devices() > 0


def _free_on_gpus(config: TrainConfig) -> tuple[int, ...]:
    if not _trains_on_gpus(config):
        return ()
    from kgshard.distributed import free_on_gpus  # CUDA

    return free_on_gpus(config.device)  # CUDA


def _size_of(dataset: Dataset) -> GraphSize:
    splits = dataset.info.splits
    return GraphSize(
        dataset.num_entities,
        dataset.num_relations,
        splits["train"].triples,
        valid=splits["valid"].triples,
        num_bytes=sum(file.bytes for file in dataset.info.files.values()),
    )


def check_memory(config: TrainConfig, dataset: Dataset, num_local_ranks: int, world_size: int) -> None:
    """Refuse a training whose tables cannot be in this machine's memory, whatever else runs.

    Raises:
        ConfigError: They cannot.
    """
    if not _trains_on_gpus(config):
        machines = max(1, world_size // num_local_ranks)
        check_tables(Training(config, _size_of(dataset), num_local_ranks, machines), total_memory())


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
        check_memory(config, run.dataset, nproc_per_node, nproc_per_node)
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
