"""DistMult: sum_i h_i r_i t_i (Yang et al., 2015)."""

from kgshard.models.arrays import Array
from kgshard.models.metric import DOT
from kgshard.models.scoring import Scoring


class DistMult(Scoring):
    """A relation weighs each coordinate. Symmetric: it cannot tell (h, r, t) from (t, r, h)."""

    metric = DOT
    has_relation_queries = True

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return heads * relations

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return tails * relations

    def query_relations(self, heads: Array, tails: Array) -> Array:
        return heads * tails
