"""Index kinds of failures that users of FAISS met, each as its report says."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pytest
import torch
from graphs import make_run, ring, stored_table
from kgshard_tools.answers import load
from kgshard_tools.cli import run as kgshard
from kgshard_tools.index.approximate import ApproximateIndex
from kgshard_tools.index.build import build_index
from kgshard_tools.index.contents import Contents
from kgshard_tools.index.kinds import KINDS, Search
from kgshard_tools.index.tuned import IndexPartFile
from kgshard_tools.lifts import UNIT_LENGTH
from kgshard_tools.search import Exclusions, search
from skewed import skewed_rows

from kgshard.errors import NonFiniteError, UsageError
from kgshard.models.metric import DOT

Vectors = npt.NDArray[np.float32]
FLAT_OR_NOT = ["flat", "ivf", "ivfsq", "hnsw", "hnswsq"]


@pytest.mark.parametrize("type", ["flat", "ivf", "hnsw"])
def test_bfloat16_tables_are_indexed_as_the_floats_they_are(tmp_path: Path, type: str) -> None:
    """B51: half of the bits of a float32, and exactly that float32 with the rest 0."""
    rows = skewed_rows(300, 8)
    run = make_run(
        tmp_path, ring(300), dim=8, model="transe", entities=rows, dtype=torch.bfloat16, world_size=3
    )
    build_index(run.folder, "links", type=type)
    index: Any = faiss.read_index(str(run.folder / "index" / "links.faiss"))
    if type == "ivf":
        index.make_direct_map()
    expected = torch.from_numpy(rows).bfloat16().float().numpy()
    np.testing.assert_array_equal(index.reconstruct_n(0, 300), expected)
    assert {piece.info.dtype for piece in run.checkpoint.entities.pieces} == {"BF16"}
    answers = load(run.folder).predict_tails("e0", "r0", 5, known=True)
    (run.folder / "index" / "index.json").unlink()
    assert load(run.folder).predict_tails("e0", "r0", 5, known=True).labels == answers.labels


@pytest.mark.parametrize("type", FLAT_OR_NOT)
def test_k_beyond_the_table_returns_the_table(tmp_path: Path, type: str) -> None:
    """B69: 10 vectors, 20 asked for: neither row -1 nor a score of 3.4e38."""
    run = make_run(tmp_path, ring(10), dim=8, model="transe")
    build_index(run.folder, "both", type=type)
    asked = load(run.folder)
    found = asked.predict_tails("e0", "r0", 20, known=True)
    assert sorted(each.id for each in found) == list(range(10))
    similar = asked.most_similar("e0", 20)
    assert sorted(each.id for each in similar) == sorted(set(range(10)) - {0})
    for each in (*found, *similar):
        assert np.isfinite(each.score)
        assert abs(each.score) < 1e6


def hand_made(folder: Path, vectors: Vectors, *, lists: int, nprobe: int) -> ApproximateIndex:
    """Return an index of many lists of which few are looked through, over rows of length 1."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    units = (vectors / lengths).astype(np.float32)
    index = faiss.index_factory(vectors.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(units)
    index.add(units)
    path = folder / "hand.faiss"
    faiss.write_index(index, str(path))
    contents = Contents("neighbors", DOT, UNIT_LENGTH)
    return ApproximateIndex(
        [IndexPartFile(path, range(len(vectors)))],
        contents,
        KINDS["ivf"],
        stored_table(folder, vectors),
        Search(nprobe, 1),
        longest=1.0,
    )


def test_one_list_of_a_hundred_still_gives_k_answers(tmp_path: Path) -> None:
    """B69: bare FAISS comes back short for most of these queries; here each has its 50, none excluded."""
    rows = skewed_rows(5000, 12)
    source = hand_made(tmp_path, rows, lists=100, nprobe=1)
    draw = np.random.default_rng(4)
    anchors = draw.integers(0, 5000, 64)
    queries = rows[anchors].astype(np.float64)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    bare: Any = faiss.read_index(str(tmp_path / "hand.faiss"))
    bare.nprobe = 1
    _, ids = bare.search(queries.astype(np.float32), 50)
    assert (ids == -1).any()  # the control
    per_query = [
        np.argsort(-(rows @ query), kind="stable")[: 40 * (n % 4)] for n, query in enumerate(queries)
    ]
    pairs = [(n, row) for n, excluded in enumerate(per_query) for row in (*excluded.tolist(), anchors[n])]
    excluded = Exclusions(*np.array(pairs).T, num_queries=64, num_rows=5000)
    for k in (50, 400):
        found = search(source, queries, k, excluded)
        assert found.counts.tolist() == [k] * 64
        assert found.ids.shape == (64, k)
        assert (found.ids >= 0).all()
        assert not {(n, row) for n in range(64) for row in found.ids[n].tolist()} & set(pairs)
        assert all(len(set(each)) == k for each in found.ids.tolist())
        units = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        expected = np.einsum("bd,bkd->bk", queries, units[found.ids])
        np.testing.assert_allclose(found.scores, expected, atol=1e-6)
        assert (np.diff(found.scores, axis=1) <= 0).all()
    everything = search(source, queries[:3], 5000, Exclusions.none(3))
    assert [sorted(each) for each in everything.ids.tolist()] == [list(range(5000))] * 3


@pytest.mark.parametrize("type", ["ivf", "ivfsq", "ivfpq"])
def test_fewer_rows_than_lists_want_are_built_flat_and_told(
    tmp_path: Path, type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """B71: 50 entities."""
    run = make_run(tmp_path, ring(50), dim=8, model="transe")
    assert kgshard(["index", str(run.folder), "--type", type]) == 0
    said = capsys.readouterr()
    assert "rows, this table has 50; built flat, which is exact" in said.out + said.err
    assert "Traceback" not in said.err
    entries = json.loads((run.folder / "index" / "index.json").read_text())["indexes"]
    assert {entry["type"] for entry in entries.values()} == {"flat"}
    assert len(load(run.folder).most_similar("e3", 100)) == 49


@pytest.mark.parametrize("num_rows", [78, 79, 255, 256, 400])
@pytest.mark.parametrize("type", ["ivf", "ivfsq", "ivfpq"])
def test_just_enough_rows_make_lists(tmp_path: Path, type: str, num_rows: int) -> None:
    """B71, at its edge: nothing FAISS trains wants more rows than there are."""
    run = make_run(tmp_path, ring(num_rows), dim=8, model="transe", entities=skewed_rows(num_rows, 8))
    try:
        build_index(run.folder, "links", type=type, recall=0.5)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        assert str(num_rows) in str(error)  # noqa: PT017
        return
    assert len(load(run.folder).predict_tails("e0", "r0", num_rows, known=True)) == num_rows


@pytest.mark.parametrize("type", [None, *FLAT_OR_NOT])
def test_cosines_are_cosines(tmp_path: Path, type: str | None) -> None:
    """B73: rows of lengths from 1e-3 to 1e3, rows that are multiples of others, and one of zeros."""
    draw = np.random.default_rng(2)
    rows = draw.standard_normal((200, 8)) * 10 ** draw.uniform(-3, 3, (200, 1))
    rows[101:111] = rows[1:11] * 405
    rows[77] = 0
    run = make_run(tmp_path, ring(200), dim=8, model="transe", entities=rows)
    if type is not None:
        build_index(run.folder, "neighbors", type=type, recall=0.9)
    asked = load(run.folder)
    names = [asked.entities[row] for row in range(200)]
    table = np.asarray(asked.vectors(names), np.float64)
    lengths = np.linalg.norm(table, axis=1)
    zero = 77
    assert np.flatnonzero(lengths == 0).tolist() == [zero]
    for row, answers in enumerate(asked.most_similar_many(names, 199)):
        scores = np.array([each.score for each in answers])
        assert (np.abs(scores) <= 1).all()
        assert row not in {each.id for each in answers}
        assert len(answers) == 199
        if row == zero:
            assert not scores.any()
            continue
        ids = [each.id for each in answers]
        expected = table[ids] @ table[row] / np.where(lengths[ids] > 0, lengths[ids], 1) / lengths[row]
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        assert scores[ids.index(zero)] == 0
    for row in range(1, 11):
        (first,) = asked.most_similar(names[row], 1)
        assert (first.id, round(first.score, 6)) == (row + 100, 1.0)


@pytest.mark.parametrize("type", sorted(KINDS))
def test_a_row_with_one_nan_is_refused_by_name_in_every_kind(tmp_path: Path, type: str) -> None:
    """B74: FAISS takes it, and never finds it."""
    rows = skewed_rows(200, 8)
    rows[5, 3] = np.nan
    run = make_run(tmp_path, ring(200), dim=8, model="distmult", entities=rows)
    label = run.dataset.entities[5]
    for purpose in ("links", "neighbors"):
        if KINDS[type].is_by_norm and purpose == "neighbors":
            continue
        with pytest.raises(NonFiniteError, match=f"entity 5 .*{label}"):
            build_index(run.folder, purpose, type=type, recall=0.5)
    assert not list(run.folder.glob("index/*"))


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def bait(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that leaves a trace; none may be there in the end."""
    trace = tmp_path / "trace"
    yield pickle.dumps(Trap(trace))
    assert not trace.exists()


def test_a_pickle_beside_an_index_is_never_opened(tmp_path: Path, bait: bytes) -> None:
    """B77: such as other libraries keep there."""
    run = make_run(tmp_path, ring(60), dim=8, model="transe")
    build_index(run.folder, "both")
    before = load(run.folder).predict_tails("e0", "r0", 5)
    for name in ("links.pkl", "index.pkl", "docstore.pkl", "links.faiss.pkl"):
        (run.folder / "index" / name).write_bytes(bait)
    assert load(run.folder).predict_tails("e0", "r0", 5) == before
    assert load(run.folder).most_similar("e0", 5)
    assert kgshard(["verify", str(run.folder), "--deep"]) == 0
    build_index(run.folder, "both")


@pytest.mark.parametrize(
    "name", ["data/entities.parquet", "index/index.json", "index/links.faiss", "run.json", "data/data.json"]
)
def test_a_pickle_in_place_of_a_file_is_refused(tmp_path: Path, bait: bytes, name: str) -> None:
    """B77: whichever file it takes the place of."""
    run = make_run(tmp_path, ring(60), dim=8, model="transe")
    build_index(run.folder, "both")
    (run.folder / name).write_bytes(bait)
    with pytest.raises(UsageError) as caught:
        load(run.folder).predict_tails("e0", "r0", 5)
    assert len(str(caught.value).splitlines()) == 1
    assert Path(name).name in str(caught.value)


def test_the_control_the_bait_bites(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "trace")))
    assert (tmp_path / "trace").is_dir()
