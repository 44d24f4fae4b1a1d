"""--entities, --top-degree, --dtype and --normalize: what every format of vectors gets to write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from graphs import make_run, ring, save_tables, tree
from hypothesis import given
from hypothesis import strategies as st
from kgshard_tools.export import FORMATS, export
from kgshard_tools.merge import merge_shards
from kgshard_tools.reshard import reshard
from numpy.typing import NDArray

from kgshard.errors import ConfigError, NonFiniteError, RunError, ShardError
from kgshard.runs import Run, open_run
from kgshard.shards import narrow, widen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Forty entities on three ranks; e0 and e1 have four triples, others two or three."""
    triples = [*ring(40), ("e0", "r0", "e5"), ("e0", "r0", "e9"), ("e1", "r0", "e7"), ("e2", "r0", "e1")]
    return make_run(tmp_path_factory.mktemp("run"), triples, dim=6, world_size=3)


def exported(run: Run, folder: Path, **choices: object) -> tuple[NDArray[np.float32], list[str]]:
    """Return the entity rows and labels of an export to numpy."""
    export(run.folder, "numpy", folder / "out", **choices)  # type: ignore[arg-type]
    labels = pq.read_table(folder / "out" / "entities.parquet")["label"].to_pylist()
    assert (folder / "out" / "entities.txt").read_text().splitlines() == labels
    return np.load(folder / "out" / "entities.npy"), labels


def rows_of(run: Run, labels: list[str]) -> NDArray[np.float32]:
    """Return the stored rows of labels, one by one."""
    ids = [list(run.dataset.entities).index(label) for label in labels]
    return np.concatenate([run.checkpoint.entities.read(range(row, row + 1)) for row in ids])


def test_a_file_chooses_entities_and_their_order(run: Run, tmp_path: Path) -> None:
    wanted = [run.dataset.entities[row] for row in (30, 1, 17, 3, 2)]
    lines = [wanted[0], wanted[1] + "\n", wanted[2] + "\r", "#3", wanted[4]]
    (tmp_path / "names").write_bytes("\n".join(lines).encode())
    rows, labels = exported(run, tmp_path, entities=tmp_path / "names")
    assert labels == wanted
    np.testing.assert_array_equal(rows, run.checkpoint.entities.gather([30, 1, 17, 3, 2]))
    table = pq.read_table(tmp_path / "out" / "entities.parquet")
    assert table["id"].to_pylist() == [0, 1, 2, 3, 4]
    assert table["degree"].to_pylist() == run.dataset.entities.degrees[[30, 1, 17, 3, 2]].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e1\nBerln\n", r"names:2: no entity 'Berln'"),
        ("e1\ne2\ne1\n", r"names:3: names 'e1' again, as line 1 does"),
        ("\n\n", "names no entity"),
        ("", "names no entity"),
    ],
)
def test_a_file_that_names_nothing_right_is_refused(
    run: Run, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "names").write_text(text)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=message):
        export(run.folder, "numpy", tmp_path / "out", entities=tmp_path / "names")
    assert tree(tmp_path) == before


def test_a_file_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: No such file"):
        export(run.folder, "numpy", tmp_path / "out", entities=tmp_path / "absent")
    (tmp_path / "names").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        export(run.folder, "numpy", tmp_path / "out", entities=tmp_path / "names")


def test_the_highest_degrees_come_first_and_of_equals_the_lower_row(run: Run, tmp_path: Path) -> None:
    rows, labels = exported(run, tmp_path, top_degree=8)
    degrees = dict(zip(run.dataset.entities, run.dataset.entities.degrees.tolist(), strict=True))
    expected = sorted(run.dataset.entities, key=lambda label: -degrees[label])[:8]
    assert labels == expected
    assert set(labels[:2]) == {"e0", "e1"}
    np.testing.assert_array_equal(rows, rows_of(run, labels))
    rows, labels = exported(run, tmp_path, top_degree=10**9)
    assert len(labels) == 40


