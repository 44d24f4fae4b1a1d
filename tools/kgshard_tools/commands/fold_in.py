"""`kgshard fold-in`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command("fold-in", epilog="Example: kgshard fold-in world-run new.tsv -o world-new")
@run_argument
@click.argument("triples", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The overlay to write.")
@click.option("--steps", type=int, default=100, show_default=True, help="Steps for each entity at most.")
@click.option("--seed", type=int, default=0, show_default=True, help="Fixes what is sampled.")
@click.option("--overwrite", is_flag=True, help="Replace an overlay that is there already.")
@output_options
def command(
    run: Path, triples: Path, out: Path, steps: int, seed: int, overwrite: bool, output: Output
) -> None:
    """Give entities that were not trained approximate vectors.

    TRIPLES (a file, or - for stdin) holds one head TAB relation TAB tail a line; each names an entity that
    RUN does not know. Only their vectors are fitted, and written beside the run, which stays as it is.
    """
    from kgshard_tools.overlay import fold_in

    written = fold_in(run, triples, out, steps=steps, seed=seed, overwrite=overwrite)
    output.result(written.to_dict(), written.lines())
