"""Losses on the scores of true candidates and of sampled negatives. All return sums over questions.

    softmax            cross-entropy, its denominator estimated from the sample
    self-adversarial   log-sigmoid, negatives weighted by how plausible they look (Sun et al., 2019)
    margin             pairwise hinge (Bordes et al., 2013)
    bce                binary cross-entropy, labels smoothed on request (Dettmers et al., 2018)

Losses over all entities are in kgshard.training.full_losses.

Shape letters: q questions, K negatives, M pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, relu

from kgshard.training.negatives import Negatives

LossName = Literal["softmax", "self-adversarial", "margin", "bce"]
LOSSES: tuple[LossName, ...] = ("softmax", "self-adversarial", "margin", "bce")


class SampledLoss(ABC):
    """A loss on true scores float[q] and negatives' scores float[q, K]."""

    @abstractmethod
    def __call__(self, positives: Tensor, scores: Tensor, negatives: Negatives) -> Tensor:
        """Return a scalar: the sum over questions.

        Args:
            positives: float[q] scores of the true candidates.
            scores: float[q, K] scores of the negatives.
            negatives: What these stand for, and which of them are none.
        """


class Softmax(SampledLoss):
    """Cross-entropy against an estimate of the sum over all candidates.

    Each negative stands for exp(log_weight) candidates, so that is added to its score, which makes the
    estimated denominator unbiased (Bengio and Senecal, 2008; Jean et al., 2015). A negative that is the
    question's own answer counts as nothing.
    """

    def __call__(self, positives: Tensor, scores: Tensor, negatives: Negatives) -> Tensor:
        weights = negatives.log_weights
        if isinstance(weights, Tensor):
            scores, weights = scores + weights, 0.0
        if negatives.allowed is not None:
            scores = scores.masked_fill(~negatives.allowed, -torch.inf)
        loss: Tensor = _SampledSoftmax.apply(positives, scores, *negatives.excluded, weights)
        return loss


class _SampledSoftmax(torch.autograd.Function):
    """The loss in as few passes over the q x K scores as torch allows: six, and one for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        positives: Tensor,
        negatives: Tensor,
        hit_questions: Tensor,
        hit_negatives: Tensor,
        correction: float,
    ) -> Tensor:
        weights = negatives.clone()
        # Before the maximum: a known answer may score so high that all others would vanish beside it.
        weights[hit_questions, hit_negatives] = -torch.inf
        top = torch.maximum(weights.amax(dim=1) + correction, positives)
        weights.sub_((top - correction)[:, None]).exp_()
        positive_weight = (positives - top).exp_()
        total = weights.sum(dim=1).add_(positive_weight)
        ctx.save_for_backward(weights, positive_weight, total)
        return (total.log() + (top - positives)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, positive_weight, total = ctx.saved_tensors
        scale = gradient / total
        return positive_weight * scale - gradient, weights * scale[:, None], None, None, None


@dataclass(frozen=True, slots=True)
class SelfAdversarial(SampledLoss):
    """-log sigmoid(margin + s) - sum_k p_k log sigmoid(-margin - s_k), p = softmax(temperature s_k)."""

    margin: float
    temperature: float

    def __call__(self, positives: Tensor, scores: Tensor, negatives: Negatives) -> Tensor:
        with torch.no_grad():
            # The weights are no part of the gradient.
            plausible = _masked(self.temperature * scores + negatives.log_weights, negatives)
            weights = plausible.softmax(dim=1).nan_to_num_(0.0)  # NaN where no negative is left.
        return (
            -logsigmoid(self.margin + positives).sum() - (weights * logsigmoid(-self.margin - scores)).sum()
        )


@dataclass(frozen=True, slots=True)
class Margin(SampledLoss):
    """Mean over negatives of max(0, margin - s + s_k)."""

    margin: float

    def __call__(self, positives: Tensor, scores: Tensor, negatives: Negatives) -> Tensor:
        return (_weights(scores, negatives) * relu(self.margin - positives[:, None] + scores)).sum()


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropy(SampledLoss):
    """The true candidate's term, and the mean over negatives of theirs.

    Labels y are smoothed to (1 - smoothing) y + smoothing / num_candidates.
    """

    smoothing: float
    num_candidates: int

    def __call__(self, positives: Tensor, scores: Tensor, negatives: Negatives) -> Tensor:
        low = self.smoothing / self.num_candidates
        true_labels = torch.full_like(positives, 1 - self.smoothing + low)
        terms = binary_cross_entropy_with_logits(scores, torch.full_like(scores, low), reduction="none")
        true_terms = binary_cross_entropy_with_logits(positives, true_labels, reduction="sum")
        return true_terms + (_weights(scores, negatives) * terms).sum()


def _masked(values: Tensor, negatives: Negatives) -> Tensor:
    """Return values [q, K] with -inf where a negative is none; may overwrite them."""
    if negatives.allowed is not None:
        values = values.masked_fill(~negatives.allowed, -torch.inf)
    values[negatives.excluded] = -torch.inf
    return values


@torch.no_grad()
def _weights(scores: Tensor, negatives: Negatives) -> Tensor:
    """Return float[q, K]: the share of all candidates that each negative stands for; rows sum to 1 or 0."""
    return (
        _masked(torch.zeros_like(scores) + negatives.log_weights, negatives).softmax(dim=1).nan_to_num_(0.0)
    )


def sampled_loss(
    name: LossName, *, margin: float, temperature: float, smoothing: float, num_candidates: int
) -> SampledLoss:
    """Return a loss by its name; each takes the settings that are its own."""
    if name == "softmax":
        return Softmax()
    if name == "self-adversarial":
        return SelfAdversarial(margin, temperature)
    if name == "margin":
        return Margin(margin)
    return BinaryCrossEntropy(smoothing, num_candidates)
