"""Complex numbers, quaternions and octonions: one product, by Cayley and Dickson's doubling.

An element is a list of its real parts, the blocks of a row: 2, 4 or 8 arrays [..., k]. Pairs of elements
(a, b) of one algebra are the elements of the next, with the product

    (a, b)(c, d) = (a c - conj(d) b, d a + b conj(c))

which makes Hamilton's quaternions [1 | i | j | k] of complex numbers, and octonions of quaternions
(Baez, 2002, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from kgshard.models.arrays import Array, blocks, concat, moduli
from kgshard.models.metric import DOT
from kgshard.models.scoring import BlockScoring


def multiply(x: Sequence[Array], y: Sequence[Array]) -> list[Array]:
    """Return the product x y, block by block."""
    product = []
    for k in range(len(x)):
        total = x[0] * y[k]
        for i in range(1, len(x)):
            term = x[i] * y[i ^ k]
            total = total + term if _sign(i, i ^ k, len(x)) > 0 else total - term
        product.append(total)
    return product


def conjugate(x: Sequence[Array]) -> list[Array]:
    """Return x with all its imaginary parts negated."""
    return [x[0]] + [-part for part in x[1:]]


@cache
def _sign(i: int, j: int, size: int) -> int:
    """Return the sign of e_i e_j, which is e_(i xor j) or its negative, among `size` basis elements."""
    if size == 1:
        return 1
    half = size // 2
    a, b = i % half, j % half
    if i < half:
        return _sign(a, b, half) if j < half else _sign(b, a, half)
    conjugated = 1 if b == 0 else -1
    return conjugated * (_sign(a, b, half) if j < half else -_sign(b, a, half))


class HypercomplexScoring(BlockScoring):
    """The inner product <h r, t>, coordinate by coordinate.

    Multiplying by conj(r) is the adjoint of multiplying by r, from either side and for octonions too, hence
    tails: q = h r. Heads: q = t conj(r). Relations: q = conj(h) t.
    """

    metric = DOT
    has_relation_queries = True

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return concat(multiply(self._blocks(heads), self._blocks(relations)))

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return concat(multiply(self._blocks(tails), conjugate(self._blocks(relations))))

    def query_relations(self, heads: Array, tails: Array) -> Array:
        return concat(multiply(conjugate(self._blocks(heads)), self._blocks(tails)))

    def magnitudes(self, rows: Array) -> Array:
        """Return the moduli [..., dim / num_blocks] of the coordinates."""
        return moduli(rows, self.num_blocks)

    def _blocks(self, rows: Array) -> list[Array]:
        return blocks(rows, self.num_blocks)
