"""`kgshard evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kgshard_tools.commands.output import Output, nproc_option, output_options, run_argument


@click.command("evaluate", epilog="Example: kgshard evaluate world-run --split test --by relation --json")
@run_argument
@click.option(
    "--split",
    type=click.Choice(["train", "valid", "test"]),
    default="test",
    show_default=True,
    help="What to rank.",
)
@click.option(
    "--filtered/--raw", default=True, show_default=True, help="Whether known triples are no candidates."
)
@click.option("--sides", default="both", show_default=True, metavar="both|tail|head", help="What to ask for.")
@click.option(
    "--ties",
    default="realistic",
    show_default=True,
    metavar="realistic|optimistic|pessimistic",
    help="How candidates of equal score count: half, not, or all as better. --json has all three.",
)
@click.option(
    "--by",
    multiple=True,
    metavar="relation|side|degree|cardinality",
    help="Break the figures down; may be given several times.",
)
@click.option(
    "--sample", type=int, metavar="N", help="Estimate from N triples drawn at random, among all candidates."
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Fixes the sample.")
@click.option("--checkpoint", metavar="best|latest|STEP-NAME", help="By default the best where there is one.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda", help="Where to rank.")
@nproc_option("Ranks on this machine, whatever the run was trained on.")
@output_options
def command(run: Path, output: Output, **settings: Any) -> None:
    """Rank a split's triples among all entities.

    Prints how it was done, and MRR, MR, Hits@k and the adjusted mean rank for both sides together and for
    each. Ranks are exact, and realistic: of equal scores half count as better.
    """
    from kgshard.api import evaluate
    from kgshard_tools.results import Evaluation

    result = evaluate(run, **settings)
    output.result(result, Evaluation(result).lines(), is_answer=True)
