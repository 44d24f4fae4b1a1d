"""An index that kgshard did not write: its candidates are scored by the model, none of it is believed."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
from graphs import make_run, ring
from kgshard_tools.answers import load

from kgshard.errors import ConfigError, ShardError
from kgshard.runs import Run

NUM_ENTITIES, DIM = 500, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("foreign")
    hub = [("e0", "r0", f"e{i}") for i in range(1, 200)]
    return make_run(folder, ring(NUM_ENTITIES, 2) + hub, dim=DIM, model="distmult")


def written(path: Path, vectors: np.ndarray, kind: str = "Flat", **settings: int) -> Path:
    index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    for name, value in settings.items():
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    faiss.write_index(index, str(path))
    return path


def test_a_flat_index_of_the_exported_vectors_gives_the_answers_of_a_scan(run: Run, tmp_path: Path) -> None:
    entities, _ = load(run).to_numpy()
    path = written(tmp_path / "theirs.faiss", entities)
    asked = load(run, foreign_index=path)
    for k, known in ((10, False), (50, True), (NUM_ENTITIES, True)):
        found, truth = (each.predict_tails("e0", "r0", k, known=known) for each in (asked, load(run)))
        assert found.results == truth.results
    assert asked.predict_tails("e0", "r0").query["exact"] is False
    assert asked.predict_tails("e0", "r0").query["index"] == "foreign"
    assert asked.predict_tails("e0", "r0", exact=True) == load(run).predict_tails("e0", "r0")


def test_an_index_that_finds_little_still_gives_k_answers_with_their_scores(run: Run, tmp_path: Path) -> None:
    entities, _ = load(run).to_numpy()
    asked = load(run, foreign_index=written(tmp_path / "ivf.faiss", entities, "IVF12,Flat", nprobe=1))
    answers = asked.predict_tails("e3", "r1", 100)
    assert len({each.id for each in answers}) == 100
    triples = [("e3", "r1", each.label) for each in answers]
    assert [each.score for each in answers] == load(run).score(triples).tolist()


def test_an_index_of_other_vectors_gives_rows_that_exist(run: Run, tmp_path: Path) -> None:
    vectors = np.random.default_rng(5).standard_normal((NUM_ENTITIES, DIM)).astype(np.float32)
    answers = load(run, foreign_index=written(tmp_path / "others.faiss", vectors)).predict_tails(
        "e3", "r1", 20
    )
    assert [each.score for each in answers] == sorted((each.score for each in answers), reverse=True)
    assert all(0 <= each.id < NUM_ENTITIES for each in answers)


@pytest.mark.parametrize("shape", [(NUM_ENTITIES - 1, DIM), (NUM_ENTITIES, DIM + 1)])
def test_an_index_of_another_size_is_refused_with_both_numbers(
    run: Run, tmp_path: Path, shape: tuple[int, int]
) -> None:
    path = written(tmp_path / "small.faiss", np.ones(shape, np.float32))
    words = rf"{shape[0]} vectors of {shape[1]} floats, expected {NUM_ENTITIES} of {DIM}"
    with pytest.raises(ConfigError, match=words):
        load(run, foreign_index=path).predict_tails("e0", "r0")


def test_what_is_no_index_is_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "text.faiss"
    path.write_text("no index")
    with pytest.raises(ShardError, match=r"text\.faiss") as caught:
        load(run, foreign_index=path).predict_tails("e0", "r0")
    assert len(str(caught.value).splitlines()) == 1
