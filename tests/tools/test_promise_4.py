"""Promise 4: a single flipped bit anywhere in a run's files is found, and the file is named.

1,000 flips over records, shards, shared parameters, the dataset and the indexes, by `verify`; by merge and
export where they are asked to look; and by whoever opens an index.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kgshard_tools.verify.hashes
import pytest
from graphs import make_run, ring
from kgshard_tools.answers import load
from kgshard_tools.export import export
from kgshard_tools.index.build import build_index
from kgshard_tools.merge import merge_shards
from kgshard_tools.verify import verify, verify_files

import kgshard.runs
from kgshard.errors import UsageError
from kgshard.files import file_sha256

FLIPS = {"shards": 300, "records": 300, "data": 250, "index": 150}
GROUPS: dict[str, list[str]] = {
    "shards": ["checkpoints/*/*.safetensors"],
    "records": ["run.json", "checkpoints/*/manifest.json", "data/data.json", "index/index.json"],
    "data": ["data/*.parquet", "data/*.npy"],
    "index": ["index/*.faiss"],
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with shared parameters, an index, and triples in all splits."""
    triples = ring(30, 3)
    run = make_run(
        tmp_path_factory.mktemp("pristine"),
        triples,
        [("e0", "r0", "e9")],
        [("e1", "r1", "e5"), ("e2", "r2", "e7")],
        model="tucker:3",
        dim=4,
        world_size=2,
    )
    build_index(run.folder)
    return run.folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def files(folder: Path, group: str) -> list[Path]:
    return sorted(path for pattern in GROUPS[group] for path in folder.glob(pattern))


@contextmanager
def flipped(path: Path, source: random.Random) -> Iterator[str]:
    """Flip one bit of a file, and flip it back; yield which."""
    content = bytearray(path.read_bytes())
    position, bit = source.randrange(len(content)), source.randrange(8)
    content[position] ^= 1 << bit
    path.write_bytes(content)
    try:
        yield f"{path.name}: bit {bit} of byte {position}"
    finally:
        content[position] ^= 1 << bit
        path.write_bytes(content)


def test_there_are_1000_flips() -> None:
    assert sum(FLIPS.values()) == 1000


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_verify_finds_every_flipped_bit_and_names_the_file(folder: Path, group: str) -> None:
    source, paths = random.Random(4), files(folder, group)
    if group == "index":
        paths.append(folder / "index" / "labels.sqlite")
    assert len(paths) >= 2
    for number in range(FLIPS[group]):
        path = paths[number % len(paths)]
        # The folder that a file lies in is an artefact of its own; now and then the whole run is asked.
        whole = folder if number % 10 == 0 else path.parent
        with flipped(path, source) as which:
            try:
                verify(whole)
            except UsageError as error:
                assert path.name in str(error), which  # noqa: PT017
                assert len(str(error).splitlines()) == 1, which  # noqa: PT017
            else:
                pytest.fail(f"not found: {which}")
    assert verify(folder, deep=True).files


@pytest.mark.parametrize("reader", [merge_shards, export])
@pytest.mark.parametrize("group", ["shards", "records", "data"])
def test_merge_and_export_find_every_flipped_bit_where_they_are_asked_to(
    folder: Path, tmp_path: Path, group: str, reader: Callable[..., object]
) -> None:
    source, out = random.Random(5), tmp_path / "out"
    paths = [path for path in files(folder, group) if path.name != "index.json"]
    for number in range(50):
        with flipped(paths[number % len(paths)], source) as which:
            try:
                reader(folder, out=out, verify=True)
            except UsageError as error:
                assert len(str(error).splitlines()) == 1, which  # noqa: PT017
            else:
                pytest.fail(f"not found: {which}")
        assert not out.exists()
    reader(folder, out=out, verify=True)


@pytest.mark.parametrize("group", ["index", "index record"])
def test_whoever_opens_an_index_finds_every_flipped_bit(folder: Path, group: str) -> None:
    """predict and neighbors would otherwise answer from it."""
    source = random.Random(6)
    paths = files(folder, "index") if group == "index" else [folder / "index" / "index.json"]
    for number in range(100):
        path = paths[number % len(paths)]
        with flipped(path, source) as which:
            try:
                ask(folder)
            except UsageError as error:
                assert "index" in str(error), which  # noqa: PT017
            else:
                pytest.fail(f"not found: {which}")
    ask(folder)


def ask(folder: Path) -> None:
    model = load(folder)
    model.predict_tails("e0", "r0", k=3)
    model.most_similar("e0", k=3)


def test_without_hashes_most_flips_in_values_are_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: structure alone does not show them."""
    recorded: dict[str, str] = {}
    hashed = [path for group in ("shards", "data", "index") for path in files(folder, group)]
    for path in [*hashed, folder / "index" / "labels.sqlite"]:
        recorded[str(path)] = file_sha256(path)
    for module in (kgshard.runs, kgshard_tools.verify.hashes):
        monkeypatch.setattr(module, "file_sha256", lambda path: recorded[str(path)])
    source, missed = random.Random(7), 0
    paths = [*files(folder, "shards"), *files(folder, "index")]
    for number in range(100):
        with flipped(paths[number % len(paths)], source):
            try:
                list(verify_files(folder, deep=True))
            except UsageError:
                continue
            missed += 1
    assert missed > 40
