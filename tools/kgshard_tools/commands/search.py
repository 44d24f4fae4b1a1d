"""`kgshard search`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from kgshard_tools.commands.names import ENTITY_NAME
from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("search", epilog="Example: kgshard search world-run austri")
@run_argument
@click.argument("text", type=ENTITY_NAME)
@click.option("--limit", type=int, default=10, show_default=True, help="How many labels.")
@click.option(
    "--kind",
    type=click.Choice(["entity", "relation", "both"]),
    default="entity",
    show_default=True,
    help="Labels of what.",
)
@output_options
def command(
    run: Path, text: str, limit: int, kind: Literal["entity", "relation", "both"], output: Output
) -> None:
    """Find labels by a part of them, or by what is nearly one.

    First labels that are TEXT, then those that begin with it, then those with words that begin with its
    words, then those a typing error or two away. Case and accents do not count. Of those found alike the ones
    that more train triples name come first. Fast where `kgshard index` has built labels.sqlite.
    """
    from kgshard_tools.labels.found import LabelMatches, open_labels
    from kgshard_tools.stored import open_stored

    with open_labels(open_stored(run).run) as labels:
        matches = LabelMatches({"text": text, "kind": kind, "limit": limit}, labels.search(text, limit, kind))
    output.result(matches.to_dict(), matches.lines(), is_answer=True)
