"""The loss of one update on whole tables, in float64, one question at a time: what the trainer is held to.

Nothing here is shared with kgshard's samplers, losses, regularisers or tables. Taken from kgshard are a
model's formulas (queries, candidates, magnitudes; tests/core/models holds them to the papers), and what a
world of one rank draws for a step: its triples, and its negatives with their weights.

Shape letters: N entities, E floats for each candidate, K negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from rank_functions import Floats, Ints
from torch import Tensor
from training_functions import Job, Recorded, Tables

from kgshard.config import TrainConfig
from kgshard.exchange import SingleExchange
from kgshard.models.link import SIDES, LinkModel
from kgshard.models.scoring import Scoring
from kgshard.training.assemble import build_sampler
from kgshard.training.batches import Batch


@dataclass(frozen=True)
class Asked:
    """One question."""

    side: str
    anchor: int
    row: int
    """Of the relation table."""
    answers: list[int]


@dataclass(frozen=True)
class Values:
    """Whole tables in float64 that autograd knows, and the formula."""

    model: LinkModel
    entities: Tensor
    relations: Tensor
    shared: dict[str, Tensor]

    @staticmethod
    def of(job: Job, tables: Tables) -> Values:
        return Values(
            job.link_model,
            torch.tensor(tables.entities, requires_grad=True),
            torch.tensor(tables.relations, requires_grad=True),
            {name: torch.tensor(part, requires_grad=True) for name, part in tables.shared.items()},
        )

    @property
    def scoring(self) -> Scoring:
        return self.model.scoring.bind(self.shared)

    def is_asked_backwards(self, side: str) -> bool:
        return side == "head" and not self.model.reciprocal

    def scores(self, side: str, anchor: int, row: int) -> Tensor:
        """Return float64[N]: every entity's score as the answer to a question."""
        given, relation = self.entities[anchor], self.relations[row]
        if self.is_asked_backwards(side):
            query = self.scoring.query_heads(given, relation)
            return self.model.metric.score_pairs(query, self.scoring.candidates("head", self.entities))
        query = self.scoring.query_tails(given, relation)
        return self.model.metric.score_pairs(query, self.scoring.candidates("tail", self.entities))

    def relation_scores(self, asked: Asked) -> Tensor:
        """Return float64[relation rows]: the score of every relation row between both ends."""
        given, answer = self.entities[asked.anchor], self.entities[asked.answers[0]]
        head, tail = (answer, given) if self.is_asked_backwards(asked.side) else (given, answer)
        tails = self.scoring.candidates("tail", tail)
        queries = self.scoring.query_tails(head.expand(len(self.relations), -1), self.relations)
        return self.model.metric.score_pairs(queries, tails)


def questions_of(job: Job, batch: Batch) -> list[Asked]:
    """Return what a step of a world of one rank asks, with answers looked up in train by a loop."""
    mine, found = batch.mine, []
    for position, anchor in enumerate(mine.anchors.tolist()):
        row = int(mine.relation_rows[position])
        side = SIDES[0] if position < mine.num_heads else SIDES[1]
        if job.config.train_type == "kvsall":
            answers = _known(job.triples, side, anchor, row % job.num_relations)
        else:
            answers = [int(mine.answers[position])]
        found.append(Asked(side, anchor, row, answers))
    return found


def _known(triples: Ints, side: str, anchor: int, relation: int) -> list[int]:
    ends = [(h, t) if side == "tail" else (t, h) for h, r, t in triples.tolist() if r == relation]
    return [answer for given, answer in ends if given == anchor]


def plain_step(job: Job, tables: Tables) -> tuple[float, Tables]:
    """Return the mean loss a question of the first update of job.num_steps steps, and its gradient."""
    sampler = build_sampler(SingleExchange(), job.link_model, job.triples, job.config)
    return plain_loss(job, tables, list(islice(sampler.epoch(0), job.num_steps)))


def relative_errors(found: Recorded, truth: tuple[float, Tables]) -> dict[str, float]:
    """Return how far a mean loss and each table's gradient are off, as a share of the largest true value."""
    loss, gradients = truth
    pairs = {
        "entities": (found.gradients.entities, gradients.entities),
        "relations": (found.gradients.relations, gradients.relations),
    }
    pairs |= {name: (found.gradients.shared[name], gradients.shared[name]) for name in gradients.shared}
    errors = {
        name: float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        for name, (ours, theirs) in pairs.items()
    }
    return errors | {"loss": abs(float(np.mean(found.losses)) - loss) / abs(loss)}


def plain_loss(job: Job, tables: Tables, batches: list[Batch]) -> tuple[float, Tables]:
    """Return the mean loss a question of one update, and its gradient."""
    values = Values.of(job, tables)
    total, num_questions = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        asked = questions_of(job, batch)
        num_questions += len(asked)
        total = total + sum(_question_losses(job.config, values, asked, batch))
        for question in asked:
            total = total + _penalty(job.config, values, question)
    mean = total / num_questions
    mean.backward()  # type: ignore[no-untyped-call]
    shared = {name: _gradient(leaf) for name, leaf in values.shared.items()}
    return mean.item(), Tables(_gradient(values.entities), _gradient(values.relations), shared)


def _gradient(leaf: Tensor) -> Floats:
    assert leaf.grad is not None
    return leaf.grad.numpy()


