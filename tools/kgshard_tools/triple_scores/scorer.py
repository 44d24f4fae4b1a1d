"""Triples scored and ranked, by name: a block at a time, so memory does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kgshard.errors import DataError, UnknownEntityError, UnknownNameError, UnknownRelationError
from kgshard.models.link import SIDES, Side
from kgshard.vocabulary import Vocabulary
from kgshard_tools.batches import Entry
from kgshard_tools.calibration import Calibration, pooled
from kgshard_tools.known import NEW, KnownTriples
from kgshard_tools.links import LinkSearch, Sources
from kgshard_tools.search import Ids, Scores
from kgshard_tools.stored import Stored
from kgshard_tools.terminal import shown
from kgshard_tools.triple_scores.ranks import Placed, place

PARTS = ("head", "relation", "tail")
BLOCK_TRIPLES = 1024
"""Triples that are ranked together: a pass over the table serves them all."""
OnError = Literal["stop", "skip"]
_ERRORS_WITH_SUGGESTIONS = 20


@dataclass(frozen=True, slots=True)
class TripleScore:
    """One triple as the model sees it."""

    triple: dict[str, str]
    score: float
    """As `TrainedModel.score` gives it: asked for the tail."""
    scores: dict[Side, float]
    """By the side that is asked for; with reciprocal relations they differ."""
    rank: dict[Side, float]
    """Among all entities but known answers; of equal scores half count as better."""
    candidates: dict[Side, int]
    """How many entities it is ranked among, itself counted."""
    known: bool
    split: str | None
    """The first split that holds it."""
    probability: float | None = None
    """Calibrated, where that was asked for."""
    approximate: bool = False
    """Whether the head or the tail was folded in."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; "probability" is there only where it was asked for, "approximate" if true."""
        whole = {name: getattr(self, name) for name in self.__slots__}
        if self.probability is None:
            del whole["probability"]
        if not self.approximate:
            del whole["approximate"]
        return whole

    def line(self) -> str:
        """Return a line of a table: score, ranks, probability, whether it is known, the triple."""
        ranks = "  ".join(f"{self.rank[side]:10,.1f}" for side in SIDES)
        probability = "" if self.probability is None else f"  {self.probability:11.4f}"
        known = f"known ({self.split})" if self.known else "-"
        names = "  ".join(shown(self.triple[part]) for part in PARTS)
        folded = "  (folded in)" if self.approximate else ""
        return f"{self.score:10.4f}  {ranks}{probability}  {known:<13}  {names}{folded}"


