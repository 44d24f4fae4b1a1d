"""`kgshard index`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("index", epilog="Example: kgshard index world-run --for both")
@run_argument
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["links", "neighbors", "both"]),
    default="both",
    envvar="KGSHARD_INDEX_FOR",
    show_default=True,
    help="Which questions to answer.",
)
@click.option(
    "--type", type=click.Choice(["auto", "flat"]), default="auto", show_default=True, help="Kind of index."
)
@output_options
def command(run: Path, purpose: str, type: str, output: Output) -> None:
    """Build FAISS indexes of a run.

    Straight from its shards, block by block. The metric of the links index is the model's, so the same
    index answers for tails and heads of every relation. predict and neighbors use what is there.
    """
    from kgshard_tools.index import build_index

    written = build_index(run, purpose, type=type)
    output.result(written.to_dict(), written.lines())
