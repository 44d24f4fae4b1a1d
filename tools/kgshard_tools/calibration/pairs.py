"""Scores of true and of other answers to the questions that a split asks: what calibrations are fitted to.

Every distinct question (h, r, ?) or (?, r, t) of valid is asked of all entities but those that train answers
it with. Answers that valid holds are true; all others count as false, though some may be true and known to
nobody.

Of the many false answers a stratified sample is kept, each with the number that it stands for: all that score
high, which decide a fit, and a few of the others. Of a large table a random part of the entities answers.

Shape letters: B questions, M entities that may answer, E floats for each candidate, n pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.data.dataset import Triples
from kgshard.errors import DataError, NonFiniteError
from kgshard.known import KnownLinks, anchors_of
from kgshard.models.link import Side
from kgshard.seeds import generator
from kgshard.shards import Floats
from kgshard_tools.lifts import link_lift
from kgshard_tools.links import LinkSearch, Sources
from kgshard_tools.search import Ids, Scores
from kgshard_tools.stored import Stored

MIN_TRIPLES = 100
MAX_TRIPLES = 1 << 15
"""Of more triples so many are drawn."""
_MAX_ENTITIES = 1 << 14
_CANDIDATE_FLOATS = 1 << 25
_PRODUCTS = {"dot": 1 << 38, "l2": 1 << 38, "hyperplane": 1 << 37}
"""Products of two floats that all comparisons may take, some seconds."""
_OTHER_PRODUCTS = 1 << 33
_BLOCK_VALUES = 1 << 23
_PILOTS = 1024
"""Entities of which a question's threshold is found."""
_ABOVE = 4
"""Of the pilots so many score above it."""
_BELOW = 16
"""So many answers below the threshold stand for all of them."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Questions with an answer each."""

    relations: Ids
    """int64[n]: of the questions."""
    scores: Scores
    """float64[n]."""
    true: Flags
    """bool[n]: whether the split holds the answer."""
    weights: Scores
    """float64[n]: for how many answers each stands."""

    def __len__(self) -> int:
        return len(self.scores)

    @staticmethod
    def join(parts: list[Pairs]) -> Pairs:
        columns = ("relations", "scores", "true", "weights")
        return Pairs(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def collect(
    stored: Stored,
    side: Side,
    *,
    seed: int,
    split: str = "valid",
    known: tuple[str, ...] = ("train",),
) -> Pairs:
    """Score answers to the questions of a split about one side.

    Args:
        stored: The model.
        side: Which end is asked for.
        seed: Fixes what is drawn.
        split: Whose triples ask, and are true.
        known: Splits whose answers are left out.

    Raises:
        DataError: The split holds too few triples.
        NonFiniteError: A row or a query is NaN or infinite.
    """
    triples = stored.dataset.triples(split)
    if len(triples) < MIN_TRIPLES:
        raise DataError(
            f"{stored.run.folder}: probabilities are fitted to {split}, which holds {len(triples):,} "
            f"triples; at least {MIN_TRIPLES} are needed"
        )
    random = generator(seed, f"calibration {split} {side}")
    drawn = triples
    if len(triples) > MAX_TRIPLES:
        drawn = triples[np.sort(random.choice(len(triples), MAX_TRIPLES, replace=False))]
    questions = np.unique(np.stack([anchors_of(side, drawn), drawn[:, 1]], axis=1), axis=0).astype(np.int64)
    answers = _Answers(stored, side, triples, stored.dataset.known_triples(*known))
    candidates = _Candidates(stored, side, len(questions), random)
    size = max(1, _BLOCK_VALUES // len(candidates.rows))
    links = LinkSearch(stored, Sources(stored))
    blocks = (questions[start : start + size] for start in range(0, len(questions), size))
    return Pairs.join(
        [part for block in blocks for part in _pairs_of(block, links, side, answers, candidates)]
    )


class _Answers:
    """The answers that triples give to questions about one side."""

    def __init__(self, stored: Stored, side: Side, triples: Triples, known: Triples) -> None:
        num_relations = stored.dataset.num_relations
        self._true = KnownLinks(triples, side, num_relations=num_relations)
        self._known = KnownLinks(known, side, num_relations=num_relations)
        self._num_entities = stored.model.num_entities

    def of(self, questions: Ids) -> tuple[tuple[Ids, Ids], tuple[Ids, Ids]]:
        """Return the true answers to questions [B, 2] that are not known, and the known ones, as pairs."""
        known = self._known.answers(questions[:, 0], questions[:, 1])
        question, answer = self._true.answers(questions[:, 0], questions[:, 1])
        keys, known_keys = (q * self._num_entities + a for q, a in ((question, answer), known))
        keys = np.unique(keys)
        keys = keys[np.isin(keys, known_keys, invert=True)]
        return np.divmod(keys, self._num_entities), known


class _Candidates:
    """The entities that may answer: all, or a random part of a large table."""

    def __init__(self, stored: Stored, side: Side, num_questions: int, random: np.random.Generator) -> None:
        model, table = stored.model, stored.checkpoint.entities
        lift = link_lift(model, side)
        width = lift.width(model.dim)
        products = _PRODUCTS.get(model.metric.name, _OTHER_PRODUCTS)
        most = min(_MAX_ENTITIES, _CANDIDATE_FLOATS // width, products // (num_questions * width))
        self.rows: Ids = np.arange(model.num_entities)
        if len(self.rows) > max(most, _PILOTS):
            self.rows = np.sort(random.choice(self.rows, max(most, _PILOTS), replace=False))
        self.share = len(self.rows) / model.num_entities
        self.pilots = np.sort(random.permutation(len(self.rows))[:_PILOTS])
        self._model = model
        self._values: Floats = np.concatenate(
            [lift.rounded(table.gather(self.rows[start : start + 4096])) for start in self._starts()]
        )
        with np.errstate(over="ignore", invalid="ignore"):
            self._squares: Floats = np.einsum("me,me->m", self._values, self._values)
        finite = np.isfinite(self._squares)
        if not finite.all():
            name = stored.dataset.entities.row_name(int(self.rows[np.argmin(finite)]))
            raise NonFiniteError(f"{name} is not finite, or too large to be compared")

    def _starts(self) -> range:
        return range(0, len(self.rows), 4096)

    def scores(self, queries: Scores) -> Floats:
        """Return float32[B, M]."""
        metric = self._model.metric
        with np.errstate(over="ignore", invalid="ignore"):
            values = metric.compare_all(queries.astype(np.float32), self._values, self._squares)
        if metric.uses_squares:
            # The square of a tiny distance can come out above zero.
            values = np.minimum(values + metric.constant(queries)[:, None], 0)
        scores: Floats = np.asarray(metric.score(values) + self._model.offset, np.float32)
        return scores

    def hide(self, scores: Floats, pairs: tuple[Ids, Ids]) -> None:
        """Let pairs of a question and an entity be no answers."""
        asked, entities = pairs
        places = np.minimum(np.searchsorted(self.rows, entities), len(self.rows) - 1)
        here = self.rows[places] == entities
        scores[asked[here], places[here]] = -np.inf


def _pairs_of(
    questions: Ids, links: LinkSearch, side: Side, answers: _Answers, candidates: _Candidates
) -> Iterator[Pairs]:
    """Yield the true answers to questions [B, 2], and a sample of the false ones."""
    true, known = answers.of(questions)
    anchors, relations = questions[:, 0], questions[:, 1]
    queries = links.queries(side, anchors, relations)
    if not np.isfinite(queries).all():
        raise NonFiniteError("a query of valid is not finite")
    asked, entities = true
    found = links.scores(side, anchors[asked], relations[asked], entities)
    yield Pairs(relations[asked], found, np.ones(len(asked), bool), np.ones(len(asked)))
    scores = candidates.scores(queries)
    for pairs in (true, known):
        candidates.hide(scores, pairs)
    for which, values, weights in _false_answers(scores, candidates.pilots):
        yield Pairs(
            relations[which],
            values.astype(np.float64),
            np.zeros(len(which), bool),
            weights / candidates.share,
        )


def _false_answers(scores: Floats, pilots: Ids) -> Iterator[tuple[Ids, Floats, Scores]]:
    """Yield questions, scores and weights: all answers above each question's threshold, and some below.

    Args:
        scores: float32[B, M]; -inf is no answer.
        pilots: int64: places of entities drawn at random.
    """
    pilot = scores[:, pilots]
    above = min(_ABOVE, pilot.shape[1] - 1)
    thresholds = np.partition(pilot, pilot.shape[1] - 1 - above, axis=1)[:, -1 - above, None]
    hits = np.flatnonzero(scores > thresholds)
    which = hits // scores.shape[1]
    yield which, scores.reshape(-1)[hits], np.ones(len(hits))
    num_below = (scores > -np.inf).sum(axis=1) - np.bincount(which, minlength=len(scores))
    is_below = (pilot <= thresholds) & (pilot > -np.inf)
    is_below &= np.cumsum(is_below, axis=1) <= _BELOW
    which, place = np.nonzero(is_below)
    num_drawn = np.bincount(which, minlength=len(scores))
    yield which, pilot[which, place], num_below[which] / num_drawn[which]
