"""SimplE: (sum_i h'_i r_i t''_i + sum_i t'_i s_i h''_i) / 2 (Kazemi and Poole, 2018).

Entity rows are halves [x' as head | x'' as tail]; relation rows are halves [r | s], s for the inverse. So
both vectors of an entity learn from every triple. Tails: q = [s h'' | r h'] / 2. Heads: q =
[r t'' | s t'] / 2.
"""

from kgshard.models.arrays import Array, concat, halves
from kgshard.models.metric import DOT
from kgshard.models.scoring import BlockScoring


class SimplE(BlockScoring):
    """The mean of CP's scores of a triple and of its inverse."""

    metric = DOT
    has_relation_queries = True
    num_blocks = 2
    kind = "two-role"

    def query_tails(self, heads: Array, relations: Array) -> Array:
        (as_head, as_tail), (forward, inverse) = halves(heads), halves(relations)
        return concat([as_tail * inverse, as_head * forward]) / 2

    def query_heads(self, tails: Array, relations: Array) -> Array:
        (as_head, as_tail), (forward, inverse) = halves(tails), halves(relations)
        return concat([as_tail * forward, as_head * inverse]) / 2

    def query_relations(self, heads: Array, tails: Array) -> Array:
        (h_head, h_tail), (t_head, t_tail) = halves(heads), halves(tails)
        return concat([h_head * t_tail, h_tail * t_head]) / 2
