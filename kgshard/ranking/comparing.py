"""Candidates compared with true answers: in float32 where that is certain, else in float64.

A matrix product in float32 decides every candidate whose distance from the true score exceeds what rounding
can explain; the few others are scored again in float64, on the rows as they are stored.

Shape letters: Q true answers, U distinct queries, N candidates, E floats for each lifted candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kgshard.errors import NonFiniteError
from kgshard.models.link import LinkModel, Side
from kgshard.models.metric import DOT, Metric, is_beyond_float32
from kgshard.ranking.flags import count_true, find_true, no_flags

_SETTLED_NUMBERS = 1 << 18
"""Numbers of the pairs that are scored together in float64: a dead model leaves every candidate to it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Queries, the scores of true answers to them, and what float32 comparisons need of both."""

    queries: Tensor
    """float64[U, query width]."""
    lengths: Tensor
    """float64[U]: norms that bound rounding."""
    which: Tensor
    """int64[Q]: true answer i is one to query which[i]."""
    scores: Tensor
    """float64[Q]."""
    levels: Tensor
    """float64[Q]: the scores as comparison values, as `Metric.compare_all` gives them."""

    @staticmethod
    def of(metric: Metric, queries: Tensor, which: Tensor, scores: Tensor) -> Asked:
        levels = metric.comparison(scores) - metric.constant(queries)[which]
        return Asked(queries, metric.lengths(queries), which, scores, levels)

    def part(self, answers: slice, queries: slice) -> Asked:
        """Return some of the true answers, and the queries that they need."""
        return Asked(
            self.queries[queries],
            self.lengths[queries],
            self.which[answers] - queries.start,
            self.scores[answers],
            self.levels[answers],
        )


class CandidateBlock:
    """Some rows, lifted to what queries are compared with, and a bound on float32's error."""

    def __init__(self, model: LinkModel, side: Side, rows: Tensor, first_entity: int) -> None:
        """Lift rows [N, D], of any float dtype, of consecutive entities.

        Raises:
            NonFiniteError: A row is NaN or infinite; names it.
        """
        self.entities = range(first_entity, first_entity + len(rows))
        self._model, self._side, self._rows = model, side, rows
        self._metric = model.metric
        lifted = self._exact(rows) if model.lifts else rows
        lengths = torch.linalg.vector_norm(lifted, dim=1, dtype=torch.float64)
        finite = torch.isfinite(lengths)
        if not finite.all():
            row = int(finite.long().argmin())
            what = "makes a candidate that is" if torch.isfinite(rows[row]).all() else "is"
            raise NonFiniteError(f"entity {first_entity + row} {what} not finite")
        self._candidates = lifted.float()
        self._squares = lengths.square().float()
        self._longest = float(lengths.max())

    def _exact(self, rows: Tensor) -> Tensor:
        """Return float64[..., E]: rows as queries are compared with them."""
        return self._model.candidates(self._side, rows.double())

    def count(self, asked: Asked, excluded: tuple[Tensor, Tensor]) -> Tensor:
        """Return int64[2, Q]: candidates that score higher than the true answer, and the same.

        Args:
            asked: The true answers.
            excluded: Pairs (int64[M] true answer, int64[M] row of this block) that are no candidates.

        Raises:
            NonFiniteError: A score is NaN or infinite.
        """
        values, low, high = self._compare_with(asked)
        values[excluded] = torch.nan  # Neither higher, nor lower, nor the same.
        (num_answers, num_rows), device = values.shape, values.device
        is_higher, is_near = (no_flags(num_answers, num_rows, device) for _ in range(2))
        torch.gt(values, high, out=is_higher[:, :num_rows])
        torch.ge(values, low, out=is_near[:, :num_rows])
        is_near ^= is_higher
        higher = count_true(is_higher)
        counts = torch.stack([higher, torch.zeros_like(higher)])
        self._settle(counts, asked, *find_true(is_near))
        return counts

    def _compare_with(self, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
        """Return float32[Q, N] comparison values and float32[Q, 1] limits, between which they say nothing."""
        dim = self._candidates.shape[1]
        values = self._metric.compare_all(asked.queries.float(), self._candidates, self._squares)
        slack = self._metric.slack(dim, asked.lengths, self._longest)
        beyond = is_beyond_float32(dim, asked.lengths, self._longest)
        if beyond.any():
            values[beyond], slack[beyond] = 0, torch.inf
        slack = slack[asked.which]
        low, high = (asked.levels - slack).float()[:, None], (asked.levels + slack).float()[:, None]
        if len(values) < len(slack):  # Else every query has one true answer, and stands at its place.
            values = values.index_select(0, asked.which)
        return values, low, high

    def _settle(self, counts: Tensor, asked: Asked, answers: Tensor, rows: Tensor) -> None:
        """Add to `counts` the pairs (true answer, row) that float32 could not decide, scored in float64."""
        size = max(256, _SETTLED_NUMBERS // self._candidates.shape[1])
        for start in range(0, len(rows), size):
            a, e = answers[start : start + size], rows[start : start + size]
            queries, candidates = asked.queries[asked.which[a]], self._exact(self._rows[e])
            scores = self._metric.score_pairs(queries, candidates)
            finite = torch.isfinite(scores)
            if not finite.all():
                entity = self.entities[int(e[finite.long().argmin()])]
                raise NonFiniteError(f"entity {entity} as an answer has no finite score")
            difference = scores - asked.scores[a]
            slack = _tie_slack(self._metric, queries, candidates, asked.scores[a])
            counts[0].index_add_(0, a, (difference > slack).long())
            counts[1].index_add_(0, a, (difference.abs() <= slack).long())


def _tie_slack(metric: Metric, queries: Tensor, candidates: Tensor, scores: Tensor) -> Tensor:
    """Return float64[M]: equal rows may differ by this much in float64, unequal ones hardly ever do."""
    # A distance is rounded as what it is a distance of, however small it is itself: on a hyperplane, the far
    # larger candidate that was projected there.
    lengths, sizes = metric.lengths(queries), torch.linalg.vector_norm(candidates, dim=1)
    scale = lengths * sizes if metric is DOT else lengths + sizes - scores
    slack: Tensor = scale * (4 * queries.shape[1] * 2.0**-53)
    return slack
