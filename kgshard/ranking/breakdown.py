"""Figures of groups of queries: by relation, side, degree of the answer, and cardinality. No torch here.

A query is a triple and the side that is asked for; every grouping gives each of them one group.

    relation      the triple's relation
    side          the end that is asked for
    degree        how many train triples name the asked entity, the true answer: 0, 1-9, 10-99, ...
    cardinality   1-1, 1-N, N-1 or N-N: whether a relation's mean heads a (?, r, t), and then its mean tails a
                  (h, r, ?), are below 1.5 over train (Bordes et al., 2013, section 4.3)

Shape letters: Q queries, n triples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.data.dataset import Dataset, Triples
from kgshard.known import Ids, targets_of
from kgshard.models.link import SIDES, Side
from kgshard.ranking.metrics import TIES, Ranks, metric_intervals, ranking_metrics

MANY = 1.5
"""From so many answers on, in the mean, a question has "many"."""
CARDINALITIES = ("1-1", "1-N", "N-1", "N-N", "unseen in train")


@dataclass(frozen=True, slots=True)
class Queries:
    """Ranked queries: all that figures are made of."""

    triples: Triples
    """int[n, 3]: the ranked triples."""
    sides: tuple[Side, ...]
    """The ends that were asked for."""
    ranks: Ranks
    """Q = n * len(sides) of them: all triples' first side, then all triples' second side."""
    num_triples: int
    """Triples of the split: more than n where some were drawn, and figures are estimates."""

    @property
    def is_estimate(self) -> bool:
        return len(self.triples) < self.num_triples

    def of(self, side: Side, which: Ids) -> Ids:
        """Return those of some queries that ask for `side`."""
        if side not in self.sides:
            return np.empty(0, np.int64)
        mine: Ids = which[which // len(self.triples) == self.sides.index(side)]
        return mine

    def figures(self, which: Ids, ties: str) -> dict[str, Any]:
        """Return the metrics of some queries, together and by side.

        Returns:
            {"metrics": over all of them, "head": ..., "tail": ... (None where that end was not asked for),
            "ties": {rule: metrics, with "head" and "tail"}}, and for an estimate {"intervals": {"metrics",
            "head", "tail"}}: the ends of each metric's 95 % interval, or None for fewer than two triples.
        """
        parts = {"metrics": which} | {side: self.of(side, which) for side in SIDES}
        rules = {rule: {part: self._metrics(parts[part], rule) for part in parts} for rule in TIES}
        figures: dict[str, Any] = dict(rules[ties])
        figures["ties"] = {
            rule: {**(found["metrics"] or {}), **{side: found[side] for side in SIDES}}
            for rule, found in rules.items()
        }
        if self.is_estimate:
            figures["intervals"] = {part: self._intervals(queries, ties) for part, queries in parts.items()}
        return figures

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the ends of the 95 % interval of every metric over all queries, of realistic ranks."""
        found = self._intervals(np.arange(len(self.ranks)), "realistic")
        assert found is not None  # A sample has two triples or more.
        return found

    def _metrics(self, which: Ids, ties: str) -> dict[str, float] | None:
        return ranking_metrics(self.ranks.take(which), ties) if len(which) else None

    def _intervals(self, which: Ids, ties: str) -> dict[str, tuple[float, float]] | None:
        drawn = len(self.triples)
        triples = which % drawn
        if len(np.unique(triples)) < 2:
            return None
        return metric_intervals(
            self.ranks.take(which), ties, triples, num_drawn=drawn, num_triples=self.num_triples
        )


def break_down(queries: Queries, dataset: Dataset, by: str, ties: str) -> list[dict[str, Any]]:
    """Return the figures of every group that holds a query.

    Args:
        queries: The ranked queries.
        dataset: Where they are from.
        by: "relation" (groups come by falling number of triples), "side", "degree" or "cardinality".
        ties: See TIES.

    Returns:
        For every group {"label", "triples", "queries"}, the number of triples it holds a query of and the
        number of its queries, and what `Queries.figures` returns.
    """
    groups, labels = _GROUPINGS[by](queries, dataset)
    order = np.argsort(groups, kind="stable")
    found, starts = np.unique(groups[order], return_index=True)
    entries = []
    for group, which in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        num_triples = len(np.unique(which % len(queries.triples)))
        entry = {"label": labels[group], "triples": num_triples, "queries": len(which)}
        entries.append(entry | queries.figures(which, ties))
    if by == "relation":
        entries.sort(key=lambda entry: -entry["triples"])
    return entries


def _by_relation(queries: Queries, dataset: Dataset) -> tuple[Ids, Sequence[str]]:
    return np.tile(queries.triples[:, 1].astype(np.int64), len(queries.sides)), dataset.relations


def _by_side(queries: Queries, dataset: Dataset) -> tuple[Ids, Sequence[str]]:
    return np.repeat(np.arange(len(queries.sides)), len(queries.triples)), queries.sides


def _by_degree(queries: Queries, dataset: Dataset) -> tuple[Ids, Sequence[str]]:
    asked = np.concatenate([targets_of(side, queries.triples) for side in queries.sides])
    digits = num_digits(dataset.entities.degrees[asked])
    return digits, ["0", "1-9", *(f"{10**d:,}-{10 ** (d + 1) - 1:,}" for d in range(1, 19))]


def _by_cardinality(queries: Queries, dataset: Dataset) -> tuple[Ids, Sequence[str]]:
    classes = cardinalities(dataset.triples("train"), dataset.num_relations)
    return np.tile(classes[queries.triples[:, 1]], len(queries.sides)), CARDINALITIES


_GROUPINGS = {
    "relation": _by_relation,
    "side": _by_side,
    "degree": _by_degree,
    "cardinality": _by_cardinality,
}


def num_digits(numbers: npt.NDArray[np.int64]) -> Ids:
    """Return int64[...]: how many decimal digits each number >= 0 has; 0 has none."""
    powers = 10 ** np.arange(19, dtype=np.int64)
    return np.searchsorted(powers, numbers, side="right").astype(np.int64)


def cardinalities(train: Triples, num_relations: int) -> Ids:
    """Return int64[num_relations]: the position in CARDINALITIES of every relation.

    Args:
        train: int[N, 3], distinct.
        num_relations: Relations that train lacks are in a class of their own.
    """
    relations = train[:, 1].astype(np.int64)
    counts = np.bincount(relations, minlength=num_relations)
    many = []
    for end in (2, 0):  # heads of a (?, r, t), then tails of a (h, r, ?)
        questions = np.unique(train[:, end] * np.int64(num_relations) + relations) % num_relations
        num_questions = np.bincount(questions, minlength=num_relations)
        many.append(counts >= MANY * num_questions)
    return np.where(counts == 0, 4, 2 * many[0] + many[1])
