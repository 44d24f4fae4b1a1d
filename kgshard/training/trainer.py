"""One training step on shards: fetch rows once, score, push gradients once, update touched rows.

All ranks take part of the same global batch, and losses are divided by its number of questions, so the sum of
all ranks' gradients is the gradient of the global mean, at any world size.

Shape letters: q questions of this rank, K negatives, D floats an entity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kgshard.errors import NonFiniteError
from kgshard.models.link import LinkModel, Side
from kgshard.optim import RowOptimizer
from kgshard.routing import RowGradient, sum_by_row
from kgshard.seeds import generator
from kgshard.stages import stage
from kgshard.table import Lookup, ShardedTable
from kgshard.training.batches import Batch, Questions
from kgshard.training.full_losses import Candidates, FullLoss, gradient_of
from kgshard.training.losses import SampledLoss
from kgshard.training.moved_queries import MovedSoftmax, moves_fewer_bytes
from kgshard.training.negatives import Negatives
from kgshard.training.regularisers import Regulariser, UsedRows

Move = Literal["rows", "queries", "auto"]
"""Negatives' rows go to the questions, or questions' queries to the rows; or what is fewer bytes."""
Part = slice | EllipsisType
"""Some questions of a rank, or all of them, of which a slice would cost a gradient as large as the whole."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Everything that is trained, as one rank holds it."""

    entities: ShardedTable
    """This rank's rows."""
    relations: ShardedTable | Tensor
    """This rank's rows, or float[relation rows, relation_dim], equal on every rank."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 parameters that all rows share, equal on every rank."""


@dataclass(frozen=True, slots=True)
class Optimizers:
    """One for each of the parameters; all take the same learning rate."""

    entities: RowOptimizer
    relations: RowOptimizer
    shared: Mapping[str, RowOptimizer] = field(default_factory=dict)

    def set_lr(self, lr: float) -> None:
        for optimizer in (self.entities, self.relations, *self.shared.values()):
            optimizer.lr = lr


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised."""

    loss: SampledLoss | FullLoss
    """Over sampled negatives, or over all rows."""
    regulariser: Regulariser = field(default_factory=Regulariser)
    relation_prediction: float = 0.0
    """Weight of the cross-entropy of (h, ?, t) over all relation rows (Chen et al., 2021)."""
    dropout: float = 0.0
    """Chance that a query's coordinate is dropped; the others are scaled up."""
    seed: int = 0
    """Fixes what is dropped."""
    move: Move = "rows"
    """What travels where negatives are scored; other than "rows" only for the sampled softmax of candidates
    that do not differ by side, over negatives that all questions of a batch share."""


@dataclass(slots=True)
class _Gradients:
    """What the steps of one update have added up so far."""

    entities: RowGradient | None = None
    relations: RowGradient | None = None
    shared: dict[str, Tensor] = field(default_factory=dict)

    def add(self, entities: RowGradient, relations: RowGradient, shared: dict[str, Tensor]) -> None:
        self.entities = _sum(self.entities, entities)
        self.relations = _sum(self.relations, relations)
        for name, gradient in shared.items():
            self.shared[name] = self.shared[name] + gradient if name in self.shared else gradient


def _sum(first: RowGradient | None, second: RowGradient) -> RowGradient:
    if first is None:
        return second
    if len(first.rows) == len(second.rows) and torch.equal(first.rows, second.rows):
        return RowGradient(first.rows, first.values + second.values)
    return sum_by_row(torch.cat([first.rows, second.rows]), torch.cat([first.values, second.values]))


