"""RESCAL: h^T R t, a matrix for each relation (Nickel et al., 2011).

A relation row is R [dim, dim], row by row. Tails: q = R^T h. Heads: q = R t. Relations: q = h t^T.
"""

from kgshard.models.arrays import Array, outer
from kgshard.models.metric import DOT
from kgshard.models.scoring import Scoring


class RESCAL(Scoring):
    """A relation is a bilinear form."""

    metric = DOT
    has_relation_queries = True

    def relation_dim(self, dim: int) -> int:
        return dim * dim

    def query_tails(self, heads: Array, relations: Array) -> Array:
        return (heads[..., None, :] @ _matrices(relations, heads))[..., 0, :]

    def query_heads(self, tails: Array, relations: Array) -> Array:
        return (_matrices(relations, tails) @ tails[..., None])[..., 0]

    def query_relations(self, heads: Array, tails: Array) -> Array:
        return outer(heads, tails)


def _matrices(relations: Array, entities: Array) -> Array:
    dim = entities.shape[-1]
    return relations.reshape(*relations.shape[:-1], dim, dim)
