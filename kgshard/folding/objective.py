"""A run's loss as a function of new rows.

A new row minimises what the run minimised, as far as the row is part of it:

    its questions   (new, r, ?) and (?, r, new): their answers against trained rivals
    as an answer    (a, r, ?) and (?, r, a) that it answers, against the same rivals
    as a rival      train's questions, none of which it answers: what keeps it from answering everything

and the run's regularisers. A run without any gets a Gaussian prior instead, fitted to its trained rows, so
that one triple makes no row that is like no other. Dropout, label smoothing and relation prediction are left
out.

Shape letters: q questions, K rivals, Q train questions, n new entities, c those of one group, I ids, D floats
an entity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding

from kgshard.errors import NonFiniteError
from kgshard.folding.frozen import FrozenModel
from kgshard.folding.losses import loss_of
from kgshard.folding.questions import Asked, Competition, Questions, hits_within, per_entity
from kgshard.folding.sampling import drawn, how_many
from kgshard.folding.spread import Spread
from kgshard.known import KnownLinks, anchors_of, targets_of
from kgshard.models.link import SIDES, Side
from kgshard.shards import first_non_finite
from kgshard.training.negatives import find_hits

Ids = npt.NDArray[np.int64]

RIVAL_FLOATS = 1 << 21
"""Floats of rivals, at most: a larger table is sampled. 2,097 rows of 1,000 floats, 16,384 of 128."""
TRAIN_FLOATS = 1 << 22
"""Floats of the queries of train's questions, at most; train is sampled beyond."""
SCORES = 1 << 23
"""Scores that are made at once."""


