"""`kgshard`: a group of commands, each imported when it runs, and what all of them share.

stdout carries results, stderr progress and errors. Exit codes: 0 done, 1 failed, 2 the caller's mistake,
130 interrupted. An error is one line; `--debug` adds the traceback.
"""

from __future__ import annotations

import keyword
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click

from kgshard.errors import KgshardError, RankFailureError, wants_traceback
from kgshard.launch import is_rank
from kgshard_tools.terminal import reader_may_leave, shown

COMMANDS = {
    "ingest": "Turn triples into a prepared dataset.",
    "models": "List the models that can be trained.",
    "plan": "Say what a training would take, and whether it fits this machine.",
    "train": "Train embeddings on row-sharded tables.",
    "import": "Make a run of another program's model.",
    "curves": "Draw a run's loss and validation curves.",
    "evaluate": "Rank a split's triples among all entities.",
    "merge-shards": "Merge a run's shards into one safetensors file, or a few.",
    "reshard": "Cut a run's tables into another number of shards.",
    "export": "Write a run's tables for other programs.",
    "card": "Write a run's model card, as a Hugging Face hub shows it.",
    "index": "Build FAISS indexes of a run.",
    "predict": "Find the missing tail, head or relation of a triple.",
    "ask": "Answer a query of several links and variables.",
    "score": "Score and rank whole triples.",
    "neighbors": "Find the entities most like another.",
    "vector": "Print the vector of an entity.",
    "fold-in": "Give entities that were not trained approximate vectors.",
    "search": "Find labels by a part of them, or by what is nearly one.",
    "completion": "Print what makes a shell complete kgshard's commands, options and names.",
    "info": "Say what a folder or file is.",
    "verify": "Check the files of a run, a dataset, an index, an overlay or a model.",
}
"""Command name to one line of help. Kept here so that `--help` imports no command."""


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if is_rank() and cmd_name != "train":
            raise click.UsageError(f"torchrun is for kgshard train; {cmd_name} starts ranks of its own")
        name = cmd_name.replace("-", "_")
        module = import_module(f"kgshard_tools.commands.{name}{'_' * keyword.iskeyword(name)}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"auto_envvar_prefix": "KGSHARD", "help_option_names": ["-h", "--help"]},
    epilog="Begin with: kgshard train world -o world-run --nproc-per-node 2",
)
@click.version_option(package_name="kgshard")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Train knowledge-graph embeddings on row-sharded tables; merge, export, index and query them."""
    if debug:
        os.environ["KGSHARD_DEBUG"] = "1"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    if not is_rank():
        signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code. Errors end here, in one line."""
    try:
        cli.main(arguments, prog_name="kgshard", standalone_mode=False)
        with reader_may_leave():
            if sys.stdout is not None:
                sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        _say(error.format_message(), error)
        return error.exit_code
    except KgshardError as error:
        if not _is_said_elsewhere(error):
            _say(str(error), error)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted", None)
        return 130
    except Exception as error:
        _say(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", error)
        return 1
    return 0


def _is_said_elsewhere(error: KgshardError) -> bool:
    """Under torchrun one rank's failure is raised on every rank; the one that failed speaks."""
    return is_rank() and isinstance(error, RankFailureError) and error.told


def _terminate(signal_number: int, frame: object) -> None:
    """End a command on SIGTERM as on Ctrl-C: what is half written is removed on the way out."""
    raise SystemExit(128 + signal_number)


def _say(message: str, error: Exception | None) -> None:
    if error is not None and wants_traceback():
        traceback.print_exception(error)
    click.echo(f"Error: {shown(message)}", err=True)
