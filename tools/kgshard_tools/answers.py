"""A trained run, asked by name: vectors, neighbours, missing tails, heads and relations. No torch here."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np

from kgshard.api import evaluate
from kgshard.errors import ConfigError
from kgshard.files import AnyPath
from kgshard.models.link import SIDES, Side
from kgshard.models.metric import METRICS
from kgshard.shards import Floats
from kgshard.vocabulary import Vocabulary
from kgshard_tools.index import neighbor_contents
from kgshard_tools.known import KnownTriples
from kgshard_tools.labels.found import open_labels
from kgshard_tools.labels.matching import LabelMatch, LabelSource
from kgshard_tools.lifts import unit_rows
from kgshard_tools.links import LinkSearch, Sources
from kgshard_tools.questions import Question, Wanted
from kgshard_tools.results import Answer, Answers, Evaluation
from kgshard_tools.search import CandidateSource, Exclusions, Found, Ids, Scan, Scores, search
from kgshard_tools.stored import open_stored

Similarity = Literal["cosine", "dot", "l2", "l1"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot", "l2", "l1")
LabelKind = Literal["entity", "relation", "both"]
MAX_K = 1_000_000
_MANY_LABELS = 1000
"""To look up more it is worth to have all labels in memory."""
_TEN_NEW = Wanted()


class TrainedModel:
    """What a run learned, with the labels of its graph. Tables stay on disk, memory-mapped."""

    def __init__(
        self, run: AnyPath, overlay: AnyPath | None = None, *, foreign_index: AnyPath | None = None
    ) -> None:
        """Open a run's best or newest checkpoint, or one of its checkpoint folders; see `load`."""
        self._stored = open_stored(run)
        self.num_trained = self._stored.num_trained
        """Entities of the run: those from this id on were folded in."""
        if overlay is not None:
            from kgshard_tools.overlay import extend

            self._stored = extend(self._stored, overlay)
        self.link_model = self._stored.model
        self._table = self._stored.checkpoint.entities
        self._known = KnownTriples(self._stored.dataset)
        if overlay is not None and foreign_index is not None:
            raise ConfigError("a foreign index holds no rows of an overlay; give one of the two")
        self._sources = Sources(self._stored, None if foreign_index is None else Path(foreign_index))
        self._scans: dict[str, Scan] = {}
        self.links = LinkSearch(self._stored, self._sources)
        """The same questions by row ids, thousands at a time."""

    @cached_property
    def entities(self) -> Vocabulary:
        """The entities' labels; `entities.search(text)` finds them by a part."""
        labels = self._stored.dataset.entities
        labels.finder = self.search
        return labels

    def search(self, text: str, limit: int = 10, kind: LabelKind = "entity") -> list[LabelMatch]:
        """Return labels that are `text`, begin with it, hold its words, or are nearly it.

        With `labels.sqlite` (`kgshard index`) that takes milliseconds, else a pass over all labels. Entities
        of an overlay are not among them.
        """
        return self._labels.search(text, limit, kind)

    @cached_property
    def _labels(self) -> LabelSource:
        return open_labels(self._stored.run)

    @property
    def relations(self) -> Vocabulary:
        return self._stored.dataset.relations

    def __repr__(self) -> str:
        model = self.link_model
        num_folded = len(self) - self.num_trained
        folded = f" ({num_folded:,} folded in)" if num_folded else ""
        return (
            f"TrainedModel({model.name}, dim={model.dim}, {model.num_entities:,} entities{folded}, "
            f"{model.num_relations:,} relations, step {self._stored.checkpoint.step})"
        )

    def __getitem__(self, name: str) -> Floats:
        """Return float32[dim]: the vector of an entity.

        Raises:
            UnknownNameError: There is no such entity; similar names are suggested.
        """
        vector: Floats = self.vectors([name])[0]
        return vector

    def __contains__(self, name: object) -> bool:
        return name in self.entities

    def __iter__(self) -> Iterator[str]:
        return iter(self.entities)

    def __fspath__(self) -> str:
        """Return the run's folder, so that functions which take a run take this too.

        Raises:
            ConfigError: There is an overlay, which they would pass over.
        """
        self._refuse_overlay("only what load(RUN) opens stands for RUN")
        return str(self._stored.run.folder)

    def __len__(self) -> int:
        return self.link_model.num_entities

    def vectors(self, names: Iterable[str]) -> Floats:
        """Return float32[n, dim]: the vectors of entities, in the order asked."""
        if isinstance(names, str):
            raise TypeError(f"vectors takes several names; for one use model[{names!r}]")
        return self._table.gather(self.entities.ids_of(names))

    def to_numpy(self) -> tuple[Floats, Floats]:
        """Return the entity matrix float32[num_entities, dim] and the relation matrix
        float32[num_relations, relation_dim], as get_embeddings does. Loads both; `export` does not.
        """
        relations = self._stored.checkpoint.relations.read(range(self.link_model.num_relations))
        return np.array(self._table.read(range(len(self)))), np.array(relations)

    def most_similar(
        self, name: str, k: int = 10, *, metric: Similarity = "cosine", exact: bool = False
    ) -> Answers:
        """Return the k entities most like `name`, itself apart.

        Args:
            name: An entity.
            k: How many; fewer come back where there are no more.
            metric: cosine (in [-1, 1]; with a row of zeros it is 0), dot, l2 or l1 (negative distances).
            exact: Look at every row, also where an approximate index was built.
        """
        return self.most_similar_many([name], k, metric=metric, exact=exact)[0]

    def most_similar_many(
        self, names: Sequence[str], k: int = 10, *, metric: Similarity = "cosine", exact: bool = False
    ) -> list[Answers]:
        """Return the answers of `most_similar` for several entities, found together."""
        k = _checked(k)
        if metric not in SIMILARITIES:
            raise ConfigError(f"--metric: unknown value {metric!r} (known: {', '.join(SIMILARITIES)})")
        entities = self.entities.ids_of(names)
        queries = self._table.gather(entities).astype(np.float64)
        if metric == "cosine":
            queries = unit_rows(queries)
        itself = Exclusions(np.arange(len(names)), entities, num_queries=len(names), num_rows=len(self))
        source = self._similarity_source(metric, exact=exact)
        found = search(source, queries, k, itself)
        scores = np.clip(found.scores, -1.0, 1.0) if metric == "cosine" else found.scores
        names, labels = _labels(self.entities, entities), _labels_of_each(self.entities, found)
        return [
            _answers(
                {
                    "entity": name,
                    "id": entity,
                    "metric": metric,
                    "k": k,
                    **_how(source, found, number),
                    **self._approximate(entity),
                },
                labels[number],
                found.ids[number],
                scores[number],
                folded=self._folded(found.ids[number]),
            )
            for number, (name, entity) in enumerate(zip(names, entities.tolist(), strict=True))
        ]

    def predict_tails(
        self,
        head: str,
        relation: str,
        k: int = 10,
        *,
        known: bool = False,
        candidates: Sequence[str] | Literal["seen"] | None = None,
        min_score: float | None = None,
        exact: bool = False,
    ) -> Answers:
        """Return the k best tails of (head, relation, ?).

        Args:
            head: An entity.
            relation: A relation.
            k: How many; fewer come back where there are no more.
            known: Also return tails of triples that train, valid, test or the overlay hold.
            candidates: The only entities that may answer; "seen": the relation's tails in train.
            min_score: Leave out what scores lower.
            exact: Look at every row, also where an approximate index was built.
        """
        wanted = Wanted(k, known, candidates, min_score, exact)
        return self.predict([Question(head=head, relation=relation)], wanted)[0]

    def predict_heads(
        self,
        relation: str,
        tail: str,
        k: int = 10,
        *,
        known: bool = False,
        candidates: Sequence[str] | Literal["seen"] | None = None,
        min_score: float | None = None,
        exact: bool = False,
    ) -> Answers:
        """Return the k best heads of (?, relation, tail); see `predict_tails`."""
        wanted = Wanted(k, known, candidates, min_score, exact)
        return self.predict([Question(relation=relation, tail=tail)], wanted)[0]

    def predict_relations(
        self, head: str, tail: str, k: int = 10, *, known: bool = False, min_score: float | None = None
    ) -> Answers:
        """Return the k best relations of (head, ?, tail), scored as when the tail is asked for."""
        return self.predict([Question(head=head, tail=tail)], Wanted(k, known, None, min_score))[0]

    def predict(self, questions: Sequence[Question], wanted: Wanted = _TEN_NEW) -> list[Answers]:
        """Answer questions of any kind, those of a kind together; in their order.

        Raises:
            UnknownNameError: A name is of no entity or relation.
            ConfigError: A question has not exactly one part missing, or an option is out of range.
            NonFiniteError: A query or a row is NaN or infinite.
        """
        wanted = replace(wanted, k=_checked(wanted.k))
        asked = [question.asked for question in questions]
        for part in set(asked):
            wanted.check(part)
        answers: dict[int, Answers] = {}
        for side in SIDES:
            places = [place for place, part in enumerate(asked) if part == side]
            answers |= zip(
                places, self._predict(side, [questions[place] for place in places], wanted), strict=True
            )
        for place, part in enumerate(asked):
            if part == "relation":
                answers[place] = self._predict_relation(questions[place], wanted)
        return [answers[place] for place in range(len(questions))]

    def score(self, triples: Sequence[tuple[str, str, str]], *, side: Side = "tail") -> Scores:
        """Return float64[n]: the scores of (head, relation, tail) triples.

        Args:
            triples: Names.
            side: Score as when this side is asked for. With reciprocal relations the two differ.
        """
        if side not in SIDES:
            raise ConfigError(f"side: unknown value {side!r} (known: {', '.join(SIDES)})")
        heads, tails = (self.entities.ids_of(triple[end] for triple in triples) for end in (0, 2))
        relations = self.relations.ids_of(triple[1] for triple in triples)
        anchors, answers = (heads, tails) if side == "tail" else (tails, heads)
        return self.links.scores(side, anchors, relations, answers)

    def evaluate(self, split: str = "test", **settings: Any) -> Evaluation:
        """Rank a split's triples among all entities; `settings` are those of `kgshard.evaluate`."""
        self._refuse_overlay("a run is evaluated without one: its entities are in no split")
        settings = {"checkpoint": self._stored.checkpoint.folder.name} | settings
        return Evaluation(evaluate(self._stored.run.folder, split=split, **settings))

    def _predict(self, side: Side, questions: Sequence[Question], wanted: Wanted) -> list[Answers]:
        """Answer questions for one side."""
        if not questions:
            return []
        given: Side = "head" if side == "tail" else "tail"
        anchors = self.entities.ids_of(getattr(question, given) for question in questions)
        relations = self.relations.ids_of(str(question.relation) for question in questions)
        if wanted.only_seen and (relations != relations[0]).any():
            return self._predict_by_relation(side, questions, relations, wanted)
        known = self._known.answers(side, anchors, relations)
        everywhere = known.everywhere()
        among = self._candidates(side, int(relations[0]), wanted)
        source = self.links.source(side, among=among, exact=wanted.exact)
        found = self.links.best(
            side,
            anchors,
            relations,
            wanted.k,
            excluded=None if wanted.known else everywhere,
            source=source,
        )
        splits = known.splits_of(found.ids)
        by = "inverse relation" if side == "head" and self.link_model.reciprocal else "relation"
        labels = _labels_of_each(self.entities, found)
        asked = _labels(self.entities, anchors), _labels(self.relations, relations)
        meaning, probabilities = self._probabilities(side, relations, found, wanted)
        return [
            _answers(
                {
                    given: anchor,
                    "relation": relation,
                    "asked": side,
                    "k": wanted.k,
                    "known": "shown" if wanted.known else "left out",
                    "num_known": num_known,
                    "by": by,
                    **_how(source, found, number),
                    **self._approximate(given_id),
                    **meaning,
                },
                labels[number],
                *found.of(number),
                [self._known.split_name(split) for split in splits[number].tolist()],
                folded=self._folded(found.ids[number]),
                probabilities=probabilities[number].tolist() if meaning else (),
                min_score=wanted.min_score,
            )
            for number, (anchor, relation, given_id, num_known) in enumerate(
                zip(*asked, anchors.tolist(), everywhere.counts.tolist(), strict=True)
            )
        ]

    def _probabilities(
        self, side: Side, relations: Ids, found: Found, wanted: Wanted
    ) -> tuple[dict[str, str], Scores]:
        """Return what questions say of probabilities, and float64[B, K]; nothing unless asked for."""
        if not wanted.calibrate:
            return {}, found.scores
        from kgshard_tools.calibration import calibration

        fitted = calibration(open_stored(self._stored.run.folder), side=side)
        each = np.broadcast_to(relations[:, None], found.ids.shape)
        flat = fitted.probabilities(found.scores.ravel(), each.ravel(), side)
        return {"probability": fitted.line()}, flat.reshape(found.ids.shape)

    def _predict_by_relation(
        self, side: Side, questions: Sequence[Question], relations: Ids, wanted: Wanted
    ) -> list[Answers]:
        """Answer questions relation by relation, for each has candidates of its own."""
        answers: dict[int, Answers] = {}
        for relation in np.unique(relations):
            places = np.flatnonzero(relations == relation).tolist()
            found = self._predict(side, [questions[place] for place in places], wanted)
            answers |= zip(places, found, strict=True)
        return [answers[place] for place in range(len(questions))]

    def _candidates(self, side: Side, relation: int, wanted: Wanted) -> Ids | None:
        """Return the only rows that may answer, ascending, or None where all may."""
        if wanted.candidates is None:
            return None
        if wanted.only_seen:
            return self._known.seen(side, relation)
        if isinstance(wanted.candidates, np.ndarray):
            return np.unique(wanted.candidates)
        return np.unique(self.entities.ids_of(wanted.candidates))

    def _predict_relation(self, question: Question, wanted: Wanted) -> Answers:
        head, tail = (self.entities.id_of(str(name)) for name in (question.head, question.tail))
        scores, known = self.links.relation_scores(head, tail), self._known.relations(head, tail)
        order = np.lexsort((np.arange(len(scores)), -scores))
        ids = order if wanted.known else order[~np.isin(order, list(known))]
        ids = ids[: wanted.k]
        described = {
            "head": self.entities[head],
            "tail": self.entities[tail],
            "asked": "relation",
            "k": wanted.k,
            "known": "shown" if wanted.known else "left out",
            "num_known": len(known),
            "by": "relation",
            "exact": True,
            **self._approximate(head, tail),
        }
        splits = [known.get(relation) for relation in ids.tolist()]
        labels = _labels(self.relations, ids)
        return _answers(described, labels, ids, scores[ids], splits, min_score=wanted.min_score)

    def _similarity_source(self, metric: Similarity, *, exact: bool) -> CandidateSource:
        if metric == "cosine":
            return self._sources.opened(neighbor_contents(), exact=exact)
        if metric not in self._scans:
            self._scans[metric] = Scan(self._table, METRICS[metric], labels=self.entities)
        return self._scans[metric]

    def _folded(self, ids: Ids) -> list[bool]:
        """Return which entities int64[K] were folded in; nothing where there is no overlay."""
        return [] if len(self) == self.num_trained else (ids >= self.num_trained).tolist()

    def _approximate(self, *given: int) -> dict[str, bool]:
        """Return what a question's description says where a given entity was folded in."""
        return {"approximate": True} if max(given) >= self.num_trained else {}

    def _refuse_overlay(self, why: str) -> None:
        if len(self) > self.num_trained:
            raise ConfigError(f"a model with an overlay: {why}")


