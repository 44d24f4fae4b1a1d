"""`kgshard models`."""

from __future__ import annotations

import click

from kgshard_tools.commands.output import Output, output_options


@click.command("models", epilog="Example: kgshard models --dim 200")
@click.option("--dim", type=int, default=128, show_default=True, help="Floats for each entity.")
@output_options
def command(dim: int, output: Output) -> None:
    """List the models that can be trained.

    With the formula of each, its metric, and what it stores for each relation and for all rows together.
    """
    from kgshard_tools.catalogue import list_models

    catalogue = list_models(dim)
    output.result(catalogue.to_dict(), catalogue.lines(), is_answer=True)
