"""`kgshard index`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument
from kgshard_tools.index.kinds import TYPES


@click.command("index", epilog="Example: kgshard index world-run --for both")
@run_argument
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["links", "neighbors", "both"]),
    default="both",
    envvar="KGSHARD_INDEX_FOR",
    show_default=True,
    help="Which questions to answer.",
)
@click.option(
    "--type",
    type=click.Choice(TYPES),
    default="auto",
    show_default=True,
    help="Kind of index; auto is flat, which is exact, up to 100,000 entities, else what is fast here.",
)
@click.option(
    "--recall",
    type=float,
    default=0.95,
    show_default=True,
    help="Recall at 10 that an approximate index must reach, measured on this table.",
)
@click.option("--per-shard", is_flag=True, help="One file for each shard; they are searched together.")
@click.option(
    "--queries", type=int, default=500, show_default=True, help="Queries for each side that measure recall."
)
@click.option(
    "--labels/--no-labels",
    "with_labels",
    envvar="KGSHARD_INDEX_LABELS",
    default=True,
    show_default=True,
    help="Also build labels.sqlite, which `search` and completion look names up in.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Fixes what is drawn.")
@output_options
def command(
    run: Path,
    purpose: str,
    type: str,
    recall: float,
    per_shard: bool,
    queries: int,
    seed: int,
    with_labels: bool,
    output: Output,
) -> None:
    """Build FAISS indexes of a run.

    Straight from its shards, block by block. The metric of the links index is the model's, so the same
    index answers for tails and heads of every relation. predict and neighbors use what is there. How an
    approximate index is searched is chosen by measurement; its recall is stored and told with every answer.
    """
    from kgshard_tools.index.build import build_index

    written = build_index(
        run,
        purpose,
        type=type,
        recall=recall,
        per_shard=per_shard,
        num_queries=queries,
        seed=seed,
        with_labels=with_labels,
    )
    output.result(written.to_dict(), written.lines())
