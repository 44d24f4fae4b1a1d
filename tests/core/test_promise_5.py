"""Promise 5: a set of shards that is not whole, or not of one checkpoint, is refused naming file and rank.

12 faults at worlds 2, 4 and 12: 36 of 36. Order comes from the manifest, never from a directory listing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kgshard_tools.merge import merge_shards
from ranking_functions import begin_run, chain, random_tables, save_on_threads
from safetensors import SafetensorError
from safetensors.numpy import load_file

from kgshard.errors import ShardError
from kgshard.runs import open_run, read_manifest, shard_name
from kgshard.shards import ENTITIES, header_bytes, read_header

WORLDS = (2, 4, 12)
NUM_ROWS = 24  # equally many on every rank, so that lengths tell nothing
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that a test may damage."""

    folder: Path
    world_size: int
    stale: Path
    """An earlier checkpoint of the same run, of the same world size."""
    foreign: Path
    """A checkpoint of another run of the same shapes."""

    @property
    def rank(self) -> int:
        """Whose shard is damaged: the second."""
        return 1

    @property
    def shard(self) -> Path:
        return self.folder / shard_name(self.rank, self.world_size)

    @property
    def neighbour(self) -> Path:
        """The third rank's shard; the first one's where there are two."""
        return self.folder / shard_name(2 if self.world_size > 2 else 0, self.world_size)

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.folder / MANIFEST
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Damaged]:
    """World size to a run with a checkpoint at step 5, and what could be mistaken for it."""
    made = {}
    for world_size in WORLDS:
        place = tmp_path_factory.mktemp(f"world-{world_size}")
        runs = [begin_run(place / name, train=chain(NUM_ROWS)) for name in ("ours", "theirs")]
        old = save_on_threads(runs[0], world_size, *random_tables(runs[0], 1), step=4)
        shutil.copytree(old, place / "stale")
        ours = save_on_threads(runs[0], world_size, *random_tables(runs[0], 2), step=5)
        theirs = save_on_threads(runs[1], world_size, *random_tables(runs[1], 3), step=5)
        made[world_size] = Damaged(ours, world_size, place / "stale", theirs)
    return made


def copy(pristine: Damaged, place: Path) -> Damaged:
    run = pristine.folder.parents[1]
    shutil.copytree(run, place / "run")
    folder = place / "run" / pristine.folder.relative_to(run)
    return Damaged(folder, pristine.world_size, pristine.stale, pristine.foreign)


