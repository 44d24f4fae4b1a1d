"""What happens once, before ranks start: data are prepared and a run folder begins. No torch here."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from kgshard.config import TrainConfig
from kgshard.data.dataset import DATASET_NAMES, Dataset, clone_dataset, is_dataset, open_dataset
from kgshard.data.prepare import prepare
from kgshard.data.sources import Source, find_source
from kgshard.errors import RunError, UsageError
from kgshard.files import (
    AnyPath,
    check_replaceable,
    remove_stale,
    replacing_directory,
    swap_directory,
    temporary_sibling,
    write_json,
    write_text,
)
from kgshard.models.link import LinkModel
from kgshard.records import ImportInfo, RunInfo
from kgshard.runs import CONFIG_FILE, LATEST_FILE, LOCK_FILE, RUN_FILE, RUN_NAMES, Run, is_run, open_run
from kgshard.stderr import tell


def ingest(data: AnyPath, out: AnyPath, *, overwrite: bool = False) -> Dataset:
    """Prepare `data` at the folder `out`.

    Args:
        data: A folder with train, valid and test files, or the name of a bundled graph.
        out: The folder to write.
        overwrite: Replace a prepared dataset that is there already.

    Raises:
        DataError: A line is malformed, or there is no such data; nothing was written.
        RunError: `out` exists, and is something else or `overwrite` is False; nothing was changed.
    """
    source, out = find_source(data), Path(out)
    check_replaceable(out, ours=is_dataset(out), names=DATASET_NAMES, what="a prepared dataset")
    if is_dataset(out) and not overwrite:
        raise RunError(f"{out}: holds a prepared dataset already; choose another folder or pass --overwrite")
    return _place_dataset(source, out)


def _place_dataset(source: Source | Path, folder: Path) -> Dataset:
    return (
        clone_dataset(open_dataset(source), folder) if isinstance(source, Path) else prepare(source, folder)
    )


@contextmanager
def started_run(
    data: AnyPath, out: AnyPath, config: TrainConfig, *, overwrite: bool = False
) -> Iterator[Run]:
    """Prepare the data, write run.json, and hold the run against other writers for a `with` block.

    Where a finished run is replaced, the new one grows in a temporary sibling: the old one stays until the
    block ends without an exception, and after one it is still there.

    Args:
        data: A prepared dataset, a folder with train, valid and test files, or a bundled graph's name.
        out: The run folder. One whose training never came to a checkpoint is replaced without asking.
        config: The settings.
        overwrite: Replace a finished run.

    Raises:
        DataError: The data cannot be read; nothing was written.
        RunError: `out` may not be replaced, or somebody trains there; nothing was changed.
    """
    source = find_source(data)
    finished = _check_place(Path(out), overwrite=overwrite)
    place = Path(os.path.realpath(out))
    with ExitStack() as held:
        if place.exists():
            held.enter_context(_locked(place))
        if finished:
            yield from _successor(source, place, config)
        else:
            _begin(source, place, config)
            held.enter_context(_locked(place))
            try:
                yield open_run(place)
            except UsageError:
                _discard(place)
                raise


@contextmanager
def replacing_run(out: AnyPath, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes the run at `out` when the `with` block ends without an exception.

    Args:
        out: The run folder; as `started_run` has it.
        overwrite: Replace a finished run.

    Raises:
        RunError: `out` may not be replaced, or somebody trains there; nothing was changed.
    """
    _check_place(Path(out), overwrite=overwrite)
    place = Path(os.path.realpath(out))
    with ExitStack() as held:
        if place.exists():
            held.enter_context(_locked(place))
        yield held.enter_context(replacing_directory(place))


def _check_place(out: Path, *, overwrite: bool) -> bool:
    """Raise RunError where no run may be written; return whether a finished one is there."""
    check_replaceable(out, ours=is_run(out), names=RUN_NAMES, what="a kgshard run")
    finished = (out / LATEST_FILE).exists()
    if finished and not overwrite:
        raise RunError(f"{out}: holds a run already; choose another folder or pass --overwrite")
    return finished


def tell_data(run: Run) -> None:
    """Say on stderr what became of every line of the data's files."""
    for line in run.dataset.info.lines():
        tell(line)


def _discard(place: Path) -> None:
    """Take away what was begun: the caller's mistake came to light before a checkpoint was written."""
    if not (place / LATEST_FILE).exists():
        temporary = temporary_sibling(place)
        place.rename(temporary)
        shutil.rmtree(temporary)


def _successor(source: Source | Path, place: Path, config: TrainConfig) -> Iterator[Run]:
    """Yield a new run that grows beside a finished one, and then takes its place."""
    remove_stale(place.parent, glob.escape(place.name))
    temporary = temporary_sibling(place)
    try:
        _begin(source, temporary, config)
        with _locked(temporary):
            yield open_run(temporary)
        try:
            check_replaceable(place, ours=is_run(place), names=RUN_NAMES, what="a kgshard run")
        except RunError as error:
            kept = place.with_name(f"{place.name}-{uuid.uuid4().hex[:8]}")
            swap_directory(temporary, kept)
            raise RunError(f"{error}; the new run is {kept}") from error
        swap_directory(temporary, place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(source: Source | Path, folder: Path, config: TrainConfig) -> None:
    """Make a run folder with its data and no checkpoint."""
    with replacing_directory(folder) as temporary:
        dataset = _place_dataset(source, temporary / "data")
        size = {"num_entities": dataset.num_entities, "num_relations": dataset.num_relations}
        write_record(temporary, describe_run(dataset, config.link_model(**size), config.to_dict()))


def write_record(folder: Path, info: RunInfo) -> None:
    """Write run.json and config.toml."""
    write_text(folder / CONFIG_FILE, "".join(_toml(*item) for item in info.config.items()))
    write_json(folder / RUN_FILE, info)


def _toml(name: str, value: object) -> str:
    """Return a line of TOML. JSON spells text, numbers and truth values as TOML does."""
    return f"{name} = {json.dumps(value, ensure_ascii=False)}\n"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a run for one writer. The lock ends with its process, however that ends."""
    path = folder / LOCK_FILE
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise RunError(f"{folder}: is being written by {file.read().strip() or 'somebody'}") from error
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            # By now another folder, with a lock of its own, may lie here.
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                    path.unlink()


def describe_run(
    dataset: Dataset, model: LinkModel, config: dict[str, Any], imported: ImportInfo | None = None
) -> RunInfo:
    """Return the record of a new run, with an id of its own."""
    packages = ("torch", "numpy", "kgshard")
    return RunInfo(
        format="kgshard.run/1",
        id=uuid.uuid4().hex,
        data=dataset.info.name,
        vocabulary_sha256=dataset.vocabulary_sha256,
        model=model.to_dict(),
        config=config,
        versions={package: metadata.version(package) for package in packages},
        imported=imported,
    )
