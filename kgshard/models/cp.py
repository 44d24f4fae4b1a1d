"""CP: sum_i h_i r_i t_i, an entity having one vector as head and another as tail (Hitchcock, 1927).

Entity rows are halves [as head | as tail]; a relation row is dim / 2 floats, and so are queries, which are
compared with one half of the candidates' rows. Tails: q = h r, with tail halves. Heads: q = t r, with head
halves. The halves learn nothing from each other, which reciprocal relations mend (Lacroix et al., 2018).
"""

from kgshard.models.arrays import Array, halves
from kgshard.models.metric import DOT
from kgshard.models.scoring import BlockScoring, Side


class CP(BlockScoring):
    """The canonical polyadic decomposition: DistMult with two roles."""

    metric = DOT
    has_relation_queries = True
    num_blocks = 2
    kind = "two-role"

    def relation_dim(self, dim: int) -> int:
        return dim // 2

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return halves(heads)[0] * relations

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return halves(tails)[1] * relations

    def query_relations(self, heads: Array, tails: Array) -> Array:
        return halves(heads)[0] * halves(tails)[1]

    def candidates(self, side: Side, rows: Array) -> Array:
        as_head, as_tail = halves(rows)
        return as_tail if side == "tail" else as_head

    def factors(self, heads: Array, relations: Array, tails: Array) -> tuple[Array, ...]:
        """Return the sizes of the three vectors that meet; the other roles take no part."""
        return abs(halves(heads)[0]), abs(relations), abs(halves(tails)[1])
