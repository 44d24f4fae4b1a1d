"""FAISS indexes answer only for the run they were built from, and hold every row of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np
import pytest
from graphs import make_run, ring, save_tables
from kgshard_tools.answers import load
from kgshard_tools.index.build import build_index

from kgshard.errors import ConfigError, NonFiniteError, RunError
from kgshard.models import SCORING
from kgshard.models.scoring import Side
from kgshard.runs import Run, open_run

FAISS_METRICS = {"dot": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2, "l1": faiss.METRIC_L1}
SEARCHABLE = sorted(name for name, scoring in SCORING.items() if scoring.metric.name in FAISS_METRICS)
NOT_SEARCHABLE = sorted(set(SCORING) - set(SEARCHABLE))
DIM = 16
"""Suits every model."""


def indexes_of(run: Run) -> dict[str, Any]:
    return {path.stem: faiss.read_index(str(path)) for path in (run.folder / "index").glob("*.faiss")}


def sidecar_of(run: Run) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((run.folder / "index" / "index.json").read_text())["indexes"]
    return entries


@pytest.mark.parametrize("model", SEARCHABLE)
def test_the_links_index_holds_candidates_under_the_metric_of_the_model(tmp_path: Path, model: str) -> None:
    """Entity rows themselves, for most models; either way one index is for both sides."""
    run = make_run(tmp_path, ring(9), dim=DIM, model=model, world_size=12)
    build_index(run.folder, "links")
    (index,) = indexes_of(run).values()
    assert index.metric_type == FAISS_METRICS[SCORING[model].metric.name]
    entities = run.checkpoint.entities.read(range(9))
    held = index.reconstruct_n(0, index.ntotal)
    expected = run.model.candidates("tail", entities.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(held, expected)
    entry = sidecar_of(run)["links"]
    compares_rows = held.shape == entities.shape and bool((held == entities).all())
    assert entry["transform"] == ("none" if compares_rows else "candidates")
    assert (entry["metric"], entry["dim"]) == (SCORING[model].metric.name, held.shape[1])


@pytest.mark.parametrize("model", sorted({"mure", "cp", "complex", "transe"}))
def test_where_candidates_for_heads_are_others_each_side_has_an_index(tmp_path: Path, model: str) -> None:
    run = make_run(tmp_path, ring(9), dim=DIM, model=model, corruption="both-sides")
    written = build_index(run.folder, "links", with_labels=False)
    indexes, entities = indexes_of(run), run.checkpoint.entities.read(range(9)).astype(np.float64)
    sides = {"links-head": "head", "links-tail": "tail"} if model in ("mure", "cp") else {"links": "tail"}
    assert set(indexes) == set(sidecar_of(run)) == set(sides)
    assert [Path(file).name for file in written.files] == [*(f"{name}.faiss" for name in sides), "index.json"]
    for name, side in sides.items():
        expected = run.model.candidates(cast(Side, side), entities).astype(np.float32)
        np.testing.assert_array_equal(indexes[name].reconstruct_n(0, 9), expected)


@pytest.mark.parametrize("model", NOT_SEARCHABLE)
def test_what_faiss_cannot_compare_is_refused_and_said_not_to_matter(tmp_path: Path, model: str) -> None:
    run = make_run(tmp_path, ring(60), dim=DIM, model=model)
    without = load(run.folder).predict_tails("e0", "r0", 5)
    metric = SCORING[model].metric.name
    words = f"--for links: FAISS has no metric '{metric}', which {model} is compared by; predict scans"
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_index(run.folder, "links")
    assert not (run.folder / "index").exists()
    written = build_index(run.folder, "both")
    assert set(indexes_of(run)) == {"neighbors"}
    (note,) = written.notes
    assert note.startswith("no index for links: ")
    assert build_index(run.folder, "neighbors").notes == []
    assert load(run.folder).predict_tails("e0", "r0", 5) == without


def test_some_models_are_searchable_and_some_are_not() -> None:
    """The negative control: both kinds were tested."""
    assert {"complex", "transe", "transe-l1", "mure"} <= set(SEARCHABLE)
    assert {"transh", "rotate-moduli"} <= set(NOT_SEARCHABLE)


def test_the_neighbors_index_holds_rows_of_length_one(tmp_path: Path) -> None:
    entities = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    entities[3] = 0
    run = make_run(tmp_path, ring(9), dim=4, model="transe", entities=entities)
    build_index(run.folder, "neighbors")
    index = faiss.read_index(str(run.folder / "index" / "neighbors.faiss"))
    assert index.metric_type == faiss.METRIC_INNER_PRODUCT
    stored = index.reconstruct_n(0, index.ntotal)
    lengths = np.linalg.norm(entities.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(stored, entities / np.where(lengths > 0, lengths, 1), atol=1e-7)
    assert not stored[3].any()


@pytest.mark.parametrize(
    ("purpose", "names"),
    [("links", ["links"]), ("neighbors", ["neighbors"]), ("both", ["links", "neighbors"])],
)
def test_only_what_was_asked_for_is_built(tmp_path: Path, purpose: str, names: list[str]) -> None:
    run = make_run(tmp_path, ring(9), dim=4)
    written = build_index(run.folder, purpose, with_labels=False)
    files = [f"{name}.faiss" for name in names]
    assert sorted(path.name for path in (run.folder / "index").iterdir()) == sorted([*files, "index.json"])
    assert [Path(file).name for file in written.files] == [*files, "index.json"]
    assert written.rows == 9
    assert sorted(sidecar_of(run)) == names
    assert json.loads((run.folder / "index" / "index.json").read_text())["format"] == "kgshard.index/1"


def test_building_one_keeps_the_other(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), dim=4)
    build_index(run.folder, "links")
    build_index(run.folder, "neighbors")
    assert sorted(sidecar_of(run)) == ["links", "neighbors"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("purpose", ["links", "neighbors", "both"])
def test_a_row_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float, purpose: str) -> None:
    entities = np.ones((9, 4))
    entities[5, 2] = value
    run = make_run(tmp_path, ring(9), dim=4, entities=entities, world_size=3)
    label = run.dataset.entities[5]
    with pytest.raises(NonFiniteError, match=f"entity 5 .*{label}"):
        build_index(run.folder, purpose, with_labels=False)
    assert not list(run.folder.glob("index/*"))


def test_unknown_options_list_the_known(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), dim=4)
    with pytest.raises(ConfigError, match=r"--for.*'link'.*links, neighbors, both"):
        build_index(run.folder, "link")
    with pytest.raises(ConfigError, match=r"--type.*'hsnw'.*flat"):
        build_index(run.folder, type="hsnw")
    assert not (run.folder / "index").exists()


def test_an_index_changes_no_answer(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(300, 3), dim=8, model="rotate", world_size=2)
    without = load(run.folder).predict_tails("e0", "r1", 50)
    similar = load(run.folder).most_similar("e0", 50)
    build_index(run.folder)
    assert load(run.folder).predict_tails("e0", "r1", 50) == without
    assert load(run.folder).most_similar("e0", 50) == similar


def test_k_beyond_the_table_returns_the_table(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(10), dim=4)
    build_index(run.folder)
    model = load(run.folder)
    assert sorted(a.id for a in model.predict_tails("e0", "r0", 20, known=True)) == list(range(10))
    assert len(model.most_similar("e0", 20)) == 9
    assert all(abs(answer.score) < 1e3 for answer in model.most_similar("e0", 20))


def test_an_index_of_an_earlier_step_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), dim=4)
    build_index(run.folder)
    save_tables(run, np.ones((9, 4)), np.ones((2, 4)), step=7)
    model = load(run.folder)
    stale = r"step is 1.*7.*run kgshard index again"
    with pytest.raises(RunError, match=stale):
        model.predict_tails("e0", "r0")
    with pytest.raises(RunError, match=stale):
        model.most_similar("e0")
    build_index(run.folder)
    assert len(load(run.folder).most_similar("e0", 3)) == 3


def test_an_index_of_another_run_is_refused(tmp_path: Path) -> None:
    """Same graph, same step, other rows: only the run's id tells."""
    run, other = (make_run(tmp_path / name, ring(9), dim=4, seed=len(name)) for name in ("a", "bb"))
    build_index(other.folder)
    (other.folder / "index").rename(run.folder / "index")
    with pytest.raises(RunError, match=r"run_id is .*run kgshard index again"):
        load(run.folder).predict_tails("e0", "r0")


