"""Exact filtered ranking straight from the shards: queries move, rows stay.

Every rank sees every query, counts how many of its own rows beat the true score, and only counts travel.
No rank holds the whole table, and none holds queries x entities.

Ranks are those of float64 arithmetic on the stored rows. A float32 matrix product decides every candidate
whose score is farther from the true one than rounding can explain; the few others are scored again in
float64. So a rank depends neither on batch size, nor on world size, nor on the BLAS library.

Shape letters: Q queries, N candidates in a block, D floats for each entity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.data.dataset import Triples
from kgshard.errors import DataError, NonFiniteError
from kgshard.exchange import Exchange
from kgshard.known import KnownLinks, anchors_of, targets_of
from kgshard.metrics import ranking_metrics, realistic_ranks
from kgshard.models.link import SIDES, LinkModel, Side
from kgshard.models.metric import Metric, comparison_slack, is_beyond_float32, score_all, score_pairs
from kgshard.partition import RowPartition
from kgshard.runs import Checkpoint, Run
from kgshard.shards import Floats, find_non_finite
from kgshard.table import ShardedTable

QUERY_BLOCK = 512
"""Queries scored together."""
ROW_BLOCK = 8192
"""Candidates scored together: 16 MiB of float32 scores a block."""


class Ranker:
    """Ranks true answers among all entities of a sharded table."""

    def __init__(self, model: LinkModel, table: ShardedTable, relations: Tensor) -> None:
        """Prepare this rank's rows.

        Args:
            model: The formula.
            table: Entities, float32.
            relations: float32[relation rows, relation_dim], on every rank.
        """
        self.model = model
        self.table = table
        self.relations = relations
        blocks = table.weight.split(ROW_BLOCK) if len(table.weight) else ()
        self._blocks = [_CandidateBlock(model.metric, block) for block in blocks]

    @torch.no_grad()
    def rank(self, side: Side, triples: Triples, known: KnownLinks | None) -> npt.NDArray[np.float64]:
        """Return float64[n] realistic ranks of the `side` of triples [n, 3], equal on every rank.

        Args:
            side: Which end to rank.
            triples: int[n, 3], the same on every rank.
            known: Its answers are no candidates, the true one apart; None ranks unfiltered.
        """
        higher, ties = np.empty(len(triples), np.int64), np.empty(len(triples), np.int64)
        for start in range(0, len(triples), QUERY_BLOCK):
            part = triples[start : start + QUERY_BLOCK]
            counts = self.table.exchange.all_reduce(self._count(side, part, known)).cpu().numpy()
            higher[start : start + len(part)], ties[start : start + len(part)] = counts
        return realistic_ranks(higher, ties)

    def _count(self, side: Side, triples: Triples, known: KnownLinks | None) -> Tensor:
        """Return int64[2, Q]: how many candidates here score higher, and how many the same."""
        anchors, targets = anchors_of(side, triples), targets_of(side, triples)
        queries, true_scores = self._ask(side, anchors, triples[:, 1], targets)
        questions, excluded = np.arange(len(triples)), targets.astype(np.int64)
        if known is not None:
            known_questions, answers = known.answers(anchors, triples[:, 1])
            questions = np.concatenate([questions, known_questions])
            excluded = np.concatenate([excluded, answers])
        counts = torch.zeros(2, len(triples), dtype=torch.int64, device=queries.device)
        local = excluded - self.table.rows.start
        for index, block in enumerate(self._blocks):
            inside = (local >= index * ROW_BLOCK) & (local < index * ROW_BLOCK + len(block.rows))
            where = (_ids(questions[inside], queries), _ids(local[inside] - index * ROW_BLOCK, queries))
            counts += block.count(queries, true_scores, where)
        return counts

    def _ask(
        self,
        side: Side,
        anchors: npt.NDArray[np.integer[Any]],
        relation_ids: npt.NDArray[np.integer[Any]],
        targets: npt.NDArray[np.integer[Any]],
    ) -> tuple[Tensor, Tensor]:
        """Return float64[Q, D] queries and float64[Q] scores of their true answers."""
        wanted = torch.from_numpy(np.concatenate([anchors, targets]).astype(np.int64))
        anchor_rows, target_rows = self.table.replicate(wanted.to(self.relations.device)).double().chunk(2)
        rows = _ids(self.model.relation_row(side, relation_ids.astype(np.int64)), self.relations)
        queries = self.model.queries(side, anchor_rows, self.relations[rows].double())
        return queries, score_pairs(self.model.metric, queries, target_rows)


def _ids(ids: npt.NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(ids).to(like.device)


class _CandidateBlock:
    """Some rows, and their float32 comparison values with a bound on the error."""

    def __init__(self, metric: Metric, rows: Tensor) -> None:
        self.metric = metric
        self.rows = rows
        lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        self._longest = float(lengths.max())
        self._bias = -lengths.square().float() if metric == "l2" else None

    def count(self, queries: Tensor, true_scores: Tensor, excluded: tuple[Tensor, Tensor]) -> Tensor:
        """Return int64[2, Q]: candidates that score higher than the true answer, and the same.

        Args:
            queries: float64[Q, D].
            true_scores: float64[Q].
            excluded: Pairs (int64[M] query, int64[M] row of this block) that are no candidates.
        """
        values, low, high = self._compare_with(queries, true_scores)
        values[excluded] = torch.nan  # Neither higher, nor lower, nor the same.
        # Comparing into floats and adding those is over ten times faster than counting booleans, and
        # exact: a block has fewer than 2^24 rows.
        beats = torch.empty_like(values)
        higher = torch.gt(values, high, out=beats).sum(dim=1).long()
        at_least = torch.ge(values, low, out=beats).sum(dim=1).long()
        counts = torch.stack([higher, torch.zeros_like(higher)])
        unsure = (at_least > higher).nonzero()[:, 0]
        if len(unsure):
            self._settle(counts, unsure, values[unsure], (low[unsure], high[unsure]), queries, true_scores)
        return counts

    def _compare_with(self, queries: Tensor, true_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return float32[Q, N] comparison values and float32[Q, 1] limits, between which they say nothing."""
        lengths = torch.linalg.vector_norm(queries, dim=1)
        dim = queries.shape[1]
        values = self._compare(queries.float())
        level = lengths.square() - true_scores.square() if self.metric == "l2" else true_scores
        slack = comparison_slack(self.metric, dim, lengths, self._longest)
        low, high = (level - slack).float()[:, None], (level + slack).float()[:, None]
        beyond = is_beyond_float32(dim, lengths, self._longest)
        values[beyond], low[beyond], high[beyond] = 0, -torch.inf, torch.inf
        return values, low, high

    def _compare(self, queries: Tensor) -> Tensor:
        """Return float32[Q, N] comparison values; for `l2` without -|q|^2, which all candidates share."""
        if self._bias is not None:
            return torch.addmm(self._bias, queries, self.rows.T, alpha=2)
        return score_all(self.metric, queries, self.rows)

    def _settle(
        self,
        counts: Tensor,
        unsure: Tensor,
        values: Tensor,
        limits: tuple[Tensor, Tensor],
        queries: Tensor,
        true_scores: Tensor,
    ) -> None:
        """Add to `counts` the candidates that float32 could not decide, scored in float64."""
        which, rows = ((values >= limits[0]) & (values <= limits[1])).nonzero(as_tuple=True)
        which = unsure[which]
        step = 1 << 16  # Pairs scored together: a dead model makes every candidate unsure.
        for start in range(0, len(rows), step):
            q, e = which[start : start + step], rows[start : start + step]
            candidates = self.rows[e].double()
            difference = score_pairs(self.metric, queries[q], candidates) - true_scores[q]
            slack = _tie_slack(self.metric, queries[q], candidates, true_scores[q])
            counts[0].index_add_(0, q, (difference > slack).long())
            counts[1].index_add_(0, q, (difference.abs() <= slack).long())