class Trainer:
    """Trains a sharded entity table, a replicated relation table, and shared parameters."""

    def __init__(
        self,
        model: LinkModel,
        parameters: Parameters,
        optimizers: Optimizers,
        objective: Objective,
        *,
        learning_rate: Callable[[int], float],
        clip_norm: float = 0.0,
        max_norm: float = 0.0,
    ) -> None:
        """Put the parts together.

        Args:
            model: The formula.
            parameters: Updated in place.
            optimizers: Over the parameters.
            objective: What is minimised.
            learning_rate: Of each update, counted from 0.
            clip_norm: Gradients longer than this, over all parameters and ranks, are scaled down to it; 0
                leaves them.
            max_norm: Entity rows longer than this, now or after an update, are scaled down to it; 0 leaves
                them.
        """
        self.model = model
        self.parameters = parameters
        self.optimizers = optimizers
        self.objective = objective
        self._learning_rate = learning_rate
        self._clip_norm = clip_norm
        self._max_norm = max_norm
        self._pending = _Gradients()
        if max_norm:
            table = parameters.entities.weight
            _shorten(table, torch.arange(len(table), device=table.device), max_norm)

    def step(self, batch: Batch) -> float:
        """Do one step; return the loss a question, averaged over the global batch, before the update.

        Raises:
            NonFiniteError: The loss or a gradient is NaN or infinite. Raised on every rank, before any
                update; it names the ranks whose questions they are.
        """
        table, mine = self.parameters.entities, batch.mine
        moves_queries = self._moves_queries(batch)
        wanted = [mine.anchors, mine.answers]
        wanted += [] if moves_queries else [group.ids for group in batch.negatives]
        lookup = table.fetch(torch.cat(wanted))
        with stage("relations") as work:
            asked = self._fetch_relations(batch)
            work.moves(2 * asked.rows.nbytes)
        leaves = _Leaves(
            lookup.rows.float().requires_grad_(),
            asked.rows.float().requires_grad_(),
            {name: values.detach().requires_grad_() for name, values in self.parameters.shared.items()},
        )
        with stage("gather") as work:
            places = lookup.inverse.split([len(ids) for ids in wanted])
            rows = _Gathered.apply(leaves.entities, *places)
            (relations,) = _Gathered.apply(leaves.relations, asked.inverse)
            work.moves(2 * sum(part.nbytes for part in (*rows, relations)))
        loss, scored_here = self._loss(batch, leaves, relations, rows[0], rows[1], rows[2:])
        if self.objective.regulariser:
            with stage("regulariser") as work:
                loss = loss + self._penalty(batch, leaves, places[0], places[1], asked.inverse)
                work.moves(leaves.entities.nbytes + leaves.relations.nbytes)
        with stage("backward"):
            loss.backward()
        with stage("finite?"):
            # A sum is finite only where all its terms are.
            slopes = [gradient_of(leaf).sum() for leaf in leaves]
            slopes += [scored_here.values.sum()] if scored_here else []
            own = torch.stack([loss.detach(), torch.stack(slopes).sum()])
        replicated, (total, slope) = self._reduce(asked, leaves, own)
        if not torch.isfinite(total + slope):
            self._refuse(batch, own, float(total))
        entities = table.push(lookup, gradient_of(leaves.entities))
        if scored_here:
            entities = _added(scored_here, entities, len(table.weight))
        self._pending.add(entities, self._relation_gradient(asked, leaves, replicated), replicated)
        if batch.is_last:
            self._update(batch.update)
        return float(total) * batch.num_update_questions / batch.num_questions

    def _moves_queries(self, batch: Batch) -> bool:
        """Whether negatives are scored where they lie; the same on all ranks."""
        move, table = self.objective.move, self.parameters.entities
        if move != "auto":
            return move == "queries"
        return table.exchange.world_size > 1 and moves_fewer_bytes(
            num_questions=batch.num_questions,
            query_width=self.model.dim,
            num_negatives=min(len(batch.negatives[0].ids), table.num_rows),
            row_bytes=table.sent_row_bytes,
        )

    def _refuse(self, batch: Batch, own: Tensor, total: float) -> NoReturn:
        """Say on every rank whose questions have a loss or gradients (`own` float[2]) that are no numbers."""
        everyone = torch.stack(self.parameters.entities.exchange.all_gather(own, kind="sum"))
        ranks = torch.nonzero(~torch.isfinite(everyone).all(dim=1))[:, 0].tolist()
        whose = (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "the sum over ranks"
        )
        what = f"loss is {total}" if not math.isfinite(total) else "a gradient is not finite"
        raise NonFiniteError(f"{what} at step {batch.step} ({whose}); lower --lr")

    def _fetch_relations(self, batch: Batch) -> _Asked:
        """Bring the relation rows of this rank's questions here, or find them here."""
        table = self.parameters.relations
        if isinstance(table, ShardedTable):
            lookup = table.fetch(batch.mine.relation_rows)
            return _Asked(lookup.rows, lookup.inverse, lookup)
        ids = batch.relation_rows
        if self.objective.relation_prediction:
            ids = torch.arange(len(table), device=ids.device)
        return _Asked(table[ids], torch.searchsorted(ids, batch.mine.relation_rows), ids)

    def _relation_gradient(
        self, asked: _Asked, leaves: _Leaves, replicated: dict[str, Tensor]
    ) -> RowGradient:
        """Return the gradient of the relation rows held here, summed over ranks."""
        table = self.parameters.relations
        if isinstance(table, ShardedTable):
            assert isinstance(asked.source, Lookup)
            return table.push(asked.source, gradient_of(leaves.relations))
        assert isinstance(asked.source, Tensor)
        return RowGradient(asked.source, replicated.pop(_RELATIONS))

    def _loss(
        self,
        batch: Batch,
        leaves: _Leaves,
        relations: Tensor,
        anchors: Tensor,
        answers: Tensor,
        negatives: tuple[Tensor, ...],
    ) -> tuple[Tensor, RowGradient | None]:
        """Return this rank's share of the loss, and the gradient of rows that were scored where they lie."""
        objective, mine = self.objective, batch.mine
        sides = self._sides(mine)
        with stage("queries") as work:
            # Apart: where the sides differ, so may the widths of their queries.
            queries = [
                self.model.queries(side, anchors[part], relations[part], leaves.shared)
                for side, part in sides
            ]
            work.moves(anchors.nbytes + relations.nbytes + sum(asked.nbytes for asked in queries))
        if objective.dropout:
            kept = self._kept(batch, max(asked.shape[1] for asked in queries)).to(relations.device)
            queries = [
                asked * kept[part, : asked.shape[1]] for asked, (_, part) in zip(queries, sides, strict=True)
            ]
        scale, scored_here = 1 / batch.num_update_questions, None
        lift = partial(self.model.candidates, "tail")
        candidates = Candidates(self.parameters.entities, self.model.metric, lift)
        if isinstance(objective.loss, FullLoss):
            assert batch.labels is not None
            loss, values = objective.loss(torch.cat(queries), batch.labels, candidates, scale=scale)
            scored_here = RowGradient(torch.arange(len(values), device=values.device), values)
        elif batch.negatives and not negatives:
            softmax = MovedSoftmax(batch.negatives[0], candidates, scale)
            loss = softmax(torch.cat(queries), self._positives(queries, batch, answers))
            scored_here = softmax.gradient
        else:
            loss = self._sampled(objective.loss, batch, queries, answers, negatives) * scale
        if objective.relation_prediction:
            weight = objective.relation_prediction * scale
            for side, part in sides:
                loss = loss + weight * self._relation_loss(side, part, mine, anchors, answers, leaves)
        return loss, scored_here

    def _penalty(
        self, batch: Batch, leaves: _Leaves, anchors: Tensor, answers: Tensor, relations: Tensor
    ) -> Tensor:
        """Return this rank's share of the regularisers; ids are places among the leaves' rows."""
        terms = []
        for side, part in self._sides(batch.mine):
            entities = UsedRows.of(leaves.entities, anchors[part], answers[part])
            asked = UsedRows.of(leaves.relations, relations[part])
            terms.append(self.objective.regulariser(self.model, side, entities, asked))
        return torch.stack(terms).sum() / batch.num_update_questions

    def _sampled(
        self,
        loss: SampledLoss,
        batch: Batch,
        queries: list[Tensor],
        answers: Tensor,
        negatives: tuple[Tensor, ...],
    ) -> Tensor:
        """Return the sum over this rank's questions of their loss against sampled negatives."""
        positives = self._positives(queries, batch, answers)
        total = positives.sum() * 0
        for group, rows in zip(batch.negatives, negatives, strict=True):
            truths = positives if group.questions is None else positives[group.questions]
            with stage("scores") as work:
                scores = self._scores(queries, rows, group)
                work.moves(scores.nbytes)
                work.multiplies(2 * scores.numel() * rows.shape[1])
            with stage("loss") as work:
                total = total + loss(truths, scores, group)
                work.moves(2 * scores.nbytes)
        return total

    def _positives(self, queries: list[Tensor], batch: Batch, answers: Tensor) -> Tensor:
        """Return float32[q]: the scores of this rank's questions with their own answers."""
        with stage("scores") as work:
            work.moves(2 * answers.nbytes)
            return torch.cat(
                [
                    self.model.metric.score_pairs(asked, self.model.candidates(side, answers[part]))
                    for asked, (side, part) in zip(queries, self._sides(batch.mine), strict=True)
                ]
            )

    def _scores(self, queries: list[Tensor], rows: Tensor, group: Negatives) -> Tensor:
        """Return float32[q, K]: a group's questions, those for heads first, against its K negatives' rows."""
        if self.model.sides_differ:
            heads, tails = queries
            if group.questions is not None:
                of_heads, of_tails = group.questions[: group.num_heads], group.questions[group.num_heads :]
                heads, tails = heads[of_heads], tails[of_tails - len(heads)]
            return torch.cat([self._score("head", heads, rows), self._score("tail", tails, rows)])
        asked = queries[0] if len(queries) == 1 else torch.cat(queries)
        return self._score("tail", asked if group.questions is None else asked[group.questions], rows)

    def _score(self, side: Side, queries: Tensor, rows: Tensor) -> Tensor:
        return self.model.metric.score_all(queries, self.model.candidates(side, rows), exact=False)

    def _sides(self, questions: Questions) -> list[tuple[Side, Part]]:
        """Return which questions ask for which side; with reciprocal relations all ask as for tails."""
        if self.model.reciprocal:
            return [("tail", ...)]
        return [("head", slice(0, questions.num_heads)), ("tail", slice(questions.num_heads, None))]

    def _relation_loss(
        self, side: Side, part: Part, mine: Questions, anchors: Tensor, answers: Tensor, leaves: _Leaves
    ) -> Tensor:
        """Return the summed cross-entropy of the relation, given both ends, over all relation rows."""
        queries = self.model.relation_queries(side, anchors[part], answers[part], leaves.shared)
        scores = queries @ leaves.relations.T
        return torch.nn.functional.cross_entropy(scores, mine.relation_rows[part], reduction="sum")

    def _kept(self, batch: Batch, width: int) -> Tensor:
        """Return float32[q, width]: 0 where a query's coordinate is dropped; the same at any world size."""
        chance = self.objective.dropout
        source = generator(self.objective.seed, "dropout", batch.step)
        mine = source.random((batch.num_questions, width), "float32")[batch.mine.places]
        return torch.from_numpy((mine >= chance).astype("float32")) / (1 - chance)

    def _reduce(self, asked: _Asked, leaves: _Leaves, own: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Sum over all ranks, in one call: gradients of what they all hold, by name, and `own` numbers."""
        replicated = dict(leaves.shared)
        if isinstance(asked.source, Tensor):
            replicated[_RELATIONS] = leaves.relations
        flat = torch.cat([*(gradient_of(leaf).reshape(-1) for leaf in replicated.values()), own])
        with stage("sums exchanged") as work:
            flat = self.parameters.entities.exchange.all_reduce(flat)
            work.moves(self.parameters.entities.exchange.world_size * flat.nbytes)
        *parts, sums = flat.split([*(leaf.numel() for leaf in replicated.values()), len(own)])
        named = zip(replicated.items(), parts, strict=True)
        return {name: part.view_as(leaf) for (name, leaf), part in named}, sums

    def _update(self, update: int) -> None:
        """Apply what the steps of one update have added up."""
        gradients, self._pending = self._pending, _Gradients()
        assert gradients.entities is not None
        assert gradients.relations is not None
        if self._clip_norm:
            self._clip(gradients.entities, gradients.relations, gradients.shared)
        self.optimizers.set_lr(self._learning_rate(update))
        self.optimizers.entities.step(gradients.entities)
        self.optimizers.relations.step(gradients.relations)
        for name, optimizer in self.optimizers.shared.items():
            optimizer.step_dense(gradients.shared[name])
        if self._max_norm:
            _shorten(self.parameters.entities.weight, gradients.entities.rows, self._max_norm)

    def _clip(self, entities: RowGradient, relations: RowGradient, shared: dict[str, Tensor]) -> None:
        """Scale all gradients down where their joint 2-norm, over all ranks' rows, is too long."""
        is_sharded = isinstance(self.parameters.relations, ShardedTable)
        sharded = [entities.values, *([relations.values] if is_sharded else [])]
        replicated = [*([] if is_sharded else [relations.values]), *shared.values()]
        own = torch.stack([gradient.double().square().sum() for gradient in sharded]).sum().reshape(1)
        square = self.parameters.entities.exchange.all_reduce(own)
        for gradient in replicated:
            square = square + gradient.double().square().sum()
        factor = float((self._clip_norm / square.sqrt().clamp_(min=1e-300)).clamp_(max=1.0))
        if factor < 1:
            for gradient in (*sharded, *replicated):
                gradient.mul_(factor)


_SHORTENED_AT_ONCE = 1 << 16
"""Rows, so that no second table is made."""
_RELATIONS = "relation rows"
"""Stands beside the names of shared parameters, which are identifiers."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The relation rows of a step."""

    rows: Tensor
    """float[U, relation_dim]."""
    inverse: Tensor
    """int64[q]: which of them are those of this rank's questions."""
    source: Lookup | Tensor
    """How they were fetched from other ranks, or int64[U] their ids, ascending, where every rank has all."""


@dataclass(frozen=True, slots=True)
class _Leaves:
    """What autograd differentiates by in one step: float32 copies of the rows it uses."""

    entities: Tensor
    relations: Tensor
    shared: dict[str, Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.entities, self.relations, *self.shared.values()))


