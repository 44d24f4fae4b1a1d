"""`kgshard vector`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options, overlay_option, run_argument


@click.command("vector", epilog="Example: kgshard vector world-run Austria --json")
@run_argument
@click.argument("name")
@overlay_option("VECTOR")
@output_options
def command(run: Path, name: str, overlay: Path | None, output: Output) -> None:
    """Print the vector of an entity.

    NAME is a label, or #ROW. One number a line.
    """
    from kgshard_tools.answers import load

    model = load(run, overlay)
    entity = model.entities.id_of(name)
    values = [float(value) for value in model[name]]
    result = {
        "label": model.entities[entity],
        "id": entity,
        "vector": values,
        "folded": entity >= model.num_trained,
    }
    # Nine digits keep every float32 apart.
    output.result(result, (f"{value:.9g}" for value in values), is_answer=True)
