"""What is written appears whole at its name or not at all, and leaves nothing else behind."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard import files
from kgshard.files import (
    copy_bytes,
    file_sha256,
    link_or_copy,
    read_json,
    remove_stale,
    replacing,
    replacing_directory,
    temporary_sibling,
    write_json,
    write_text,
)


class WentWrong(Exception):
    """What the writer's own code raises."""


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below `folder` by its relative name, and folders as empty names."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def write_half(target: Path, error: type[BaseException]) -> None:
    with replacing(target) as temporary:
        temporary.write_bytes(b"half")
        raise error


def fill_half(target: Path, error: type[BaseException], *, beside: Path | None = None) -> None:
    with replacing_directory(target) as temporary:
        fill(temporary, b"half")
        if beside is not None:
            beside.write_bytes(b"x")
        raise error


def failing(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Return `call`, whose call number `at` (from 1) raises ENOSPC instead."""
    calls = 0

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*arguments, **keywords)

    return wrapper


def test_a_file_appears_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "table.bin"
    with replacing(target) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_bytes(b"half")
        assert not target.exists()
        temporary.write_bytes(b"whole")
    assert tree(tmp_path) == {"table.bin": b"whole"}


def test_a_file_replaces_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "table.bin"
    target.write_bytes(b"old")
    with replacing(target) as temporary:
        temporary.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert tree(tmp_path) == {"table.bin": b"new"}


@pytest.mark.parametrize("error", [WentWrong, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [None, b"old"])
def test_an_exception_leaves_what_was_there(
    tmp_path: Path, old: bytes | None, error: type[BaseException]
) -> None:
    target = tmp_path / "table.bin"
    if old is not None:
        target.write_bytes(old)
    with pytest.raises(error):
        write_half(target, error)
    assert tree(tmp_path) == ({} if old is None else {"table.bin": old})


def test_a_writer_that_never_opened_its_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "table.bin"):
        pass
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_at_the_end_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    target = tmp_path / "table.bin"
    target.write_bytes(b"old")
    monkeypatch.setattr(os, call, failing(getattr(os, call), 1))
    with pytest.raises(OSError, match="No space left"), replacing(target) as temporary:
        temporary.write_bytes(b"new")
    assert tree(tmp_path) == {"table.bin": b"old"}


def test_a_file_is_synced_before_its_rename_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    with replacing(tmp_path / "one.bin") as temporary:
        temporary.write_bytes(b"1")
    assert events == [temporary.name, "rename", tmp_path.name]
    events.clear()
    with replacing_directory(tmp_path / "many") as folder:
        (folder / "a").write_bytes(b"1")
        (folder / "inner").mkdir()
        (folder / "inner" / "b").write_bytes(b"2")
    assert set(events[:-2]) == {"a", "b", "inner", folder.name}
    assert events[-2:] == ["rename", tmp_path.name]


def fill(folder: Path, text: bytes) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "a").write_bytes(text)


WHOLE = {"run": b"", "run/inner": b""}


def test_a_folder_appears_whole_and_alone(tmp_path: Path) -> None:
    with replacing_directory(tmp_path / "run") as temporary:
        fill(temporary, b"1")
        assert not (tmp_path / "run").exists()
    assert tree(tmp_path) == WHOLE | {"run/inner/a": b"1"}


def test_a_folder_replaces_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stale").write_bytes(b"0")
    with replacing_directory(tmp_path / "run") as temporary:
        fill(temporary, b"2")
        assert (tmp_path / "run" / "stale").exists()
    assert tree(tmp_path) == WHOLE | {"run/inner/a": b"2"}


def test_missing_parents_are_made(tmp_path: Path) -> None:
    with replacing_directory(tmp_path / "a" / "b" / "run") as temporary:
        fill(temporary, b"1")
    assert (tmp_path / "a" / "b" / "run" / "inner" / "a").read_bytes() == b"1"


@pytest.mark.parametrize("error", [WentWrong, KeyboardInterrupt])
def test_an_exception_leaves_no_folder_and_no_new_parents(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(error):
        fill_half(tmp_path / "a" / "b" / "c" / "run", error)
    assert tree(tmp_path) == {"a": b""}


def test_an_exception_leaves_parents_that_others_use_by_now(tmp_path: Path) -> None:
    with pytest.raises(WentWrong):
        fill_half(tmp_path / "a" / "run", WentWrong, beside=tmp_path / "a" / "theirs")
    assert tree(tmp_path) == {"a": b"", "a/theirs": b"x"}


def test_an_exception_leaves_the_folder_before(tmp_path: Path) -> None:
    with replacing_directory(tmp_path / "run") as temporary:
        fill(temporary, b"1")
    before = tree(tmp_path)
    with pytest.raises(WentWrong):
        fill_half(tmp_path / "run", WentWrong)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_the_folder_before_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int, old: bool
) -> None:
    """Whichever call fails, what is at the name is a whole folder, and nothing lies beside it."""
    if old:
        with replacing_directory(tmp_path / "run") as temporary:
            fill(temporary, b"old")
    monkeypatch.setattr(os, call, failing(getattr(os, call), at))
    failed = False
    try:
        with replacing_directory(tmp_path / "run") as temporary:
            fill(temporary, b"new")
    except OSError:
        failed = True
    new, before = WHOLE | {"run/inner/a": b"new"}, WHOLE | {"run/inner/a": b"old"} if old else {}
    assert tree(tmp_path) in ([before, new] if failed else [new])


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(0, 5000), offset=st.integers(0, 5000), length=st.integers(0, 5000), denied=st.booleans()
)
def test_bytes_are_copied_exactly(
    tmp_path_factory: pytest.TempPathFactory, size: int, offset: int, length: int, denied: bool
) -> None:
    folder = tmp_path_factory.mktemp("copy")
    content = hashlib.shake_128(b"seed").digest(size)
    (folder / "source").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        if denied:
            deny_kernel_copies(patch)
            patch.setattr(files, "_BLOCK_BYTES", 37)
        with (folder / "source").open("rb") as source, (folder / "target").open("wb") as target:
            target.write(b"start")
            if length == 0 or offset + length <= size:
                copy_bytes(source, offset, length, target)
                target.write(b"end")
                target.close()
                copied = (folder / "target").read_bytes()
                assert copied == b"start" + content[offset : offset + length] + b"end"
            else:
                with pytest.raises(EOFError, match=r"source: ends \d+ bytes early"):
                    copy_bytes(source, offset, length, target)


def deny_kernel_copies(patch: pytest.MonkeyPatch) -> None:
    """Make copy_file_range fail as it does across file systems."""

    def denied(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    patch.setattr(os, "copy_file_range", denied)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.write may take less than it was given."""
    real = os.write
    deny_kernel_copies(monkeypatch)
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:3])))
    (tmp_path / "source").write_bytes(b"0123456789")
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        copy_bytes(source, 1, 8, target)
    assert (tmp_path / "target").read_bytes() == b"12345678"