def _tie_slack(metric: Metric, queries: Tensor, candidates: Tensor, true_scores: Tensor) -> Tensor:
    """Return float64[M]: equal rows may differ by this much in float64, unequal ones hardly ever do."""
    lengths = torch.linalg.vector_norm(queries, dim=1)
    scale = (
        lengths * torch.linalg.vector_norm(candidates, dim=1) if metric == "dot" else lengths - true_scores
    )
    slack: Tensor = scale * (4 * queries.shape[1] * 2.0**-53)
    return slack


def evaluate_on_ranks(
    exchange: Exchange,
    run: Run,
    checkpoint_name: str | None = None,
    *,
    split: str = "test",
    filtered: bool = True,
) -> dict[str, Any]:
    """Rank a split's triples on both sides; the same result on every rank.

    Each rank reads only its own rows, whatever the world size of the training was.

    Args:
        exchange: The other ranks.
        run: A run with a checkpoint.
        checkpoint_name: Which; by default the newest.
        split: "train", "valid" or "test".
        filtered: Known triples other than the ranked one are no candidates. For "test" these are
            train, valid and test; else train and valid, so that nothing is chosen by looking at test.

    Raises:
        DataError: The split is empty.
        NonFiniteError: A row of a table is NaN or infinite; names it.
    """
    model, dataset = run.model, run.dataset
    triples = dataset.triples(split)
    if len(triples) == 0:
        raise DataError(f"{run.folder}: split {split!r} holds no triples")
    checkpoint = run.open_checkpoint(checkpoint_name)
    ranker = Ranker(model, *_load_tables(exchange, run, checkpoint))
    filters = (("train", "valid", "test") if split == "test" else ("train", "valid")) if filtered else ()
    known = dataset.known_triples(*filters) if filtered else None
    ranks = {}
    for side in SIDES:
        links = KnownLinks(known, side, num_relations=model.num_relations) if known is not None else None
        ranks[side] = ranker.rank(side, triples, links)
    return {
        "protocol": {
            "split": split,
            "triples": len(triples),
            "queries": 2 * len(triples),
            "candidates": model.num_entities,
            "filtered": filtered,
            "filter": list(filters),
            "ties": "realistic",
            "sides": list(SIDES),
            "head_queries": "inverse relations" if model.reciprocal else "the model's own",
            "step": checkpoint.step,
        },
        "metrics": ranking_metrics(np.concatenate([ranks[side] for side in SIDES])),
        "head": ranking_metrics(ranks["head"]),
        "tail": ranking_metrics(ranks["tail"]),
    }


def _load_tables(exchange: Exchange, run: Run, checkpoint: Checkpoint) -> tuple[ShardedTable, Tensor]:
    partition = RowPartition(run.model.num_entities, exchange.world_size)
    rows = partition.rows_of(exchange.rank)
    exchange.share_failure(_non_finite_row(run, checkpoint, rows))
    entities = _tensor(checkpoint.entities.read(rows), exchange)
    relations = _tensor(checkpoint.relations.read(range(checkpoint.relations.num_rows)), exchange)
    return ShardedTable(entities, partition, exchange), relations


def _tensor(values: Floats, exchange: Exchange) -> Tensor:
    return torch.from_numpy(values).to(exchange.device)


def _non_finite_row(run: Run, checkpoint: Checkpoint, rows: range) -> NonFiniteError | None:
    dataset = run.dataset
    row = find_non_finite(checkpoint.entities, rows)
    if row is not None:
        return NonFiniteError(f"{checkpoint.folder}: entity {row} ({dataset.entities[row]!r}) is not finite")
    row = find_non_finite(checkpoint.relations)
    if row is not None:
        name = dataset.relations[row % dataset.num_relations]
        return NonFiniteError(f"{checkpoint.folder}: relation row {row} ({name!r}) is not finite")
    return None
