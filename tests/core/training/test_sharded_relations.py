"""A relation table cut over ranks is saved as entities are, and is one table again when it is read.

That it is trained and evaluated as one is in test_trainer.py, test_world_size.py and test_training.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import begin_run, ring, tree
from ranking_functions import Floats, random_tables, sharded
from worlds import ThreadWorld

from kgshard.checkpoint import save_checkpoint
from kgshard.errors import NonFiniteError, RankFailureError, ShardError
from kgshard.exchange import Exchange
from kgshard.runs import open_run


def save_both(exchange: Exchange, folder: str, entities: Floats, relations: Floats) -> Exception | None:
    rows, relation_rows = sharded(exchange, entities), sharded(exchange, relations)
    try:
        save_checkpoint(open_run(folder), rows, relation_rows, step=2, epoch=1)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("num_relations", [1, 3, 10])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_they_are_saved_in_as_many_files_and_read_as_one_table(
    tmp_path: Path, world_size: int, num_relations: int
) -> None:
    """Some ranks own none."""
    run = begin_run(tmp_path, ring(5, num_relations), model="rotate", dim=6)
    entities, relations = random_tables(run, 1)
    assert ThreadWorld(world_size).run(save_both, str(run.folder), entities, relations) == [None] * world_size
    opened = open_run(run.folder).checkpoint
    np.testing.assert_array_equal(opened.entities.read(range(opened.entities.num_rows)), entities)
    np.testing.assert_array_equal(opened.relations.read(range(len(relations))), relations)
    assert [piece.rank for piece in opened.relations.pieces] == list(range(world_size))
    assert len(list(opened.verify())) == 2 * world_size
    files = sorted(path.name for path in opened.folder.glob("relation*"))
    ranks = range(1, world_size + 1)
    assert files == [f"relation-{rank:05d}-of-{world_size:05d}.safetensors" for rank in ranks]


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_that_is_not_finite_is_refused_on_every_rank(tmp_path: Path, world_size: int) -> None:
    run = begin_run(tmp_path, ring(7, 3), model="distmult", dim=4)
    before = tree(run.folder)
    entities, relations = random_tables(run, 1)
    relations[-1, 0] = np.nan
    errors = ThreadWorld(world_size).run(save_both, str(run.folder), entities, relations)
    assert [type(error) for error in errors] == [RankFailureError] * (world_size - 1) + [NonFiniteError]
    last = run.dataset.relations[run.dataset.num_relations - 1]  # Its inverse's row is the last one.
    words = f"relation row {len(relations) - 1} ({last!r}) is not finite; no checkpoint was written"
    assert all(words in str(error) for error in errors)
    assert tree(run.folder) == before


def test_swapped_shards_are_refused_by_file(tmp_path: Path) -> None:
    run = begin_run(tmp_path, ring(8, 4), model="distmult", dim=4)
    ThreadWorld(2).run(save_both, str(run.folder), *random_tables(run, 1))
    first, second = sorted((run.folder / "checkpoints" / "step-00000002").glob("relation*"))
    one, other = first.read_bytes(), second.read_bytes()
    assert len(one) == len(other)
    first.write_bytes(other)
    second.write_bytes(one)
    with pytest.raises(ShardError) as caught:
        open_run(run.folder).checkpoint  # noqa: B018
    assert caught.value.file == str(first)
