"""The losses of kgshard.training.losses, question by question, and as a rival sees them.

Shape letters: q questions, K rivals, n new entities.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kgshard.config import TrainConfig


class Loss(ABC):
    """One of kgshard.training.losses, question by question, and as a rival sees it."""

    @abstractmethod
    def answers(self, positives: Tensor, scores: Tensor, shares: Tensor) -> Tensor:
        """Return float[q] losses.

        Args:
            positives: float[q] scores of the true answers.
            scores: float[q, K] scores of rivals, -inf where one is none.
            shares: float[q]: the part of its question that each is, where one has several answers.
        """

    @abstractmethod
    def constants(self, positives: Tensor, scores: Tensor) -> Tensor:
        """Return float[q]: what `rival` must know of questions without the new rows."""

    @abstractmethod
    def rival(self, scores: Tensor, constants: Tensor) -> Tensor:
        """Return float[q, n]: what new rows add to questions by their scores; constants are float[q, 1]."""


@dataclass(frozen=True)
class Softmax(Loss):
    log_weight: float
    """Log of how many entities each rival stands for."""
    is_shared: bool
    """Whether all answers of a question are one question."""

    def answers(self, positives: Tensor, scores: Tensor, shares: Tensor) -> Tensor:
        losses = softplus(torch.logsumexp(scores, dim=1) + self.log_weight - positives)
        return losses * shares if self.is_shared else losses

    def constants(self, positives: Tensor, scores: Tensor) -> Tensor:
        return torch.logaddexp(torch.logsumexp(scores, dim=1) + self.log_weight, positives)

    def rival(self, scores: Tensor, constants: Tensor) -> Tensor:
        return softplus(scores - constants)


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    num_entities: int
    is_sum: bool
    """Whether all entities' terms are summed, as where all are candidates; otherwise they are averaged."""

    def answers(self, positives: Tensor, scores: Tensor, shares: Tensor) -> Tensor:
        others = softplus(scores).mean(dim=1)
        return softplus(-positives) + (others * shares * self.num_entities if self.is_sum else others)

    def constants(self, positives: Tensor, scores: Tensor) -> Tensor:
        return positives

    def rival(self, scores: Tensor, constants: Tensor) -> Tensor:
        return softplus(scores) / (1 if self.is_sum else self.num_entities)


@dataclass(frozen=True)
class Margin(Loss):
    num_entities: int
    margin: float

    def answers(self, positives: Tensor, scores: Tensor, shares: Tensor) -> Tensor:
        return torch.relu(self.margin - positives[:, None] + scores).mean(dim=1)

    def constants(self, positives: Tensor, scores: Tensor) -> Tensor:
        return positives

    def rival(self, scores: Tensor, constants: Tensor) -> Tensor:
        return torch.relu(self.margin - constants + scores) / self.num_entities


@dataclass(frozen=True)
class SelfAdversarial(Loss):
    log_weight: float
    margin: float
    temperature: float

    def answers(self, positives: Tensor, scores: Tensor, shares: Tensor) -> Tensor:
        # The weights are no part of the gradient; a rival that is none has weight 0.
        weights = (self.temperature * scores.detach()).softmax(dim=1)
        others = (weights * softplus(self.margin + scores)).sum(dim=1)
        return softplus(-self.margin - positives) + others

    def constants(self, positives: Tensor, scores: Tensor) -> Tensor:
        return torch.logsumexp(self.temperature * scores, dim=1) + self.log_weight

    def rival(self, scores: Tensor, constants: Tensor) -> Tensor:
        hot = self.temperature * scores.detach()
        return (hot - torch.logaddexp(hot, constants)).exp() * softplus(self.margin + scores)


def loss_of(config: TrainConfig, num_entities: int, num_rivals: int) -> Loss:
    log_weight = math.log(num_entities / num_rivals)
    if config.loss == "softmax":
        return Softmax(log_weight, is_shared=config.train_type == "kvsall")
    if config.loss == "bce":
        return BinaryCrossEntropy(num_entities, is_sum=config.train_type != "negative-sampling")
    if config.loss == "margin":
        return Margin(num_entities, config.margin)
    return SelfAdversarial(log_weight, config.margin, config.adversarial_temperature)