def header(*, calibrated: bool) -> str:
    """Return the head of the table that `TripleScore.line` makes lines of."""
    probability = "  probability" if calibrated else ""
    return f"{'score':>10}  {'head rank':>10}  {'tail rank':>10}{probability}  {'known':<13}  triple"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one triple of a batch."""

    entry: Entry
    score: TripleScore | None
    """None: it could not be scored."""
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        if self.score is not None:
            return self.score.to_dict()
        return {"triple": self.entry.given, "error": self.error, "line": self.entry.number}


class TripleScorer:
    """The model of a checkpoint, asked about whole triples."""

    def __init__(self, stored: Stored, calibration: Calibration | None = None) -> None:
        """Open; with `calibration` of both sides every triple gets a probability, too."""
        self._stored = stored
        self._links = LinkSearch(stored, Sources(stored))
        self._known = KnownTriples(stored.dataset)
        self.calibration = calibration

    def score(self, names: Sequence[dict[str, str]]) -> list[TripleScore]:
        """Score triples, each given by its head, relation and tail.

        Raises:
            DataError: One lacks a part.
            UnknownNameError: There is no such entity or relation.
            NonFiniteError: A row or a score is NaN or infinite.
        """
        if not names:
            return []
        triples = np.array([self.ids(given) for given in names], np.int64)
        placed = {side: place(self._stored, self._links, self._known, side, triples) for side in SIDES}
        splits = self._splits(triples).tolist()
        probabilities: Sequence[float | None] = [None] * len(names)
        if self.calibration is not None:
            probabilities = self._probabilities(self.calibration, triples[:, 1], placed).tolist()
        is_folded = triples[:, [0, 2]].max(axis=1) >= self._stored.num_trained
        ranks = {side: found.ranks.under() for side, found in placed.items()}
        return [
            TripleScore(
                given,
                float(placed["tail"].scores[number]),
                {side: float(found.scores[number]) for side, found in placed.items()},
                {side: float(ranks[side][number]) for side in SIDES},
                {side: int(found.ranks.candidates[number]) for side, found in placed.items()},
                splits[number] != NEW,
                self._known.split_name(splits[number]),
                probabilities[number],
                bool(is_folded[number]),
            )
            for number, given in enumerate(names)
        ]

    def ids(self, given: dict[str, str], *, suggest: bool = True) -> list[int]:
        """Return the row ids of a triple's head, relation and tail.

        Raises:
            DataError, UnknownNameError: See `score`. Without `suggest` no near names are looked for.
        """
        lacking = [part for part in PARTS if part not in given]
        if lacking:
            raise DataError(f"a triple gives head, relation and tail; this one lacks {', '.join(lacking)}")
        dataset = self._stored.dataset
        vocabularies = dataset.entities, dataset.relations, dataset.entities
        return [
            _id_of(labels, given[part], suggest=suggest)
            for labels, part in zip(vocabularies, PARTS, strict=True)
        ]

    def _splits(self, triples: Ids) -> Ids:
        """Return int64[n]: the first split, numbered as in SPLITS, that holds a triple; or NEW."""
        questions, which = np.unique(triples[:, :2], axis=0, return_inverse=True)
        which = which.reshape(-1)
        known = self._known.answers("tail", questions[:, 0], questions[:, 1])
        order = np.argsort(which, kind="stable")
        within = np.arange(len(order)) - np.searchsorted(which[order], which[order])
        tails = np.full((len(questions), int(within.max()) + 1), -1, np.int64)
        tails[which[order], within] = triples[order, 2]
        splits = np.empty(len(triples), np.int64)
        splits[order] = known.splits_of(tails)[which[order], within]
        return splits

    def _probabilities(self, calibration: Calibration, relations: Ids, placed: dict[Side, Placed]) -> Scores:
        return pooled(
            [calibration.probabilities(found.scores, relations, side) for side, found in placed.items()]
        )


def _id_of(labels: Vocabulary, name: str, *, suggest: bool) -> int:
    # What begins with # may be a row; to find near names takes far longer than to find none.
    if not suggest and not name.startswith("#") and name not in labels:
        raise (UnknownRelationError if labels.kind == "relation" else UnknownEntityError)(name)
    return labels.id_of(name)


class TripleBatch:
    """Blocks of triples, scored one after the other."""

    def __init__(
        self, scorer: TripleScorer, blocks: Iterable[list[Entry]], *, on_error: OnError = "stop"
    ) -> None:
        """Nothing is read before `outcomes` is iterated.

        Args:
            scorer: Who is asked.
            blocks: Of triples, BLOCK_TRIPLES at most.
            on_error: "stop" at the first triple that cannot be scored, or "skip" it.
        """
        self._scorer = scorer
        self._blocks = blocks
        self._on_error = on_error
        self.triples = 0
        self.failed = 0
        self.first_error = ""

    def outcomes(self) -> Iterator[list[Outcome]]:
        """Yield what became of each block's triples, in their order.

        Raises:
            DataError: A triple is at fault, and "stop" was chosen: those before it were yielded. Or "skip"
                was, and none at all could be scored.
        """
        for entries in self._blocks:
            errors = self._errors(entries)
            good = entries[: min(errors)] if errors and self._on_error == "stop" else entries
            block = self._scored(good, errors)
            if block:
                self.triples += len(block)
                yield block
            if len(good) < len(entries):
                raise DataError(self.first_error)
        if self.failed and self.failed == self.triples:
            raise DataError(f"no triple could be scored; the first: {self.first_error}")

    def _errors(self, entries: Sequence[Entry]) -> dict[int, str]:
        """Return what is wrong with triples, by place; with "stop", only with the first."""
        errors: dict[int, str] = {}
        for number, entry in enumerate(entries):
            error = entry.error or self._fault(entry)
            if error:
                errors[number] = error
                self.first_error = self.first_error or (f"{entry.where}: {error}" if entry.where else error)
                self.failed += 1
                if self._on_error == "stop":
                    break
        return errors

    def _fault(self, entry: Entry) -> str:
        try:
            self._scorer.ids(entry.given, suggest=self.failed < _ERRORS_WITH_SUGGESTIONS)
        except (DataError, UnknownNameError) as error:
            return str(error)
        return ""

    def _scored(self, entries: Sequence[Entry], errors: dict[int, str]) -> list[Outcome]:
        good = [entry.given for number, entry in enumerate(entries) if number not in errors]
        scores = iter(self._scorer.score(good))
        return [
            Outcome(entry, None, errors[number]) if number in errors else Outcome(entry, next(scores))
            for number, entry in enumerate(entries)
        ]

    def lines(self) -> list[str]:
        """Say how many triples could not be scored, if any, and why the first could not."""
        if not self.failed:
            return []
        return [f"{self.failed:,} of {self.triples:,} triples failed; the first: {self.first_error}"]
