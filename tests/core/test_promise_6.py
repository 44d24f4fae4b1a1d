"""Promise 6: hostile safetensors files and records cost little, are refused in a line, and never crash.

Mutated headers by the thousand and cases made by hand, through `kgshard info`, through a checkpoint that
holds them, and in a process of its own whose memory is measured. The rules of the format itself are in
test_shards.py.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from kgshard_tools.cli import run as kgshard
from ranking_functions import begin_run, chain, random_tables, save_on_threads
from safetensors import SafetensorError
from safetensors.numpy import load

from kgshard.errors import KgshardError, ShardError
from kgshard.runs import open_checkpoint, open_run, shard_name
from kgshard.shards import ENTITIES, read_header

FAST, NIGHTLY = 1_000, 10_000
MANY = pytest.mark.parametrize("count", [FAST, pytest.param(NIGHTLY, marks=pytest.mark.nightly)])
MIB = 1 << 20


@pytest.fixture(autouse=True)
def debug_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGSHARD_DEBUG", "")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = begin_run(tmp_path_factory.mktemp("pristine"), train=chain(8))
    save_on_threads(run, 2, *random_tables(run, 1), step=5)
    return run.folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own to damage, in its run."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step-00000005"


PARTS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"9" * 20, b"null", b"1e9", b"\\u0000", b" "]


def mutate(source: random.Random, content: bytes) -> bytes:
    """Change a safetensors file's header in one to three places; mostly keep its length right."""
    length = int.from_bytes(content[:8], "little")
    header, data = bytearray(content[8 : 8 + length]), content[8 + length :]
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(header))
        match source.randrange(5):
            case 0:
                header[at] ^= 1 << source.randrange(8)
            case 1:
                header[at] = source.choice(b'0123456789abF"[]{},: ')
            case 2:
                del header[at : at + source.randint(1, 8)]
            case 3:
                header[at:at] = header[at : at + source.randint(1, 30)]
            case _:
                header[at:at] = source.choice(PARTS)
    stated = len(header) if source.random() < 0.9 else source.choice([0, 1, length, 10**8 + 1, 2**63])
    return stated.to_bytes(8, "little") + bytes(header) + data


def loads(content: bytes) -> bool:
    """Whether the safetensors package takes it."""
    try:
        load(content)
    except (SafetensorError, KeyError, ValueError, TypeError):
        return False
    return True


