"""`kgshard import`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options


@click.command("import", epilog="Example: kgshard import models/RotatE_umls --data data/umls -o umls-run")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The run folder to write.")
@click.option(
    "--format",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="auto, npy, rotate, dglke, dicee, pykeen or libkge.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), help="Folder of the triples, where SOURCE holds none."
)
@click.option("--model", metavar="NAME", help="Scoring function of plain arrays.")
@click.option("--overwrite", is_flag=True, help="Replace a run.")
@output_options
def command(
    source: Path,
    out: Path,
    format: str,
    data: Path | None,
    model: str | None,
    overwrite: bool,
    output: Output,
) -> None:
    """Make a run of another program's model.

    SOURCE is the folder that the program wrote. Nothing in it is executed. The run evaluates, merges,
    exports and indexes as one that was trained here, and scores triples as the program does.
    """
    from kgshard_tools.importers import import_run

    run = import_run(source, out, format, data, model, overwrite=overwrite)
    imported = run.info.imported
    assert imported is not None
    described = {
        "run": str(out),
        "checkpoint": str(out / "checkpoints" / run.checkpoint.folder.name),
        "program": imported.program,
        "model": run.model.to_dict(),
        "decisions": imported.decisions,
    }
    lines = [f"{out}: {run.model.name} of dim {run.model.dim}, made by {imported.program}"]
    output.result(described, [*lines, *run.dataset.info.lines(), *imported.decisions])