def _answers(
    query: dict[str, Any],
    labels: Sequence[str],
    ids: Ids,
    scores: Scores,
    splits: Sequence[str | None] = (),
    *,
    folded: Sequence[bool] = (),
    probabilities: Sequence[float] = (),
    min_score: float | None = None,
) -> Answers:
    """Put answers together.

    Args:
        query: The question.
        labels: One for each answer.
        ids: int64[K]; what lies beyond the labels is no answer. So are `scores` and `splits`.
        scores: float64[K], falling.
        splits: Which of the answers are known, and from where; none is, if it is empty.
        folded: Which of them were folded in; none was, if it is empty.
        probabilities: How likely each is; not known, if it is empty.
        min_score: Leave out what scores lower.
    """
    if min_score is not None:
        query = query | {"min_score": min_score}
        labels = labels[: int((scores >= min_score).sum())]
    notes = splits or repeat(None), folded or repeat(False), probabilities or repeat(None)
    rows = zip(labels, ids.tolist(), scores.tolist(), *notes, strict=False)
    return Answers(
        query,
        [
            Answer(rank, label, row, score, split is not None, split, is_folded, probability)
            for rank, (label, row, score, split, is_folded, probability) in enumerate(rows, start=1)
        ],
    )


def _labels(vocabulary: Vocabulary, ids: Ids) -> list[str]:
    """Return the labels of int64[I]."""
    if len(ids) > _MANY_LABELS:
        return vocabulary.labels_of(ids)
    return [vocabulary[row] for row in ids.tolist()]


