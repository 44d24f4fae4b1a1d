"""`kgshard predict`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, run_argument


@click.command(
    "predict", epilog="Example: kgshard predict world-run --head Austria --relation 'uses currency'"
)
@run_argument
@click.option("--head", help="The given head: find tails. A label, or #ROW.")
@click.option("--tail", help="The given tail: find heads.")
@click.option("--relation", required=True, help="The relation.")
@click.option("-k", "k", type=int, default=10, show_default=True, help="How many answers.")
@click.option("--known", is_flag=True, help="Also show triples that train, valid or test hold.")
@output_options
def command(
    run: Path, head: str | None, tail: str | None, relation: str, k: int, known: bool, output: Output
) -> None:
    """Find the missing tail or head of a triple.

    Tails with --head and --relation, heads with --relation and --tail.
    """
    if (head is None) == (tail is None):
        raise click.UsageError("give --head to find tails, or --tail to find heads")
    from kgshard_tools.answers import load

    model = load(run)
    if head is not None:
        answers = model.predict_tails(head, relation, k, known=known)
    else:
        answers = model.predict_heads(relation, str(tail), k, known=known)
    output.result(answers.to_dict(), answers.lines(), is_answer=True)
