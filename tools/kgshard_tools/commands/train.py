"""`kgshard train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from kgshard.config import DEFAULTS, TrainConfig, option, parse_setting, read_settings
from kgshard.launch import is_rank
from kgshard.ranking.protocol import valid_mrr
from kgshard_tools.commands.output import Output, nproc_option, output_options

_GROUPS = {
    "model": "Model",
    "epochs": "Training",
    "train_type": "Loss and negatives",
    "n3": "Regularisers",
    "optimizer": "Optimizer",
    "eval_every": "Evaluation while training",
    "device": "Devices",
}
"""Headings of the help, each before the setting that it names."""


class _Train(click.Command):
    """A command whose many options are listed under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        heading = "Options"
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_setting = parameter.name in TrainConfig.__dataclass_fields__
            heading = _GROUPS.get(parameter.name or "", heading) if is_setting else "Options"
            if record is not None:
                groups.setdefault(heading, []).append(record)
        for name in (*_GROUPS.values(), "Options"):
            with formatter.section(name):
                formatter.write_dl(groups[name])


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of TrainConfig, which checks values; one that was not given is None."""
    for declared in reversed(fields(TrainConfig)):
        command = _option(declared)(command)
    return command


def _option(declared: Field[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    spelling, default = option(declared.name), declared.default
    is_flag = isinstance(default, bool)
    shown = ("on" if default else "off") if is_flag else default
    return click.option(
        f"{spelling}/--no-{spelling[2:]}" if is_flag else spelling,
        declared.name,
        type=None if is_flag else type(default),
        default=None,
        metavar="|".join(declared.metadata["choices"]) or None,
        help=f"{declared.metadata['help']}  [default: {shown}]",
    )


@click.command(
    "train",
    cls=_Train,
    epilog="Example: kgshard train world -o world-run --model complex --dim 100 --nproc-per-node 2. "
    "The same under torchrun: torchrun --nproc-per-node 2 -m kgshard train world -o world-run.",
)
@click.argument("data")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The run folder to make.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A TOML file of settings: a recipe, a run's config.toml.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    envvar="KGSHARD_TRAIN_SET",
    metavar="NAME=VALUE",
    help="A setting, by its name.",
)
@_settings
@nproc_option("Ranks on this machine. The result does not depend on it, but for float rounding.")
@click.option("--overwrite", is_flag=True, help="Replace a finished run, once the new one is.")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard's events into RUN as well.")
@click.option("--profile", is_flag=True, help="Say where a step's time goes, and its least.")
@output_options
def command(
    data: str,
    out: Path,
    config: Path | None,
    assignments: tuple[str, ...],
    nproc_per_node: int,
    overwrite: bool,
    tensorboard: bool,
    profile: bool,
    output: Output,
    **options: Any,
) -> None:
    """Train embeddings on row-sharded tables.

    DATA is a prepared dataset, a folder with train, valid and test files, or the name of a bundled
    graph (world). Settings come from --config, then --set, then options of their own; the last one holds.
    """
    given = dict(map(parse_setting, assignments))
    given |= {name: value for name, value in options.items() if value is not None}
    recipe = read_settings(config) if config is not None else {}
    settings = TrainConfig.from_dict(recipe | given)
    # Back to its default: that turns off what a recipe says, whether it means anything here or not.
    settings.check_applies(
        [name for name, value in given.items() if value != DEFAULTS[name] or name not in recipe]
    )
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
        result = start_and_train_rank(data, out, settings, **how)
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
