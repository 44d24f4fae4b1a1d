"""`kgshard export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("export", epilog="Example: kgshard export world-run --format numpy -o world-numpy")
@run_argument
@click.option(
    "--format", default="numpy", show_default=True, help="What to write; docs/formats.md lists all."
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="The folder to write. [default: RUN/export-FORMAT]"
)
@click.option(
    "--entities", type=click.Path(path_type=Path), help="Only those that this file names, one a line."
)
@click.option("--top-degree", type=int, metavar="N", help="Only the N of the highest degree in train.")
@click.option(
    "--dtype", metavar="float32|float16|bfloat16", help="Of the values. [default: as they are stored]"
)
@click.option("--normalize", is_flag=True, help="Scale entity rows to length 1.")
@click.option(
    "--label-escape",
    default="refuse",
    show_default=True,
    metavar="refuse|percent|underscore",
    help="What becomes of a label that the format cannot say.",
)
@click.option("--verify", is_flag=True, help="First compare every shard with its SHA-256.")
@output_options
def command(run: Path, output: Output, **settings: Any) -> None:
    """Write a run's tables for other programs.

    RUN may also be one of its checkpoint folders. Straight from the shards; no merge first. Row i is label i.
    """
    from kgshard_tools.export import export
    from kgshard_tools.progress import byte_progress

    with byte_progress(quiet=output.quiet) as advance:
        written = export(run, advance=advance, **settings)
    output.result(written.to_dict(), written.lines())
