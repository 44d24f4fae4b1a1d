"""`kgshard merge-shards`."""

from __future__ import annotations

from pathlib import Path

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
@click.option("--verify", is_flag=True, help="First compare every shard with its SHA-256.")
@output_options
def command(run: Path, out: Path | None, verify: bool, output: Output) -> None:
    """Merge a run's shards into one safetensors file.

    RUN may also be one of its checkpoint folders. Bytes go from file to file; memory does not grow with
    the table.
    """
    from kgshard_tools.merge import merge_shards

    written = merge_shards(run, out, verify=verify)
    output.result(written.to_dict(), written.lines())
