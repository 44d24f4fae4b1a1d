"""Parquet exports: every reader sees the tables, bit for bit, and row i is label i."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from graphs import Triple, make_run, ring
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.export import export, parquet_file
from kgshard_tools.export.parquet_file import write_parquet
from kgshard_tools.export.tables import Rows

from kgshard.runs import Run
from kgshard.shards import Piece, StoredTable, TensorInfo
from kgshard.vocabulary import Vocabulary

HOSTILE = ["=1+1", "nan", "NA", "007", "a\u2028b", "x" * 70000, "日本", " ", "\\n", 'quote"', "no\ufeffbreak"]


def hostile_graph() -> list[Triple]:
    return [(label, "r", HOSTILE[i - 1]) for i, label in enumerate(HOSTILE)]


@dataclass(frozen=True)
class Written:
    """A Parquet file, and what must be in it."""

    raw: bytes
    values: np.ndarray[Any, Any]
    labels: list[str]


def written(folder: Path, num_rows: int, dim: int, metadata: dict[str, str] | None = None) -> Written:
    """Write a table of random bits, NaN apart, straight through the encoder."""
    values = np.random.default_rng(num_rows + dim).standard_normal((num_rows, dim)).astype(np.float32)
    values[:, 0] = np.resize([-0.0, 1e-45, 3.4e38, -1e-40], num_rows)
    labels = [f"label {i}" for i in range(num_rows)]
    (folder / "rows").write_bytes(values.tobytes())
    vocabulary = Vocabulary(pa.array(labels, pa.large_string()), np.arange(num_rows)[::-1], kind="entity")
    vocabulary.save(folder / "v.parquet")
    info = TensorInfo("F32", values.shape, 0)
    table = StoredTable("t", [Piece(folder / "rows", range(num_rows), info)])
    everything = range(num_rows)
    rows = Rows(
        table=table,
        ids=everything,
        dtype="F32",
        vocabulary=folder / "v.parquet",
        label_ids=everything,
    )
    with (folder / "t.parquet").open("wb") as file:
        write_parquet(rows, file, metadata or {})
    return Written((folder / "t.parquet").read_bytes(), values, labels)


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 40), dim=st.integers(1, 300), group=st.integers(1, 50), page=st.integers(1, 9000)
)
def test_any_shape_in_any_groups_and_pages_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, dim: int, group: int, page: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_file, "_GROUP_ROWS", group)
        patch.setattr(parquet_file, "_PAGE_BYTES", page)
        made = written(tmp_path_factory.mktemp("p"), num_rows, dim)
    table = pq.read_table(io.BytesIO(made.raw))
    assert table["id"].to_pylist() == list(range(num_rows))
    assert table["label"].to_pylist() == made.labels
    assert table["degree"].to_pylist() == list(range(num_rows))[::-1]
    vectors = table["vector"].combine_chunks()
    assert vectors.type.list_size == dim
    assert vectors.flatten().to_numpy().tobytes() == made.values.tobytes()


def test_one_row_group_can_be_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_GROUP_ROWS", 7)
    made = written(tmp_path, 20, 3)
    file = pq.ParquetFile(io.BytesIO(made.raw))
    assert file.num_row_groups == 3
    assert file.read_row_group(2)["label"].to_pylist() == made.labels[14:]
    np.testing.assert_array_equal(np.array(file.read_row_group(1)["vector"].to_pylist()), made.values[7:14])


def test_long_labels_take_several_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of more than 2^31 bytes cannot be said; here the limit is 100."""
    monkeypatch.setattr(parquet_file, "_PAGE_BYTES", 100)
    headers: list[int] = []
    real = parquet_file._page_header
    monkeypatch.setattr(
        parquet_file, "_page_header", lambda count, *sizes: headers.append(sizes[0]) or real(count, *sizes)
    )
    made = written(tmp_path, 50, 2)
    assert pq.read_table(io.BytesIO(made.raw))["label"].to_pylist() == made.labels
    assert len([size for size in headers if 80 <= size < 120]) >= 5


