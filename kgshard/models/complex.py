"""ComplEx: Re(sum_i h_i r_i conj(t_i)) over complex numbers (Trouillon et al., 2016).

Rows are halves [real | imaginary]. The tails' query is h r, the heads' t conj(r), the relations' t conj(h).
"""

from kgshard.models.arrays import Array, complex_product, moduli
from kgshard.models.metric import DOT
from kgshard.models.scoring import ComplexScoring


class ComplEx(ComplexScoring):
    """A relation multiplies complex coordinates."""

    metric = DOT
    has_relation_queries = True

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return complex_product(heads, relations)

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return complex_product(tails, relations, conjugate=True)

    def query_relations(self, heads: Array, tails: Array) -> Array:
        return complex_product(tails, heads, conjugate=True)

    def magnitudes(self, rows: Array) -> Array:
        return moduli(rows)
