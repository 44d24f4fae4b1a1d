"""Negatives scored where their rows lie: the same training, with fewer bytes where negatives are many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_functions import exchanged_bytes, first_tables, random_job, train
from worlds import ThreadWorld

from kgshard.training.moved_queries import moves_fewer_bytes

SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "by degree": {"negatives_from": "degree"},
    "known answers left out": {"filter_negatives": True, "num_entities": 12, "negatives": 30},
    "heads by their own query": {"corruption": "both-sides", "dropout": 0.2},
    "a distance": {"model": "rotate", "n3": 0.0},
    "lifted candidates": {"model": "mure"},
    "accumulated and clipped": {"accumulate": 3, "clip_norm": 0.05, "batch_size": 8},
    "fewer negatives than ranks": {"negatives": 2},
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_moving_queries_trains_as_moving_rows_does(name: str, world_size: int) -> None:
    settings = {"num_entities": 40, "model": "complex", "n3": 0.01, "num_steps": 6} | SETTINGS[name]
    # Adagrad makes full steps of gradients that are rounding's alone.
    job = random_job(75, optimizer="sgd", lr=0.5, init_scale=8.0, **settings)
    rows = ThreadWorld(1).run(train, job.but(move="rows"))[0]
    queries = ThreadWorld(world_size).run(train, job.but(move="queries"))
    for rank in queries:
        np.testing.assert_allclose(rank.losses, rows.losses, rtol=1e-5)
        np.testing.assert_allclose(rank.tables.flat(), rows.tables.flat(), rtol=1e-6, atol=1e-6)
    before = ThreadWorld(1).run(first_tables, job)[0]
    assert np.abs(rows.tables.flat() - before.flat()).max() > 1e-3


def test_what_moves_is_what_takes_fewer_bytes() -> None:
    """40 questions: queries of 8 floats and two sums against rows of 8 floats, which meet at 50."""
    sizes = {"num_questions": 40, "query_width": 8, "row_bytes": 32}
    assert [moves_fewer_bytes(num_negatives=count, **sizes) for count in (50, 51)] == [False, True]


@pytest.mark.parametrize(("negatives", "chosen"), [(10, "rows"), (900, "queries")])
def test_auto_chooses_the_smaller_traffic_that_is_then_seen(negatives: int, chosen: str) -> None:
    """Of 1,000 entities; 20 triples a batch are 40 questions."""
    job = random_job(75, 1000, batch_size=20, negatives=negatives, num_steps=4, model="complex", dim=32)
    seen = {move: ThreadWorld(2).run(exchanged_bytes, job.but(move=move))[0] for move in ("rows", "queries")}
    assert min(seen, key=lambda move: seen[move]) == chosen
    assert ThreadWorld(2).run(exchanged_bytes, job.but(move="auto"))[0] == seen[chosen]
