"""A foreign model becomes a run: its rows by label, its triples, its scores, whatever order they had."""

from __future__ import annotations

import json
import mmap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import ENTITIES, RELATIONS, draw, draw_triples, run_scores, toy
from graphs import make_run, ring, tree
from kgshard_tools.answers import load
from kgshard_tools.curves import draw_curves
from kgshard_tools.export import export
from kgshard_tools.importers.foreign import ForeignModel
from kgshard_tools.importers.mapped import map_floats
from kgshard_tools.importers.read_ahead import ReadAhead
from kgshard_tools.importers.writer import write_run
from kgshard_tools.index.build import build_index
from kgshard_tools.merge import merge_shards
from papers import PAPER
from safetensors.numpy import load_file

from kgshard.config import TrainConfig, read_settings
from kgshard.data.prepare import Origin
from kgshard.errors import ConfigError, DataError, NonFiniteError, RunError
from kgshard.files import TEMPORARY_PREFIX
from kgshard.runs import Run, open_run
from kgshard.start import locked, started_run


def rows_by_label(run: Run) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a run's tables in the order of the foreign labels, inverses of relations behind."""
    entities, relations = run.dataset.entities, run.dataset.relations
    sides = range(run.model.num_relation_rows // len(relations))
    rows = [relations.id_of(label) + side * len(relations) for side in sides for label in RELATIONS]
    return (
        run.checkpoint.entities.gather(entities.ids_of(ENTITIES)),
        run.checkpoint.relations.gather(rows),
    )


@pytest.mark.parametrize("reciprocal", [False, True])
def test_every_row_goes_with_its_label(tmp_path: Path, reciprocal: bool) -> None:
    foreign = toy(reciprocal=reciprocal)
    run = write_run(foreign, tmp_path / "run")
    entities, relations = rows_by_label(run)
    np.testing.assert_array_equal(entities, foreign.entities)
    np.testing.assert_array_equal(relations, foreign.relations)
    assert list(run.dataset.entities) != ENTITIES  # the order did change
    assert len(list(run.checkpoint.verify())) == 2


def test_triples_are_the_foreign_ones_by_label(tmp_path: Path) -> None:
    foreign = toy(triples={"train": np.array([[0, 1, 2], [0, 1, 2], [3, 0, 3]], np.int16)})
    dataset = write_run(foreign, tmp_path / "run").dataset
    named = [
        (dataset.entities[h], dataset.relations[r], dataset.entities[t])
        for h, r, t in dataset.triples("train").tolist()
    ]
    assert named == [("e0", "knows", "e2"), ("e3", "likes", "e3")]
    assert (dataset.info.splits["train"].lines, dataset.info.splits["train"].duplicates) == (3, 1)
    assert [len(dataset.triples(split)) for split in ("valid", "test")] == [0, 0]


def test_labels_that_no_triple_names_stay(tmp_path: Path) -> None:
    foreign = toy(triples={})
    run = write_run(foreign, tmp_path / "run")
    assert sorted(run.dataset.entities) == sorted(ENTITIES)
    assert sorted(run.dataset.relations) == sorted(RELATIONS)
    assert run.info.imported is not None
    assert any("nothing can be evaluated" in line for line in run.info.imported.decisions)


def test_scores_are_the_papers_with_the_offset_added(tmp_path: Path) -> None:
    foreign = toy(offset=9.0)
    run = write_run(foreign, tmp_path / "run")
    ids = draw_triples(30, 8)
    expected = [
        PAPER["complex"](foreign.entities[h], foreign.relations[r], foreign.entities[t], {}) + 9.0
        for h, r, t in ids.tolist()
    ]
    for side in ("tail", "head"):
        np.testing.assert_allclose(run_scores(run, ids, side=side), expected, atol=1e-5)
    model = load(run)
    best = model.predict_tails("e3", "knows", 1, known=True)[0]
    assert best.score == pytest.approx(model.score([("e3", "knows", best.label)])[0])
    assert open_run(run).model.offset == 9.0


def test_no_rank_depends_on_the_offset(tmp_path: Path, here: None) -> None:
    metrics = [
        load(write_run(toy(offset=offset), tmp_path / f"run{offset}")).evaluate("test").to_dict()["metrics"]
        for offset in (0.0, 1e6)
    ]
    assert metrics[0] == metrics[1]


LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "Fortran": np.asfortranarray,
    "strided": lambda table: np.repeat(np.repeat(table, 2, axis=0), 3, axis=1)[::2, ::3],
    "backwards": lambda table: np.ascontiguousarray(table[::-1, ::-1])[::-1, ::-1],
    "big-endian": lambda table: table.astype(">f4"),
    "float64": lambda table: table.astype(np.float64),
    "float16": lambda table: table.astype(np.float16),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_bytes_are_right_however_a_table_lies_in_memory(tmp_path: Path, layout: str) -> None:
    """safetensors writes a Fortran-ordered array scrambled (safetensors#825). All values here are halves."""
    exact = toy().entities.astype(np.float16).astype(np.float32)
    foreign = toy(entities=LAYOUTS[layout](exact), relations=LAYOUTS[layout](toy().relations))
    run = write_run(foreign, tmp_path / "run")
    [shard] = run.checkpoint.folder.glob("entity-*.safetensors")
    order = [ENTITIES.index(label) for label in run.dataset.entities]
    np.testing.assert_array_equal(load_file(shard)["entity_embedding.weight"], exact[order])
    assert run.info.imported is not None
    told = [line for line in run.info.imported.decisions if "float32" in line]
    assert len(told) == (2 if layout in ("float64", "float16") else 0)


@pytest.mark.parametrize(
    ("table", "row", "value", "named"),
    [
        ("entities", 7, np.nan, "'e7'"),
        ("entities", 12, -np.inf, "'e12'"),
        ("entities", 0, 1e39, "'e0'"),
        ("relations", 2, np.nan, "'is part of'"),
        ("relations", 4, np.inf, "'knows'"),
    ],
)
def test_a_row_that_is_not_finite_is_named_and_nothing_is_written(
    tmp_path: Path, table: str, row: int, value: float, named: str
) -> None:
    foreign = toy(reciprocal=True)
    values = np.array(getattr(foreign, table), np.float64)
    values[row, 3] = value
    with pytest.raises(NonFiniteError, match=named):
        write_run(toy(**{"reciprocal": True, table: values}), tmp_path / "new" / "run")
    assert tree(tmp_path) == {}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"entity_labels": [*ENTITIES[:12], "e4"]}, "entity label 'e4' belongs to row 4 and to row 12"),
    "relation twice": ({"relation_labels": ["a", "b", "a"]}, "relation label 'a' belongs to row 0 and"),
    "empty": ({"entity_labels": ["", *ENTITIES[1:]]}, "entity label of row 0 is empty"),
    "no text": ({"entity_labels": ["\ud800", *ENTITIES[1:]]}, "no Unicode text"),
    "too few labels": ({"entity_labels": ENTITIES[:12]}, r"entity table is \[13, 6\], with 12 labels"),
    "inverses missing": ({"reciprocal": True, "relations": draw(3, 6)}, r"relation table is \[3, 6\]"),
    "relation width": ({"relations": draw(3, 4)}, "relation rows have 4 floats; complex of dim 6 has 6"),
    "no floats": ({"relations": np.ones((3, 6), np.int64)}, "holds int64, expected floats"),
    "id too large": ({"triples": {"valid": np.array([[0, 3, 1]])}}, "valid: relation ids run from 3 to 3"),
    "id below 0": ({"triples": {"train": np.array([[-1, 0, 1]])}}, "train: head ids run from -1 to -1"),
    "shared": ({"scoring": "keci:0,1"}, "shared parameters are {}; keci:0,1 has"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    changed, words = REFUSED[case]
    with pytest.raises(DataError, match=words) as caught:
        write_run(toy(**changed), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("changed", [{"scoring": "qmult"}, {"scoring": "nonsense"}])
def test_a_scoring_function_that_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Toy 1\.0"):
        write_run(toy(**changed), tmp_path / "run")


def test_a_run_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    first = write_run(toy(), tmp_path / "run")
    before = tree(tmp_path)
    with pytest.raises(RunError, match="--overwrite"):
        write_run(toy(), tmp_path / "run")
    with pytest.raises(NonFiniteError):
        write_run(toy(entities=np.full((13, 6), np.nan)), tmp_path / "run", overwrite=True)
    assert tree(tmp_path) == before
    second = write_run(toy(offset=1.0), tmp_path / "run", overwrite=True)
    assert (second.info.id != first.info.id, second.model.offset) == (True, 1.0)


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("work of years")
    before = tree(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(RunError, match="not a kgshard run"):
            write_run(toy(), tmp_path / "run", overwrite=overwrite)
    assert tree(tmp_path) == before


def test_a_run_that_somebody_writes_is_left_alone(tmp_path: Path) -> None:
    run = write_run(toy(), tmp_path / "run")
    with locked(run.folder), pytest.raises(RunError, match="is being written by"):
        write_run(toy(), tmp_path / "run", overwrite=True)


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kgshard_tools.importers.writer.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        write_run(toy(), tmp_path / "run")
    assert tree(tmp_path) == {}


def test_an_imported_run_is_read_by_every_command(tmp_path: Path, here: None) -> None:
    run = write_run(toy(), tmp_path / "run")
    model = load(run)
    assert model.evaluate("test").to_dict()["metrics"]["mrr"] > 0
    scanned = model.predict_tails("e1", "likes", 5)
    merge_shards(run)
    export(run, "numpy", tmp_path / "arrays")
    build_index(run)
    assert [answer.label for answer in load(run).predict_tails("e1", "likes", 5)] == [
        answer.label for answer in scanned
    ]
    with pytest.raises(RunError, match=r"was imported from Toy 1\.0; its training was not recorded"):
        draw_curves(run)
    write_run(toy(), tmp_path / "run", overwrite=True)  # what those commands left is ours to replace


def test_run_json_says_where_the_run_comes_from(tmp_path: Path) -> None:
    run = write_run(toy(files=[Path("there/model.pt")]), tmp_path / "run")
    record = json.loads((run.folder / "run.json").read_text())
    assert record["imported"] == {
        "program": "Toy 1.0",
        "files": ["model.pt"],
        "decisions": ["rows are as they are"],
    }
    assert record["config"] == {"model": "complex", "dim": 6, "corruption": "both-sides"}
    assert make_run(tmp_path / "trained", ring(5), dim=4, model="complex").info.imported is None


def test_its_settings_and_data_train_a_model_of_the_same_kind(tmp_path: Path) -> None:
    run = write_run(toy(), tmp_path / "run")
    config = TrainConfig(**read_settings(run.folder / "config.toml"))
    with started_run(run.folder / "data", tmp_path / "trained", config) as begun:
        assert begun.model == run.model
        assert begun.dataset.vocabulary_sha256 == run.dataset.vocabulary_sha256


def traced_peak(folder: Path, dim: int, *, rows: int = 2_000) -> int:
    """Return the bytes that an import of mapped tables [rows, dim] holds, mapped pages not counted."""
    folder.mkdir()
    table = np.lib.format.open_memmap(folder / "table.npy", "w+", np.float32, (rows, dim))
    foreign = ForeignModel(
        program="Toy",
        scoring="distmult",
        reciprocal=True,
        entity_labels=[f"e{row}" for row in range(rows)],
        relation_labels=[f"r{row}" for row in range(rows)],
        entities=table,
        relations=table,
        inverses=table,
    )
    tracemalloc.start()
    try:
        run = write_run(foreign, folder / "run")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert run.checkpoint.entities.shape == (rows, dim)
    assert not list(folder.glob(f"{TEMPORARY_PREFIX}*"))
    return peak


def test_memory_does_not_grow_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a mapped file are not counted: they are the system's to drop."""
    monkeypatch.setattr("kgshard_tools.importers.writer._BLOCK_BYTES", 1 << 18)
    small, large = traced_peak(tmp_path / "small", 512), traced_peak(tmp_path / "large", 4096)
    assert large < small + (1 << 20)  # The tables have 4 and 32 MB.


@pytest.mark.parametrize("apart", [False, True])
def test_inverses_may_be_a_table_of_their_own(tmp_path: Path, apart: bool) -> None:
    rows = draw(6, 6, 2)
    changed = {"relations": rows[:3], "inverses": rows[3:]} if apart else {"relations": rows}
    run = write_run(toy(**{"reciprocal": True, **changed}), tmp_path / "run")
    np.testing.assert_array_equal(rows_by_label(run)[1], rows)


def test_relation_rows_are_picked_and_converted(tmp_path: Path) -> None:
    """One row of the program may stand for two of ours."""
    table, picked = draw(5, 6, 2), [4, 0, 2, 1, 4, 3]
    foreign = toy(reciprocal=True, relations=table, relation_rows=picked, convert=np.negative)
    np.testing.assert_array_equal(rows_by_label(write_run(foreign, tmp_path / "run"))[1], -table[picked])
    with pytest.raises(DataError, match=r"relation table is \[5, 6\], with 3 labels"):
        write_run(toy(relations=table, relation_rows=picked), tmp_path / "run2")


@pytest.mark.parametrize("inverses", [draw(2, 6), draw(3, 4), np.ones((3, 6), np.int64)])
def test_inverses_that_do_not_fit_are_refused(tmp_path: Path, inverses: Any) -> None:
    with pytest.raises(DataError, match="inverse"):
        write_run(toy(reciprocal=True, relations=draw(3, 6), inverses=inverses), tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "dtype", "words"),
    [
        ("entities", np.float64, "entity rows were float64; they are rounded to float32"),
        ("entities", np.float16, "entity rows were float16; they are widened, exactly, to float32"),
        ("relations", np.float64, "relation rows were float64; they are rounded to float32"),
    ],
)
def test_another_precision_is_told(tmp_path: Path, kind: str, dtype: Any, words: str) -> None:
    table = draw(13 if kind == "entities" else 3, 6).astype(dtype)
    run = write_run(toy(**{kind: table}), tmp_path / "run")
    assert run.info.imported is not None
    assert words in run.info.imported.decisions


def test_a_shared_parameter_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    shared = {"coefficients": np.array([1.0, np.nan], np.float32)}
    foreign = toy(scoring="keci:1,1", entities=draw(13, 6), relations=draw(3, 6), shared=shared)
    with pytest.raises(NonFiniteError, match="shared parameter 'coefficients' is not finite"):
        write_run(foreign, tmp_path / "run")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("offset", [float("nan"), float("inf")])
def test_an_offset_that_is_no_number_is_refused(tmp_path: Path, offset: float) -> None:
    with pytest.raises(ConfigError, match=r"Toy 1\.0.*offset of scores must be a finite number"):
        write_run(toy(offset=offset), tmp_path / "run")


def test_what_was_written_is_read_again_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kgshard_tools.importers.writer.checkpoint_name", lambda step: "step-00000007")
    with pytest.raises(RunError, match="holds step 0; folders were renamed"):
        write_run(toy(), tmp_path / "run")
    assert tree(tmp_path) == {}


def test_counts_of_a_split_add_up(tmp_path: Path) -> None:
    triples = {"train": np.array([[0, 1, 2], [0, 1, 2], [3, 0, 3]])}
    origins = {"train": Origin("train.txt", "ab" * 32, blank=2, unknown=4, unit="lines")}
    info = write_run(toy(triples=triples, origins=origins), tmp_path / "run").dataset.info
    assert info.lines()[1] == "train: 9 lines = 2 triples + 1 duplicates + 2 blank + 4 left out"
    assert info.splits["train"].sha256 == "ab" * 32
    info = write_run(toy(triples=triples), tmp_path / "run2").dataset.info
    assert info.lines()[1] == "train: 3 rows = 2 triples + 1 duplicates"


@pytest.mark.parametrize("label", [None, 7, b"bytes"])
def test_a_label_that_is_no_text_is_named(tmp_path: Path, label: Any) -> None:
    with pytest.raises(DataError, match="the entity label of row 2 is no text: "):
        write_run(toy(entity_labels=[*ENTITIES[:2], label, *ENTITIES[3:]]), tmp_path / "run")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_mapped_table_comes_whole_whether_memory_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, in_memory: bool
) -> None:
    """Rows are asked for ahead in another way where it does not; what is read is the same."""
    monkeypatch.setattr("kgshard_tools.importers.writer._BLOCK_BYTES", 100)
    if not in_memory:
        monkeypatch.setattr("kgshard_tools.importers.read_ahead._held_in_memory", lambda: 0)
    foreign = toy()
    np.save(tmp_path / "table.npy", np.asarray(foreign.entities, order=order))  # type: ignore[call-overload]
    run = write_run(toy(entities=map_floats(tmp_path / "table.npy")), tmp_path / "run")
    np.testing.assert_array_equal(rows_by_label(run)[0], foreign.entities)


class Advised(mmap.mmap):
    """A mapped file that notes what the kernel was told."""

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        self.told = [*getattr(self, "told", []), (option, start, length)]
        super().madvise(option, start, *([] if length is None else [length]))


def test_no_more_than_the_rows_that_come_next_is_asked_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    with (tmp_path / "file").open("rb") as file:
        mapped = Advised(file.fileno(), 0, access=mmap.ACCESS_READ)
    table = np.ndarray((200, 1024), np.float32, mapped, 128)
    monkeypatch.setattr("kgshard_tools.importers.read_ahead._held_in_memory", lambda: 0)
    ReadAhead.of(table).ask_for(np.array([9, 2]))
    pages = [(mmap.MADV_WILLNEED, 4096 * row, 4096 + 128) for row in (2, 9)]
    assert mapped.told == [(mmap.MADV_RANDOM, 0, None), *pages]
    monkeypatch.undo()
    mapped.told = []
    ReadAhead.of(table).ask_for(np.array([9, 2]))
    assert mapped.told == [(mmap.MADV_WILLNEED, 0, 1 << 20)]
