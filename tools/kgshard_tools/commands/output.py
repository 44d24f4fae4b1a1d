"""What all commands share: --json and --quiet, and how a result is printed."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kgshard_tools.terminal import reader_may_leave


@dataclass(frozen=True, slots=True)
class Output:
    """How the caller wants results."""

    json: bool
    quiet: bool

    def result(self, value: dict[str, Any], lines: Iterable[str], *, is_answer: bool = False) -> None:
        """Print one JSON object, or lines for people; --quiet leaves out lines that answer no question."""
        with reader_may_leave():
            if self.json:
                click.echo(json.dumps(value, ensure_ascii=False))
            elif is_answer or not self.quiet:
                for line in lines:
                    click.echo(line)


def output_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add --json, --quiet and --debug to a command, which gets them as `output`."""

    @click.option("--json", is_flag=True, help="Print one JSON object.")
    @click.option("-q", "--quiet", is_flag=True, help="Print no progress and no summary.")
    @click.option("--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show tracebacks.")
    @functools.wraps(function)
    def wrapped(*args: Any, quiet: bool, **kwargs: Any) -> None:
        function(*args, output=Output(json=kwargs.pop("json"), quiet=quiet), **kwargs)

    return wrapped


def _set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        os.environ["KGSHARD_DEBUG"] = "1"


run_argument = click.argument("run", type=click.Path(path_type=Path))
"""A run folder. That it is one is checked where it is opened, with one message for all commands."""


def overlay_option(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option --with of a command, whose name (in capitals) its variable has."""
    return click.option(
        "--with",
        "overlay",
        type=click.Path(path_type=Path),
        envvar=f"KGSHARD_{command}_WITH",
        metavar="OVERLAY",
        help="Entities that fold-in added to RUN.",
    )


def foreign_index_option(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option --allow-foreign-index of a command, whose name (in capitals) its variable has."""
    return click.option(
        "--allow-foreign-index",
        "foreign_index",
        type=click.Path(path_type=Path),
        envvar=f"KGSHARD_{command}_ALLOW_FOREIGN_INDEX",
        metavar="FILE",
        help="Take candidates from a FAISS file that kgshard did not write, read apart and under limits.",
    )


def nproc_option(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option --nproc-per-node, spelt as torchrun spells it."""
    return click.option(
        "--nproc-per-node", "--nproc_per_node", type=int, default=1, show_default=True, metavar="N", help=help
    )
