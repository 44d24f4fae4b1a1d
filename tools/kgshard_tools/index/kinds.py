"""The kinds of index, and what can be turned on each. No faiss here.

A kind is exact, or approximate: then its search parameter (`nprobe` lists are looked through, or `ef` nodes
of a graph) and how many candidates are scored again for each answer (`depth`) are chosen by measurement.

Vectors are added as they are where FAISS knows the metric. Graphs collapse on raw inner products, because
long vectors are everybody's neighbours (Morozov and Babenko, 2018), so for those a column makes all vectors
equally long, [e | sqrt(M^2 - |e|^2)], and the 2-norm of the difference orders as the inner product does.
Metrics that FAISS does not know, or not in this kind, are approximated by the 2-norm, and the candidates
scored again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kgshard.errors import ConfigError
from kgshard.models.metric import Metric

FaissMetric = Literal["dot", "l2", "l1"]

_ROWS_FOR_A_LIST = 39
"""Fewer would make poor centroids, which FAISS warns of."""
_LEAST_NODES = 32
"""Fewer are all linked to each other."""
_FEW_ROWS = 100_000
"""Below this a scan of all rows takes a few milliseconds, and is exact."""


@dataclass(frozen=True, slots=True)
class Search:
    """How an index is searched."""

    setting: int
    """What `Kind.parameter` names."""
    depth: int
    """Candidates scored again for each answer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to build an index and to search it."""

    name: str
    words: str
    """What it is, for help texts."""
    parameter: Literal["", "nprobe", "ef", "rows"] = ""
    """What is turned to trade speed for recall; nothing where it is exact."""
    is_lossy: bool = False
    """Whether vectors are held only nearly, so that more candidates must be scored again."""
    is_raw: bool = False
    """Whether a graph compares inner products as they are."""
    is_by_norm: bool = False
    """Whether vectors come in order of length."""
    least_rows: int = 0
    """So many are needed for two lists, and for what codes are made of."""

    @property
    def is_exact(self) -> bool:
        return not self.parameter

    def searched_by(self, metric: Metric) -> FaissMetric | None:
        """Return FAISS's metric that stands for `metric`, or None where there is none."""
        if self.is_by_norm:
            return "dot" if metric.name == "dot" else None
        if self.is_exact:
            return metric.name if metric.name in ("dot", "l2", "l1") else None  # type: ignore[return-value]
        return "dot" if metric.name == "dot" and (self.parameter == "nprobe" or self.is_raw) else "l2"

    def lengthens(self, metric: Metric) -> bool:
        """Whether vectors get a column that makes them equally long."""
        return metric.name == "dot" and self.searched_by(metric) == "l2"

    def depths(self, metric: Metric) -> list[int]:
        """Return how many candidates for each answer are worth trying."""
        if not self.is_lossy and metric.name in ("dot", "l2"):
            return [1]
        return [1, 2, 4, 8] if metric.name in ("dot", "l2") else [1, 4, 16, 64]

    def settings(self, num_lists: int, num_rows: int) -> list[int]:
        """Return the values of the parameter that are worth trying, ascending."""
        if self.parameter == "rows":
            ladder = (rows for power in range(10, 40) for rows in (2**power, 3 * 2 ** (power - 1)))
            return [*(rows for rows in ladder if rows < num_rows), num_rows]
        if self.parameter == "nprobe":
            return [*(2**power for power in range(num_lists.bit_length()) if 2**power < num_lists), num_lists]
        return [ef for ef in (16, 32, 64, 128, 256, 512, 1024) if ef < 2 * num_rows] if self.parameter else []


KINDS = {
    kind.name: kind
    for kind in (
        Kind("flat", "every row, exact"),
        Kind("norm", "rows from the longest on, until none left can be better; exact", is_by_norm=True),
        Kind("norm-top", "the same, no more rows than are enough", "rows", is_by_norm=True),
        Kind("ivf", "lists of rows around centroids", "nprobe", least_rows=2 * _ROWS_FOR_A_LIST),
        Kind("ivfsq", "the same, 8 bits a float", "nprobe", is_lossy=True, least_rows=2 * _ROWS_FOR_A_LIST),
        Kind("ivfpq", "the same, 8 bits for four floats", "nprobe", is_lossy=True, least_rows=256),
        Kind("hnsw", "a graph of near rows", "ef", least_rows=_LEAST_NODES),
        Kind("hnswsq", "the same, 8 bits a float", "ef", is_lossy=True, least_rows=_LEAST_NODES),
        Kind(
            "hnsw-ip",
            "a graph on raw inner products, which may collapse",
            "ef",
            is_raw=True,
            least_rows=_LEAST_NODES,
        ),
    )
}
TYPES = ("auto", *KINDS)


def find_kind(name: str, *, num_rows: int) -> Kind | None:
    """Return the kind of a name, or the one that suits so few rows; None where "auto" must look at the table.

    Raises:
        ConfigError: There is no such kind.
    """
    if name not in TYPES:
        raise ConfigError(f"--type: unknown value {name!r} (known: {', '.join(TYPES)})")
    if name == "auto":
        return KINDS["flat"] if num_rows <= _FEW_ROWS else None
    return KINDS["flat"] if is_too_small(name, num_rows) else KINDS[name]


def is_too_small(name: str, num_rows: int) -> bool:
    """Whether there are too few rows for a kind."""
    return name in KINDS and num_rows < KINDS[name].least_rows


def num_lists(num_rows: int) -> int:
    """Return how many lists to cut rows into: a power of two near 4 sqrt(N), and enough rows in each."""
    wanted: int = 1 << round(math.log2(4 * math.sqrt(num_rows)))
    return max(1, min(wanted, num_rows // _ROWS_FOR_A_LIST))