def test_text_beside_the_schema_is_kept(tmp_path: Path) -> None:
    made = written(tmp_path, 2, 2, {"kgshard": '{"a": "é"}'})
    assert pq.read_schema(io.BytesIO(made.raw)).metadata == {b"kgshard": '{"a": "é"}'.encode()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), hostile_graph(), dim=6, world_size=3)


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "p"
    export(run.folder, "parquet", out)
    return out


def test_tables_and_labels_are_the_runs(run: Run, exported: Path) -> None:
    entities = pq.read_table(exported / "entities.parquet")
    assert entities["label"].to_pylist() == list(run.dataset.entities)
    assert entities["degree"].to_pylist() == run.dataset.entities.degrees.tolist()
    expected = run.checkpoint.entities.read(range(len(HOSTILE)))
    np.testing.assert_array_equal(np.array(entities["vector"].to_pylist(), np.float32), expected)
    for name, row in (("relations", 0), ("inverse_relations", 1)):
        table = pq.read_table(exported / f"{name}.parquet")
        assert table["label"].to_pylist() == ["r"]
        expected = run.checkpoint.relations.read(range(row, row + 1))
        np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), expected)
    schema = pq.read_schema(exported / "entities.parquet")
    assert json.loads(schema.metadata[b"kgshard"])["score_function"] == "complex"


def test_shared_parameters_lie_beside_the_tables(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    run = make_run(tmp_path, ring(9), dim=4, model="tucker")
    export(run.folder, "parquet", tmp_path / "out")
    shared = load_file(tmp_path / "out" / "shared.safetensors")
    np.testing.assert_array_equal(shared["core"], run.checkpoint.shared["core"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_dtype_is_kept_or_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    run = make_run(tmp_path, ring(5), dim=4, entities=values, dtype=dtype)
    notes = export(run.folder, "parquet", tmp_path / "out").notes
    vectors = pq.read_table(tmp_path / "out" / "entities.parquet")["vector"]
    assert vectors.type.value_type == (pa.float16() if dtype == torch.float16 else pa.float32())
    expected = torch.from_numpy(values).to(dtype).float().numpy()
    np.testing.assert_array_equal(np.array(vectors.to_pylist(), np.float32), expected)
    assert any("bfloat16 was widened" in note for note in notes) == (dtype == torch.bfloat16)


def test_polars_reads_arrays_of_one_length(run: Run, exported: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars is an extra: pip install 'kgshard[interop]'")
    frame = polars.read_parquet(exported / "entities.parquet")
    assert frame.schema["vector"] == polars.Array(polars.Float32, 6)
    assert frame["label"].to_list() == list(run.dataset.entities)
    np.testing.assert_array_equal(frame["vector"].to_numpy(), run.checkpoint.entities.read(range(len(frame))))


def test_pandas_reads_a_vector_a_row(run: Run, exported: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is an extra: pip install 'kgshard[interop]'")
    frame = pandas.read_parquet(exported / "entities.parquet")
    assert frame["label"].tolist() == list(run.dataset.entities)
    expected = run.checkpoint.entities.read(range(len(frame)))
    np.testing.assert_array_equal(np.stack(frame["vector"]), expected)


def test_duckdb_finds_the_nearest_by_cosine(run: Run, exported: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is an extra: pip install 'kgshard[interop]'")
    path = exported / "entities.parquet"
    found = duckdb.sql(
        f"select b.id, array_cosine_similarity(a.vector::FLOAT[6], b.vector::FLOAT[6]) as s "
        f"from '{path}' a, '{path}' b where a.id = 3 order by s desc"
    ).fetchall()
    rows = run.checkpoint.entities.read(range(len(HOSTILE))).astype(np.float64)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    similarities = unit @ unit[3]
    assert [row for row, _ in found] == np.argsort(-similarities).tolist()
    np.testing.assert_allclose([value for _, value in found], np.sort(similarities)[::-1], atol=1e-6)
    labels = duckdb.sql(f"select label from '{path}' order by id").fetchall()
    assert [label for (label,) in labels] == list(run.dataset.entities)
