"""Logistic regressions of outcomes on one number, one for each group, drawn towards what groups share.

log odds = slope * x + intercept (Platt, 1999), with slope >= 0. Slopes and intercepts of the groups are drawn
from a normal distribution each, whose mean and variance are found with them (expectation maximisation with
Laplace's approximation): a group with few outcomes is like the others, one with many is itself. What Platt's
smoothed targets are for, that no fit is certain, the distribution does.

Shape letters: n pairs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard_tools.search import Ids, Scores

_ROUNDS = 40
_STEPS = 30
_HALVINGS = 30
_BINS_PER_UNIT = 16
_LEAST_VARIANCE = 1e-6


def log_odds(probabilities: Scores) -> Scores:
    """Return log(p / (1 - p))."""
    odds: Scores = np.log(probabilities) - np.log1p(-probabilities)
    return odds


def probability(odds: Scores) -> Scores:
    """Return 1 / (1 + exp(-odds)), without overflow."""
    small = np.exp(-abs(odds))
    found: Scores = np.where(odds >= 0, 1, small) / (1 + small)
    return found


@dataclass(frozen=True, slots=True)
class Points:
    """What is regressed: numbers with outcomes, by group."""

    groups: Ids
    """int64[n], from 0 to G - 1."""
    values: Scores
    """float64[n]: x."""
    outcomes: Scores
    """float64[n], in [0, 1]."""
    weights: Scores
    """float64[n]: how often each occurred."""
    num_groups: int

    def sums(self, terms: Scores) -> Scores:
        """Return float64[G] sums of float64[n] terms."""
        summed: Scores = np.bincount(self.groups, terms, self.num_groups).astype(np.float64)
        return summed

    def binned(self) -> Points:
        """Return fewer points, each the mean of those of one group and outcome that lie within 1/16."""
        places = np.floor(self.values * _BINS_PER_UNIT).astype(np.int64)
        outcomes, outcome = np.unique(self.outcomes, return_inverse=True)
        places -= places.min(initial=0)
        keys = (self.groups * (places.max(initial=0) + 1) + places) * len(outcomes) + outcome
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        weights = np.bincount(which, self.weights).astype(np.float64)
        means = np.bincount(which, self.weights * self.values) / weights
        return Points(self.groups[first], means, self.outcomes[first], weights, self.num_groups)


@dataclass(frozen=True, slots=True)
class Normals:
    """The distributions that slopes and intercepts are drawn from."""

    means: Scores
    """float64[2]."""
    variances: Scores
    """float64[2]."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Slope and intercept of every group."""

    slopes: Scores
    """float64[G], >= 0."""
    intercepts: Scores
    """float64[G]."""

    def at(self, groups: Ids, values: Scores) -> Scores:
        """Return float64[n] log odds."""
        odds: Scores = self.slopes[groups] * values + self.intercepts[groups]
        return odds


def fit_lines(points: Points) -> tuple[Lines, Normals]:
    """Regress every group, and find what they share; a group without a true outcome gets the mean line."""
    points = points.binned()
    has_true = points.sums(points.weights * points.outcomes) > 0
    normals = Normals(np.array([1.0, 0.0]), np.array([0.25, 1.0]))
    lines = _mean_lines(normals, points.num_groups)
    for _ in range(_ROUNDS if has_true.any() else 0):
        lines = fit_given(points, normals, lines)
        spread = _variances(points, normals, lines)[:, has_true]
        fitted = np.stack([lines.slopes, lines.intercepts])[:, has_true]
        means = fitted.mean(axis=1)
        variances = ((fitted - means[:, None]) ** 2 + spread).mean(axis=1)
        variances = np.maximum(variances, _LEAST_VARIANCE)
        has_settled = np.allclose(variances, normals.variances, rtol=0.02) and np.allclose(
            means, normals.means, atol=0.01
        )
        normals = Normals(means, variances)
        if has_settled:
            break
    lines = fit_given(points, normals, lines)
    mean = _mean_lines(normals, points.num_groups)
    slopes = np.where(has_true, lines.slopes, mean.slopes)
    return Lines(slopes, np.where(has_true, lines.intercepts, mean.intercepts)), normals