class StillWaiting(BaseException):
    """No OSError, as TimeoutError is: nobody may take it for a file's."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Whoever waits for a pipe to be written is interrupted."""

    def expire(number: int, frame: object) -> None:
        raise StillWaiting(f"after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Fault = Callable[[Damaged], tuple[str, int | None]]
"""Damages a checkpoint; returns the name of the file that must be named, and the rank."""


def of_shard(damage: Callable[[Damaged], None]) -> Fault:
    def fault(what: Damaged) -> tuple[str, int | None]:
        damage(what)
        return what.shard.name, what.rank

    return fault


def truncate(what: Damaged) -> None:
    what.shard.write_bytes(what.shard.read_bytes()[:-4])


def empty(what: Damaged) -> None:
    what.shard.write_bytes(b"")


def copy_over(source: Callable[[Damaged], Path]) -> Callable[[Damaged], None]:
    def damage(what: Damaged) -> None:
        content = source(what).read_bytes()
        assert len(content) == what.shard.stat().st_size
        assert content != what.shard.read_bytes()
        what.shard.write_bytes(content)

    return damage


def swap(what: Damaged) -> None:
    """Only the lower of the two need be named; with two ranks that is the first."""
    one, other = what.shard.read_bytes(), what.neighbour.read_bytes()
    what.shard.write_bytes(other)
    what.neighbour.write_bytes(one)


def swapped(what: Damaged) -> tuple[str, int | None]:
    swap(what)
    rank = min(what.rank, 2 if what.world_size > 2 else 0)
    return shard_name(rank, what.world_size), rank


def shift_rows(by: int) -> Fault:
    def fault(what: Damaged) -> tuple[str, int | None]:
        def change(manifest: dict[str, Any]) -> None:
            piece = manifest["tables"][ENTITIES]["pieces"][what.rank]
            piece["rows"] = [row + by for row in piece["rows"]]

        what.edit(change)
        return what.shard.name, what.rank

    return fault


def shift_rows_and_header(by: int) -> Fault:
    """The shard agrees with the manifest; only its neighbours do not."""

    def fault(what: Damaged) -> tuple[str, int | None]:
        named = shift_rows(by)(what)
        start, digit = NUM_ROWS // what.world_size, "]"
        before, after = f"[{start}, 0{digit}".encode(), f"[{start + by}, 0{digit}".encode()
        content = what.shard.read_bytes()
        assert content.count(before) == 1
        assert len(before) == len(after)
        what.shard.write_bytes(content.replace(before, after))
        return named

    return fault


def wrong_world(what: Damaged) -> tuple[str, int | None]:
    what.edit(lambda manifest: manifest.update(world_size=what.world_size + 1))
    return MANIFEST, None


def foreign_manifest(what: Damaged) -> tuple[str, int | None]:
    what.edit(lambda manifest: manifest.update(run_id="0" * 32))
    return what.folder.name, None


def extra_file(what: Damaged) -> tuple[str, int | None]:
    name = shard_name(what.world_size, what.world_size + 1)
    (what.folder / name).write_bytes(header_bytes({ENTITIES: ("F32", (0, 4))}, {}))
    return name, None


def symlink(what: Damaged) -> None:
    elsewhere = what.folder.parents[1] / "elsewhere.safetensors"
    shutil.move(what.shard, elsewhere)
    what.shard.symlink_to(elsewhere)


def become(make: Callable[[Path], None]) -> Fault:
    def damage(what: Damaged) -> None:
        what.shard.unlink()
        make(what.shard)

    return of_shard(damage)


FAULTS: dict[str, list[Fault]] = {
    "truncated": [of_shard(truncate)],
    "zero-byte": [of_shard(empty)],
    "missing": [of_shard(lambda what: what.shard.unlink())],
    "duplicated": [of_shard(copy_over(lambda what: what.neighbour))],
    "swapped": [swapped],
    "stale step": [of_shard(copy_over(lambda what: what.stale / what.shard.name))],
    "foreign run id": [
        of_shard(copy_over(lambda what: what.foreign / what.shard.name)),
        foreign_manifest,
    ],
    "wrong world size": [wrong_world],
    "overlapping or gapped rows": [shift_rows(-1), shift_rows(1), shift_rows_and_header(-1)],
    "extra file": [extra_file],
    "symlinked": [of_shard(symlink)],
    "unreadable": [become(Path.mkdir), become(os.mkfifo)],
}
NEEDS_HASHES = {"stale step", "foreign run id"}
"""The rest is seen when a checkpoint is opened, without reading the rows."""


def open_and_merge(what: Damaged, out: Path, verify: bool) -> None:
    run = open_run(what.folder.parents[1])
    assert run.checkpoint.entities.num_rows == NUM_ROWS
    merge_shards(run, out, verify=verify)


def refusal(what: Damaged, out: Path, *, verify: bool) -> ShardError:
    """Return the error of whoever refuses it: the run that opens it, or merging its shards."""
    with limited(10), pytest.raises(ShardError) as caught:
        open_and_merge(what, out, verify)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_a_set_of_shards_with_a_fault_is_refused_by_file_and_rank(
    pristine: dict[int, Damaged], tmp_path: Path, kind: str, world_size: int
) -> None:
    for number, fault in enumerate(FAULTS[kind]):
        what = copy(pristine[world_size], tmp_path / str(number))
        name, rank = fault(what)
        error = refusal(what, tmp_path / "merged.safetensors", verify=kind in NEEDS_HASHES)
        assert name in str(error)
        assert len(str(error).splitlines()) == 1
        assert error.rank == rank
        if rank is not None:
            assert Path(error.file).name == name
            assert f"rank {rank}" in str(error)


def test_there_are_twelve_faults() -> None:
    assert len(FAULTS) == 12


@pytest.mark.parametrize("world_size", WORLDS)
def test_without_a_fault_it_is_opened_and_merged(
    pristine: dict[int, Damaged], tmp_path: Path, world_size: int
) -> None:
    """The control: what is refused above is refused for its fault."""
    what = copy(pristine[world_size], tmp_path)
    merge_shards(what.folder.parents[1], tmp_path / "m.safetensors", verify=True)
    run = open_run(what.folder.parents[1])
    expected = random_tables(run, 2)[0]
    np.testing.assert_array_equal(load_file(tmp_path / "m.safetensors")[ENTITIES], expected)


def read_naively(folder: Path, world_size: int) -> bool:
    """Read what a directory listing gives, as many loaders do; return whether it looked like the table."""
    paths = [folder / shard_name(rank, world_size) for rank in range(world_size)]
    if any(path.exists() and not (path.is_file() or path.is_dir()) for path in paths):
        return False  # it would wait for the pipe for ever
    try:
        rows = [load_file(path)[ENTITIES] for path in sorted(folder.glob("entity-*"))]
    except (OSError, SafetensorError, KeyError):
        return False
    return sum(map(len, rows)) == NUM_ROWS


def test_a_reader_without_a_manifest_takes_half_of_them(pristine: dict[int, Damaged], tmp_path: Path) -> None:
    """The negative control: these faults are not of the kind that shows by itself."""
    accepted = set()
    for world_size in WORLDS:
        for kind, faults in FAULTS.items():
            what = copy(pristine[world_size], tmp_path / f"{kind}-{world_size}")
            faults[0](what)
            if read_naively(what.folder, world_size):
                accepted.add((kind, world_size))
    assert len(accepted) >= 18


@pytest.mark.parametrize("name", [MANIFEST, "../../LATEST", "../../run.json", "../../data/data.json"])
def test_a_pipe_in_place_of_a_record_is_refused_and_waits_for_nobody(
    pristine: dict[int, Damaged], tmp_path: Path, name: str
) -> None:
    what = copy(pristine[2], tmp_path)
    path = (what.folder / name).resolve()
    path.unlink()
    os.mkfifo(path)
    with limited(10), pytest.raises(Exception, match=path.name):
        open_run(what.folder.parents[1]).checkpoint  # noqa: B018


def test_a_pipe_is_no_safetensors_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with limited(10), pytest.raises(ShardError, match="no ordinary file"):
        read_header(tmp_path / "w.safetensors")


def test_a_manifest_that_is_a_pipe_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with limited(10), pytest.raises(ShardError, match="no ordinary file"):
        read_manifest(tmp_path)
