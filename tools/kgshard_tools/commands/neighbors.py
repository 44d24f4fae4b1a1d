"""`kgshard neighbors`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("neighbors", epilog="Example: kgshard neighbors world-run Austria")
@run_argument
@click.argument("name")
@click.option("-k", "k", type=int, default=10, show_default=True, help="How many neighbours.")
@click.option(
    "--metric",
    type=click.Choice(["cosine", "dot", "l2", "l1"]),
    default="cosine",
    show_default=True,
    help="How to compare.",
)
@output_options
def command(run: Path, name: str, k: int, metric: str, output: Output) -> None:
    """Find the entities most like another.

    NAME is a label, or #ROW. What is compared are vectors.
    """
    from kgshard_tools.answers import load

    answers = load(run).most_similar(name, k, metric=metric)  # type: ignore[arg-type]  # checked there
    output.result(answers.to_dict(), answers.lines(), is_answer=True)