def _labels_of_each(vocabulary: Vocabulary, found: Found) -> list[list[str]]:
    """Return the labels of what was found, for each question."""
    are_rows = np.arange(found.ids.shape[1]) < found.counts[:, None]
    labels = iter(_labels(vocabulary, found.ids[are_rows]))
    return [list(islice(labels, count)) for count in found.counts.tolist()]


def _how(source: CandidateSource, found: Found, number: int) -> dict[str, Any]:
    """Return what a question's description says of how its answers were found."""
    return {"exact": True} if found.exact[number] else {"exact": False, **source.described()}


def _checked(k: SupportsIndex) -> int:
    """Return how many answers are wanted, as an int."""
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= operator.index(k) <= MAX_K:
        raise ConfigError(f"-k must be a whole number from 1 to {MAX_K:,}, got {k!r}")
    return operator.index(k)


def load(
    run: AnyPath, overlay: AnyPath | None = None, *, foreign_index: AnyPath | None = None
) -> TrainedModel:
    """Open a run for questions; nothing is loaded until it is needed.

    Args:
        run: A run, or one of its checkpoint folders.
        overlay: What `kgshard fold-in` wrote: entities that were not trained, which ask and answer like the
            others. Indexes of the run do not hold them, so that every question looks at every row, exactly.
            Answers say which entities were folded in; the overlay's triples are known ones.
        foreign_index: A FAISS file that kgshard did not write, of this run's vectors in their order. It is
            read by a process of its own, with limits; its candidates are scored again.

    Raises:
        RunError: It is no run, or holds no checkpoint; the overlay is none, or of another run or checkpoint.
        ShardError: A shard is missing or damaged.
    """
    return TrainedModel(run, overlay, foreign_index=foreign_index)
