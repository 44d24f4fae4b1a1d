"""Where candidates for the best rows come from.

Shape letters: B queries, N rows, D floats for each row, E floats for each candidate made of one, Q floats for
a query (as many as E, or what the metric wants), F fetched candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.errors import NonFiniteError
from kgshard.models.metric import Metric
from kgshard.shards import Floats, StoredTable, first_non_finite
from kgshard_tools.lifts import AS_STORED, Lift
from kgshard_tools.search.exclusions import Exclusions, Ids

Scores = npt.NDArray[np.float64]

_SPARE = 16


@dataclass(frozen=True, slots=True)
class Fetched:
    """The best candidates by float32 comparison values (kgshard.models.metric)."""

    ids: Ids
    """int64[B, F], distinct in each row; -1 where there is none."""
    values: Floats
    """float32[B, F]; -inf where there is none."""
    worst: Scores
    """float64[B]: no row that was not fetched has a higher comparison value."""
    longest: float
    """The largest 2-norm among all candidates, to bound rounding."""


class CandidateSource(ABC):
    """Something that finds the best rows of a table, nearly."""

    is_exact = True
    """Whether `Fetched.worst` bounds what was not fetched; else nothing is known of that."""

    def __init__(
        self, table: StoredTable, metric: Metric, lift: Lift = AS_STORED, *, labels: Sequence[str] = ()
    ) -> None:
        """Search `table`.

        Args:
            table: The rows.
            metric: How to compare.
            lift: What queries are compared with, made from the rows.
            labels: Names of the rows, for messages.
        """
        self.table = table
        self.metric = metric
        self.lift = lift
        self.width = lift.width(table.dim)
        """E."""
        self.labels = labels

    def __len__(self) -> int:
        return self.table.num_rows

    def ids(self, places: range) -> Ids:
        """Return int64[n]: the rows at some places of what is searched, ascending."""
        return np.arange(places.start, places.stop)

    def applicable(self, excluded: Exclusions) -> Exclusions:
        """Return the exclusions of rows that are searched at all."""
        return excluded

    def first_count(self, k: int) -> int:
        """Return how many candidates are worth fetching at first for k answers."""
        return k + _SPARE

    def described(self) -> dict[str, object]:
        """Return what an answer says of an approximate source."""
        return {}

    @abstractmethod
    def fetch(self, queries: Scores, count: int, excluded: Exclusions) -> Fetched:
        """Return the `count` best rows for each query float64[B, Q] but its exclusions.

        Every query has more than `count` rows left.
        """

    def candidates(self, ids: Ids) -> Scores:
        """Return float64[I, E], what scores are defined on; not finite where rows are not."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.lift(self.table.gather(ids).astype(np.float64))

    def check_finite(self, ids: Ids | range) -> None:
        """Raise NonFiniteError where one of these rows, or what is made of it, is NaN or infinite."""
        rows = self.table.gather(np.asarray(ids))
        self._check(rows, ids)
        with np.errstate(over="ignore", invalid="ignore"):
            self._check(self.lift(rows.astype(np.float64)), ids)

    def _check(self, rows: npt.NDArray[np.floating], ids: Ids | range) -> None:
        bad = first_non_finite(rows)
        if bad is not None:
            row = int(ids[bad])
            name = f" ({self.labels[row]!r})" if len(self.labels) else ""
            raise NonFiniteError(f"entity {row}{name} is not finite; such a run cannot be searched")
