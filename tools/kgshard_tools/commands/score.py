"""`kgshard score`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kgshard_tools.commands.batch import check_out
from kgshard_tools.commands.names import ENTITY_NAME, RELATION_NAME
from kgshard_tools.commands.output import Output, output_options, overlay_option, run_argument
from kgshard_tools.terminal import reader_may_leave, shown

if TYPE_CHECKING:
    from kgshard_tools.triple_scores import TripleBatch, TripleScorer


@click.command(
    "score", epilog="Example: kgshard score world-run --head Austria --relation 'uses currency' --tail Euro"
)
@run_argument
@click.argument("triples", required=False, metavar="[FILE|-]")
@click.option("--head", type=ENTITY_NAME, help="The head of a triple. A label, or #ROW.")
@click.option("--relation", type=RELATION_NAME, help="Its relation.")
@click.option("--tail", type=ENTITY_NAME, help="Its tail.")
@click.option("--calibrate", is_flag=True, help="Add the probability that a triple is true.")
@click.option(
    "--base-rate",
    type=float,
    metavar="X",
    help="The share of true triples among those that are asked about; with --calibrate. "
    "[default: that among all answers to the questions of valid]",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Write .ndjson, .json, .tsv or .parquet. [default: to stdout]",
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do about a triple that cannot be scored.",
)
@overlay_option("SCORE")
@output_options
def command(
    run: Path,
    triples: str | None,
    head: str | None,
    relation: str | None,
    tail: str | None,
    calibrate: bool,
    base_rate: float | None,
    out: Path | None,
    on_error: Literal["stop", "skip"],
    overlay: Path | None,
    output: Output,
) -> None:
    """Score and rank whole triples.

    Give --head, --relation and --tail, or a file: .tsv with three columns, .ndjson or .json with objects,
    .parquet with columns, all named head, relation, tail; - is NDJSON on stdin. With each come its ranks
    among all entities, as evaluate has them, and whether it is known. --json prints an object a line.
    """
    parts = {"head": head, "relation": relation, "tail": tail}
    given = {part: name for part, name in parts.items() if name is not None}
    if (triples is None and len(given) != len(parts)) or (triples is not None and given):
        raise click.UsageError("give --head, --relation and --tail, or a file of triples")
    if base_rate is not None and not calibrate:
        raise click.UsageError("--base-rate has no effect without --calibrate")
    check_out(out, triples)
    scorer = _scorer(run, overlay, calibrate=calibrate, base_rate=base_rate)
    if triples is None and out is None:
        [found] = scorer.score([given])
        output.result(found.to_dict(), _described(scorer, [found.line()]), is_answer=True)
        return
    from kgshard_tools.batches import one_question, read_entries
    from kgshard_tools.triple_scores import BLOCK_TRIPLES, PARTS, TripleBatch, write_scores

    blocks = one_question(given) if triples is None else read_entries(triples, PARTS, BLOCK_TRIPLES)
    batch = TripleBatch(scorer, blocks, on_error=on_error)
    if out is not None:
        written = write_scores(batch, out)
        output.result(written.to_dict(), written.lines())
        return
    with reader_may_leave():
        for text in _as_json(batch) if output.json else _as_lines(batch, scorer):
            click.echo(text, nl=False)
    if not output.quiet:
        for line in batch.lines():
            click.echo(shown(line), err=True)


def _scorer(run: Path, overlay: Path | None, *, calibrate: bool, base_rate: float | None) -> TripleScorer:
    from kgshard_tools.calibration import calibration
    from kgshard_tools.overlay import extend
    from kgshard_tools.stored import open_stored
    from kgshard_tools.triple_scores import TripleScorer

    stored = open_stored(run)
    fitted = calibration(stored, base_rate=base_rate) if calibrate else None
    return TripleScorer(stored if overlay is None else extend(stored, overlay), fitted)


def _described(scorer: TripleScorer, lines: list[str]) -> list[str]:
    """Put a head above lines of a table, and below them what a probability means."""
    from kgshard_tools.triple_scores import header

    calibration = scorer.calibration
    notes = [] if calibration is None else [calibration.line()]
    return [header(calibrated=calibration is not None), *lines, *notes]


def _as_json(batch: TripleBatch) -> Iterator[str]:
    from kgshard_tools.triple_scores import ndjson_blocks

    for lines in ndjson_blocks(batch.outcomes()):
        yield lines.decode()


def _as_lines(batch: TripleBatch, scorer: TripleScorer) -> Iterator[str]:
    head, *notes = _described(scorer, [])
    for block in batch.outcomes():
        if head:
            yield head + "\n"
            head = ""
        for outcome in block:
            if outcome.score is not None:
                yield outcome.score.line() + "\n"
            else:
                yield shown(f"      {outcome.entry.where}: {outcome.error}") + "\n"
    for note in notes:
        yield note + "\n"
