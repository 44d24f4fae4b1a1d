"""A split's triples ranked: once, with all that can be said about it, or again and again in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from kgshard.data.dataset import Dataset, Triples
from kgshard.errors import DataError, KgshardError, NonFiniteError
from kgshard.exchange import Exchange
from kgshard.known import KnownLinks
from kgshard.models.link import LinkModel
from kgshard.partition import RowPartition
from kgshard.ranking.breakdown import Queries, break_down
from kgshard.ranking.metrics import HITS_AT, Ranks, ranking_metrics
from kgshard.ranking.protocol import EvaluationSettings, Protocol
from kgshard.ranking.ranker import Ranker
from kgshard.runs import RELATION_FILE, Checkpoint, Run
from kgshard.seeds import generator
from kgshard.shards import Floats, StoredTable, find_non_finite
from kgshard.table import ShardedTable
from kgshard.vocabulary import Vocabulary


class Evaluator:
    """Ranks one split as often as wanted: triples are drawn, and known links sorted, once."""

    def __init__(self, model: LinkModel, dataset: Dataset, settings: EvaluationSettings) -> None:
        """Prepare; equal on every rank.

        Raises:
            DataError: The split is empty.
        """
        self.model = model
        self.settings = settings
        all_triples = dataset.triples(settings.split)
        if len(all_triples) == 0:
            raise DataError(f"{dataset.folder}: split {settings.split!r} holds no triples")
        self.num_triples = len(all_triples)
        self.triples = draw_triples(all_triples, settings)
        self.unseen = _num_unseen(dataset, self.triples)
        known = dataset.known_triples(*settings.filters) if settings.filtered else None
        self._known = {
            side: KnownLinks(known, side, num_relations=model.num_relations) if known is not None else None
            for side in settings.asked
        }

    def rank(
        self, table: ShardedTable, relations: ShardedTable | Tensor, shared: Mapping[str, Tensor] | None
    ) -> Queries:
        """Rank in tables as they are now; equal on every rank. See `Ranker`."""
        ranker = Ranker(self.model, table, relations, shared)
        ranks = [ranker.rank(side, self.triples, known) for side, known in self._known.items()]
        return Queries(self.triples, self.settings.asked, Ranks.join(ranks), self.num_triples)

    @property
    def protocol(self) -> Protocol:
        """How figures come about, of whatever tables."""
        model, settings = self.model, self.settings
        drawn = len(self.triples) < self.num_triples
        return Protocol(
            split=settings.split,
            triples=len(self.triples),
            queries=len(self.triples) * len(settings.asked),
            candidates=model.num_entities,
            filtered=settings.filtered,
            filter=list(settings.filters),
            ties=settings.ties,
            sides=list(settings.asked),
            head_queries="inverse relations" if model.reciprocal else "the model's own query",
            model=f"{model.name}, dim {model.dim}",
            split_triples=self.num_triples if drawn else None,
            seed=settings.seed if drawn else None,
            unseen=self.unseen,
        )


def draw_triples(triples: Triples, settings: EvaluationSettings) -> Triples:
    """Return the triples to rank: all, or `settings.sample` of them, drawn without replacement."""
    if settings.sample is None or settings.sample >= len(triples):
        return triples
    random = generator(settings.seed, f"evaluate {settings.split}")
    return triples[np.sort(random.choice(len(triples), settings.sample, replace=False))]


class ValidEvaluator:
    """Ranks a split, both sides, while a model trains; filtered by train and valid."""

    def __init__(
        self,
        model: LinkModel,
        dataset: Dataset,
        split: str = "valid",
        *,
        sample: int | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare, once; equal on every rank.

        Args:
            model: The formula.
            dataset: The graph.
            split: What to rank. Where it is "test", test is filtered too.
            sample: Rank only so many triples, always the same; the figures are estimates.
            seed: Fixes the sample.

        Raises:
            DataError: The split is empty.
        """
        settings = EvaluationSettings(split=split, sample=sample, seed=seed if sample is not None else 0)
        self._evaluator = Evaluator(model, dataset, settings)

    @property
    def protocol(self) -> str:
        """The line that stands beside the figures."""
        return self._evaluator.protocol.line()

    def figures(
        self,
        table: ShardedTable,
        relations: ShardedTable | Tensor,
        shared: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Any]:
        """Return how the split is ranked, over both sides, realistic ranks; equal on every rank.

        Args:
            table: Entities as they are now, of any float dtype.
            relations: Sharded too, or float[relation rows, relation_dim] on every rank.
            shared: The model's shared parameters, on every rank.

        Returns:
            {"valid": {"mrr", "mr", "hits@k"}}, and for a sample {"intervals": the ends of each one's 95 %
            interval}.

        Raises:
            NonFiniteError, RankFailureError: A number is NaN or infinite; see `Ranker.rank`.
        """
        queries = self._evaluator.rank(table, relations, shared)
        names = ("mrr", "mr", *(f"hits@{k}" for k in HITS_AT))
        found = ranking_metrics(queries.ranks)
        figures: dict[str, Any] = {"valid": {name: found[name] for name in names}}
        if queries.is_estimate:
            intervals = queries.intervals()
            figures["intervals"] = {name: intervals[name] for name in names}
        return figures


