"""Small graphs, runs and tables for tests of ranking and storage, and what ranks do with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from exact_scores import SmallGraph
from runs import begun_run
from worlds import ThreadWorld

from kgshard.checkpoint import save_checkpoint
from kgshard.config import TrainConfig
from kgshard.exchange import Exchange
from kgshard.known import KnownLinks
from kgshard.models.link import SIDES
from kgshard.partition import RowPartition
from kgshard.ranking.evaluation import ValidEvaluator, evaluate_on_ranks
from kgshard.ranking.metrics import Ranks
from kgshard.ranking.ranker import Ranker
from kgshard.runs import Run, open_run
from kgshard.table import ShardedTable

Floats = npt.NDArray[np.float32]
Links = Iterable[tuple[str, str, str]]


def write_graph(folder: Path, **splits: Links) -> Path:
    """Write one TSV file a split; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, links in splits.items():
        text = "".join("\t".join(link) + "\n" for link in links)
        (folder / f"{split}.tsv").write_bytes(text.encode())
    return folder


def begin_run(folder: Path, *, model: str = "distmult", dim: int = 4, **splits: Links) -> Run:
    """Start a run at folder/run over a graph of these splits. It has no checkpoint yet."""
    data = write_graph(folder / "graph", **splits)
    config = TrainConfig(model=model, dim=dim, corruption="both-sides")
    return begun_run(data, folder / "run", config)


def chain(num_entities: int) -> list[tuple[str, str, str]]:
    """Return links that name exactly `num_entities` entities (at least 2) and one relation."""
    return [(f"e{i}", "next", f"e{i + 1}") for i in range(num_entities - 1)]


def sharded(exchange: Exchange, entities: Floats) -> ShardedTable:
    """Return this rank's part of a table that every rank was given whole."""
    partition = RowPartition(len(entities), exchange.world_size)
    rows = partition.rows_of(exchange.rank)
    return ShardedTable(torch.tensor(entities[rows.start : rows.stop]), partition, exchange)


def rank_both_sides(exchange: Exchange, graph: SmallGraph, *, filtered: bool = True) -> dict[str, Ranks]:
    """Return the ranks of each side of the graph's triples."""
    model = graph.model
    shared = {name: torch.tensor(values) for name, values in graph.shared.items()}
    ranker = Ranker(model, sharded(exchange, graph.entities), torch.tensor(graph.relations), shared)
    ranks: dict[str, Ranks] = {}
    for side in SIDES:
        links = KnownLinks(graph.known, side, num_relations=model.num_relations) if filtered else None
        ranks[side] = ranker.rank(side, graph.triples, links)
    return ranks


def rank_on_threads(graph: SmallGraph, world_size: int, *, filtered: bool) -> dict[str, list[list[int]]]:
    """Return [higher, ties, candidates] of every query by side; every rank must have found the same."""

    def listed(exchange: Exchange) -> dict[str, list[list[int]]]:
        found = rank_both_sides(exchange, graph, filtered=filtered)
        return {
            side: np.stack([ranks.higher, ranks.ties, ranks.candidates], axis=1).tolist()
            for side, ranks in found.items()
        }

    outcomes = ThreadWorld(world_size).run(listed)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    first: dict[str, list[list[int]]] = outcomes[0]
    return first


def save_tables(
    exchange: Exchange,
    folder: str,
    entities: Floats,
    relations: Floats,
    step: int = 1,
    shared: dict[str, Floats] | None = None,
    shard_relations: bool = False,
) -> str:
    """Save one checkpoint of a run; return its folder."""
    run, table = open_run(folder), sharded(exchange, entities)
    tensors = {name: torch.tensor(values) for name, values in (shared or {}).items()}
    held = sharded(exchange, relations) if shard_relations else torch.tensor(relations)
    return str(save_checkpoint(run, table, held, tensors, step=step, epoch=1))


def save_on_threads(
    run: Run,
    world_size: int,
    entities: Floats,
    relations: Floats,
    step: int = 1,
    shared: dict[str, Floats] | None = None,
    shard_relations: bool = False,
) -> Path:
    """Save one checkpoint from as many ranks as threads; return its folder."""
    # Training saves no table that is not finite; a test may, to see who notices.
    with patch("kgshard.checkpoint._non_finite", return_value=None):
        folders = ThreadWorld(world_size).run(
            save_tables, str(run.folder), entities, relations, step, shared, shard_relations
        )
    assert len(set(folders)) == 1
    return Path(folders[0])


def validate(
    exchange: Exchange, evaluator: ValidEvaluator, entities: Floats, relations: Floats
) -> dict[str, Any]:
    """Return the figures of tables that every rank was given whole."""
    return evaluator.figures(sharded(exchange, entities), torch.tensor(relations))


def evaluate_run(exchange: Exchange, folder: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Evaluate a run that every rank opens for itself."""
    return evaluate_on_ranks(exchange, open_run(folder), **(settings or {}))


def evaluated(run: Run, *, world_size: int = 1, **settings: Any) -> dict[str, Any]:
    """Evaluate a run on threads; every rank must return the same."""
    outcomes = ThreadWorld(world_size).run(evaluate_run, str(run.folder), settings)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    result: dict[str, Any] = outcomes[0]
    return result


def random_tables(run: Run, seed: int) -> tuple[Floats, Floats]:
    """Return float32 normal entity and relation rows of a run's shapes."""
    random = np.random.default_rng(seed)
    model = run.model
    entities = random.standard_normal((model.num_entities, model.dim)).astype(np.float32)
    relations = random.standard_normal((model.num_relation_rows, model.relation_dim)).astype(np.float32)
    return entities, relations