def _mean_lines(normals: Normals, num_groups: int) -> Lines:
    slope, intercept = normals.means.tolist()
    return Lines(np.full(num_groups, max(slope, 0.0)), np.full(num_groups, intercept))


def fit_given(points: Points, normals: Normals, start: Lines) -> Lines:
    """Return the most probable line of every group, given the distribution of lines, by Newton's method.

    Steps that make a group worse are halved; slopes below 0 are held at 0.
    """
    lines, costs = start, _costs(points, normals, start)
    for _ in range(_STEPS):
        step = _newton_step(points, normals, lines)
        new, new_costs = lines, costs
        for halving in range(_HALVINGS):
            new = Lines(np.maximum(lines.slopes - step.slopes, 0), lines.intercepts - step.intercepts)
            new_costs = _costs(points, normals, new)
            worse = new_costs > costs + 1e-12 * abs(costs)
            if not worse.any():
                break
            factor = np.where(worse, 0.5 if halving < _HALVINGS - 1 else 0.0, 1.0)
            step = Lines(step.slopes * factor, step.intercepts * factor)
        moved = max(
            float(abs(new.slopes - lines.slopes).max()), float(abs(new.intercepts - lines.intercepts).max())
        )
        lines, costs = new, new_costs
        if moved < 1e-9:
            break
    return lines


def _costs(points: Points, normals: Normals, lines: Lines) -> Scores:
    """Return float64[G]: minus the log of the posterior density, but for a constant."""
    odds = lines.at(points.groups, points.values)
    losses = np.logaddexp(0, odds) - points.outcomes * odds
    costs: Scores = points.sums(points.weights * losses)
    for found, mean, variance in zip(
        (lines.slopes, lines.intercepts), normals.means, normals.variances, strict=True
    ):
        costs = costs + (found - mean) ** 2 / (2 * variance)
    return costs


def _newton_step(points: Points, normals: Normals, lines: Lines) -> Lines:
    """Return what to take off the lines."""
    slope_gradient, intercept_gradient = gradients(points, normals, lines)
    ss, si, ii = _hessians(points, normals, lines)
    determinant = ss * ii - si * si
    slopes = (ii * slope_gradient - si * intercept_gradient) / determinant
    intercepts = (ss * intercept_gradient - si * slope_gradient) / determinant
    is_held = (lines.slopes <= 0) & (slope_gradient > 0)
    return Lines(np.where(is_held, 0, slopes), np.where(is_held, intercept_gradient / ii, intercepts))


def gradients(points: Points, normals: Normals, lines: Lines) -> tuple[Scores, Scores]:
    """Return float64[G] twice: how the cost of a group changes with its slope, and with its intercept."""
    residuals = points.weights * (probability(lines.at(points.groups, points.values)) - points.outcomes)
    (slope, intercept), (slope_variance, intercept_variance) = normals.means, normals.variances
    return (
        points.sums(residuals * points.values) + (lines.slopes - slope) / slope_variance,
        points.sums(residuals) + (lines.intercepts - intercept) / intercept_variance,
    )


def _hessians(points: Points, normals: Normals, lines: Lines) -> tuple[Scores, Scores, Scores]:
    """Return float64[G] three times: second derivatives by slope, by both, and by intercept."""
    chance = probability(lines.at(points.groups, points.values))
    curvature = points.weights * chance * (1 - chance)
    tilted = curvature * points.values
    slope_variance, intercept_variance = normals.variances
    return (
        points.sums(tilted * points.values) + 1 / slope_variance,
        points.sums(tilted),
        points.sums(curvature) + 1 / intercept_variance,
    )


def _variances(points: Points, normals: Normals, lines: Lines) -> npt.NDArray[np.float64]:
    """Return float64[2, G]: how uncertain slopes and intercepts are (Laplace's approximation)."""
    ss, si, ii = _hessians(points, normals, lines)
    return np.stack([ii, ss]) / (ss * ii - si * si)
