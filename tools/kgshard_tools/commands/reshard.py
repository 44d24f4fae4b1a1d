"""`kgshard reshard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("reshard", epilog="Example: kgshard reshard world-run -o world-8 --world-size 8")
@run_argument
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The run folder to make.")
@click.option("--world-size", required=True, type=int, metavar="N", help="Shards of each table.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is there already.")
@click.option("--verify", is_flag=True, help="First compare every shard with its SHA-256.")
@output_options
def command(run: Path, output: Output, **settings: Any) -> None:
    """Cut a run's tables into another number of shards.

    RUN may also be one of its checkpoint folders. Optimizer state is cut as well. Bytes go from file to
    file; nothing of the run but the pieces changes.
    """
    from kgshard_tools.progress import byte_progress
    from kgshard_tools.reshard import reshard

    with byte_progress(quiet=output.quiet) as advance:
        written = reshard(run, advance=advance, **settings)
    output.result(written.to_dict(), written.lines())
