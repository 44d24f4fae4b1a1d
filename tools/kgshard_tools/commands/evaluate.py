"""`kgshard evaluate`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, nproc_option, output_options, run_argument


@click.command("evaluate", epilog="Example: kgshard evaluate world-run --split test --json")
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
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda", help="Where to rank.")
@nproc_option("Ranks on this machine, whatever the run was trained on.")
@output_options
def command(run: Path, split: str, filtered: bool, device: str, nproc_per_node: int, output: Output) -> None:
    """Rank a split's triples among all entities.

    Prints MRR, MR and Hits@k for both sides together and for each. Ranks are exact, and realistic: of
    equal scores half count as better.
    """
    from kgshard.api import evaluate
    from kgshard_tools.results import Evaluation

    result = evaluate(run, split=split, filtered=filtered, nproc_per_node=nproc_per_node, device=device)
    output.result(result, Evaluation(result).lines(), is_answer=True)
