"""MuRE: -||R h + tau - t||^2 + b_h + b_t, R diagonal (Balazevic, Allen and Hospedales, 2019).

Entity rows are [vector (n) | b as head | b as tail], so dim = n + 2; relation rows are [R (n) | tau (n)].
Multiplied out, the score is an inner product with a candidate's row and a few columns made from it:

    tails: q = [2 x | 1 | b_h - |x|^2] with [t | b_t - |t|^2 | 1],            x = R h + tau
    heads: q = [2 R y | -R R | 1 | b_t - |y|^2] with [h | h h | b_h | 1],     y = t - tau

The last column carries what the query adds to all its scores, so that they are the formula's. tau is the
negative of the paper's translation, which is the tail's. dicee leaves out the square; that has no such form.
"""

from kgshard.errors import ConfigError
from kgshard.models.arrays import Array, concat, halves, ones_like
from kgshard.models.metric import DOT
from kgshard.models.scoring import Columns, Init, Scoring, Side


class MuRE(Scoring):
    """A relation stretches and shifts the head; entities have biases."""

    metric = DOT
    takes_dropout = False  # One of a query's coordinates is a 1 that brings in the candidate's own terms.

    def check_dim(self, dim: int) -> None:
        super().check_dim(dim)
        if dim < 3:
            raise ConfigError(f"dim must be >= 3, a vector and two biases, got {dim}")

    def relation_dim(self, dim: int) -> int:
        return 2 * (dim - 2)

    def entity_init(self, dim: int) -> Columns:
        return (dim - 2, Init("normal", 1e-2)), (2, Init("normal", 0.0))

    def relation_init(self, dim: int) -> Columns:
        return (dim - 2, Init("normal", 0.0, center=1.0)), (dim - 2, Init("normal", 1e-2))

    def query_tails(self, heads: Array, relations: Array) -> Array:
        (vectors, as_head, _), (stretch, shift) = _split(heads), halves(relations)
        x = stretch * vectors + shift
        return concat([2 * x, ones_like(x[..., :1]), as_head - _squared(x)])

    def query_heads(self, tails: Array, relations: Array) -> Array:
        (vectors, _, as_tail), (stretch, shift) = _split(tails), halves(relations)
        y = vectors - shift
        own = as_tail - _squared(y)
        return concat([2 * stretch * y, -stretch * stretch, ones_like(own), own])

    def candidates(self, side: Side, rows: Array) -> Array:
        vectors, as_head, as_tail = _split(rows)
        one = ones_like(as_head)
        if side == "tail":
            return concat([vectors, as_tail - _squared(vectors), one])
        return concat([vectors, vectors * vectors, as_head, one])

    def factors(self, heads: Array, relations: Array, tails: Array) -> tuple[Array, ...]:
        """Return the sizes of the vectors and of the shift; R and the biases are left free."""
        return abs(_split(heads)[0]), abs(halves(relations)[1]), abs(_split(tails)[0])


def _split(rows: Array) -> tuple[Array, Array, Array]:
    """Return vectors [..., n] and both biases [..., 1] of entity rows."""
    return rows[..., :-2], rows[..., -2:-1], rows[..., -1:]


def _squared(vectors: Array) -> Array:
    return (vectors * vectors).sum(-1)[..., None]
