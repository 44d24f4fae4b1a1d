"""`kgshard ingest`."""

from __future__ import annotations

from pathlib import Path

import click

from kgshard_tools.commands.output import Output, output_options


@click.command("ingest", epilog="Example: kgshard ingest ./fb15k-237 -o data/fb15k-237")
@click.argument("source")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option("--overwrite", is_flag=True, help="Replace a prepared dataset that is there already.")
@output_options
def command(source: str, out: Path, overwrite: bool, output: Output) -> None:
    """Turn triples into a prepared dataset.

    SOURCE is a folder with train, valid and test files (head TAB relation TAB tail; .tsv or .txt, also
    .gz or .zst), or the name of a bundled graph.
    """
    import os
    import time

    import msgspec

    from kgshard.start import ingest
    from kgshard_tools.written import describe_folder

    began = time.monotonic()
    place = Path(os.path.realpath(out))
    dataset = ingest(source, place, overwrite=overwrite)
    written = describe_folder(out, place, dataset.num_entities, began)
    output.result(
        {**written.to_dict(), "info": msgspec.to_builtins(dataset.info)},
        [*dataset.info.lines(), str(out)],
    )
