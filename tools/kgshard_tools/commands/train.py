"""`kgshard train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from kgshard.config import CORRUPTIONS, DEVICES, OPTIMIZER_NAMES, TrainConfig
from kgshard.launch import is_rank
from kgshard_tools.commands.output import Output, nproc_option, output_options

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}


def _setting(name: str, help: str, *, known: tuple[str, ...] = ()) -> _Decorator:
    """Return the option of one field of TrainConfig, with its default. Values are checked there."""
    default = _DEFAULTS[name]
    return click.option(
        f"--{name.replace('_', '-')}",
        name,
        type=type(default),
        default=default,
        show_default=True,
        metavar="|".join(known) or None,
        help=help,
    )


@click.command(
    "train",
    epilog="Example: kgshard train world -o world-run --model complex --dim 100 --nproc-per-node 2. "
    "The same under torchrun: torchrun --nproc-per-node 2 -m kgshard train world -o world-run.",
)
@click.argument("data")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The run folder to make.")
@_setting("model", "Scoring function: distmult, complex, transe, transe-l1, rotate.")
@_setting("dim", "Floats for each entity.")
@_setting("epochs", "Passes over the train triples.")
@_setting("batch_size", "Positive triples for each step, over all ranks.")
@_setting("negatives", "Negative entities for each step, shared by the batch.")
@_setting("corruption", "How heads are asked for.", known=CORRUPTIONS)
@_setting("optimizer", "Optimizer of touched rows.", known=OPTIMIZER_NAMES)
@_setting("lr", "Learning rate.")
@_setting("n3", "Weight of the N3 regulariser.")
@_setting("seed", "Fixes initial rows, shuffles and negatives.")
@_setting("device", "Where tables live.", known=DEVICES)
@_setting("optimizer_device", "Where optimizer state lives; auto is beside the table.", known=DEVICES)
@nproc_option("Ranks on this machine. The result does not depend on it, but for float rounding.")
@click.option("--overwrite", is_flag=True, help="Replace a finished run, once the new one is.")
@output_options
def command(
    data: str, out: Path, nproc_per_node: int, overwrite: bool, output: Output, **settings: Any
) -> None:
    """Train embeddings on row-sharded tables.

    DATA is a prepared dataset, a folder with train, valid and test files, or the name of a bundled
    graph (world).
    """
    config = TrainConfig.from_dict(settings)
    if is_rank():
        from kgshard.training import start_and_train_rank

        if nproc_per_node != 1:
            raise click.UsageError("under torchrun, torchrun's own --nproc-per-node says how many ranks")
        result = start_and_train_rank(data, out, config, overwrite=overwrite, quiet=output.quiet)
    else:
        from kgshard.api import train_config

        result = train_config(data, out, config, nproc_per_node, overwrite=overwrite, quiet=output.quiet)
    if result is not None:
        _say(result, output)


def _say(result: dict[str, Any], output: Output) -> None:
    metrics = result["metrics"]
    output.result(
        result,
        [
            f"{result['epochs']} epochs in {result['seconds']:.1f} s, "
            f"{metrics['triples_per_second']:,.0f} triples/s, loss {metrics['loss']:.4f}",
            result["checkpoint"],
            f"next: kgshard evaluate {result['run']}",
        ],
    )
