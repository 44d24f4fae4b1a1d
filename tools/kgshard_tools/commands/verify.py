"""`kgshard verify`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options


@click.command("verify", epilog="Example: kgshard verify world-run --deep")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--deep", is_flag=True, help="Also read every value: rows must be finite, ids in range, labels as hashed."
)
@output_options
def command(path: Path, deep: bool, output: Output) -> None:
    """Check the files of a run, a dataset, an index, an overlay or a model.

    Where a record has their lengths and SHA-256 they must be those; of other files headers and row counts
    are checked. Ends at the first bad file.
    """
    from kgshard_tools.verify import Verified, verify_files

    checked = []
    for file in verify_files(path, deep=deep):
        checked.append(file)
        if not output.json:
            output.result({}, [file.line()])
    verified = Verified(str(path), deep, checked)
    output.result(verified.to_dict(), [verified.last_line()])
