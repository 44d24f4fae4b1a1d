"""TransE: -||h + r - t|| with the 2-norm or the 1-norm, not squared (Bordes et al., 2013)."""

import math

from kgshard.models.arrays import Array
from kgshard.models.metric import Metric
from kgshard.models.scoring import Init, Scoring


class TransE(Scoring):
    """A relation is a translation from head to tail."""

    def __init__(self, metric: Metric) -> None:
        """Compare by METRICS["l2"] or METRICS["l1"]."""
        self.metric = metric

    def entity_init(self, dim: int) -> Init:
        # The paper's bound: a row's 2-norm starts near 3.5 at every dimension.
        return Init("uniform", 6 / math.sqrt(dim))

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return heads + relations

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return tails - relations
