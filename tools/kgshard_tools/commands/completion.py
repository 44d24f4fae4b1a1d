"""`kgshard completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kgshard_tools.commands.output import Output, output_options


@click.command("completion", epilog="Example: kgshard completion bash > ~/.kgshard-completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@output_options
@click.pass_context
def command(ctx: click.Context, shell: str, output: Output) -> None:
    """Print what makes a shell complete kgshard's commands, options and names.

    Names of entities and relations are completed where `kgshard index` has built labels.sqlite.
    """
    completion = get_completion_class(shell)
    assert completion is not None, "click knows the three shells"
    script = completion(ctx.find_root().command, {}, "kgshard", "_KGSHARD_COMPLETE").source()
    output.result({"shell": shell, "script": script}, script.splitlines(), is_answer=True)
