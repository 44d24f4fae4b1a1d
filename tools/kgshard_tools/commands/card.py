"""`kgshard card`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("card", epilog="Example: kgshard card world-run --license cc-by-4.0 -o README.md")
@run_argument
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The file to write. [default: stdout]")
@click.option("--license", metavar="ID", help="As the hub spells it: cc-by-4.0.")
@output_options
def command(run: Path, out: Path | None, license: str | None, output: Output) -> None:
    """Write a run's model card, as a Hugging Face hub shows it.

    Its figures are those of `kgshard evaluate RUN --split test`, where that was run.
    """
    from kgshard_tools.card import model_card, write_card
    from kgshard_tools.stored import open_stored
    from kgshard_tools.written import Written

    began = time.monotonic()
    stored = open_stored(run)
    if out is None:
        text = model_card(stored, license=license)
        output.result({"card": text}, text.splitlines(), is_answer=True)
        return
    write_card(stored, out, license=license)
    size, seconds = out.stat().st_size, time.monotonic() - began
    written = Written([str(out)], stored.model.num_entities, size, seconds)
    output.result(written.to_dict(), written.lines())