def test_a_full_disk_during_a_copy_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny_kernel_copies(monkeypatch)
    monkeypatch.setattr(os, "write", failing(os.write, 1))
    (tmp_path / "source").write_bytes(b"0123456789")
    with (
        (tmp_path / "source").open("rb") as source,
        (tmp_path / "target").open("wb") as target,
        pytest.raises(OSError, match="No space left"),
    ):
        copy_bytes(source, 0, 10, target)


def test_a_second_name_or_a_copy_holds_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(b"abc")
    link_or_copy(tmp_path / "source", tmp_path / "linked")
    assert (tmp_path / "linked").stat().st_ino == (tmp_path / "source").stat().st_ino
    monkeypatch.setattr(os, "link", failing(os.link, 1))
    link_or_copy(tmp_path / "source", tmp_path / "copied")
    assert tree(tmp_path) == {"copied": b"abc", "linked": b"abc", "source": b"abc"}


@settings(max_examples=20, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_text_is_written_as_its_utf8_bytes(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "text.txt"
    write_text(path, text)
    assert path.read_bytes() == text.encode()


def test_json_is_readable_and_comes_back(tmp_path: Path) -> None:
    value = {"label": "Côte d'Ivoire\u2028", "rows": [0, 3], "none": None}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert "Côte" in (tmp_path / "x.json").read_text("utf-8")
    assert (tmp_path / "x.json").read_bytes().endswith(b"}\n")


def test_json_that_cannot_be_written_leaves_the_file_before(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", object())
    assert tree(tmp_path) == {"x.json": b"1\n"}


def test_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert file_sha256(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_a_link_stays_and_the_file_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(Path("far", "file"))
    before = set(tree(tmp_path))
    with replacing(link) as temporary:
        temporary.write_bytes(b"new")
    assert link.is_symlink()
    assert (tmp_path / "far" / "file").read_bytes() == b"new"
    assert set(tree(tmp_path)) == before


def test_a_link_stays_and_the_folder_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far" / "folder").mkdir(parents=True)
    (tmp_path / "far" / "folder" / "old").touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / "folder")
    with replacing_directory(link) as temporary:
        (temporary / "new").touch()
    assert link.is_symlink()
    assert sorted(tree(tmp_path / "far")) == ["folder", "folder/new"]
    with pytest.raises(WentWrong), replacing_directory(link):
        raise WentWrong
    assert link.is_symlink()
    assert sorted(tree(tmp_path / "far")) == ["folder", "folder/new"]


def test_a_link_to_nothing_yet_is_filled(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def left_by(pid: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary name that process `pid` would write `path` under."""
    with monkeypatch.context() as context:
        context.setattr(os, "getpid", lambda: pid)
        return temporary_sibling(path)


def test_what_dead_processes_left_is_removed_and_what_live_ones_write_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    dead, live = process.pid, os.getppid()
    targets = [tmp_path / "table", tmp_path / "other"]
    for pid in (dead, live):
        for target in targets:
            left_by(pid, target, monkeypatch).write_bytes(b"half")
        left_by(pid, tmp_path / "folder", monkeypatch).mkdir()
    foreign = tmp_path / left_by(dead, tmp_path / "table", monkeypatch).name.replace(files._HOST, "0" * 8)
    foreign.write_bytes(b"half of another host")
    before = set(tmp_path.iterdir())
    remove_stale(tmp_path, "table")
    gone = before - set(tmp_path.iterdir())
    assert [path.name.endswith("-table") and f"-{dead}-" in path.name for path in gone] == [True]
    remove_stale(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert foreign.exists()
    assert all(f"-{live}-" in path.name for path in tmp_path.iterdir() if path != foreign)


@pytest.mark.parametrize("name", ["a table", "[ab]*?", "table"])
def test_writing_a_file_anew_removes_what_a_killed_writer_left_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    left_by(process.pid, tmp_path / name, monkeypatch).write_bytes(b"half")
    left_by(process.pid, tmp_path / f"{name}-folder", monkeypatch).mkdir()
    write_text(tmp_path / name, "new")
    with replacing_directory(tmp_path / f"{name}-folder"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}-folder"}
