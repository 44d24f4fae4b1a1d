"""Promise 7, foreign index files: whatever is in one, who asks lives on and is told in a line."""

from __future__ import annotations

import collections
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hostile_indexes import DIM, ROWS, TYPES, greedy, lattice, make_index, mutants, some_vectors
from kgshard_tools.cli import run as kgshard
from kgshard_tools.index.foreign import ForeignReader, describe_foreign, search_foreign
from kgshard_tools.index.foreign_answers import ForeignError, read_answer

from kgshard.errors import ConfigError, ShardError

FAST, NIGHTLY = 150, 6_000
METRICS = {"inner product": faiss.METRIC_INNER_PRODUCT, "L2": faiss.METRIC_L2}


@pytest.fixture(scope="module")
def reader() -> Iterator[ForeignReader]:
    with ForeignReader() as opened:
        yield opened


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


Helpers = Callable[[], list[int]]


@pytest.fixture
def helpers(reader: ForeignReader) -> Helpers:
    """Lists processes that read foreign indexes, but for that of `reader`."""

    def list_all() -> list[int]:
        every = children_of(os.getpid())
        return [pid for pid in every if b"foreign_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    before = list_all()
    return lambda: [pid for pid in list_all() if pid not in before]


def written(index: Any, path: Path) -> Path:
    faiss.write_index(index, str(path))
    return path


def refusal(reader: ForeignReader, path: Path) -> str:
    with pytest.raises(ShardError) as caught:
        reader.describe(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert len(text.splitlines()) == 1
    assert len(text) < len(str(path)) + 450
    assert text.isprintable()
    assert caught.value.file == str(path)
    return text.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("type", "metric"),
    [*((type, "L2") for type in TYPES), *((type, "inner product") for type in ("Flat", "IVF8,SQ8", "HNSW8"))],
)
def test_answers_are_those_of_the_index_higher_is_nearer(
    reader: ForeignReader, tmp_path: Path, type: str, metric: str
) -> None:
    """Also a check that the limits leave honest files alone."""
    index = make_index(type, METRICS[metric])
    path, queries = written(index, tmp_path / "i.faiss"), some_vectors()[:20] + np.float32(0.1)
    found = reader.search(path, queries, 7)
    raw, ids = index.search(queries, 7)
    np.testing.assert_array_equal(found.ids, ids)
    larger = index.metric_type == faiss.METRIC_INNER_PRODUCT
    expected = np.where(ids < 0, -np.inf, raw if larger else -raw)
    np.testing.assert_allclose(found.values, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.counts, (ids >= 0).sum(axis=1))
    assert found.num_dropped == 0
    described = reader.describe(path)
    assert described == found.index
    assert (described.rows, described.dim) == (ROWS, DIM)
    assert described.metric == ("inner product" if larger else "L2")
    assert described.type == faiss.downcast_index(faiss.read_index(str(path))).__class__.__name__


def test_only_possible_answers_are_left(reader: ForeignReader, tmp_path: Path) -> None:
    """Ids of another vocabulary, an id twice, an infinite value, and more asked for than there is."""
    vectors = np.arange(6, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    vectors[5] = 3e38  # its inner product is infinite
    index = faiss.IndexIDMap(faiss.IndexFlatIP(4))
    index.add_with_ids(vectors, np.array([4, 4, 900, -7, 0, 1]))
    path = written(index, tmp_path / "i.faiss")
    found = search_foreign(path, np.ones((1, 4), np.float32), 9, num_rows=100)
    assert found.ids.tolist() == [[0, 4, *([-1] * 7)]]
    assert found.values.tolist() == [[16, 4, *([-np.inf] * 7)]]
    assert (found.counts.tolist(), found.num_dropped) == ([2], 4)
    assert reader.search(path, -np.ones((1, 4), np.float32), 1).ids.tolist() == [[4]]


def test_what_cannot_be_asked_is_said(reader: ForeignReader, tmp_path: Path) -> None:
    path = written(make_index("Flat"), tmp_path / "i.faiss")
    with pytest.raises(ShardError, match="its vectors are of 8 floats, the queries of 3"):
        reader.search(path, np.zeros((2, 3), np.float32), 5)
    for k in (0, -1, 10**9):
        with pytest.raises(ConfigError, match=r"k must be >= 1, and 2 queries .* may ask for"):
            reader.search(path, np.zeros((2, 8), np.float32), k)
    for queries in (np.full((1, 8), np.nan), np.zeros((0, 8)), np.zeros(8)):
        with pytest.raises(ValueError, match="queries must be finite"):
            reader.search(path, queries.astype(np.float32), 5)
    assert refusal(reader, tmp_path / "none") == "missing"
    os.mkfifo(tmp_path / "fifo")
    assert refusal(reader, tmp_path / "fifo") == "is no ordinary file"
    assert "cannot read it" in refusal(reader, written_bytes(tmp_path, b""))


def written_bytes(folder: Path, content: bytes) -> Path:
    path = folder / "mutant.faiss"
    path.write_bytes(content)
    return path


KINDS = {
    "loaded": "",
    "refused": "FAISS cannot read it: ",
    "not searchable": "FAISS cannot search it: ",
    "memory": "FAISS needs more memory for it than ",
    "crashed": "FAISS was ended by ",
    "hung": "FAISS did not read and search it within ",
    "nonsense": "FAISS (sent|takes it for|finds vectors)",
}


@pytest.mark.parametrize(
    ("count", "seconds"), [(FAST, 2.0), pytest.param(NIGHTLY, 10.0, marks=pytest.mark.nightly)]
)
def test_no_mutated_index_harms_who_asks(
    tmp_path: Path, helpers: Helpers, count: int, seconds: float
) -> None:
    originals = [written(make_index(type), tmp_path / "i.faiss").read_bytes() for type in TYPES]
    outcomes: collections.Counter[str] = collections.Counter()
    with ForeignReader(seconds=seconds) as reader:
        first = helpers()
        for content in mutants(originals, count, seed=7):
            path = written_bytes(tmp_path, content)
            began = time.monotonic()
            try:
                reader.describe(path)
                said = ""
            except ShardError as error:
                said = str(error).removeprefix(f"{path}: ")
                assert len(said.splitlines()) == 1
            assert time.monotonic() - began < seconds + (not first) * 10 + 2
            first = first or helpers()
            outcomes[next(kind for kind, words in reversed(KINDS.items()) if re.match(words, said))] += 1
            if said.startswith(KINDS["crashed"]):
                outcomes[said.split()[4]] += 1
        assert helpers() == first  # one process all the time
        for type, content in zip(TYPES, originals, strict=True):
            assert reader.describe(written_bytes(tmp_path, content)).rows == ROWS, type
    print(count, "mutants:", dict(outcomes))
    assert sum(outcomes[kind] for kind in KINDS) == count
    assert outcomes["loaded"] > 0.1 * count
    assert outcomes["refused"] > 0.1 * count


UNPROTECTED = "import faiss, sys; faiss.omp_set_num_threads(1); faiss.read_index(sys.argv[1]); print('read')"


def test_the_control_a_file_that_hangs_faiss_is_refused_here_at_once(
    reader: ForeignReader, tmp_path: Path
) -> None:
    path = lattice(tmp_path / "lattice.faiss", 512)
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", UNPROTECTED, str(path)], timeout=3, check=False)
    began = time.monotonic()
    assert re.search("r2=512 exceeds", refusal(reader, path))
    assert time.monotonic() - began < 2
    honest = lattice(path, 20)
    subprocess.run([sys.executable, "-c", UNPROTECTED, str(honest)], check=True, capture_output=True)
    assert reader.describe(honest).type == "IndexLattice"


def test_what_takes_too_long_is_ended(tmp_path: Path, helpers: Helpers) -> None:
    path = lattice(tmp_path / "lattice.faiss", 256)
    began = time.monotonic()
    with ForeignReader(seconds=0.15) as reader:
        assert refusal(reader, path) == "FAISS did not read and search it within 0.15 s"
        assert time.monotonic() - began < 5
        (helper,) = helpers()
        assert children_of(helper) == []


def test_what_takes_too_much_memory_is_ended(reader: ForeignReader, tmp_path: Path) -> None:
    """A graph that asks for 8 GiB or more, in a file of some kilobytes."""
    said = refusal(reader, greedy(tmp_path / "greedy.faiss", 2**30))
    found = re.fullmatch(r"FAISS needs more memory for it than ([0-9,]+) MiB", said)
    assert found
    assert 1024 < int(found[1].replace(",", "")) < 4096
    assert reader.describe(greedy(tmp_path / "modest.faiss", 64)).rows == ROWS


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_a_crash_is_told_by_its_signal(tmp_path: Path, helpers: Helpers, name: str) -> None:
    """A signal from outside, while a file is read that takes a while."""
    path = lattice(tmp_path / "lattice.faiss", 256)
    with ForeignReader() as reader:
        reader.describe(lattice(tmp_path / "honest.faiss", 20))
        (helper,) = helpers()

        def crash() -> None:
            while not (children := children_of(helper)):
                time.sleep(0.002)
            time.sleep(0.05)
            os.kill(children[0], signal.Signals[name])

        thread = threading.Thread(target=crash)
        thread.start()
        assert refusal(reader, path) == f"FAISS was ended by {name} while it read or searched it"
        thread.join()
        assert reader.describe(tmp_path / "honest.faiss").rows == 0


def test_a_reader_whose_process_is_gone_starts_another(tmp_path: Path, helpers: Helpers) -> None:
    path = written(make_index("SQ8"), tmp_path / "i.faiss")
    with ForeignReader() as reader:
        reader.describe(path)
        (helper,) = helpers()
        os.kill(helper, signal.SIGKILL)
        assert has_ended(helper)
        assert reader.describe(path).rows == ROWS
        assert helpers() != [helper]
    assert helpers() == []


def test_a_reader_that_nobody_ends_ends_with_its_process(tmp_path: Path) -> None:
    path = written(make_index("SQ8"), tmp_path / "i.faiss")
    script = (
        "import os, signal, sys; from kgshard_tools.index.foreign import ForeignReader\n"
        "reader = ForeignReader(); reader.describe(sys.argv[1]); print(reader._server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, check=False)
    assert has_ended(int(done.stdout))


def has_ended(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if ") Z" in stat.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_an_index_opens_no_other_file(reader: ForeignReader, tmp_path: Path) -> None:
    """The lists of this one lie elsewhere; FAISS alone would open whatever path it says."""
    index, other = make_index("IVF8,Flat"), tmp_path / "lists.bin"
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(other))
    lists.merge_from(index.invlists, 0)
    index.replace_invlists(lists)
    path = written(index, tmp_path / "i.faiss")
    done = subprocess.run([sys.executable, "-c", UNPROTECTED, str(path)], capture_output=True, check=True)
    assert done.stdout == b"read\n"
    assert "cannot read it" in refusal(reader, path)


def test_nothing_a_process_sends_is_believed() -> None:
    """Random bytes, and answers that are cut, longer or changed: other sizes, or a line."""
    from kgshard_tools.index.foreign_child import ANSWER, ENDED, EXITED, OK

    source, queries = random.Random(5), np.ones((3, 8), np.float32)
    body = np.zeros(12, "<f4").tobytes() + np.arange(12, dtype="<i8").tobytes()
    good = ENDED.pack(EXITED, 0, 0) + ANSWER.pack(OK, b"IndexFlatL2", 100, 8, 1, 3, 4) + body
    assert read_answer(good, queries, 4, seconds=1)[2].shape == (3, 4)
    refused = 0
    for number in range(3000):
        content = bytearray(good)
        if number % 3 == 0:
            content = bytearray(source.randbytes(source.randrange(300)))
        elif number % 3 == 1:
            content = content[: source.randrange(len(good))] + source.randbytes(source.randrange(3))
        for _ in range(source.randrange(4)):
            if content:
                content[source.randrange(min(len(content), ENDED.size + ANSWER.size))] = source.randrange(256)
        try:
            index, values, ids = read_answer(bytes(content), queries, 4, seconds=1)
        except ForeignError as error:
            refused += 1
            assert str(error).isprintable()  # noqa: PT017
        else:
            assert values.shape == ids.shape == (3, 4)
            assert index.rows >= 0
            assert index.dim == 8
            assert index.type.isprintable()
    assert refused > 2000


def test_verify_deep_reads_an_index_of_any_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for type, words in {
        "HNSW8": "HNSW, flat, 600 x 8, L2",
        "IVF8,PQ4x4": "IVF, product quantizer, 600 x 8, L2",
        "Flat": "flat, 600 x 8, L2",
    }.items():
        path = written(make_index(type), tmp_path / "i.faiss")
        size = path.stat().st_size
        assert kgshard(["verify", str(path), "--deep"]) == 0
        line, last = capsys.readouterr().out.splitlines()
        assert line == f"ok  {path}  ({size:,} bytes; no hash: its structure only; {words})"
        assert last == "1 files ok"
    path = written(make_index("HNSW8"), tmp_path / "i.faiss")
    path.write_bytes(path.read_bytes()[:-5])
    assert kgshard(["verify", str(path)]) == 0  # the control: its header is right
    assert kgshard(["verify", str(path), "--deep"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"Error: {path}: FAISS cannot read it: ")
    assert said.count("\n") == 1


def test_vectors_that_are_not_finite_are_told(tmp_path: Path) -> None:
    vectors = some_vectors()
    vectors[5:7, 0] = np.inf, -np.inf
    path = written(make_index("Flat", faiss.METRIC_INNER_PRODUCT, vectors), tmp_path / "i.faiss")
    with pytest.raises(ShardError, match="FAISS finds vectors in it that are not finite"):
        describe_foreign(path)
