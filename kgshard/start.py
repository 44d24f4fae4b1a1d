"""What happens once, before ranks start: data are prepared and a run folder begins. No torch here."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from kgshard.config import TrainConfig
from kgshard.data.dataset import DATASET_NAMES, Dataset, clone_dataset, is_dataset, open_dataset
from kgshard.data.prepare import prepare
from kgshard.data.sources import Source, find_source
from kgshard.errors import RunError, UsageError
from kgshard.files import (
    AnyPath,
    check_replaceable,
    replacing_directory,
    swap_directory,
    sync_tree,
    temporary_sibling,
    write_json,
    write_text,
)
from kgshard.models.link import LinkModel
from kgshard.records import ImportInfo, RunInfo
from kgshard.runs import CONFIG_FILE, LATEST_FILE, LOCK_FILE, RUN_FILE, Run, is_run, open_run, run_names
from kgshard.stderr import tell

_MAX_HOLDER = 1000
_HOLDER = re.compile(rb"(pid \d+ on [^\n]*\n)?")
"""What a lock says of who holds it, or nothing yet."""


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
def opened_data(data: AnyPath) -> Iterator[Dataset]:
    """Open a dataset for a `with` block; text is prepared in a temporary folder.

    Args:
        data: A prepared dataset, a folder with train, valid and test files, or a bundled graph's name.

    Raises:
        DataError: The data cannot be read.
    """
    source = find_source(data)
    if isinstance(source, Path):
        yield open_dataset(source)
        return
    with tempfile.TemporaryDirectory(prefix="kgshard-") as folder:
        yield prepare(source, Path(folder) / "data")


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
        RunError: `out` may not be replaced, or somebody writes a run there; nothing there was changed.
    """
    source = find_source(data)
    with ExitStack() as held:
        place, finished = held.enter_context(_held(Path(out), overwrite=overwrite))
        if finished:
            yield from _successor(source, place, config)
        else:
            with _growing(place, overwrite=overwrite) as temporary:
                _fill(source, temporary, config)
            held.enter_context(locked(place))
            try:
                yield open_run(place)
            except UsageError:
                _discard(place)
                raise


@contextmanager
def replacing_run(out: AnyPath, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes the run at `out` when the `with` block ends without an exception.

    Nobody else writes a run there meanwhile, and what somebody puts there is never lost: then the new run
    stays beside `out`, and the error says where.

    Args:
        out: The run folder; as `started_run` has it.
        overwrite: Replace a finished run.

    Raises:
        RunError: `out` may not be replaced, or somebody writes a run there; nothing there was changed.
    """
    with (
        _held(Path(out), overwrite=overwrite) as (place, _),
        _growing(place, overwrite=overwrite) as temporary,
    ):
        yield temporary


@contextmanager
def _held(out: Path, *, overwrite: bool) -> Iterator[tuple[Path, bool]]:
    """Hold a run's place for one writer, folder or not; yield it, and whether a finished run is there."""
    _check_place(out, overwrite=overwrite)
    place = Path(os.path.realpath(out))
    with _placeholder(place), locked(place):
        # What was true before the lock was ours may no longer be.
        yield place, _check_place(place, overwrite=overwrite)


@contextmanager
def _placeholder(place: Path) -> Iterator[None]:
    """Make sure that there is a folder to lock; what was made for that goes where no run came of it."""
    made = [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # Not empty: a run is there.
                folder.rmdir()


@contextmanager
def _growing(place: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `place`, or stays beside it if something came there meanwhile."""
    with replacing_directory(place) as temporary:
        yield temporary
        sync_tree(temporary)  # Now, so that nothing takes long between the look and the swap.
        try:
            _check_place(place, overwrite=overwrite)
        except RunError as error:
            kept = place.with_name(f"{place.name}-{uuid.uuid4().hex[:8]}")
            swap_directory(temporary, kept)
            raise RunError(f"{error}; the new run is {kept}") from error


def _check_place(out: Path, *, overwrite: bool) -> bool:
    """Raise RunError where no run may be written; return whether a finished one is there."""
    if os.path.ismount(out):
        raise RunError(f"{out}: is a mount point, which cannot be replaced; name a folder inside it")
    if not _is_utf8(out):
        raise RunError(f"{str(out)!a}: a path that is not UTF-8; choose another folder")
    ours = is_run(out) or _is_placeholder(out)
    check_replaceable(out, ours=ours, names=run_names(out), what="a kgshard run")
    finished = (out / LATEST_FILE).exists()
    if finished and not overwrite:
        raise RunError(f"{out}: holds a run already; choose another folder or pass --overwrite")
    return finished


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_placeholder(folder: Path) -> bool:
    """Whether a folder holds nothing but a lock of ours, which a process that was killed leaves too."""
    if not folder.is_dir() or [path.name for path in folder.iterdir()] != [LOCK_FILE]:
        return False
    path = folder / LOCK_FILE
    return path.is_file() and _HOLDER.fullmatch(path.read_bytes()) is not None


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
    with _growing(place, overwrite=True) as temporary:
        _fill(source, temporary, config)
        with locked(temporary):
            yield open_run(temporary)


def _fill(source: Source | Path, folder: Path, config: TrainConfig) -> None:
    """Write what a run begins with: its data and its record, and no checkpoint."""
    dataset = _place_dataset(source, folder / "data")
    size = {"num_entities": dataset.num_entities, "num_relations": dataset.num_relations}
    write_record(folder, describe_run(dataset, config.link_model(**size), config.to_dict()))


def write_record(folder: Path, info: RunInfo) -> None:
    """Write run.json and config.toml."""
    write_text(folder / CONFIG_FILE, "".join(_toml(*item) for item in info.config.items()))
    write_json(folder / RUN_FILE, info)


def _toml(name: str, value: object) -> str:
    """Return a line of TOML. JSON spells text, numbers and truth values as TOML does."""
    return f"{name} = {json.dumps(value, ensure_ascii=False)}\n"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run for one writer. The lock ends with its process, however that ends."""
    path = folder / LOCK_FILE
    with _opened_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise RunError(f"{folder}: is being written by {file.read().strip() or 'somebody'}") from error
        if not _lies_at(file, path):
            raise RunError(f"{folder}: somebody wrote a run there just now; look at it, or try again")
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            # By now another folder, with a lock of its own, may lie here.
            if _lies_at(file, path):
                path.unlink()


def _opened_lock(path: Path) -> IO[str]:
    """Open a lock for writing, made if it is missing; nothing of anybody's is written to through that name.

    Raises:
        RunError: What is there is no lock of ours: a link, a pipe, a folder, a file that says something else.
    """
    refusal = RunError(f"{path}: is no lock that kgshard wrote; remove it, or choose another folder")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise refusal from error
        raise
    found = os.fstat(descriptor)
    is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and found.st_size <= _MAX_HOLDER
    if not is_plain or not _HOLDER.fullmatch(os.pread(descriptor, _MAX_HOLDER, 0)):
        os.close(descriptor)
        raise refusal
    return os.fdopen(descriptor, "r+")


def _lies_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one of this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


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