def evaluate_on_ranks(
    exchange: Exchange, run: Run, checkpoint_name: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Rank a split's triples; the same result on every rank.

    Each rank reads only its own rows, whatever the world size of the training was.

    Args:
        exchange: The other ranks.
        run: A run with a checkpoint.
        checkpoint_name: See `Run.open_checkpoint`.
        **settings: See `EvaluationSettings`.

    Returns:
        {"protocol": see `Protocol`, what `Queries.figures` returns, "by": {grouping: see `break_down`}}, the
        last only where it was asked for.

    Raises:
        ConfigError: A setting is unknown or out of range.
        DataError: The split is empty.
        NonFiniteError: A table or a score is NaN or infinite; names it.
    """
    wanted = EvaluationSettings(**settings)
    evaluator = Evaluator(run.model, run.dataset, wanted)
    with exchange.sharing_failure(KgshardError, OSError):
        checkpoint = run.open_checkpoint(checkpoint_name)
        tables = _load_tables(exchange, run.dataset, checkpoint)
    queries = evaluator.rank(*tables)
    protocol = msgspec.structs.replace(
        evaluator.protocol, step=checkpoint.step, checkpoint=checkpoint.folder.name
    )
    result = {"protocol": msgspec.to_builtins(protocol)}
    result |= queries.figures(np.arange(len(queries.ranks)), wanted.ties)
    if wanted.by:
        groups = {by: break_down(queries, run.dataset, by, wanted.ties) for by in dict.fromkeys(wanted.by)}
        result["by"] = groups
    return result


def _num_unseen(dataset: Dataset, triples: Triples) -> int:
    """Return how many of some triples name an entity that train does not."""
    unseen = dataset.entities.degrees == 0
    return int((unseen[triples[:, 0]] | unseen[triples[:, 2]]).sum())


def _load_tables(
    exchange: Exchange, dataset: Dataset, checkpoint: Checkpoint
) -> tuple[ShardedTable, ShardedTable | Tensor, dict[str, Tensor]]:
    """Return this rank's entity rows, the relation rows, sharded where training had them so, and the shared
    parameters; all as float32.

    Raises:
        NonFiniteError: A number is NaN or infinite; names its entity, relation or parameter.
    """
    entities = _sharded(exchange, checkpoint, checkpoint.entities, dataset.entities)
    stored, labels = checkpoint.relations, dataset.relations
    if stored.pieces[0].path.name != RELATION_FILE:
        relations: ShardedTable | Tensor = _sharded(exchange, checkpoint, stored, labels)
    else:
        relations = _read(exchange, checkpoint, stored, labels, range(stored.num_rows))
    return entities, relations, {name: _tensor(exchange, rows) for name, rows in checkpoint.shared.items()}


def _sharded(
    exchange: Exchange, checkpoint: Checkpoint, stored: StoredTable, labels: Vocabulary
) -> ShardedTable:
    partition = RowPartition(stored.num_rows, exchange.world_size)
    rows = _read(exchange, checkpoint, stored, labels, partition.rows_of(exchange.rank))
    return ShardedTable(rows, partition, exchange)


def _read(
    exchange: Exchange, checkpoint: Checkpoint, stored: StoredTable, labels: Vocabulary, rows: range
) -> Tensor:
    row = find_non_finite(stored, rows)
    if row is not None:
        raise NonFiniteError(f"{checkpoint.folder}: {labels.row_name(row)} is not finite")
    return _tensor(exchange, stored.read(rows))


def _tensor(exchange: Exchange, values: Floats) -> Tensor:
    return torch.from_numpy(values).to(exchange.device)