class Objective:
    """The run's loss as a function of new rows."""

    def __init__(self, frozen: FrozenModel, triples: Ids, seed: int, rivals: Ids | None) -> None:
        self._frozen, self._model, config = frozen, frozen.model, frozen.config
        self.first = frozen.model.num_entities
        """The id of the first new entity."""
        num_rivals = self.first if rivals is None else len(rivals)
        chosen = drawn(num_rivals, how_many(RIVAL_FLOATS, self._model.dim), seed, "rivals")
        self.rivals = chosen if rivals is None else rivals[chosen]
        self.block_size = max(1, SCORES // len(self.rivals))
        """Questions at a time."""
        rows = self.entity_rows(self.rivals)
        self.spread = Spread.of(rows)
        self._candidates: dict[Side, Tensor] = {side: self._model.candidates(side, rows) for side in SIDES}
        self._loss = loss_of(config, num_rivals, len(self.rivals))
        self._shared = {name: torch.from_numpy(np.array(values)) for name, values in frozen.shared.items()}
        self._known: dict[Side, KnownLinks] | None = None
        self._filters = config.filter_negatives or (config.train_type == "kvsall" and config.loss == "bce")
        if self._filters or config.train_type == "kvsall":
            both = np.concatenate([np.asarray(frozen.train, np.int64), triples])
            relations = self._model.num_relations
            self._known = {side: KnownLinks(both, side, num_relations=relations) for side in SIDES}
        used = [name for name in ("n3", "l2", "l3", "max_norm") if getattr(config, name)]
        self.regulariser = ", ".join(used) or "prior"
        self._train = self._competitions(seed)
        self.num_train_questions = sum(len(one.queries) for one in self._train)

    def entity_rows(self, ids: Ids) -> Tensor:
        """Return float[I, D] trained rows; NonFiniteError names the first that is no number."""
        values = self._frozen.entities.gather(ids)
        bad = first_non_finite(values)
        if bad is not None:
            raise NonFiniteError(f"{self._frozen.row_name(int(ids[bad]))} is not finite")
        return torch.from_numpy(values)

    def _relation_rows(self, side: Side, relations: Ids) -> Tensor:
        ids = self._model.relation_row(side, relations)
        values = self._frozen.relations.gather(ids)
        bad = first_non_finite(values)
        if bad is not None:
            raise NonFiniteError(f"relation row {ids[bad]} is not finite")
        return torch.from_numpy(values)

    def _shares_and_hits(
        self, side: Side, anchors: Ids, relations: Ids, answers: Ids
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return float[q] shares, and which rivals are none: own answers and, where filtered, known ones."""
        shares, own = np.ones(len(anchors), np.float32), (np.arange(len(anchors)), answers)
        if self._known is not None:
            which, known = self._known[side].answers(anchors, relations)
            shares = (1 / np.maximum(1, np.bincount(which, minlength=len(anchors)))).astype(np.float32)
            own = (which, known) if self._filters else own
        pairs, places = find_hits(torch.from_numpy(own[1]), torch.from_numpy(self.rivals))
        return torch.from_numpy(shares), (torch.from_numpy(own[0])[pairs], places)

    def _competitions(self, seed: int) -> list[Competition]:
        """Sample questions of train, both sides of each triple."""
        train, is_shared = self._frozen.train, self._frozen.config.train_type == "kvsall"
        count = how_many(TRAIN_FLOATS, 2 * self._model.dim)
        chosen = np.asarray(train[drawn(len(train), count, seed, "train questions")], np.int64)
        if not len(chosen):
            return []
        weight = len(train) / len(chosen)
        return [self._competition(side, chosen, weight, is_shared=is_shared) for side in SIDES]

    def _competition(self, side: Side, triples: Ids, weight: float, *, is_shared: bool) -> Competition:
        anchors, relations, answers = _given_ends(side, triples), triples[:, 1], _asked_ends(side, triples)
        shares, hits = self._shares_and_hits(side, anchors, relations, answers)
        queries, constants = [], []
        for start in range(0, len(triples), self.block_size):
            part = slice(start, start + self.block_size)
            query = self._queries(
                side, self.entity_rows(anchors[part]), self._relation_rows(side, relations[part])
            )
            true = self._model.candidates(side, self.entity_rows(answers[part]))
            scores = self._scores(side, query, hits_within(hits, part.start, part.stop))
            queries.append(query)
            constants.append(self._loss.constants(self._model.metric.score_pairs(query, true), scores))
        # Where a question is one whatever its answers, each of them brings only its share of it here.
        weights = weight * (shares if is_shared else torch.ones_like(shares))
        links = anchors, relations
        return Competition(side, torch.cat(queries), torch.cat(constants)[:, None], weights[:, None], links)

    def _queries(self, side: Side, anchors: Tensor, relations: Tensor) -> Tensor:
        return self._model.queries(side, anchors, relations, self._shared)

    def _scores(self, side: Side, queries: Tensor, hits: tuple[Tensor, Tensor]) -> Tensor:
        """Return float[q, K], -inf where a rival is none."""
        scores = self._model.metric.score_all(queries, self._candidates[side], exact=False)
        return scores.index_put(hits, scores.new_tensor(-math.inf))

    def questions_of(self, triples: Ids, members: Ids) -> Questions:
        """Return what new entities are fitted to.

        Args:
            triples: int64[n, 3], all that name one of them.
            members: int64[c], ascending, counted from the first new entity.
        """
        asked = [part for side in SIDES for part in self._asked(side, triples, members)]
        counts = torch.zeros(len(members))
        for one in asked:
            counts += per_entity(one, torch.ones(len(one.anchors)), len(members))
        allowed = [self._allowed(one, members) for one in self._train]
        return Questions(asked, allowed, counts, len(members))

    def _asked(self, side: Side, triples: Ids, members: Ids) -> Iterator[Asked]:
        """Yield the questions with a new anchor, whose queries have gradients, apart from the others."""
        is_new = _given_ends(side, triples) >= self.first
        for part in (triples[is_new], triples[~is_new]):
            if not len(part):
                continue
            anchors, answers = _given_ends(side, part), _asked_ends(side, part)
            ends = np.concatenate([anchors, answers])
            known = np.unique(ends[ends < self.first])
            ids = np.concatenate([members + self.first, known])
            order = np.argsort(ids)
            places = torch.from_numpy(order[np.searchsorted(ids, ends, sorter=order)])
            shares, hits = self._shares_and_hits(side, anchors, part[:, 1], answers)
            relations = self._relation_rows(side, part[:, 1])
            rows = self.entity_rows(known)
            scores = None
            if int(anchors[0]) < self.first and len(part) <= self.block_size:
                at = torch.from_numpy(np.searchsorted(known, anchors))
                scores = self._scores(side, self._queries(side, rows[at], relations), hits)
            one = places[: len(part)], places[len(part) :]
            yield Asked(side, relations, rows, *one, shares, hits, scores)

    def _allowed(self, competition: Competition, members: Ids) -> Tensor | None:
        if not self._filters:
            return None
        assert self._known is not None
        which, answers = self._known[competition.side].answers(*competition.links)
        allowed = torch.ones(len(competition.queries), len(members), dtype=torch.bool)
        inside = np.isin(answers, members + self.first)
        places = np.searchsorted(members, answers[inside] - self.first)
        allowed[torch.from_numpy(which[inside]), torch.from_numpy(places)] = False
        return allowed

    def blocks(self, questions: Questions) -> Iterator[Asked]:
        """Yield the questions, as many at a time as memory is for."""
        for one in questions.asked:
            for start in range(0, len(one.anchors), self.block_size):
                yield one.block(start, start + self.block_size)

    def losses(self, asked: Asked, rows: Tensor) -> Tensor:
        """Return float[q]: the loss of each question, given new rows float[c, D]."""
        # Known anchors are taken from rows without a gradient, so that none is made for their queries.
        anchors_are_new = int(asked.anchors[0]) < len(rows)
        source, places = (
            (rows, asked.anchors) if anchors_are_new else (asked.known, asked.anchors - len(rows))
        )
        anchors = embedding(places, source)
        queries = self._queries(asked.side, anchors, asked.relations)
        answers = embedding(asked.answers, torch.cat([rows, asked.known]))
        positives = self._model.metric.score_pairs(queries, self._model.candidates(asked.side, answers))
        scores = asked.scores
        if scores is None:
            scores = self._scores(asked.side, queries, asked.hits)
        return self._loss.answers(positives, scores, asked.shares)

    def rivalry(self, questions: Questions, rows: Tensor) -> Tensor:
        """Return float[c]: what new rows cost as rivals in train's questions."""
        total = rows.sum(dim=1) * 0
        for competition, allowed in zip(self._train, questions.allowed, strict=True):
            candidates = self._model.candidates(competition.side, rows)
            scores = self._model.metric.score_all(competition.queries, candidates, exact=False)
            costs = self._loss.rival(scores, competition.constants)
            if allowed is not None:
                costs = costs.masked_fill(~allowed, 0.0)
            total = total + (competition.weights * costs).sum(dim=0)
        return total

    def penalty(self, questions: Questions, rows: Tensor) -> Tensor:
        """Return float[c]: the run's regularisers, once a question as in training, or the prior."""
        if self.regulariser == "prior":
            return ((rows - self.spread.mean) / self.spread.deviation).square().sum(dim=1) / 2
        config, total = self._frozen.config, rows.sum(dim=1) * 0
        if config.n3:
            for one in questions.asked:
                total = total + config.n3 * self._cubes(one, rows)
        if config.l2:
            total = total + config.l2 * questions.counts * rows.square().sum(dim=1)
        if config.l3:
            total = total + config.l3 * questions.counts * rows.abs().pow(3).sum(dim=1)
        return total

    def _cubes(self, asked: Asked, rows: Tensor) -> Tensor:
        """Return float[c]: cubed magnitudes of new rows, in the roles that questions give them."""
        middle = asked.relations[:1]
        total = rows.sum(dim=1) * 0
        as_head, *_, as_tail = self._model.factors(asked.side, rows, middle, rows)
        heads, tails = asked.anchors, asked.answers
        if self._model.asks_heads(asked.side):
            heads, tails = tails, heads
        for sizes, places in ((as_head, heads), (as_tail, tails)):
            uses = torch.bincount(places[places < len(rows)], minlength=len(rows))
            total = total + uses * sizes.pow(3).sum(dim=1)
        return total

    def shorten(self, rows: Tensor) -> None:
        """Scale rows down to the run's longest, where it has one."""
        longest = self._frozen.config.max_norm
        if longest:
            rows.mul_((longest / torch.linalg.vector_norm(rows, dim=1, keepdim=True)).clamp(max=1.0))


def _given_ends(side: Side, triples: Ids) -> Ids:
    return anchors_of(side, triples).astype(np.int64)


def _asked_ends(side: Side, triples: Ids) -> Ids:
    return targets_of(side, triples).astype(np.int64)
