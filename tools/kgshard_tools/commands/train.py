"""`kgshard train`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kgshard.config import TrainConfig
from kgshard.launch import is_rank
from kgshard.ranking.protocol import valid_mrr
from kgshard_tools.commands.output import Output, nproc_option, output_options
from kgshard_tools.commands.settings import SettingsCommand, settings_options


@click.command(
    "train",
    cls=SettingsCommand,
    epilog="Example: kgshard train world -o world-run --model complex --dim 100 --nproc-per-node 2. "
    "The same under torchrun: torchrun --nproc-per-node 2 -m kgshard train world -o world-run.",
)
@click.argument("data")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The run folder to make.")
@settings_options("TRAIN")
@nproc_option("Ranks on this machine. The result does not depend on it, but for float rounding.")
@click.option("--overwrite", is_flag=True, help="Replace a finished run, once the new one is.")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard's events into RUN as well.")
@click.option("--profile", is_flag=True, help="Say where a step's time goes, and its least.")
@click.option("--dry-run", is_flag=True, help="Write nothing; say what training would take (kgshard plan).")
@output_options
def command(
    data: str,
    out: Path,
    settings: TrainConfig,
    nproc_per_node: int,
    overwrite: bool,
    tensorboard: bool,
    profile: bool,
    dry_run: bool,
    output: Output,
) -> None:
    """Train embeddings on row-sharded tables.

    DATA is a prepared dataset, a folder with train, valid and test files, or the name of a bundled
    graph (world). Settings come from --config, then --set, then options of their own; the last one holds.
    """
    how: dict[str, Any] = {
        "overwrite": overwrite,
        "quiet": output.quiet,
        "tensorboard": tensorboard,
        "profile": profile,
    }
    if is_rank():
        from kgshard.training.tasks import start_and_train_rank

        if nproc_per_node != 1:
            raise click.UsageError("under torchrun, torchrun's own --nproc-per-node says how many ranks")
        if dry_run:
            raise click.UsageError("--dry-run is not for torchrun; kgshard plan starts ranks of its own")
        result = start_and_train_rank(data, out, settings, **how)
    elif dry_run:
        from kgshard.api import plan_config
        from kgshard_tools.plans import plan_lines

        plan = plan_config(data, settings, nproc_per_node, out=out)
        output.result(plan.to_dict(), plan_lines(plan), is_answer=True)
        return
    else:
        from kgshard.api import train_config

        result = train_config(data, out, settings, nproc_per_node, **how)
    if result is not None:
        _say(result, output)


def _say(result: dict[str, Any], output: Output) -> None:
    metrics = result["metrics"]
    best = metrics.get("valid")
    output.result(
        result,
        [
            f"{result['epochs']} epochs in {result['seconds']:.1f} s, "
            f"{metrics['triples_per_second']:,.0f} triples/s, loss {metrics['loss']:.4f}",
            *(_profile_lines(result["profile"]) if "profile" in result else []),
            *([metrics["protocol"]] if best else []),
            *([f"best {valid_mrr(metrics)} after epoch {best['epoch']}"] if best else []),
            result["checkpoint"],
            f"next: kgshard evaluate {result['run']}",
        ],
    )


def _profile_lines(profile: dict[str, Any]) -> Iterator[str]:
    """Yield a table of what one step takes on rank 0, on average."""
    yield f"{'stage of a step':<22}{'ms':>9}{'at least':>10}{'MB':>9}{'MFLOP':>9}"
    for name, stage in profile["stages"].items():
        yield (
            f"{name:<22}{stage['milliseconds']:>9.3f}{stage['floor_milliseconds']:>10.3f}"
            f"{stage['bytes'] / 1e6:>9.2f}{stage['flops'] / 1e6:>9.1f}"
        )
    yield f"{'together':<22}{profile['milliseconds']:>9.3f}{profile['floor_milliseconds']:>10.3f}"
    yield (
        f"rank 0, {profile['steps']:,} steps; the least is at {profile['gigabytes_per_second']:.1f} GB/s"
        f" copied and {profile['gigaflops_per_second']:.0f} GFLOP/s multiplied, all ranks at once"
    )