@pytest.mark.parametrize(("key", "value"), [("metric", "l2"), ("transform", "candidates")])
def test_an_index_of_another_kind_is_refused(tmp_path: Path, key: str, value: str) -> None:
    run = make_run(tmp_path, ring(9), dim=4)
    build_index(run.folder)
    path = run.folder / "index" / "index.json"
    sidecar = json.loads(path.read_text())
    sidecar["indexes"]["links"][key] = value
    del sidecar["seal"]  # it is of the text as it was
    path.write_text(json.dumps(sidecar))
    with pytest.raises(RunError, match=rf"links\.faiss: {key} is {value}, .*run kgshard index again"):
        load(run.folder).predict_tails("e0", "r0")


def test_candidates_that_leave_float32_are_refused_by_name(tmp_path: Path) -> None:
    """Rows fit float32, the squares that MuRE makes of them do not: FAISS would see infinity."""
    entities = np.ones((9, 4))
    entities[5, 0] = 1e25
    run = make_run(tmp_path, ring(9), dim=4, model="mure", entities=entities)
    with pytest.raises(NonFiniteError, match=f"entity 5 .*{run.dataset.entities[5]}"):
        build_index(run.folder, "links")
    assert load(run.folder).predict_tails("e0", "r0", 3)


@pytest.mark.parametrize("position", [-1, 60, 200])
def test_an_index_file_that_was_changed_is_refused(tmp_path: Path, position: int) -> None:
    run = make_run(tmp_path, ring(9), dim=8)
    build_index(run.folder)
    path = run.folder / "index" / "links.faiss"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match=r"links\.faiss.*run kgshard index again"):
        load(run.folder).predict_tails("e0", "r0")


def test_an_index_file_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), dim=8)
    build_index(run.folder)
    (run.folder / "index" / "links.faiss").unlink()
    with pytest.raises(RunError, match="run kgshard index again"):
        load(run.folder).predict_tails("e0", "r0")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "kgshard.index/2", "indexes": {}}'])
def test_a_damaged_sidecar_is_refused_in_words(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, ring(9), dim=8)
    build_index(run.folder)
    (run.folder / "index" / "index.json").write_text(text)
    with pytest.raises(RunError, match=r"index\.json"):
        load(run.folder).predict_tails("e0", "r0")


def test_a_pickle_beside_the_index_is_never_opened(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9), dim=4)
    build_index(run.folder)
    (run.folder / "index" / "links.pkl").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert len(load(open_run(run.folder).folder).predict_tails("e0", "r0", 3)) == 3
    assert not Path("pwned").exists()
