"""Ranks of triples among all entities, straight from the shards. No torch here.

They are those of `kgshard evaluate` (kgshard.ranking): a float32 product decides every candidate whose
distance from the true score exceeds what rounding can explain; the few others are scored again in float64, on
the rows as they are stored. Triples that ask the same share one query.

Shape letters: Q triples, U distinct questions, N candidates, E floats for each lifted candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.data.dataset import Triples
from kgshard.errors import NonFiniteError
from kgshard.models.link import Side
from kgshard.models.metric import DOT, Metric, is_beyond_float32
from kgshard.ranking.excluded import Questions, question_order
from kgshard.ranking.metrics import Ranks
from kgshard.shards import Floats
from kgshard_tools.known import KnownTriples
from kgshard_tools.lifts import link_lift
from kgshard_tools.links import LinkSearch
from kgshard_tools.search import Exclusions, Ids, Scores
from kgshard_tools.stored import Stored

_BLOCK_FLOATS = 1 << 21
_BLOCK_VALUES = 1 << 23
_SETTLED_FLOATS = 1 << 20

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Placed:
    """How one side of some triples scores, and stands among its candidates."""

    scores: Scores
    """float64[Q], as the model has them."""
    ranks: Ranks


def place(stored: Stored, links: LinkSearch, known: KnownTriples, side: Side, triples: Triples) -> Placed:
    """Score and rank the `side` of triples [Q, 3]; other known triples are no candidates.

    Raises:
        NonFiniteError: A row, a query or a score is NaN or infinite.
    """
    order = question_order(side, triples)
    questions = Questions.of(side, triples[order])
    excluded = known.answers(side, questions.anchors, questions.relations).everywhere()
    asked = _ask(stored, links, side, questions)
    counts = _count(stored, side, asked, questions, excluded)
    is_known = _held(excluded, questions, stored.model.num_entities)
    candidates = stored.model.num_entities - excluded.counts[questions.asked] + is_known
    back = np.argsort(order)
    return Placed(
        (asked.scores + stored.model.offset)[back], Ranks(counts[0], counts[1], candidates).take(back)
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """Queries, the scores of true answers to them, and what float32 comparisons need of both."""

    queries: Scores
    """float64[U, query width]."""
    narrow: Floats
    """float32[U, query width]."""
    lengths: Scores
    """float64[U]: norms that bound rounding."""
    which: Ids
    """int64[Q]: true answer i is one to query which[i]."""
    scores: Scores
    """float64[Q], without the model's offset."""
    levels: Scores
    """float64[Q]: the scores as comparison values, as `Metric.compare_all` gives them."""


def _ask(stored: Stored, links: LinkSearch, side: Side, questions: Questions) -> _Asked:
    metric, which = stored.model.metric, questions.asked
    queries = links.queries(side, questions.anchors, questions.relations)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = metric.lengths(queries)
        rows = stored.checkpoint.entities.gather(questions.targets).astype(np.float64)
        scores = metric.score_pairs(queries[which], link_lift(stored.model, side)(rows))
        levels = metric.comparison(scores) - metric.constant(queries)[which]
        narrow = queries.astype(np.float32)
    finite = (np.isfinite(queries).all(axis=1) & np.isfinite(lengths))[which] & np.isfinite(scores)
    if not finite.all():
        first = int(np.argmin(finite))
        entities, relations = stored.dataset.entities, stored.dataset.relations
        answer, question = entities[int(questions.targets[first])], which[first]
        anchor, relation = (
            entities[int(questions.anchors[question])],
            relations[int(questions.relations[question])],
        )
        raise NonFiniteError(f"{answer!r} as {side} of {anchor!r} and {relation!r} has no finite score")
    return _Asked(queries, narrow, lengths, which, scores, levels)


def _held(excluded: Exclusions, questions: Questions, num_entities: int) -> Flags:
    """Return bool[Q]: whether a true answer is known."""
    held = np.zeros(len(questions.targets), bool)
    for question, part in _runs(questions.asked):
        held[part] = np.isin(questions.targets[part], excluded.of(question), assume_unique=False)
    return held


