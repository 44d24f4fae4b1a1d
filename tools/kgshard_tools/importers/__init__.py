"""Other programs' models, made runs. A new format is one file, and one line here.

Nothing of a source is executed: arrays are mapped, JSON and text are parsed, pickles are read as data
(`kgshard_tools.importers.pickles`, `torch_files`).
"""

from __future__ import annotations

from pathlib import Path

from kgshard.errors import ConfigError, DataError
from kgshard.files import AnyPath
from kgshard.runs import Run
from kgshard_tools.importers.arrays import ARRAYS
from kgshard_tools.importers.dglke import DGLKE
from kgshard_tools.importers.dicee import DICEE
from kgshard_tools.importers.foreign import Importer, ImportOptions
from kgshard_tools.importers.libkge import LIBKGE
from kgshard_tools.importers.pykeen import PYKEEN
from kgshard_tools.importers.rotate import ROTATE
from kgshard_tools.importers.writer import write_run

IMPORTERS: dict[str, Importer] = {
    importer.name: importer for importer in (ARRAYS, ROTATE, DGLKE, DICEE, PYKEEN, LIBKGE)
}
"""Every format by the name that `--format` takes."""


def import_run(
    source: AnyPath,
    out: AnyPath,
    format: str = "auto",
    data: AnyPath | None = None,
    model: str | None = None,
    *,
    overwrite: bool = False,
) -> Run:
    """Make a run of another program's model; `run.info.imported` says what was decided about its layout.

    Args:
        source: The program's own folder (or file).
        out: The run folder to write.
        format: A name in IMPORTERS, or "auto": the one that knows the source by its files.
        data: A folder with the triples, and label files, where the source holds none.
        model: The scoring function, where the source does not say; where it does, they must agree.
        overwrite: Replace a run that is there.

    Raises:
        UsageError: The source is of no known format or cannot be said exactly, or `out` may not be
            replaced; nothing was written.
        NonFiniteError: A row is not finite; nothing was written.
    """
    source = Path(source)
    options = ImportOptions(data=None if data is None else Path(data), model=model)
    if not source.exists():
        raise DataError(f"{source}: no such folder or file")
    if options.data is not None and not options.data.is_dir():
        raise DataError(f"{options.data}: no such folder (--data)")
    importer = _importer(source, format)
    if model is not None and not importer.takes_model:
        raise ConfigError(f"--model: {importer.name} says itself which model it is; leave --model out")
    foreign = importer.read(source, options)
    return write_run(foreign, out, overwrite=overwrite)


def _importer(source: Path, format: str) -> Importer:
    if format != "auto":
        if format not in IMPORTERS:
            known = ", ".join(("auto", *IMPORTERS))
            raise ConfigError(f"--format: unknown value {format!r} (known: {known})")
        return IMPORTERS[format]
    found = [importer for importer in IMPORTERS.values() if importer.recognises(source)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(importer.name for importer in found)
        raise ConfigError(f"{source}: looks like {names}; choose one with --format")
    looked = "; ".join(f"{importer.name}: {importer.looks_for}" for importer in IMPORTERS.values())
    raise ConfigError(f"{source}: no known format ({looked})")
