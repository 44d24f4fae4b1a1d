"""RotatE: -||h e^(i theta) - t|| over complex numbers, theta = the relation's angles (Sun et al., 2019).

Entity rows are halves [real | imaginary]; a relation row is dim / 2 angles in radians. The distance is the
2-norm of the whole difference, which is what an L2 index searches (PyKEEN and dicee take it too), or the
sum of the moduli (the paper). A rotation keeps both, so the heads' query is the tail turned back.
"""

import math

from kgshard.models.arrays import Array, concat, cos, halves, sin
from kgshard.models.metric import Metric
from kgshard.models.scoring import ComplexScoring, Init


class RotatE(ComplexScoring):
    """A relation rotates each complex coordinate."""

    def __init__(self, metric: Metric) -> None:
        """Compare by METRICS["l2"] or METRICS["moduli"]."""
        self.metric = metric

    def relation_dim(self, dim: int) -> int:
        return dim // 2

    def entity_init(self, dim: int) -> Init:
        return Init("uniform", 6 / math.sqrt(dim))

    def relation_init(self, dim: int) -> Init:
        return Init("uniform", math.pi)

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return _rotate(heads, relations)

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return _rotate(tails, -relations)


def _rotate(rows: Array, angles: Array) -> Array:
    (a, b), c, s = halves(rows), cos(angles), sin(angles)
    return concat([a * c - b * s, a * s + b * c])
