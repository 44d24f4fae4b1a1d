"""One training step on shards: fetch rows once, score, push gradients once, update touched rows.

All ranks take part of the same global batch, and losses are divided by its size, so the sum of all
ranks' gradients is the gradient of the global mean, at any world size.

Shape letters: b positives on this rank, Q = 2 b queries (both sides), K negatives, D floats an entity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kgshard.errors import NonFiniteError
from kgshard.losses import find_hits, n3, sampled_softmax
from kgshard.models.link import SIDES, LinkModel
from kgshard.models.metric import score_all, score_pairs
from kgshard.optim import RowOptimizer
from kgshard.routing import RowGradient
from kgshard.sampling import Batch
from kgshard.table import ShardedTable


class Trainer:
    """Trains a sharded entity table and a replicated relation table."""

    def __init__(
        self,
        model: LinkModel,
        table: ShardedTable,
        relations: Tensor,
        *,
        entity_optimizer: RowOptimizer,
        relation_optimizer: RowOptimizer,
        n3_weight: float = 0.0,
    ) -> None:
        """Put the parts together.

        Args:
            model: The formula.
            table: This rank's entity rows, updated in place.
            relations: float32[relation rows, relation_dim], equal on every rank, updated in place.
            entity_optimizer: Over table.weight.
            relation_optimizer: Over `relations`.
            n3_weight: Weight of the N3 regulariser of each query's three rows.
        """
        self.model = model
        self.table = table
        self.relations = relations
        self.entity_optimizer = entity_optimizer
        self.relation_optimizer = relation_optimizer
        self.n3_weight = n3_weight

    def step(self, batch: Batch) -> float:
        """Do one step; return the loss a query, averaged over the global batch, as of before the update.

        Raises:
            NonFiniteError: The loss is NaN or infinite. Raised on every rank, before any update.
        """
        lookup = self.table.fetch(
            torch.cat([batch.triples[:, 0], batch.triples[:, 2], batch.negatives]).to(self.relations.device)
        )
        relation_ids = torch.cat([self.model.relation_row(side, batch.relations) for side in SIDES]).unique()
        entity_rows = lookup.rows.requires_grad_()
        relation_rows = self.relations[relation_ids].requires_grad_()

        loss = self._loss(batch, entity_rows, lookup.inverse, relation_rows, relation_ids)
        loss.backward()

        relation_gradient, total = self._reduce(_gradient(relation_rows), loss.detach())
        if not torch.isfinite(total):
            raise NonFiniteError(f"loss is {float(total)} at step {batch.step}; lower --lr")
        self.entity_optimizer.step(self.table.push(lookup, _gradient(entity_rows)))
        self.relation_optimizer.step(RowGradient(relation_ids, relation_gradient))
        return float(total)

    def _loss(
        self, batch: Batch, entity_rows: Tensor, inverse: Tensor, relation_rows: Tensor, relation_ids: Tensor
    ) -> Tensor:
        """Return this rank's share of the global mean loss."""
        num_positives = len(batch.triples)
        gathered = torch.nn.functional.embedding(inverse, entity_rows)
        sizes = [num_positives, num_positives, len(batch.negatives)]
        heads, tails, negatives = gathered.split(sizes)
        queries, targets, penalties = [], [], []
        for side in SIDES:
            anchors, answers = (heads, tails) if side == "tail" else (tails, heads)
            asked = self.model.relation_row(side, batch.triples[:, 1]).contiguous()
            relations = relation_rows[torch.searchsorted(relation_ids, asked)]
            queries.append(self.model.queries(side, anchors, relations))
            targets.append(answers)
            if self.n3_weight:
                penalties += [self.model.scoring.magnitudes(part) for part in (anchors, relations, answers)]
        target_ids = torch.cat([batch.triples[:, 2 if side == "tail" else 0] for side in SIDES])
        loss = self._cross_entropy(
            torch.cat(queries), torch.cat(targets), target_ids, negatives, batch.negatives
        )
        if self.n3_weight:
            loss = loss + self.n3_weight * n3(*penalties)
        return loss / (2 * batch.global_size)

    def _cross_entropy(
        self, queries: Tensor, targets: Tensor, target_ids: Tensor, negatives: Tensor, negative_ids: Tensor
    ) -> Tensor:
        metric = self.model.metric
        return sampled_softmax(
            score_pairs(metric, queries, targets),
            score_all(metric, queries, negatives, exact=False),
            hits=find_hits(target_ids, negative_ids),
            num_candidates=self.model.num_entities,
        )

    def _reduce(self, relation_gradient: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the relations' gradient and the loss over all ranks, in one call."""
        flat = torch.cat([relation_gradient.reshape(-1), loss.reshape(1)])
        flat = self.table.exchange.all_reduce(flat)
        return flat[:-1].view_as(relation_gradient), flat[-1]


def _gradient(rows: Tensor) -> Tensor:
    """Return the gradient of a leaf; zeros where the loss of an empty part did not touch it."""
    return rows.grad if rows.grad is not None else torch.zeros_like(rows)