def _runs(asked: Ids) -> list[tuple[int, slice]]:
    """Return every question with its triples."""
    starts = np.flatnonzero(np.diff(asked, prepend=-1)).tolist()
    stops = [*starts[1:], len(asked)]
    return [
        (number, slice(start, stop)) for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def _count(stored: Stored, side: Side, asked: _Asked, questions: Questions, excluded: Exclusions) -> Ids:
    """Return int64[2, Q]: candidates that score higher than the true answer, and the same."""
    counts = np.zeros((2, len(questions.targets)), np.int64)
    table = stored.checkpoint.entities
    size = max(1, min(_BLOCK_FLOATS // table.dim, _BLOCK_VALUES // max(1, len(questions.targets))))
    for block, rows in table.blocks(size=size):
        candidates = _Candidates(stored, side, rows, block)
        candidates.count(counts, asked, questions.targets, excluded)
    return counts


class _Candidates:
    """Some rows, lifted to what queries are compared with, and a bound on float32's error."""

    def __init__(self, stored: Stored, side: Side, rows: Floats, block: range) -> None:
        self._block, self._rows, self._stored = block, rows, stored
        self._metric = stored.model.metric
        self._lift = link_lift(stored.model, side)
        with np.errstate(over="ignore", invalid="ignore"):
            lifted = self._lift(rows.astype(np.float64))
            self._values: Floats = lifted.astype(np.float32)
            squares = np.einsum("ne,ne->n", lifted, lifted)
            self._squares = squares.astype(np.float32)
        finite = np.isfinite(squares)
        if not finite.all():
            raise NonFiniteError(f"{self._name(int(np.argmin(finite)))} is not finite")
        self._longest = float(squares.max()) ** 0.5

    def _name(self, row: int) -> str:
        return self._stored.dataset.entities.row_name(self._block.start + row)

    def count(self, counts: Ids, asked: _Asked, targets: Ids, excluded: Exclusions) -> None:
        """Add to int64[2, Q] the candidates here that score higher than true answers, and the same."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = self._metric.compare_all(asked.narrow, self._values, self._squares)
        width = self._values.shape[1]
        slack = self._metric.slack(width, asked.lengths, self._longest)
        beyond = is_beyond_float32(width, asked.lengths, self._longest)
        values[beyond], slack[beyond] = 0, np.inf
        values[excluded.within(self._block, np.arange(len(asked.queries)))] = np.nan
        if len(values) < len(targets):
            values = values[asked.which]
        mine = np.flatnonzero((targets >= self._block.start) & (targets < self._block.stop))
        values[mine, targets[mine] - self._block.start] = np.nan
        slack = slack[asked.which]
        low, high = (
            level.astype(np.float32)[:, None] for level in (asked.levels - slack, asked.levels + slack)
        )
        is_higher = values > high  # NaN is neither higher, nor lower, nor the same.
        counts[0] += np.count_nonzero(is_higher, axis=1)
        near = np.flatnonzero((values >= low) & ~is_higher)
        self._settle(counts, asked, *np.divmod(near, values.shape[1]))

    def _settle(self, counts: Ids, asked: _Asked, answers: Ids, rows: Ids) -> None:
        """Add the pairs (true answer, row) that float32 could not decide, scored in float64."""
        size = max(1, _SETTLED_FLOATS // self._values.shape[1])
        for start in range(0, len(rows), size):
            some, where = answers[start : start + size], rows[start : start + size]
            queries = asked.queries[asked.which[some]]
            candidates = self._lift(self._rows[where].astype(np.float64))
            scores = self._metric.score_pairs(queries, candidates)
            if not np.isfinite(scores).all():
                bad = int(where[np.argmin(np.isfinite(scores))])
                raise NonFiniteError(f"{self._name(bad)} as an answer has no finite score")
            difference = scores - asked.scores[some]
            slack = _tie_slack(self._metric, queries, candidates, asked.scores[some])
            counts[0] += np.bincount(some[difference > slack], minlength=counts.shape[1])
            counts[1] += np.bincount(some[abs(difference) <= slack], minlength=counts.shape[1])


def _tie_slack(metric: Metric, queries: Scores, candidates: Scores, scores: Scores) -> Scores:
    """Return float64[M]: equal rows may differ by this much in float64; see kgshard.ranking.comparing."""
    lengths, sizes = metric.lengths(queries), np.linalg.vector_norm(candidates, axis=1)
    scale = lengths * sizes if metric is DOT else lengths + sizes - scores
    slack: Scores = scale * (4 * queries.shape[1] * 2.0**-53)
    return slack
