"""ComplEx: Re(sum_i h_i r_i conj(t_i)) over complex numbers (Trouillon et al., 2016).

Rows are halves [real | imaginary]. With h = a + bi and r = c + di the tails' query is h r; with
t = e + fi the heads' query is t conj(r).
"""

from kgshard.models.arrays import Array, concat, halves, moduli
from kgshard.models.metric import DOT
from kgshard.models.scoring import ComplexScoring


class ComplEx(ComplexScoring):
    """A relation multiplies complex coordinates."""

    metric = DOT
    has_relation_queries = True

    def query_tails(self, heads: Array, relations: Array) -> Array:
        (a, b), (c, d) = halves(heads), halves(relations)
        return concat([a * c - b * d, a * d + b * c])

    def query_heads(self, tails: Array, relations: Array) -> Array:
        (e, f), (c, d) = halves(tails), halves(relations)
        return concat([c * e + d * f, c * f - d * e])

    def query_relations(self, heads: Array, tails: Array) -> Array:
        (a, b), (e, f) = halves(heads), halves(tails)
        return concat([a * e + b * f, a * f - b * e])

    def magnitudes(self, rows: Array) -> Array:
        return moduli(rows)
