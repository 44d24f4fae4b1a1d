"""`kgshard info`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options


@click.command("info", epilog="Example: kgshard info world-run")
@click.argument("path", type=click.Path(path_type=Path))
@output_options
def command(path: Path, output: Output) -> None:
    """Say what a folder or file is.

    PATH is a run, a checkpoint, a prepared dataset, an index folder, an overlay, a merged model, an export,
    or a file: safetensors, .npy, Parquet, FAISS. Headers are read, values are not; a pickle is named and not
    opened.
    """
    from kgshard_tools.info import info

    found = info(path)
    output.result(found.to_dict(), found.lines(), is_answer=True)
