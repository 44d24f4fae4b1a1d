"""TransH: -||P(h + d) - P t||_2, P the projection on the relation's hyperplane (Wang et al., 2014).

A relation row is [d | w], 2 dim floats: a shift, and a normal of the hyperplane, made a unit as w' = w / |w|;
P x = x - <w', x> w'. Tails: q = [P(h + d) | w']. Heads: q = [P(t - d) | w']. The metric projects candidates.
The paper asks d into the hyperplane by a penalty, and dicee does not ask; projecting d puts it there. The
distance is not squared, as in TransE.
"""

import math

from kgshard.models.arrays import Array, concat, halves, unit
from kgshard.models.metric import HYPERPLANE
from kgshard.models.scoring import Init, Scoring


class TransH(Scoring):
    """A relation is a translation within a hyperplane of its own."""

    metric = HYPERPLANE

    def relation_dim(self, dim: int) -> int:
        return 2 * dim

    def entity_init(self, dim: int) -> Init:
        return Init("uniform", 6 / math.sqrt(dim))  # As TransE's.

    def query_tails(self, heads: Array, relations: Array) -> Array:
        shift, normal = halves(relations)
        return _on_the_hyperplane(heads + shift, unit(normal))

    def query_heads(self, tails: Array, relations: Array) -> Array:
        shift, normal = halves(relations)
        return _on_the_hyperplane(tails - shift, unit(normal))


def _on_the_hyperplane(points: Array, normals: Array) -> Array:
    heights = (points * normals).sum(-1)[..., None]
    return concat([points - heights * normals, normals])
