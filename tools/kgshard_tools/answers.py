"""A trained run, asked by name: vectors, neighbours, missing tails and heads. No torch here.

Scores are those of the model, in float64 on the stored rows, so a triple scores the same whether it is
asked alone, in a batch, or found among all entities.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from kgshard.api import evaluate
from kgshard.data.dataset import SPLITS, Triples
from kgshard.errors import ConfigError, NonFiniteError
from kgshard.files import AnyPath
from kgshard.known import known_answers
from kgshard.models.link import SIDES, Side
from kgshard.models.metric import METRICS
from kgshard.shards import Floats
from kgshard.vocabulary import Vocabulary
from kgshard_tools.index import Contents, link_contents, neighbor_contents, open_source
from kgshard_tools.lifts import link_lift, unit_rows
from kgshard_tools.results import Answer, Answers, Evaluation
from kgshard_tools.search import CandidateSource, Ids, Scan, Scores, search
from kgshard_tools.stored import open_stored

Similarity = Literal["cosine", "dot", "l2", "l1"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot", "l2", "l1")
MAX_K = 1_000_000


class TrainedModel:
    """What a run learned, with the labels of its graph. Tables stay on disk, memory-mapped."""

    def __init__(self, run: AnyPath) -> None:
        """Open a run's best or newest checkpoint, or one of its checkpoint folders."""
        self._stored = open_stored(run)
        self.link_model = self._stored.model
        self._table = self._stored.checkpoint.entities
        self._sources: dict[str, CandidateSource] = {}

    @property
    def entities(self) -> Vocabulary:
        return self._stored.dataset.entities

    @property
    def relations(self) -> Vocabulary:
        return self._stored.dataset.relations

    def __repr__(self) -> str:
        model = self.link_model
        return (
            f"TrainedModel({model.name}, dim={model.dim}, {model.num_entities:,} entities, "
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

    def most_similar(self, name: str, k: int = 10, *, metric: Similarity = "cosine") -> Answers:
        """Return the k entities most like `name`, itself apart.

        Args:
            name: An entity.
            k: How many; fewer come back where there are no more.
            metric: cosine (in [-1, 1]; with a row of zeros it is 0), dot, l2 or l1 (negative distances).
        """
        k = _checked(k)
        if metric not in SIMILARITIES:
            raise ConfigError(f"--metric: unknown value {metric!r} (known: {', '.join(SIMILARITIES)})")
        entity = self.entities.id_of(name)
        query = self._table.gather([entity]).astype(np.float64)
        if metric == "cosine":
            query = unit_rows(query)
        ids, scores = search(self._similarity_source(metric), query[0], k, np.array([entity]))
        if metric == "cosine":
            scores = np.clip(scores, -1.0, 1.0)
        described = {"entity": self.entities[entity], "id": entity, "metric": metric, "k": k}
        return self._answers(described, ids, scores, {})

    def predict_tails(self, head: str, relation: str, k: int = 10, *, known: bool = False) -> Answers:
        """Return the k best tails of (head, relation, ?).

        Args:
            head: An entity.
            relation: A relation.
            k: How many; fewer come back where there are no more.
            known: Also return tails of triples that train, valid or test hold.
        """
        return self._predict("tail", head, relation, k, with_known=known)

    def predict_heads(self, relation: str, tail: str, k: int = 10, *, known: bool = False) -> Answers:
        """Return the k best heads of (?, relation, tail); see `predict_tails`."""
        return self._predict("head", tail, relation, k, with_known=known)

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
        queries = self._queries(side, anchors, relations)
        candidates = link_lift(self.link_model, side)(self._table.gather(answers).astype(np.float64))
        scores: Scores = self.link_model.metric.score_pairs(queries, candidates)
        return scores + self.link_model.offset

    def evaluate(self, split: str = "test", **settings: Any) -> Evaluation:
        """Rank a split's triples among all entities; `settings` are those of `kgshard.evaluate`."""
        settings = {"checkpoint": self._stored.checkpoint.folder.name} | settings
        return Evaluation(evaluate(self._stored.run.folder, split=split, **settings))

    def _predict(
        self, side: Side, anchor_name: str, relation_name: str, k: int, *, with_known: bool
    ) -> Answers:
        k = _checked(k)
        anchor, relation = self.entities.id_of(anchor_name), self.relations.id_of(relation_name)
        query = self._queries(side, np.array([anchor]), np.array([relation]))[0]
        if not np.isfinite(query).all():
            raise NonFiniteError(f"the query of {anchor_name!r} and {relation_name!r} is not finite")
        splits = self._known_answers(side, anchor, relation)
        excluded = np.array(sorted(splits) if not with_known else [], np.int64)
        ids, scores = search(self._source(link_contents(self._stored, side)), query, k, excluded)
        given = "head" if side == "tail" else "tail"
        described = {
            given: self.entities[anchor],
            "relation": self.relations[relation],
            "asked": side,
            "k": k,
            "known": "shown" if with_known else "left out",
            "num_known": len(splits),
            "by": "inverse relation" if side == "head" and self.link_model.reciprocal else "relation",
        }
        return self._answers(described, ids, scores + self.link_model.offset, splits)

    def _known_answers(self, side: Side, anchor: int, relation: int) -> dict[int, str]:
        """Return the known answers to a question, each with the first split that holds it."""
        found: dict[int, str] = {}
        for split, triples in self._splits.items():
            for entity in known_answers(triples, side, anchor=anchor, relation=relation).tolist():
                found.setdefault(entity, split)
        return found

    @cached_property
    def _splits(self) -> dict[str, Triples]:
        """All triples by split: mapped and checked once, however many questions need them."""
        return {split: self._stored.dataset.triples(split) for split in SPLITS}

    @cached_property
    def _shared(self) -> dict[str, npt.NDArray[np.float64]]:
        """The parameters that all rows share, widened."""
        return {name: values.astype(np.float64) for name, values in self._stored.checkpoint.shared.items()}

    def _queries(self, side: Side, anchors: Ids, relations: Ids) -> npt.NDArray[np.float64]:
        rows = self._stored.checkpoint.relations.gather(self.link_model.relation_row(side, relations))
        anchor_rows = self._table.gather(anchors).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # Who asks checks that it is finite.
            return self.link_model.queries(side, anchor_rows, rows.astype(np.float64), self._shared)

    def _answers(self, query: dict[str, Any], ids: Ids, scores: Scores, splits: dict[int, str]) -> Answers:
        """Name the answers; `splits` tells which of them are known, and from where."""
        return Answers(
            query,
            [
                Answer(rank, self.entities[entity], entity, score, entity in splits, splits.get(entity))
                for rank, (entity, score) in enumerate(
                    zip(ids.tolist(), scores.tolist(), strict=True), start=1
                )
            ],
        )

    def _similarity_source(self, metric: Similarity) -> CandidateSource:
        if metric == "cosine":
            return self._source(neighbor_contents())
        return Scan(self._table, METRICS[metric], labels=self.entities)

    def _source(self, contents: Contents) -> CandidateSource:
        """Return what finds the best of some contents; each is opened once."""
        if contents.name not in self._sources:
            self._sources[contents.name] = open_source(self._stored, contents)
        return self._sources[contents.name]


def _checked(k: SupportsIndex) -> int:
    """Return how many answers are wanted, as an int."""
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= operator.index(k) <= MAX_K:
        raise ConfigError(f"-k must be a whole number from 1 to {MAX_K:,}, got {k!r}")
    return operator.index(k)


def load(run: AnyPath) -> TrainedModel:
    """Open a run for questions; nothing is loaded until it is needed.

    Raises:
        RunError: It is no run, or holds no checkpoint.
        ShardError: A shard is missing or damaged.
    """
    return TrainedModel(run)
