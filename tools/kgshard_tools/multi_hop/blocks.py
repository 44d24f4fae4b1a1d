"""Links between entities and rows of the table: fast with bounds for many, exactly for a few.

The score of a link is that of `TrainedModel.score`: float64 on the stored rows, pair by pair. Over blocks of
rows it comes from float64 matrix products, whose sums run in another order; those bounds hold what that may
change.

Shape letters: B anchors, n rows of a block, Q floats of a query, E floats of a candidate, m pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from kgshard.errors import NonFiniteError
from kgshard.known import Ids
from kgshard.models.link import LinkModel, Side
from kgshard.shards import StoredTable, first_non_finite
from kgshard_tools.multi_hop.facts import Facts
from kgshard_tools.multi_hop.scales import Scale, Spread
from kgshard_tools.multi_hop.truth import Degrees, lowered, raised
from kgshard_tools.stored import Stored

PART = 256
"""Anchors that are linked to a block at once."""
_BLOCK_FLOATS = 1 << 22
_BLOCK_ROWS = 4096
_PAIR_FLOATS = 1 << 20
_CACHED_FLOATS = 1 << 22
_KEPT_SCORES = 1 << 21
"""16 MB of each bound, for every hop."""
_ROUNDING = 2.0**-28
"""Metric.slack is about float32; in float64 half of this times that is enough."""


class Tables:
    """The tables of a checkpoint, widened as they are read."""

    def __init__(self, stored: Stored) -> None:
        self.model: LinkModel = stored.model
        self.entities: StoredTable = stored.checkpoint.entities
        self._relations: StoredTable = stored.checkpoint.relations
        self._shared = {name: values.astype(np.float64) for name, values in stored.checkpoint.shared.items()}
        self._dataset = stored.dataset

    @property
    def num_rows(self) -> int:
        return self.entities.num_rows

    def queries(self, side: Side, anchors: Ids, relation: int) -> Degrees:
        """Return float64[B, Q]: what asks for the `side` that a relation links to anchors int64[B].

        Raises:
            NonFiniteError: One is NaN or infinite.
        """
        row = self._relations.gather(np.array([self.model.relation_row(side, relation)])).astype(np.float64)
        given = self.entities.gather(anchors).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            queries: Degrees = self.model.queries(
                side, given, np.repeat(row, len(given), axis=0), self._shared
            )
        bad = first_non_finite(queries)
        if bad is not None:
            anchor = self._dataset.entities[int(anchors[bad])]
            name = self._dataset.relations[relation]
            raise NonFiniteError(f"the query of {anchor!r} and {name!r} is not finite")
        return queries

    def candidates(self, side: Side, rows: Ids | range) -> Degrees:
        """Return float64[n, E]: what queries for a side are compared with.

        Raises:
            NonFiniteError: One is NaN or infinite.
        """
        stored = self.entities.read(rows) if isinstance(rows, range) else self.entities.gather(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            candidates: Degrees = self.model.candidates(side, stored.astype(np.float64))
        bad = first_non_finite(candidates)
        if bad is not None:
            name = self._dataset.entities.row_name(int(rows[bad]))
            raise NonFiniteError(f"{name} is not finite; such a run cannot be searched")
        return candidates

    def blocks(self) -> Iterator[Block]:
        """Yield all rows in order."""
        size = max(1, min(_BLOCK_ROWS, _BLOCK_FLOATS // self.entities.dim))
        for start in range(0, self.num_rows, size):
            yield Block(self, range(start, min(start + size, self.num_rows)))
        self.entities.release()


class Block:
    """Some rows of the table, and what is compared with queries for either side."""

    def __init__(self, tables: Tables, rows: Ids | range) -> None:
        self.rows = rows
        self._tables = tables
        self._sides: dict[Side, tuple[Degrees, Degrees]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def ids(self) -> Ids:
        return np.asarray(self.rows, np.int64)

    def candidates(self, side: Side) -> tuple[Degrees, Degrees]:
        """Return candidates float64[n, E] and their squared 2-norms [n]."""
        key: Side = side if self._tables.model.sides_differ else "tail"
        if key not in self._sides:
            rows = self._tables.candidates(key, self.rows)
            self._sides[key] = rows, np.einsum("ne,ne->n", rows, rows)
        return self._sides[key]


class Links:
    """How true it is that each of B anchors is linked to rows."""

    def __init__(
        self, tables: Tables, relation: int, side: Side, anchors: Ids, scale: Scale, facts: Facts
    ) -> None:
        """Take the anchors int64[B] of a relation, all different; `side` is the end that rows are at."""
        self.anchors = anchors
        self.tables = tables
        self._relation = relation
        self._side = side
        self._scale = scale
        self._stated = facts.of(relation, side, anchors)
        self._kept: dict[tuple[int, int], tuple[Degrees, Degrees]] = {}
        self._cached: Degrees | None = None
        if len(anchors) * tables.model.dim <= _CACHED_FLOATS:
            self._cached = tables.queries(side, anchors, relation)

    def bounds(self, part: slice, block: Block) -> tuple[Degrees, Degrees]:
        """Return bounds [b, n] on the degrees of all links between some anchors and a block.

        Args:
            part: PART anchors at most, from a multiple of PART on.
            block: The rows.
        """
        low, high = self._score_bounds(part, block)
        spread = self._spread_of(part)
        lower, upper = (
            self._scale.degrees(scores, self._relation, self._side, spread) for scores in (low, high)
        )
        lower, upper = lowered(lower), raised(upper)
        self._stated.lift(part, block.ids, lower, upper)
        return lower, upper

    def degrees(self, places: Ids, rows: Ids) -> Degrees:
        """Return float64[m]: the degrees of pairs of an anchor, by its place, and a row."""
        found = np.empty(len(places))
        size = max(1, _PAIR_FLOATS // self.tables.model.dim)
        for start in range(0, len(places), size):
            part = slice(start, start + size)
            scores = self._pair_scores(places[part], rows[part])
            spread = self._spread_of(places[part])
            column = self._scale.degrees(scores[:, None], self._relation, self._side, spread)
            found[part] = column[:, 0]
        self._stated.lift_pairs(found, places, rows)
        return found

    def _queries(self, part: slice | Ids) -> Degrees:
        if self._cached is not None:
            return self._cached[part]
        return self.tables.queries(self._side, self.anchors[part], self._relation)

    def _pair_scores(self, places: Ids, rows: Ids) -> Degrees:
        model = self.tables.model
        candidates = self.tables.candidates(self._side, rows)
        scores: Degrees = model.metric.score_pairs(self._queries(places), candidates)
        return scores + model.offset

    def _score_bounds(self, part: slice, block: Block) -> tuple[Degrees, Degrees]:
        """Return bounds [b, n] on scores; those that `_spread` needed are at hand, if they are few."""
        kept = self._kept.get((part.start, block.rows.start)) if isinstance(block.rows, range) else None
        if kept is None:
            return self._computed_bounds(part, block)
        return kept[0][: part.stop - part.start], kept[1][: part.stop - part.start]

    def _computed_bounds(self, part: slice, block: Block) -> tuple[Degrees, Degrees]:
        metric, offset = self.tables.model.metric, self.tables.model.offset
        queries = self._queries(part)
        candidates, squares = block.candidates(self._side)
        with np.errstate(over="ignore", invalid="ignore"):
            values = metric.compare_all(queries, candidates, squares) + metric.constant(queries)[:, None]
        longest = float(squares.max(initial=0.0)) ** 0.5
        slack = metric.slack(candidates.shape[1], metric.lengths(queries), longest) * _ROUNDING
        low, high = values - slack[:, None], values + slack[:, None]
        if metric.uses_squares:
            low, high = np.minimum(low, 0.0), np.minimum(high, 0.0)
        return lowered(metric.score(low) + offset), raised(metric.score(high) + offset)

    def _spread_of(self, part: slice | Ids) -> Spread | None:
        if not self._scale.needs_spread:
            return None
        whole = self._spread
        return Spread(whole.lowest[part], whole.highest[part], whole.log_total[part], whole.num_known[part])

    @cached_property
    def _spread(self) -> Spread:
        """The scores of all rows, by one more pass over the table."""
        size = len(self.anchors)
        lowest, highest, log_total = _Least(size), _Least(size), np.full(size, -np.inf)
        for block in self.tables.blocks():
            for start in range(0, size, PART):
                part = slice(start, start + PART)
                low, high = self._computed_bounds(part, block)
                if size * self.tables.num_rows <= _KEPT_SCORES:
                    assert isinstance(block.rows, range)
                    self._kept[start, block.rows.start] = low, high
                scores = (low + high) / 2
                lowest.offer(part, block.ids, scores)
                highest.offer(part, block.ids, -scores)
                largest = scores.max(axis=1)
                log_sum = largest + np.log(np.exp(scores - largest[:, None]).sum(axis=1))
                log_total[part] = np.logaddexp(log_total[part], log_sum)
        every = np.arange(size)
        return Spread(
            self._pair_scores(every, lowest.rows)[:, None],
            self._pair_scores(every, highest.rows)[:, None],
            log_total[:, None],
            np.maximum(self._stated.counts, 1)[:, None],
        )


class _Least:
    """The row with the least value for each of B anchors, while blocks come by."""

    def __init__(self, size: int) -> None:
        self.rows: Ids = np.zeros(size, np.int64)
        self._values = np.full(size, np.inf)

    def offer(self, part: slice, rows: Ids, values: Degrees) -> None:
        """Take values [b, n] of some anchors and rows [n]."""
        places = values.argmin(axis=1)
        least = np.take_along_axis(values, places[:, None], axis=1)[:, 0]
        is_less = least < self._values[part]
        self.rows[part] = np.where(is_less, rows[places], self.rows[part])
        self._values[part] = np.minimum(least, self._values[part])
