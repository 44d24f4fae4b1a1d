"""How kgshard writes to disk: everything appears whole at its final name, or not at all.

Every writer in the project goes through `replacing` (one file) or `replacing_directory`
(a folder): a temporary sibling is filled, synced, renamed over the final name, and the
parent folder is synced. Temporary names start with TEMPORARY_PREFIX.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import msgspec

from kgshard.errors import RunError, ShardError

TEMPORARY_PREFIX = ".kgshard-tmp-"
_BLOCK_BYTES = 1 << 22
_COPIED_AT_ONCE = 1 << 24

AnyPath = str | os.PathLike[str]
"""A path as users give it: text, a Path, or an object that stands for its folder, as a Run does."""
Record = TypeVar("Record")


_HOST = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def temporary_sibling(path: Path) -> Path:
    """Return an unused name in the same folder, so that a rename stays within one file system.

    It says which process made it, so that `remove_stale` can tell what nobody will finish.
    """
    return path.with_name(f"{TEMPORARY_PREFIX}{_HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name}")


def remove_stale(folder: Path, name: str = "*") -> None:
    """Remove temporary siblings of `name` (a pattern) that processes of this host left when they died."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}{_HOST}-*-*-{name}"):
        pid = path.name.removeprefix(f"{TEMPORARY_PREFIX}{_HOST}-").split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's or a folder's own entry to stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place(temporary: Path, path: Path) -> None:
    """Rename a finished, synced file or folder to its final name and make the name durable."""
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success it is synced and renamed over `path`.

    On an exception the temporary file is removed and whatever was at `path` stays; missing parents are
    made, and then taken away again. A symbolic link at `path` stays too; what it points to is replaced.
    """
    path = _real(path)
    temporary = temporary_sibling(path)
    with _naming(path), _parents_made(path):
        remove_stale(path.parent, glob.escape(path.name))
        try:
            yield temporary
            sync(temporary)
            place(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a fresh temporary folder; on success its files are synced and it becomes `path`.

    A folder already at `path` is moved aside first and removed only after the new one is in place;
    whether it may be is for the caller to know (`check_replaceable`). On an exception nothing is left,
    missing parents that were made included.
    """
    path = _real(path)
    temporary = temporary_sibling(path)
    with _naming(path), _parents_made(path):
        remove_stale(path.parent, glob.escape(path.name))
        temporary.mkdir()
        try:
            yield temporary
            sync_tree(temporary)
            swap_directory(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def _parents_made(path: Path) -> Iterator[None]:
    """Make the missing parents of a path; take them away again after an exception."""
    new_parents = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()
        raise


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give errors that name no file (a full disk), or a temporary one, the path that was being written."""
    try:
        yield
    except OSError as error:
        named = str(error.filename or "")
        if error.errno is not None and (not named or TEMPORARY_PREFIX in named):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def check_replaceable(out: Path, *, ours: bool, names: Iterable[str], what: str) -> None:
    """Refuse to write at `out` where something would be lost that kgshard did not write itself.

    Args:
        out: The folder to write; missing or empty is fine.
        ours: Whether it bears the marks of `what`.
        names: Patterns of the paths of all files that kgshard writes there.
        what: What may be replaced: "a prepared dataset".

    Raises:
        RunError: It may not be replaced.
    """
    if not out.exists():
        return
    if not ours and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: exists and is not {what}; choose another folder")
    patterns = list(names)
    for path in _files_below(out):
        name = path.relative_to(out).as_posix()
        if not matches_any(name, patterns):
            raise RunError(f"{out}: holds {name!r}, which kgshard did not write; choose another folder")


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder but those that kgshard left unfinished."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(TEMPORARY_PREFIX)]
        for name in names:
            if not name.startswith(TEMPORARY_PREFIX):
                yield Path(parent, name)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a relative path fits one of some patterns; * stands for no slash."""
    parts = name.split("/")
    return any(
        len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
        for wanted in (pattern.split("/") for pattern in patterns)
    )


def swap_directory(temporary: Path, path: Path) -> None:
    """Put a finished folder at `path`; what was there goes, or comes back if this fails."""
    if not path.exists():
        place(temporary, path)
        return
    aside = temporary_sibling(path)
    os.replace(path, aside)
    try:
        place(temporary, path)
    except BaseException:
        if not path.exists():
            os.replace(aside, path)
        raise
    finally:
        if aside.exists():
            shutil.rmtree(aside)


def sync_tree(folder: Path) -> None:
    """Sync every file below `folder`, then every folder, innermost first."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, value: object) -> None:
    """Write one JSON value, indented and with a final newline, whole or not at all.

    A record (kgshard.records) ends with its seal: the SHA-256 of the text before it; see `check_seal`.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if isinstance(value, msgspec.Struct):
        text = text.removesuffix("\n}")
        text += f',\n  "seal": "sha256:{hashlib.sha256(text.encode()).hexdigest()}"\n}}'
    write_text(path, text + "\n")


_SEAL = re.compile(rb',\n  "seal": "sha256:([0-9a-f]{64})"\n}\n\Z')
_SEAL_BYTES = 88


def check_seal(path: Path) -> bool:
    """Compare a record with the SHA-256 that it ends with; return whether it ends with one.

    Raises:
        ShardError: It was changed, or is no ordinary file.
    """
    if not path.is_file():  # A pipe would wait for somebody to write.
        raise ShardError(f"{path}: {'no ordinary file' if path.exists() else 'missing'}", file=str(path))
    text = path.read_bytes()
    tail = max(0, len(text) - _SEAL_BYTES)
    seal = _SEAL.search(text, tail)
    if seal is None:
        # One flipped bit cannot take away both marks.
        changed = b'"seal"' in text[tail:] or b"sha256:" in text[tail:]
    else:
        changed = hashlib.sha256(text[: seal.start()]).hexdigest() != seal[1].decode()
    if changed:
        raise ShardError(f"{path}: was changed since it was written (its seal is broken)", file=str(path))
    return seal is not None


@overload
def read_json(path: Path) -> Any: ...
@overload
def read_json(path: Path, type: type[Record]) -> Record: ...
def read_json(path: Path, type: Any = Any) -> Any:
    """Read one JSON value, as a type whose fields are checked (see kgshard.records).

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no JSON, or not of this type; says where.
    """
    if path.exists() and not path.is_file():
        raise ValueError("no ordinary file")  # A pipe would wait for somebody to write.
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def is_record(path: Path, type: type[Record]) -> bool:
    """Whether a file is there and holds JSON of a type."""
    try:
        read_json(path, type)
    except (OSError, ValueError):
        return False
    return True


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_bytes(
    source: BinaryIO,
    offset: int,
    length: int,
    target: BinaryIO,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Append `length` bytes of `source`, from `offset` on, to `target`.

    The kernel copies where the file systems allow it (`copy_file_range`), so no byte passes through
    this process, or only shares what both files hold; elsewhere blocks of 4 MiB do. Memory does not
    depend on `length`. `advance` is told how many bytes more are copied.

    Raises:
        EOFError: `source` ends early.
    """
    target.flush()
    position = target.tell()
    os.posix_fadvise(source.fileno(), offset, length, os.POSIX_FADV_SEQUENTIAL)
    while length:
        # A disk that reads and writes at once does both more slowly than one after the other.
        is_read_from_disk = not _is_cached(source, offset + min(length, _COPIED_AT_ONCE) - 1)
        copied = _copy_block(source, offset, min(length, _COPIED_AT_ONCE), target)
        if copied == 0:
            raise EOFError(f"{source.name}: ends {length} bytes early")
        if not is_read_from_disk:
            start_writeback(target, position, copied)
        offset += copied
        position += copied
        length -= copied
        advance(copied)


def start_writeback(file: BinaryIO, position: int, length: int) -> None:
    """Let the disk begin with what was written to a file, which will be synced in the end anyway.

    So the disk works while the next bytes are copied or computed. Advice that pages are no longer needed
    does that, and drops none that are not on the disk yet.
    """
    os.posix_fadvise(file.fileno(), position, length, os.POSIX_FADV_DONTNEED)


def _is_cached(file: BinaryIO, position: int) -> bool:
    """Whether a byte of a file can be read without waiting for the disk."""
    try:
        return os.preadv(file.fileno(), [bytearray(1)], position, os.RWF_NOWAIT) == 1
    except OSError:  # It would have to wait, or the file system cannot say.
        return False


def _copy_block(source: BinaryIO, offset: int, length: int, target: BinaryIO) -> int:
    with suppress(OSError):  # Where the file systems cannot, which some say by copying nothing.
        copied = os.copy_file_range(source.fileno(), target.fileno(), length, offset)
        if copied:
            return copied
    block = os.pread(source.fileno(), min(length, _BLOCK_BYTES), offset)
    copied = 0
    while copied < len(block):
        copied += os.write(target.fileno(), block[copied:])
    return copied


def copy_file(source: Path, target: Path) -> None:
    """Copy a file into a temporary place of the caller's, as the kernel copies it (`copy_bytes`)."""
    with source.open("rb") as read, target.open("wb") as written:
        copy_bytes(read, 0, source.stat().st_size, written)


def link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name, or copy it where that cannot be done.

    For what kgshard alone writes, since it never changes a finished file in place; users get copies.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
