"""`kgshard curves`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("curves", epilog="Example: kgshard curves world-run")
@run_argument
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The PNG file; by default RUN/curves.png.")
@output_options
def command(run: Path, out: Path | None, output: Output) -> None:
    """Draw a run's loss and validation curves."""
    from kgshard_tools.curves import draw_curves

    path = draw_curves(run, out)
    output.result({"files": [str(path)]}, [str(path)])
