"""`kgshard predict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kgshard_tools.commands.batch import answer_batch, batch_options, check_out, print_answers
from kgshard_tools.commands.names import ENTITY_NAME, RELATION_NAME
from kgshard_tools.commands.output import (
    Output,
    foreign_index_option,
    output_options,
    overlay_option,
    run_argument,
)

if TYPE_CHECKING:
    from kgshard_tools.batches import LinkAsker


@click.command(
    "predict", epilog="Example: kgshard predict world-run --head Austria --relation 'uses currency'"
)
@run_argument
@click.option("--head", type=ENTITY_NAME, help="The given head. A label, or #ROW.")
@click.option("--relation", type=RELATION_NAME, help="The given relation.")
@click.option("--tail", type=ENTITY_NAME, help="The given tail.")
@click.option("-k", "k", type=int, default=10, show_default=True, help="How many answers.")
@click.option("--known", is_flag=True, help="Also show triples that train, valid or test hold.")
@click.option(
    "--candidates",
    type=click.Path(path_type=Path),
    help="Only entities that this file names, one a line, may answer.",
)
@click.option("--seen", is_flag=True, help="Only entities at this end of the relation in train may answer.")
@click.option("--min-score", type=float, metavar="X", help="Leave out what scores lower.")
@click.option("--exact", is_flag=True, help="Look at every entity, also where there is an approximate index.")
@click.option("--calibrate", is_flag=True, help="Also print how likely each answer is, fitted to valid.")
@overlay_option("PREDICT")
@foreign_index_option("PREDICT")
@batch_options
@output_options
def command(
    run: Path,
    head: str | None,
    relation: str | None,
    tail: str | None,
    queries: str | None,
    out: Path | None,
    on_error: Literal["stop", "skip"],
    output: Output,
    **wanted: Any,
) -> None:
    """Find the missing tail, head or relation of a triple.

    Give two of --head, --relation and --tail, or --queries: .tsv with three columns (the asked one empty),
    .ndjson or .json with objects, .parquet with columns (null is asked), all named head, relation, tail.
    """
    parts = {"head": head, "relation": relation, "tail": tail}
    given = {part: name for part, name in parts.items() if name is not None}
    if (queries is None and len(given) != 2) or (queries is not None and given):
        raise click.UsageError("give two of --head, --relation and --tail, or --queries")
    if wanted["exact"] and wanted["foreign_index"] is not None:
        raise click.UsageError("give --exact or --allow-foreign-index, not both")
    check_out(out, queries, wanted["candidates"])
    asker = _asker(run, **wanted)
    if queries is None and out is None:
        print_answers(asker.answer([given])[0], output)
        return
    from kgshard_tools.batches import block_size, one_question, read_entries

    blocks = (
        one_question(given) if queries is None else read_entries(queries, asker.columns, block_size(asker.k))
    )
    answer_batch(asker, blocks, out, output, on_error=on_error)


def _asker(
    run: Path,
    *,
    candidates: Path | None,
    seen: bool,
    overlay: Path | None,
    foreign_index: Path | None,
    **settings: Any,
) -> LinkAsker:
    """Open a run, and say what its answers must be like."""
    if seen and candidates is not None:
        raise click.UsageError("give --candidates or --seen, not both")
    from kgshard_tools.answers import load
    from kgshard_tools.batches import LinkAsker, read_candidates
    from kgshard_tools.questions import Wanted

    model = load(run, overlay, foreign_index=foreign_index)
    among = "seen" if seen else None if candidates is None else read_candidates(candidates, model)
    return LinkAsker(model, Wanted(candidates=among, **settings))
