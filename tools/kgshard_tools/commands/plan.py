"""`kgshard plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kgshard.config import TrainConfig
from kgshard_tools.commands.output import Output, nproc_option, output_options
from kgshard_tools.commands.settings import SettingsCommand, settings_options


@click.command(
    "plan",
    cls=SettingsCommand,
    epilog="Example: kgshard plan world --dim 100 --nproc-per-node 2. Without data: "
    "kgshard plan --num-entities 180000000 --num-relations 1000 --num-triples 1000000000 --dim 64.",
)
@click.argument("data", required=False)
@click.option("--num-entities", type=int, metavar="N", help="In place of DATA, with the next two.")
@click.option("--num-relations", type=int, metavar="N", help="Inverses not counted.")
@click.option("--num-triples", type=int, metavar="N", help="Of train.")
@settings_options("PLAN")
@nproc_option("Ranks on this machine.")
@click.option(
    "-o",
    "--out",
    default=".",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where the run would be, for the disk.",
)
@click.option(
    "--probe",
    type=float,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to train, to see how fast that is; 0 is not at all.",
)
@output_options
def command(
    data: str | None, settings: TrainConfig, nproc_per_node: int, output: Output, **options: Any
) -> None:
    """Say what a training would take, and whether it fits this machine.

    DATA and settings are those of kgshard train. Tables, optimizer state and checkpoints are counted exactly,
    what a step makes is bounded, and time is taken from steps on real ranks. Nothing is written.
    """
    from kgshard.api import plan_config
    from kgshard_tools.plans import plan_lines

    plan = plan_config(data, settings, nproc_per_node, **options)
    output.result(plan.to_dict(), plan_lines(plan), is_answer=True)