def _question_losses(
    config: TrainConfig, values: Values, asked: list[Asked], batch: Batch
) -> Iterator[Tensor]:
    for position, question in enumerate(asked):
        scores = values.scores(question.side, question.anchor, question.row)
        if config.train_type == "negative-sampling":
            ids, weights = _counted(batch, position)
            true = scores[question.answers[0]]
            yield SAMPLED[config.loss](true, scores[ids], weights, config, len(scores))
        else:
            yield FULL[config.loss](scores, question.answers, config.label_smoothing)


def _counted(batch: Batch, position: int) -> tuple[Tensor, Tensor]:
    """Return the negatives that a question of the batch is compared with, and how many each stands for."""
    [(group, row)] = [
        (group, row)
        for group in batch.negatives
        for row, number in enumerate(_positions(group, len(batch.mine.anchors)))
        if number == position
    ]
    counted = torch.ones(len(group.ids), dtype=torch.bool)
    if group.allowed is not None:
        counted &= group.allowed[row]
    questions, negatives = group.excluded
    counted[negatives[questions == row]] = False
    weights = torch.as_tensor(group.log_weights, dtype=torch.float64).exp().expand(len(group.ids))
    return group.ids[counted], weights[counted]


def _positions(group: Any, num_questions: int) -> list[int]:
    return list(range(num_questions)) if group.questions is None else group.questions.tolist()


# --- losses over all entities: scores float64[N], the answers, smoothing


def _labels(scores: Tensor, answers: list[int]) -> Tensor:
    labels = torch.zeros_like(scores)
    labels[answers] = 1.0
    return labels


def _full_softmax(scores: Tensor, answers: list[int], smoothing: float) -> Tensor:
    labels = _labels(scores, answers) / len(answers) * (1 - smoothing) + smoothing / len(scores)
    return -(labels * (scores - torch.logsumexp(scores, 0))).sum()


def _full_bce(scores: Tensor, answers: list[int], smoothing: float) -> Tensor:
    return _bce(scores, _labels(scores, answers) * (1 - smoothing) + smoothing / len(scores)).sum()


def _bce(scores: Tensor, labels: Tensor | float) -> Tensor:
    return -labels * _log_sigmoid(scores) - (1 - labels) * _log_sigmoid(-scores)


def _log_sigmoid(scores: Tensor) -> Tensor:
    return -torch.logaddexp(torch.zeros_like(scores), -scores)


FULL: dict[str, Callable[[Tensor, list[int], float], Tensor]] = {"softmax": _full_softmax, "bce": _full_bce}


# --- losses over a sample: the true score, negatives' scores and weights


def _softmax(true: Tensor, scores: Tensor, weights: Tensor, config: TrainConfig, num_rows: int) -> Tensor:
    every = torch.cat([true[None], scores + weights.log()])
    return torch.logsumexp(every, 0) - true


def _self_adversarial(
    true: Tensor, scores: Tensor, weights: Tensor, config: TrainConfig, num_rows: int
) -> Tensor:
    shares = torch.softmax(config.adversarial_temperature * scores.detach() + weights.log(), 0)
    return -_log_sigmoid(config.margin + true) - (shares * _log_sigmoid(-config.margin - scores)).sum()


def _margin(true: Tensor, scores: Tensor, weights: Tensor, config: TrainConfig, num_rows: int) -> Tensor:
    shares = weights / weights.sum()
    return (shares * torch.clamp(config.margin - true + scores, min=0)).sum()


def _sampled_bce(true: Tensor, scores: Tensor, weights: Tensor, config: TrainConfig, num_rows: int) -> Tensor:
    low = config.label_smoothing / num_rows
    shares = weights / weights.sum()
    return _bce(true, 1 - config.label_smoothing + low) + (shares * _bce(scores, low)).sum()


SAMPLED: dict[str, Callable[..., Tensor]] = {
    "softmax": _softmax,
    "self-adversarial": _self_adversarial,
    "margin": _margin,
    "bce": _sampled_bce,
}


# --- what is added


def _penalty(config: TrainConfig, values: Values, asked: Asked) -> Tensor:
    """Return a question's share of the regularisers, and of predicting its relation."""
    anchor, relation = values.entities[asked.anchor], values.relations[asked.row]
    rows = [anchor, relation]
    if config.train_type != "kvsall":
        rows.append(values.entities[asked.answers[0]])
    total = config.l2 * sum((row**2).sum() for row in rows)
    total = total + config.l3 * sum((row.abs() ** 3).sum() for row in rows)
    if config.n3:
        total = total + config.n3 * sum((size**3).sum() for size in _sizes(values, asked, rows))
    if config.relation_prediction:
        log_chances = torch.log_softmax(values.relation_scores(asked), 0)
        total = total - config.relation_prediction * log_chances[asked.row]
    return torch.as_tensor(total, dtype=torch.float64)


def _sizes(values: Values, asked: Asked, rows: list[Tensor]) -> list[Tensor]:
    """Return the magnitudes of the rows that are there, each in the role it plays in the triple."""
    anchor, relation, *answer = rows
    other = answer[0] if answer else anchor
    if values.is_asked_backwards(asked.side):
        of_other, *of_relation, of_anchor = values.scoring.factors(other, relation, anchor)
    else:
        of_anchor, *of_relation, of_other = values.scoring.factors(anchor, relation, other)
    return [of_anchor, *of_relation, *([of_other] if answer else [])]
