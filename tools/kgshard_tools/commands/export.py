"""`kgshard export`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("export", epilog="Example: kgshard export world-run --format numpy -o world-numpy")
@run_argument
@click.option("--format", default="numpy", show_default=True, help="One of: numpy.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="The folder to write. [default: RUN/export-FORMAT]"
)
@output_options
def command(run: Path, format: str, out: Path | None, output: Output) -> None:
    """Write a run's tables for other programs.

    RUN may also be one of its checkpoint folders. Straight from the shards; no merge first. Row i is label i.
    """
    from kgshard_tools.export import export

    written = export(run, format, out)
    output.result(written.to_dict(), written.lines())