def test_two_choices_of_entities_are_one_too_many(run: Run, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("e1\n")
    with pytest.raises(ConfigError, match="--entities and --top-degree: choose one"):
        export(run.folder, "numpy", tmp_path / "out", entities=tmp_path / "names", top_degree=3)
    with pytest.raises(ConfigError, match="--top-degree must be >= 1, got 0"):
        export(run.folder, "numpy", tmp_path / "out", top_degree=0)


def test_normalised_rows_have_length_one_and_relations_stay(run: Run, tmp_path: Path) -> None:
    rows, _ = exported(run, tmp_path, normalize=True)
    stored = run.checkpoint.entities.read(range(40)).astype(np.float64)
    expected = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    np.testing.assert_allclose(rows, expected, rtol=3e-7)
    relations = np.load(tmp_path / "out" / "relations.npy")
    np.testing.assert_array_equal(relations, run.checkpoint.relations.read(range(1)))


def test_a_row_of_zeros_has_no_direction(tmp_path: Path) -> None:
    rows = np.ones((5, 2))
    rows[2] = 0
    run = make_run(tmp_path, ring(5), dim=2, entities=rows)
    label = run.dataset.entities[2]
    with pytest.raises(ConfigError, match=rf"--normalize: entity 2 \('{label}'\) is all zeros"):
        export(run.folder, "numpy", tmp_path / "out", normalize=True)
    assert not (tmp_path / "out").exists()


def test_float16_is_rounded_to_nearest_and_said(run: Run, tmp_path: Path) -> None:
    written = export(run.folder, "numpy", tmp_path / "out", dtype="float16")
    rows = np.load(tmp_path / "out" / "entities.npy")
    assert rows.dtype == np.float16
    expected = torch.from_numpy(run.checkpoint.entities.read(range(40)).copy()).half().numpy()
    assert rows.tobytes() == expected.tobytes()
    assert "float32 was rounded to float16" in written.notes


def test_what_float16_cannot_hold_is_named(tmp_path: Path) -> None:
    rows = np.ones((5, 2))
    rows[3, 1] = -70000
    run = make_run(tmp_path, ring(5), dim=2, entities=rows)
    label = run.dataset.entities[3]
    with pytest.raises(ConfigError, match=rf"entity 3 \('{label}'\) holds 70000, which float16 cannot"):
        export(run.folder, "numpy", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    rows, _ = exported(run, tmp_path, normalize=True, dtype="float16")  # Of length one it can.
    assert rows[3].tolist() == pytest.approx([0, -1], abs=1e-3)


def test_a_dtype_that_the_format_lacks_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dtype: 'bfloat16' .* float32, float16"):
        export(run.folder, "numpy", tmp_path / "out", dtype="bfloat16")
    with pytest.raises(ConfigError, match="--dtype: 'int8'"):
        export(run.folder, "safetensors", tmp_path / "out", dtype="int8")


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=50))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    array = np.array(values, np.float32)
    ours = widen(narrow(array, "BF16"), "BF16")
    theirs = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(ours, theirs)
    assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(array)].all()


