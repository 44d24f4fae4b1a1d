"""DualE: <h r', t> over dual quaternions, r' being r made a unit (Cao et al., 2021).

A row is a + b eps with eps^2 = 0 and quaternions a and b: eighths, four of a and then four of b, both
[1 | i | j | k]. A relation c + d eps becomes a unit, which turns (c') and shifts (d'), by

    c' = c / |c|,    d' = d - <d, c'> c',    h r' = a c' + (a d' + b c') eps

Tails: q = [a c' | a d' + b c']. Heads, t = e + f eps: q = [e conj(c') + f conj(d') | f conj(c')]. The sign
is the paper's; dicee's DualE is the negative of this.
"""

from kgshard.models.arrays import Array, blocks, concat, moduli
from kgshard.models.hypercomplex import conjugate, multiply
from kgshard.models.metric import DOT
from kgshard.models.quate import unit_quaternions
from kgshard.models.scoring import BlockScoring, Columns, Init


class DualE(BlockScoring):
    """A relation is a rigid motion for each coordinate."""

    metric = DOT
    num_blocks = 8
    kind = "dual quaternion"

    def relation_init(self, dim: int) -> Columns:
        # Norms of c start near 1, as QuatE's do.
        return (dim // 2, Init("normal", 0.5)), (dim // 2, Init("normal", 1e-2))

    def query_tails(self, heads: Array, relations: Array) -> Array:
        a, b = _quaternions(heads)
        c, d = _unit(relations)
        return concat(multiply(a, c) + _add(multiply(a, d), multiply(b, c)))

    def query_heads(self, tails: Array, relations: Array) -> Array:
        e, f = _quaternions(tails)
        c, d = _unit(relations)
        back = conjugate(c)
        return concat(_add(multiply(e, back), multiply(f, conjugate(d))) + multiply(f, back))

    def magnitudes(self, rows: Array) -> Array:
        """Return the 2-norms [..., dim / 8] of the coordinates' eight floats."""
        return moduli(rows, 8)

    def factors(self, heads: Array, relations: Array, tails: Array) -> tuple[Array, ...]:
        """Return the sizes of h, r' and t; the row of r has sizes that the score never sees."""
        c, d = _unit(relations)
        return self.magnitudes(heads), self.magnitudes(concat(c + d)), self.magnitudes(tails)


def _add(x: list[Array], y: list[Array]) -> list[Array]:
    return [one + other for one, other in zip(x, y, strict=True)]


def _quaternions(rows: Array) -> tuple[list[Array], list[Array]]:
    parts = blocks(rows, 8)
    return parts[:4], parts[4:]


def _unit(relations: Array) -> tuple[list[Array], list[Array]]:
    """Return c' and d', four parts [..., k] each."""
    real, dual = _quaternions(relations)
    c = unit_quaternions(concat(real))
    along = c[0] * dual[0] + c[1] * dual[1] + c[2] * dual[2] + c[3] * dual[3]
    return c, [y - along * x for x, y in zip(c, dual, strict=True)]
