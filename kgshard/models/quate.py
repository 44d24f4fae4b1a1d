"""QuatE: <h r / |r|, t> over quaternions (Zhang et al., 2019).

Rows are quarters [1 | i | j | k], and r / |r| divides each quaternion by its own norm, so that a relation
turns each coordinate and stretches none. Tails: q = h r / |r|. Heads: q = t conj(r) / |r|.
"""

from kgshard.models.arrays import Array, blocks, concat, floored, moduli
from kgshard.models.hypercomplex import conjugate, multiply
from kgshard.models.metric import DOT
from kgshard.models.scoring import BlockScoring, Init


class QuatE(BlockScoring):
    """A relation is a unit quaternion for each coordinate."""

    metric = DOT
    num_blocks = 4
    kind = "quaternion"

    def relation_init(self, dim: int) -> Init:
        # Norms start near 1, so that a first step of the usual size turns a relation by a part of a circle.
        return Init("normal", 0.5)

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return concat(multiply(blocks(heads, 4), unit_quaternions(relations)))

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return concat(multiply(blocks(tails, 4), conjugate(unit_quaternions(relations))))

    def magnitudes(self, rows: Array) -> Array:
        return moduli(rows, 4)

    def factors(self, heads: Array, relations: Array, tails: Array) -> tuple[Array, ...]:
        """Return the moduli of both ends; a relation's are 1, whatever its row is."""
        return self.magnitudes(heads), self.magnitudes(tails)


def unit_quaternions(rows: Array) -> list[Array]:
    """Return the parts [..., k] of rows [..., 4 k], each quaternion divided by its norm, 0 staying 0."""
    norms = floored(moduli(rows, 4), 1e-15)
    return [part / norms for part in blocks(rows, 4)]