@MANY
def test_info_says_what_a_mutated_file_is_or_refuses_it_in_one_line(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    source, path = random.Random(6), tmp_path / "mutant.safetensors"
    original = next(pristine.glob("checkpoints/*/entity-00002*")).read_bytes()
    refused = stricter = 0
    for _ in range(count):
        content = mutate(source, original)
        path.write_bytes(content)
        began = time.perf_counter()
        code = kgshard(["info", str(path)])
        assert time.perf_counter() - began < 1
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        if code == 0:
            assert said.err == ""
            continue
        assert (code, said.out, said.err.count("\n")) == (2, "", 1)
        assert said.err.startswith(f"Error: {path}: not a safetensors file: ")
        refused += 1
        stricter += loads(content)
    assert refused > 0.7 * count
    assert stricter > 0  # the control: the package takes some that are refused here


@MANY
def test_no_mutated_shard_is_taken_for_what_the_manifest_says(folder: Path, count: int) -> None:
    """Some can be opened, for the format says nothing of content; the manifest's hash does."""
    source, path = random.Random(7), folder / shard_name(1, 2)
    original = path.read_bytes()
    opened = 0
    for _ in range(count):
        content = mutate(source, original)
        if content == original:
            continue
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(folder)
            opened += 1
            list(checkpoint.verify())
        except ShardError as error:
            assert str(path) in str(error)  # noqa: PT017
            assert len(str(error).splitlines()) == 1  # noqa: PT017
        else:
            pytest.fail(f"{content!r} was taken for {original!r}")
    assert opened > 0  # the control: without hashes these would have been read
    path.write_bytes(original)
    assert len(list(open_checkpoint(folder).verify())) == 3


def file_of(header: str | bytes, data: int = 0, length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def tensor(name: str, shape: str, start: int, stop: int) -> str:
    return f'"{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{stop}]}}'


def padded(text: str, size: int) -> str:
    """Repeat a piece of JSON in a list until the header has about so many bytes."""
    return '{"w":[' + ",".join([text] * (size // (len(text) + 1))) + "]}"


def scalars(positions: Iterable[int]) -> str:
    return "{" + ",".join(tensor(f"t{i}", "[1,1]", 4 * i, 4 * i + 4) for i in positions) + "}"


W = tensor("w", "[2,3]", 0, 24)
LONG_PATH = "x" * 4_000_000 + "/.."
COSTLY: dict[str, Callable[[], bytes]] = {
    "duplicate key": lambda: file_of("{" + W + "," + W + "}", 24),
    "overlap": lambda: file_of("{" + W + "," + tensor("v", "[2,3]", 12, 36) + "}", 36),
    "hole": lambda: file_of("{" + W + "," + tensor("v", "[1]", 28, 32) + "}", 32),
    "trailing bytes": lambda: file_of("{" + W + "}", 25),
    "header 100,000,001": lambda: file_of("{" + W + "}", 24, length=100_000_001),
    "header 2^63": lambda: file_of("{" + W + "}", 24, length=2**63),
    "header 2^64 - 1": lambda: file_of("{" + W + "}", 24, length=2**64 - 1),
    "lists nested 10^5 deep": lambda: file_of('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "objects nested 10^5 deep": lambda: file_of('{"w":' * 100_000 + "1" + "}" * 100_000),
    "lists nested as deep as fits": lambda: file_of('{"w":' + "[" * 2_000_000 + "]" * 2_000_000 + "}"),
    "shape overflow": lambda: file_of("{" + tensor("w", "[4611686018427387904,4]", 0, 0) + "}"),
    "shape product of 10^5 factors": lambda: file_of(
        "{" + tensor("w", "[" + ",".join(["9007199254740993"] * 60_000) + "]", 0, 0) + "}"
    ),
    "number of 4 million digits": lambda: file_of("{" + tensor("w", "[" + "9" * 4_000_000 + "]", 0, 0) + "}"),
    "negative shape": lambda: file_of("{" + tensor("w", "[-2,-3]", 0, 24) + "}", 24),
    "negative offset": lambda: file_of("{" + tensor("w", "[2,3]", -24, 0) + "}", 24),
    "metadata no text": lambda: file_of('{"__metadata__":{"a":1},' + W + "}", 24),
    "NUL in a name": lambda: file_of("{" + tensor("a\\u0000b", "[2,3]", 0, 24) + "}", 24),
    "a path for a name": lambda: file_of("{" + tensor("../../etc/passwd", "[2,3]", 0, 24) + "}", 24),
    "name of 4 million characters": lambda: file_of("{" + tensor(LONG_PATH, "[2,3]", 0, 24) + "}", 24),
    "dtype of 4 million characters": lambda: file_of("{" + W.replace("F32", "F" * 4_000_000) + "}", 24),
    "newlines in a dtype": lambda: file_of("{" + W.replace("F32", "\\n\\n") + "}", 24),
    "empty lists by the million": lambda: file_of(padded("[]", 4_000_000)),
    "empty objects by the million": lambda: file_of(padded("{}", 4_000_000)),
    "numbers by the million": lambda: file_of(padded("1000", 4_000_000)),
    "texts by the million": lambda: file_of(padded('"ab"', 4_000_000)),
    "wide characters": lambda: file_of('{"__metadata__":{"a":"' + "😀" * 1_000_000 + '"},' + W + "}", 23),
    "a wide character in a long text": lambda: file_of(
        '{"__metadata__":{"a":"' + "a" * 30_000_000 + '😀"},' + W + "}", 23
    ),
    "values just below the limit": lambda: file_of(padded('"😀' + "a" * 14 + '"', 190_000 * 18)),
    "header as long as the file": lambda: file_of(b" " * 4_000_000),
    "header of 20 MB": lambda: file_of(padded("[]", 20_000_000)),
    "tensors as many as are read, and a hole": lambda: file_of(scalars([*range(20_000), 20_001]), 80_008),
    "tensors by the hundred thousand": lambda: file_of(scalars(range(100_000)), 400_000),
}  # fmt: skip

MEASURE = """
import contextlib, io, json, os, sys, time
from kgshard_tools.cli import run
import kgshard_tools.info

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

for path in sys.argv[1:]:
    open("/proc/self/clear_refs", "w").write("5")
    before, began, out, err = resident(), time.perf_counter(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["info", path])
    seconds = time.perf_counter() - began
    print(json.dumps([code, out.getvalue(), err.getvalue(), seconds, peak() - before]))
"""


def test_hostile_files_cost_a_second_and_64_mib_at_most(tmp_path: Path) -> None:
    paths = []
    for number, (_, content) in enumerate(COSTLY.items()):
        paths.append(tmp_path / f"{number}.safetensors")
        paths[-1].write_bytes(content())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True, check=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(COSTLY) >= 25
    for kind, path, (code, out, err, seconds, peak) in zip(COSTLY, paths, results, strict=True):
        assert (code, out) == (2, ""), kind
        assert err.startswith(f"Error: {path}: "), kind
        assert err.count("\n") == 1, kind
        assert len(err) < 1000, kind
        assert seconds < 1, kind
        assert peak <= path.stat().st_size + 64 * MIB, kind


def test_the_largest_headers_of_models_are_read(tmp_path: Path) -> None:
    """A control: 20,000 tensors are more than any model's file has."""
    path = tmp_path / "large.safetensors"
    names = [f"model.layers.{i}.self_attention.query_projection.weight" for i in range(20_000)]
    header = ",".join(tensor(name, "[1, 1]", 4 * i, 4 * i + 4) for i, name in enumerate(names))
    path.write_bytes(file_of("{" + header + "}", 80_000))
    assert list(read_header(path)[0]) == names


HUGE = 10**30
Change = Callable[[dict[str, Any]], object]


def set_piece(key: str, value: object) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tables"][ENTITIES]["pieces"][1][key] = value

    return change


def rename_file(name: str) -> Change:
    """Let the manifest call a shard by another name, everywhere."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(shard_name(1, 2))
        set_piece("file", name)(manifest)

    return change


def list_file(name: str) -> Change:
    return lambda record: record.update(files={name: {"bytes": 1, "sha256": ""}})


PATHS = ["../x", "../../../run.json", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "x" * 300, "a\nb"]
MANIFESTS: dict[str, Change] = {
    **{f"file {name[:20]!r}": rename_file(name) for name in PATHS},
    "step huge": lambda m: m.update(step=HUGE),
    "step text": lambda m: m.update(step="5"),
    "step below 0": lambda m: m.update(step=-5),
    "world size 0": lambda m: m.update(world_size=0),
    "world size huge": lambda m: m.update(world_size=HUGE),
    "rows huge": set_piece("rows", [4, HUGE]),
    "rows of 2^62": set_piece("rows", [4, 2**62]),
    "rows below 0": set_piece("rows", [-4, 4]),
    "rows of three": set_piece("rows", [4, 6, 8]),
    "rank text": set_piece("rank", "1"),
    "shape huge": lambda m: m["tables"][ENTITIES].update(shape=[HUGE, 4]),
    "bytes huge": lambda m: m["files"][shard_name(1, 2)].update(bytes=HUGE),
    "bytes infinite": lambda m: m["files"][shard_name(1, 2)].update(bytes=1e308),
    "files a list": lambda m: m.update(files=[1]),
    "tables null": lambda m: m.update(tables=None),
    "model a list": lambda m: m.update(model=[]),
    "format of tomorrow": lambda m: m.update(format="kgshard.checkpoint/9"),
}
RUNS: dict[str, Change] = {
    "id a number": lambda r: r.update(id=7),
    "id of another run": lambda r: r.update(id="0" * 32),
    "model a list": lambda r: r.update(model=[]),
    "model empty": lambda r: r.update(model={}),
    "model unknown": lambda r: r["model"].update(score_function="complx"),
    "model elsewhere": lambda r: r["model"].update(score_function="no_such_module:Evil"),
    "model null": lambda r: r["model"].update(score_function=None),
    "dim huge": lambda r: r["model"].update(embedding_dim=HUGE),
    "dim text": lambda r: r["model"].update(embedding_dim="four"),
    "dim infinite": lambda r: r["model"].update(embedding_dim=1e308),
    "dim below 0": lambda r: r["model"].update(embedding_dim=-4),
    "entities huge": lambda r: r["model"].update(num_entities=HUGE),
    "entities null": lambda r: r["model"].update(num_entities=None),
    "vocabulary of another": lambda r: r.update(vocabulary_sha256="0" * 64),
    "versions a list": lambda r: r.update(versions=[]),
    "format of tomorrow": lambda r: r.update(format="kgshard.run/9"),
}
DATA: dict[str, Change] = {
    "entities huge": lambda d: d.update(num_entities=HUGE),
    "entities below 0": lambda d: d.update(num_entities=-8),
    "triples huge": lambda d: d["splits"]["train"].update(triples=HUGE),
    "no train": lambda d: d["splits"].pop("train"),
    "splits a list": lambda d: d.update(splits=[]),
    "lines that do not add up": lambda d: d["splits"]["train"].update(lines=1),
    "vocabulary of another": lambda d: d.update(vocabulary_sha256="0" * 64),
    "format of tomorrow": lambda d: d.update(format="kgshard.data/9"),
    **{f"file {name[:20]!r}": list_file(name) for name in PATHS},
}
RECORDS: list[tuple[str, str, Change]] = [
    *(("checkpoints/step-00000005/manifest.json", kind, change) for kind, change in MANIFESTS.items()),
    *(("run.json", kind, change) for kind, change in RUNS.items()),
    *(("data/data.json", kind, change) for kind, change in DATA.items()),
]


@pytest.mark.parametrize(("name", "kind", "change"), RECORDS, ids=[f"{n}-{k}" for n, k, _ in RECORDS])
def test_a_hostile_record_is_refused_in_one_line_that_names_it(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str, change: Change
) -> None:
    run = folder.parents[1]
    record = json.loads((run / name).read_bytes())
    change(record)
    (run / name).write_text(json.dumps(record))
    began = time.perf_counter()
    assert kgshard(["verify", str(run), "--deep", "-q"]) == 2
    assert time.perf_counter() - began < 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert str(run) in said.err
    assert "Traceback" not in said.err
    assert kgshard(["info", str((run / name).parent)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpoints/step-00000005/manifest.json", "run.json", "data/data.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b"\x80\x04pickle",
        b"\xff\xfe",
        b"[" * 100_000,
        bytes(1 << 20),
    ],
    ids=range(10),
)
def test_a_record_that_is_none_is_refused_by_everybody(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    run = folder.parents[1]
    (run / name).write_bytes(content)
    for arguments in (["info", str(run)], ["verify", str(run), "-q"], ["merge-shards", str(run)]):
        assert kgshard(arguments) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert Path(name).name in said.err


def test_the_run_behind_the_hostile_ones_is_in_order(folder: Path) -> None:
    """A control: they are refused for their fault."""
    assert kgshard(["verify", str(folder.parents[1]), "--deep", "-q"]) == 0


@pytest.mark.parametrize("name", PATHS)
def test_a_manifest_opens_no_file_outside_its_folder(folder: Path, name: str) -> None:
    record = json.loads((folder / "manifest.json").read_bytes())
    rename_file(name)(record)
    (folder / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(KgshardError, match="is no name of a file in this folder"):
        open_run(folder.parents[1]).checkpoint  # noqa: B018
