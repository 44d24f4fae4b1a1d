"""`kgshard merge-shards`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("merge-shards", epilog="Example: kgshard merge-shards world-run -o world.safetensors")
@run_argument
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="A .safetensors file, or a folder for the model with config and labels. [default: RUN/model]",
)
@click.option(
    "--dtype", metavar="float32|float16|bfloat16", help="Of the tables. [default: as they are stored]"
)
@click.option(
    "--max-file-size",
    metavar="SIZE",
    help="Cut the model into files of at most this size (5GB), with an index; no tensor is cut.",
)
@click.option(
    "--include", multiple=True, metavar="optimizer", help="More of the checkpoint: the optimizer's state."
)
@click.option(
    "--verify",
    is_flag=True,
    help="First compare every shard with its SHA-256; write down that of the merged files.",
)
@output_options
def command(run: Path, output: Output, **settings: Any) -> None:
    """Merge a run's shards into one safetensors file, or a few.

    RUN may also be one of its checkpoint folders. Bytes go from file to file; memory does not grow with
    the table.
    """
    from kgshard_tools.merge import merge_shards
    from kgshard_tools.progress import byte_progress

    with byte_progress(quiet=output.quiet) as advance:
        written = merge_shards(run, advance=advance, **settings)
    output.result(written.to_dict(), written.lines())
