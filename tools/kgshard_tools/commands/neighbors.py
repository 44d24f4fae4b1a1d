"""`kgshard neighbors`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kgshard_tools.commands.batch import answer_batch, batch_options, check_out, print_answers, print_batch
from kgshard_tools.commands.names import ENTITY_NAME
from kgshard_tools.commands.output import (
    Output,
    foreign_index_option,
    output_options,
    overlay_option,
    run_argument,
)

if TYPE_CHECKING:
    from kgshard_tools.answers import Similarity


@click.command("neighbors", epilog="Example: kgshard neighbors world-run Austria")
@run_argument
@click.argument("names", nargs=-1, metavar="[NAME]...", type=ENTITY_NAME)
@click.option("-k", "k", type=int, default=10, show_default=True, help="How many neighbours.")
@click.option(
    "--metric",
    type=click.Choice(["cosine", "dot", "l2", "l1"]),
    default="cosine",
    show_default=True,
    help="How to compare.",
)
@click.option("--exact", is_flag=True, help="Look at every entity, also where there is an approximate index.")
@overlay_option("NEIGHBORS")
@foreign_index_option("NEIGHBORS")
@batch_options
@output_options
def command(
    run: Path,
    names: tuple[str, ...],
    k: int,
    metric: Similarity,
    exact: bool,
    overlay: Path | None,
    foreign_index: Path | None,
    queries: str | None,
    out: Path | None,
    on_error: Literal["stop", "skip"],
    output: Output,
) -> None:
    """Find the entities most like another.

    NAME is a label, or #ROW, or - for labels on stdin, one a line. Instead of NAMEs --queries may give .tsv
    with a label a line, .ndjson or .json with {"entity": LABEL}, or .parquet with a column named entity.
    What is compared are vectors.
    """
    if (queries is None) == (not names):
        raise click.UsageError("give one NAME or more, or --queries")
    if exact and foreign_index is not None:
        raise click.UsageError("give --exact or --allow-foreign-index, not both")
    check_out(out, queries)
    from kgshard_tools.answers import load
    from kgshard_tools.batches import Batch, SimilarityAsker, block_size, read_entries, read_names

    asker = SimilarityAsker(load(run, overlay, foreign_index=foreign_index), k, metric=metric, exact=exact)
    if queries is not None:
        blocks = read_entries(queries, asker.columns, block_size(k))
    else:
        blocks = read_names(names, "entity", block_size(k))
    if out is not None or queries is not None or (output.json and _are_several(names)):
        answer_batch(asker, blocks, out, output, on_error=on_error)
    elif _are_several(names):
        print_batch(Batch(asker, blocks, on_error=on_error), output)
    else:
        print_answers(asker.answer([{"entity": names[0]}])[0], output)


def _are_several(names: tuple[str, ...]) -> bool:
    return len(names) > 1 or names == ("-",)
