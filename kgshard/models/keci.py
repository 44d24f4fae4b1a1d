"""Keci, CKeci: <h r, t> in the Clifford algebra Cl(p, q) (Demir and Ngonga Ngomo, 2023).

Rows are 1 + p + q blocks of k floats: scalars x_0, then coefficients x_i of the basis vectors, of which the
first p square to s_i = 1 and the last q to s_i = -1. A product of two such elements has a scalar, a vector
and a bivector part. Its inner product with t, which has no bivectors, sees the first two:

    tails: q_0 = h_0 r_0 + sum_i s_i h_i r_i,    q_i = h_0 r_i + r_0 h_i
    heads: q_0 = r_0 t_0 + sum_i r_i t_i,        q_i = s_i r_i t_0 + r_0 t_i

Keci multiplies every h_i and r_i by c_i, a learned coefficient that all rows share; CKeci has none. dicee
also adds the sum of the bivectors to the score, where an inner product has no place for them; this is the
algebra's own, from both ends and for any (p, q). CKeci in Cl(0, 1) is ComplEx, in Cl(0, 0) DistMult.
"""

from __future__ import annotations

from kgshard.models.arrays import Array, blocks, concat, moduli
from kgshard.models.metric import DOT
from kgshard.models.scoring import BlockScoring, Init, SharedInit, whole_numbers


class Keci(BlockScoring):
    """A relation multiplies elements of a Clifford algebra."""

    metric = DOT
    has_relation_queries = True

    def __init__(self, p: int = 0, q: int = 1, *, learned: bool = True) -> None:
        """Choose the algebra.

        Args:
            p: Basis vectors that square to 1.
            q: Basis vectors that square to -1.
            learned: Whether there are coefficients.
        """
        self.num_blocks = 1 + p + q
        self.kind = f"Cl({p},{q})"
        self.signs = (1,) * p + (-1,) * q
        self.learned = learned
        self._has_coefficients = learned and bool(self.signs)

    def configured(self, arguments: str) -> Keci:
        return Keci(*whole_numbers(arguments, "p,q", at_least=0), learned=self.learned)

    def shared_init(self, dim: int) -> dict[str, SharedInit]:
        if not self._has_coefficients:
            return {}
        # 1 is CKeci. dicee's 0 is DistMult on k floats, and hides all others from the first step.
        return {"coefficients": SharedInit((len(self.signs),), Init("uniform", 0.0, center=1.0))}

    def query_tails(self, heads: Array, relations: Array) -> Array:
        h, r = self._scaled(heads), self._scaled(relations)
        query = [h[0] * r[0]]
        for i, sign in enumerate(self.signs, start=1):
            query[0] = query[0] + sign * (h[i] * r[i])
            query.append(h[0] * r[i] + r[0] * h[i])
        return concat(query)

    def query_heads(self, tails: Array, relations: Array) -> Array:
        r, t = self._scaled(relations), blocks(tails, self.num_blocks)
        query = [r[0] * t[0]]
        for i, sign in enumerate(self.signs, start=1):
            query[0] = query[0] + r[i] * t[i]
            query.append(sign * (r[i] * t[0]) + r[0] * t[i])
        return concat(self._scaled(concat(query)))

    def query_relations(self, heads: Array, tails: Array) -> Array:
        # Without bivectors the product commutes: h and r can change places.
        return self.query_heads(tails, heads)

    def magnitudes(self, rows: Array) -> Array:
        """Return the 2-norms [..., k] of the coordinates' floats; for Cl(0, 1) those are ComplEx's moduli."""
        return moduli(rows, self.num_blocks)

    def _scaled(self, rows: Array) -> list[Array]:
        parts = blocks(rows, self.num_blocks)
        if not self._has_coefficients:
            return parts
        coefficients = self.shared["coefficients"]
        return parts[:1] + [coefficients[i] * parts[1 + i] for i in range(len(self.signs))]