def test_rows_that_are_not_finite_are_named_where_rows_are_read(tmp_path: Path) -> None:
    rows = np.ones((5, 2))
    run = make_run(tmp_path, ring(5), dim=2)
    rows[4, 0] = np.nan
    save_tables(run, rows, np.ones((2, 2)), step=2)
    label = run.dataset.entities[4]
    with pytest.raises(NonFiniteError, match=rf"entity 4 \('{label}'\) is not finite"):
        export(run.folder, "numpy", tmp_path / "out", normalize=True)
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_is_found_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    copy = make_run(tmp_path / "copy", ring(40), dim=6, world_size=2)
    shard = sorted(copy.checkpoint.folder.glob("entity-*"))[1]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ShardError, match=f"{shard.name}: SHA-256 differs"):
        export(copy.folder, "numpy", tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()
    export(copy.folder, "numpy", tmp_path / "out")  # Nobody asked.


WHOLE = sorted(name for name, chosen in FORMATS.items() if chosen.whole)


@pytest.mark.parametrize("format", WHOLE)
@pytest.mark.parametrize(
    ("choices", "option"), [({"top_degree": 3}, "--top-degree"), ({"normalize": True}, "--normalize")]
)
def test_a_whole_model_takes_no_choice_of_rows(
    run: Run, tmp_path: Path, format: str, choices: dict[str, object], option: str
) -> None:
    with pytest.raises(ConfigError, match=f"--format {format} is a whole model; .*{option}"):
        export(run.folder, format, tmp_path / "out", **choices)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_an_escape_where_none_is_needed_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--label-escape: --format numpy writes every label as it is"):
        export(run.folder, "numpy", tmp_path / "out", label_escape="percent")
    with pytest.raises(ConfigError, match="--label-escape: unknown value 'quote'"):
        export(run.folder, "numpy", tmp_path / "out", label_escape="quote")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_run_with_an_export_in_it_is_still_a_run_that_may_be_replaced(format: str, tmp_path: Path) -> None:
    """An export lists its files; what lies beside them is somebody's own."""
    if format == "pbg":
        pytest.importorskip("h5py", reason="an extra: pip install 'kgshard[pbg]'")
    run = make_run(tmp_path, ring(30, 2), ring(5, 2), ring(4, 2), dim=6, model="distmult")
    export(run.folder, format)
    other = make_run(tmp_path / "other", ring(5), dim=2)
    (run.folder / f"export-{format}" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=f"holds 'export-{format}/notes.txt'"):
        reshard(other.folder, 2, run.folder, overwrite=True)
    (run.folder / f"export-{format}" / "notes.txt").unlink()
    reshard(other.folder, 2, run.folder, overwrite=True)
    assert open_run(run.folder).info.id == other.info.id


def test_files_that_only_look_like_an_export_are_kept(tmp_path: Path, run: Run) -> None:
    mine = make_run(tmp_path, ring(5), dim=2)
    (mine.folder / "export-thesis").mkdir()
    (mine.folder / "export-thesis" / "thesis.md").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(RunError, match=r"export-thesis/thesis\.md"):
        reshard(run.folder, 2, mine.folder, overwrite=True)
    assert tree(tmp_path) == before


def test_what_a_user_does_with_an_export_does_not_reach_the_run(run: Run, tmp_path: Path) -> None:
    """No file is a second name of the run's own."""
    before = tree(run.folder)
    for format in ("numpy", "safetensors", "hf"):
        export(run.folder, format, tmp_path / format)
    merge_shards(run.folder, tmp_path / "merged")
    reshard(run.folder, 2, tmp_path / "cut")
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.parent != tmp_path / "cut" / "data":
            with path.open("ab") as file:
                file.write(b"mine")
    assert tree(run.folder) == before


@pytest.mark.parametrize("group", [7, 1000])
def test_row_i_is_label_i_in_vocabularies_of_several_row_groups(
    tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kgshard.vocabulary._ROW_GROUP", group)
    monkeypatch.setattr("kgshard_tools.rows.BLOCK_ROWS", 5)
    run = make_run(tmp_path, ring(40), dim=4, world_size=3)
    assert pq.ParquetFile(run.dataset.folder / "entities.parquet").num_row_groups == (6 if group == 7 else 1)
    labels = list(run.dataset.entities)
    rows = run.checkpoint.entities.read(range(40))
    for top_degree in (None, 23):
        export(run.folder, "tsv", tmp_path / "tsv", top_degree=top_degree)
        export(run.folder, "parquet", tmp_path / "parquet", top_degree=top_degree)
        table = pq.read_table(tmp_path / "parquet" / "entities.parquet")
        lines = [line.split("\t") for line in (tmp_path / "tsv" / "entities.tsv").read_text().splitlines()]
        assert table["label"].to_pylist() == [line[0] for line in lines]
        assert len(lines) == (top_degree or 40)
        for line, vector in zip(lines, table["vector"].to_pylist(), strict=True):
            expected = rows[labels.index(line[0])]
            np.testing.assert_array_equal(np.array(line[1:], np.float32), expected)
            np.testing.assert_array_equal(np.array(vector, np.float32), expected)