class _Gathered(torch.autograd.Function):
    """Rows at several lists of places, one tensor each; their gradients are added up without joining them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*places)
        ctx.shape = rows.shape
        ctx.set_materialize_grads(False)
        return tuple(rows.index_select(0, where) for where in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total: Tensor | None = None
        for where, gradient in zip(ctx.saved_tensors, gradients, strict=True):
            if gradient is not None:
                total = gradient.new_zeros(ctx.shape) if total is None else total
                total.index_add_(0, where, gradient)
        return total, *([None] * len(gradients))


def _added(first: RowGradient, second: RowGradient, num_rows: int) -> RowGradient:
    """Return the sum of gradients of a table of num_rows; the first may be overwritten."""
    if len(first.rows) < num_rows:
        return _sum(first, second)
    first.values.index_add_(0, second.rows, second.values)
    return first


@torch.no_grad()
def _shorten(weight: Tensor, rows: Tensor, max_norm: float) -> None:
    """Scale the given rows of a table down where their 2-norm is beyond max_norm."""
    for block in rows.split(_SHORTENED_AT_ONCE):
        values = weight[block].float()
        lengths = torch.linalg.vector_norm(values, dim=1, keepdim=True)
        longer = (lengths > max_norm)[:, 0]
        shortened = values[longer] * (max_norm / lengths[longer])
        if weight.dtype == torch.bfloat16:
            # Toward 0: rounded to the nearest, half of them would be too long again.
            shortened = (shortened.view(torch.int32) & -0x10000).view(torch.float32)
        weight[block[longer]] = shortened.to(weight.dtype)
