"""Exact ranks straight from the shards: queries move, rows stay.

Every rank sees every query, counts how many of its own rows beat the true score, and only counts travel.
No rank holds the whole table, and none holds queries x entities.

Ranks are those of float64 arithmetic on the stored rows, whatever their dtype (`kgshard.ranking.comparing`).
So a rank depends neither on batch size, nor on world size, nor on the BLAS library. Triples that ask the
same share one query, and its scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.data.dataset import Triples
from kgshard.errors import NonFiniteError
from kgshard.known import KnownLinks
from kgshard.models.link import LinkModel, Side
from kgshard.ranking.comparing import Asked, CandidateBlock
from kgshard.ranking.excluded import Excluded, Questions, question_order
from kgshard.ranking.metrics import Ranks
from kgshard.table import ShardedTable, held_rows, rows_everywhere

QUERY_BLOCK = 512
"""True answers compared together."""
ROW_BLOCK = 8192
"""Candidates scored together: 16 MiB of float32 scores a block."""
BLOCKS_ASKED = 16
"""Query blocks that go through the table together: a block of candidates is lifted once for all of them."""


class Ranker:
    """Ranks true answers among all entities of a sharded table."""

    def __init__(
        self,
        model: LinkModel,
        table: ShardedTable,
        relations: ShardedTable | Tensor,
        shared: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Rank in tables that may go on changing between calls.

        Args:
            model: The formula.
            table: Entities, of any float dtype.
            relations: Sharded too, or float[relation rows, relation_dim] on every rank.
            shared: The model's shared parameters, on every rank.
        """
        self.model = model
        self.table = table
        self.relations = relations
        self.shared = dict(shared or {})

    @torch.no_grad()
    def rank(self, side: Side, triples: Triples, known: KnownLinks | None) -> Ranks:
        """Return how the `side` of triples [n, 3] ranks, equal on every rank.

        Args:
            side: Which end to rank.
            triples: int[n, 3], the same on every rank.
            known: Its answers are no candidates, the true one apart; None ranks unfiltered.

        Raises:
            NonFiniteError: An entity, a relation, a shared parameter or a score is NaN or infinite; names it.
                Nothing compares with NaN, so it would get the first rank.
            RankFailureError: It was found on another rank.
        """
        with self.table.exchange.sharing_failure(NonFiniteError):
            self._check_finite()
        order, size = question_order(side, triples), QUERY_BLOCK * BLOCKS_ASKED
        parts = [triples[order[start : start + size]] for start in range(0, len(order), size)]
        return Ranks.join([self._rank_some(side, part, known) for part in parts]).take(np.argsort(order))

    def _check_finite(self) -> None:
        """Raise where something that is not ranked, and that this rank holds, is not finite."""
        finite = torch.isfinite(held_rows(self.relations)).all(dim=1)
        if not finite.all():
            first = self.relations.rows.start if isinstance(self.relations, ShardedTable) else 0
            raise NonFiniteError(f"relation row {first + int(finite.long().argmin())} is not finite")
        for name, values in self.shared.items():
            if not torch.isfinite(values).all():
                raise NonFiniteError(f"shared parameter {name!r} is not finite")

    def _rank_some(self, side: Side, triples: Triples, known: KnownLinks | None) -> Ranks:
        """Rank triples of which those that ask the same are neighbours."""
        questions = Questions.of(side, triples)
        excluded = Excluded(known, questions, num_entities=self.model.num_entities)
        asked = self._ask(side, questions)
        exchange = self.table.exchange
        with exchange.sharing_failure(NonFiniteError):
            counts = self._count(side, questions, asked, excluded)
        higher, ties = exchange.all_reduce(counts).cpu().numpy()
        return Ranks(higher, ties, excluded.num_candidates)

    def _ask(self, side: Side, questions: Questions) -> Asked:
        """Return the queries and the scores of the true answers.

        Raises:
            NonFiniteError: One of them is NaN or infinite. Raised on every rank: all compute the same.
        """
        ends = np.concatenate([questions.anchors, questions.targets])
        rows = self.table.replicate(_ids(ends, self.table.weight)).double()
        anchors, targets = rows[: len(questions.anchors)], rows[len(questions.anchors) :]
        relation_rows = _ids(self.model.relation_row(side, questions.relations), rows)
        shared = {name: values.double() for name, values in self.shared.items()}
        # Relation rows, and what a network makes on the way, may be far wider than queries.
        parts = []
        for start in range(0, len(anchors), QUERY_BLOCK):
            some = slice(start, start + QUERY_BLOCK)
            relations = rows_everywhere(self.relations, relation_rows[some]).double()
            parts.append(self.model.queries(side, anchors[some], relations, shared))
        queries, which = torch.cat(parts), _ids(questions.asked, rows)
        scores = self.model.metric.score_pairs(queries[which], self.model.candidates(side, targets))
        asked = Asked.of(self.model.metric, queries, which, scores)
        finite = torch.isfinite(queries).all(dim=1) & torch.isfinite(asked.lengths)
        finite = finite[which] & torch.isfinite(scores)
        if not finite.all():
            first = int(finite.long().argmin())
            question = questions.asked[first]
            raise NonFiniteError(
                f"entity {questions.targets[first]} as {side} of entity {questions.anchors[question]} and "
                f"relation {questions.relations[question]} has no finite score"
            )
        return asked

    def _count(self, side: Side, questions: Questions, asked: Asked, excluded: Excluded) -> Tensor:
        """Return int64[2, Q]: how many candidates here score higher, and how many the same.

        Raises:
            NonFiniteError: A row or a score here is NaN or infinite.
        """
        num_answers = len(questions.targets)
        counts = torch.zeros(2, num_answers, dtype=torch.int64, device=asked.scores.device)
        for start in range(0, len(self.table.weight), ROW_BLOCK):
            rows = self.table.weight[start : start + ROW_BLOCK]
            block = CandidateBlock(self.model, side, rows, self.table.rows.start + start)
            for first in range(0, num_answers, QUERY_BLOCK):
                part = slice(first, min(first + QUERY_BLOCK, num_answers))
                queries = slice(int(questions.asked[part.start]), int(questions.asked[part.stop - 1]) + 1)
                answer, entity = excluded.pairs(part, block.entities)
                where = _ids(answer, counts), _ids(entity - block.entities.start, counts)
                counts[:, part] += block.count(asked.part(part, queries), where)
        return counts


def _ids(ids: npt.NDArray[np.integer[Any]], like: Tensor) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64, copy=False)).to(like.device)
