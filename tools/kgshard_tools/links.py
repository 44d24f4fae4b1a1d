"""Questions about links by row ids: (h, r, ?), (?, r, t) and (h, ?, t), thousands at a time. No torch here.

Scores are those of the model, in float64 on the stored rows, so a triple scores the same whether it is
asked alone, in a batch, or found among all entities.

Shape letters: B questions, Q floats for a query.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kgshard.errors import NonFiniteError
from kgshard.models.link import Side
from kgshard_tools.index import Contents, link_contents, open_source
from kgshard_tools.lifts import link_lift
from kgshard_tools.search import CandidateSource, Exclusions, Found, Ids, Scan, Scores, search
from kgshard_tools.stored import Stored

_QUERY_FLOATS = 1 << 20
"""Floats of queries that are made at once."""


class Sources:
    """What finds the best of some contents: an index where one was built, else a scan; each opened once."""

    def __init__(self, stored: Stored, foreign_index: Path | None = None) -> None:
        """Search a checkpoint; with `foreign_index` by that file alone, which is read apart, under limits."""
        self._stored, self._foreign_index = stored, foreign_index
        self._opened: dict[tuple[str, bool], CandidateSource] = {}

    def opened(self, contents: Contents, *, exact: bool = False) -> CandidateSource:
        """Return what searches all entities; `exact` passes over an approximate index."""
        key = contents.name, exact
        if key not in self._opened:
            self._opened[key] = self._open(contents, exact=exact)
        return self._opened[key]

    def _open(self, contents: Contents, *, exact: bool) -> CandidateSource:
        if not self._stored.has_indexes or (exact and self._foreign_index):
            return self.scan(contents)
        if self._foreign_index is not None:
            from kgshard_tools.index.foreign_source import ForeignSource

            table, labels = self._stored.checkpoint.entities, self._stored.dataset.entities
            return ForeignSource(self._foreign_index, contents, table, labels=labels)
        source = open_source(self._stored, contents)
        return source if source.is_exact or not exact else self.scan(contents)

    def scan(self, contents: Contents, rows: Ids | None = None) -> CandidateSource:
        """Return a scan over the shards: over all rows, or some, int64 ascending."""
        table, labels = self._stored.checkpoint.entities, self._stored.dataset.entities
        return Scan(table, contents.metric, contents.lift, labels=labels, rows=rows)


class LinkSearch:
    """The model of a checkpoint, asked by row ids."""

    def __init__(self, stored: Stored, sources: Sources) -> None:
        self._stored = stored
        self._sources = sources
        self._model = stored.model

    def source(self, side: Side, *, among: Ids | None = None, exact: bool = False) -> CandidateSource:
        """Return what finds the best answers for one side; those `among` some rows are scanned, exactly."""
        contents = link_contents(self._stored, side)
        if among is not None:
            return self._sources.scan(contents, among)
        return self._sources.opened(contents, exact=exact)

    def best(
        self,
        side: Side,
        anchors: Ids,
        relations: Ids,
        k: int,
        *,
        excluded: Exclusions | None = None,
        source: CandidateSource | None = None,
    ) -> Found:
        """Return the best answers to B questions about one side.

        Args:
            side: Which end is asked for.
            anchors: int64[B], the given ends.
            relations: int64[B].
            k: How many answers.
            excluded: Rows that are no answers to a question.
            source: What finds them, as `source` gives it; an index where there is one.

        Raises:
            NonFiniteError: A query or a row is NaN or infinite.
        """
        queries = self.queries(side, anchors, relations)
        if not np.isfinite(queries).all():
            [bad] = np.argwhere(~np.isfinite(queries).all(axis=1))[:1, 0].tolist()
            names = self._stored.dataset.entities, self._stored.dataset.relations
            anchor, relation = (
                labels[int(ids[bad])] for labels, ids in zip(names, (anchors, relations), strict=True)
            )
            raise NonFiniteError(f"the query of {anchor!r} and {relation!r} is not finite")
        source = self.source(side) if source is None else source
        found = search(source, queries, k, excluded)
        return replace(found, scores=found.scores + self._model.offset)

    def queries(self, side: Side, anchors: Ids, relations: Ids) -> Scores:
        """Return float64[B, Q], which may hold what is not finite."""
        relation_table = self._stored.checkpoint.relations
        parts, size = [], max(1, _QUERY_FLOATS // max(self._model.dim, relation_table.dim))
        for start in range(0, max(1, len(anchors)), size):
            part = slice(start, start + size)
            rows = relation_table.gather(self._model.relation_row(side, relations[part])).astype(np.float64)
            given = self._stored.checkpoint.entities.gather(anchors[part]).astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):  # Who asks checks that it is finite.
                parts.append(self._model.queries(side, given, rows, self._shared))
        queries: Scores = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return queries

    def scores(self, side: Side, anchors: Ids, relations: Ids, answers: Ids) -> Scores:
        """Return float64[B]: the score of each answer to its own question."""
        queries = self.queries(side, anchors, relations)
        rows = self._stored.checkpoint.entities.gather(answers).astype(np.float64)
        scores: Scores = self._model.metric.score_pairs(queries, link_lift(self._model, side)(rows))
        return scores + self._model.offset

    def relation_scores(self, head: int, tail: int) -> Scores:
        """Return float64[num_relations]: scores of all relations between two entities, as for tails."""
        every = np.arange(self._model.num_relations)
        return np.concatenate(
            [
                self.scores("tail", np.full_like(part, head), part, np.full_like(part, tail))
                for part in np.array_split(every, -(-len(every) * self._model.dim // _QUERY_FLOATS) or 1)
            ]
        )

    @cached_property
    def _shared(self) -> dict[str, npt.NDArray[np.float64]]:
        """The parameters that all rows share, widened."""
        return {name: values.astype(np.float64) for name, values in self._stored.checkpoint.shared.items()}
