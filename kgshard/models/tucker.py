"""TuckER: sum_(a,i,j) W_aij r_a h_i t_j, the core W shared by all relations (Balazevic et al., 2019).

A relation row is d_r floats, W is d_r x dim x dim. Tails: q_j = sum_(a,i) W_aij r_a h_i. Heads: q_i =
sum_(a,j) W_aij r_a t_j. Relations: q_a = sum_(i,j) W_aij h_i t_j. The paper's batch normalisation and dropout
are left out: a score must depend on its triple, and not on its company.
"""

from __future__ import annotations

from kgshard.models.arrays import Array, outer
from kgshard.models.metric import DOT
from kgshard.models.scoring import Init, Scoring, SharedInit, whole_numbers

_DEFAULT_RELATION_DIM = 30
"""The paper's for WN18RR, with entities of 200 floats."""


class TuckER(Scoring):
    """A relation weighs the slices of one bilinear form."""

    metric = DOT
    has_relation_queries = True

    def __init__(self, relation_dim: int | None = None) -> None:
        """Choose d_r; by default dim, but at most 30: the core has d_r * dim * dim floats."""
        self._relation_dim = relation_dim

    def configured(self, arguments: str) -> TuckER:
        return TuckER(*whole_numbers(arguments, "the relation dim", at_least=1))

    def relation_dim(self, dim: int) -> int:
        return self._relation_dim or min(dim, _DEFAULT_RELATION_DIM)

    def shared_init(self, dim: int) -> dict[str, SharedInit]:
        return {"core": SharedInit((self.relation_dim(dim), dim, dim), Init("uniform", 1.0))}

    def query_tails(self, heads: Array, relations: Array) -> Array:
        core = self.shared["core"]
        return outer(relations, heads) @ core.reshape(-1, core.shape[2])

    def query_heads(self, tails: Array, relations: Array) -> Array:
        core = self.shared["core"].swapaxes(1, 2)
        return outer(relations, tails) @ core.reshape(-1, core.shape[2])

    def query_relations(self, heads: Array, tails: Array) -> Array:
        core = self.shared["core"]
        return outer(heads, tails) @ core.reshape(len(core), -1).T
