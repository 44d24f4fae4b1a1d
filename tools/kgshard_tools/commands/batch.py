"""What commands share that answer questions: one, or a batch from a file or a stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kgshard_tools.commands.output import Output
from kgshard_tools.terminal import reader_may_leave, shown

if TYPE_CHECKING:  # A shell that completes names waits for no numpy.
    from kgshard_tools.batches import Asker, Batch, Entry
    from kgshard_tools.results import Answers


def batch_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add --queries, --out and --on-error to a command."""

    @click.option(
        "--queries", metavar="FILE|-", help="Answer the questions of a file, or NDJSON as it comes on stdin."
    )
    @click.option(
        "-o",
        "--out",
        type=click.Path(path_type=Path),
        help="Write .ndjson, .json, .tsv or .parquet. [default: NDJSON on stdout]",
    )
    @click.option(
        "--on-error",
        type=click.Choice(["stop", "skip"]),
        default="stop",
        show_default=True,
        help="What to do about a question that cannot be answered.",
    )
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return wrapped


def answer_batch(
    asker: Asker,
    blocks: Iterable[list[Entry]],
    out: Path | None,
    output: Output,
    *,
    on_error: Literal["stop", "skip"],
) -> None:
    """Write the answers to blocks of questions to a file, or as NDJSON to stdout while they are found."""
    from kgshard_tools.batches import Batch, answer_to_file, ndjson_blocks
    from kgshard_tools.progress import byte_progress

    batch = Batch(asker, blocks, on_error=on_error)
    if out is not None:
        with byte_progress(quiet=output.quiet) as advance:
            written = answer_to_file(batch, out, advance=advance)
        output.result(written.to_dict(), written.lines())
        return
    with reader_may_leave():
        for lines in ndjson_blocks(batch.outcomes()):
            click.echo(lines, nl=False)
    say_failed(batch, output)


def print_batch(batch: Batch, output: Output) -> None:
    """Print tables of answers, each below its question, while they are found."""
    with reader_may_leave():
        for block in batch.outcomes():
            for outcome in block:
                click.echo(shown(" ".join(outcome.entry.given.values())))
                lines = (
                    [f"      {shown(outcome.error)}"] if outcome.answers is None else outcome.answers.lines()
                )
                for line in lines:
                    click.echo(line)
    say_failed(batch, output)


def say_failed(batch: Batch, output: Output) -> None:
    """Say on stderr how many questions could not be answered, if any."""
    if not output.quiet:
        for line in batch.tally.lines():
            click.echo(shown(line), err=True)


def print_answers(answers: Answers, output: Output) -> None:
    """Print the answers to a single question."""
    output.result(answers.to_dict(), answers.lines(), is_answer=True)


def check_out(out: Path | None, *inputs: str | Path | None) -> None:
    """Refuse to write answers over what they are made from, or into what kgshard wrote."""
    if out is not None:
        from kgshard_tools.stored import check_answers_outside

        check_answers_outside(out, *inputs)
