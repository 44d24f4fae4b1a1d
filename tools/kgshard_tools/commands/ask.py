"""`kgshard ask`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kgshard_tools.commands.batch import check_out
from kgshard_tools.commands.output import Output, output_options, run_argument
from kgshard_tools.terminal import reader_may_leave, shown

if TYPE_CHECKING:
    from kgshard_tools.multi_hop import MultiHop


@click.command(
    "ask",
    epilog="Example: kgshard ask world-run '?x: (Austria, part of, ?y) & (?x, part of, ?y)' --new",
)
@run_argument
@click.argument("query", required=False)
@click.option("-k", "k", type=int, default=10, show_default=True, help="How many answers.")
@click.option(
    "--t-norm",
    type=click.Choice(["min", "product", "lukasiewicz"]),
    default="product",
    show_default=True,
    help="How true it is that several things hold.",
)
@click.option(
    "--beam",
    default="64",
    show_default=True,
    metavar="N|all",
    help="How many entities a variable may be; all finds the best of all assignments.",
)
@click.option(
    "--scores",
    type=click.Choice(["softmax", "minmax", "sigmoid", "calibrated"]),
    default="softmax",
    show_default=True,
    help="How a link's score becomes a number from 0 to 1.",
)
@click.option(
    "--facts",
    type=click.Choice(["none", "train", "all"]),
    default="train",
    show_default=True,
    help="Which triples are true, whatever their scores.",
)
@click.option("--new", is_flag=True, help="Leave out answers that the graph yields by itself.")
@click.option(
    "--queries", metavar="FILE|-", help="Answer the queries of a file, or of stdin, a JSON value a line."
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Write .ndjson. [default: NDJSON on stdout]"
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do about a query that cannot be answered.",
)
@output_options
def command(
    run: Path,
    query: str | None,
    k: int,
    t_norm: str,
    beam: str,
    scores: str,
    facts: str,
    new: bool,
    queries: str | None,
    out: Path | None,
    on_error: Literal["stop", "skip"],
    output: Output,
) -> None:
    """Answer a query of several links and variables.

    QUERY names what is asked for, then links that must hold: & both, | either, ! not, parentheses. A label
    goes in quotes, as in JSON, if it holds , ( ) or ", or begins with ? or !. Or QUERY is a nested list:
    ["Austria", ["borders", "uses currency"]]. --queries has such text, lists, or {"query": ...} on each line.
    """
    if (query is None) == (queries is None):
        raise click.UsageError("give either a QUERY or --queries")
    check_out(out, queries)
    model = _model(run, k=k, t_norm=t_norm, beam=beam, scores=scores, facts=facts, known=not new)
    from kgshard_tools.multi_hop.batch import QueryBatch, read_lines, read_query, write_answers

    if query is not None and out is None:
        answers = model.ask(read_query(query))
        output.result(answers.to_dict(), answers.lines(), is_answer=True)
        return
    lines = [(1, "QUERY", json.dumps(read_query(query)).encode())] if query is not None else None
    batch = QueryBatch(model, lines or read_lines(str(queries)), on_error=on_error)
    if out is not None:
        written = write_answers(batch, out)
        output.result(written.to_dict(), written.lines())
        return
    with reader_may_leave():
        for line in batch.answers():
            click.echo(line, nl=False)
    if not output.quiet:
        for text in batch.tally.lines():
            click.echo(shown(text), err=True)


def _model(run: Path, *, k: int, t_norm: str, beam: str, scores: str, facts: str, known: bool) -> MultiHop:
    """Open a run, and say how it reasons."""
    from kgshard_tools.multi_hop import MultiHop, Reasoning

    if beam != "all" and not re.fullmatch("[0-9]{1,9}", beam):
        raise click.UsageError(f"--beam must be a whole number or all, got {beam!r}")
    return MultiHop(run, Reasoning(k, t_norm, "all" if beam == "all" else int(beam), scores, facts, known))
