"""ConvE: <f(vec(f([h; r] * filters)) W), t>, f(x) = max(0, x) (Dettmers et al., 2018).

Rows h and r are images, stacked to twice their height and convolved with 32 filters of 3 x 3, unpadded.
Tails: q = f(n(vec(f(n(n([h; r]) * filters))) W)), n for normalising. The head goes through f, so no query
finds heads; ask with reciprocal relations, as the paper does.

Where the authors normalise images, maps and queries over a batch, this normalises each by itself (layer
normalisation; Ba et al., 2016), and drops nothing out: a score must depend on its triple, not on its company.
"""

from __future__ import annotations

import math

from kgshard.errors import ConfigError
from kgshard.models.arrays import Array, concat, convolve, layer_norm, relu
from kgshard.models.metric import DOT
from kgshard.models.scoring import Init, Scoring, SharedInit, whole_numbers

_NUM_FILTERS = 32
_FILTER_SIZE = 3


class ConvE(Scoring):
    """A small neural network reads head and relation, and looks for the tail."""

    metric = DOT
    has_head_queries = False

    def __init__(self, height: int | None = None) -> None:
        """Choose the height of the images; by default the divisor of dim next below its root."""
        self._height = height

    def configured(self, arguments: str) -> ConvE:
        return ConvE(*whole_numbers(arguments, "the images' height", at_least=2))

    def check_dim(self, dim: int) -> None:
        super().check_dim(dim)
        height, width = self._image(dim)
        if height * width != dim or height < 2 or width < _FILTER_SIZE:
            wanted = self._height or "height (2 or more)"
            raise ConfigError(f"dim must be {wanted} x width (3 or more) for images, got {dim}")

    def shared_init(self, dim: int) -> dict[str, SharedInit]:
        # Uniform in 1 / sqrt(inputs), which is torch's default for both kinds of layers.
        height, width = self._image(dim)
        seen = _FILTER_SIZE**2
        features = _NUM_FILTERS * (2 * height - _FILTER_SIZE + 1) * (width - _FILTER_SIZE + 1)
        per_filter, per_feature = (Init("uniform", 1 / math.sqrt(inputs)) for inputs in (seen, features))
        return {
            "filters": SharedInit((_NUM_FILTERS, _FILTER_SIZE, _FILTER_SIZE), per_filter),
            "filter_bias": SharedInit((_NUM_FILTERS,), per_filter),
            "projection": SharedInit((features, dim), per_feature),
            "gain": SharedInit((dim,), Init("uniform", 0.0, center=1.0)),
            "bias": SharedInit((dim,), Init("uniform", 0.0)),
        }

    def query_tails(self, heads: Array, relations: Array) -> Array:
        shared, pixels = self.shared, layer_norm(concat([heads, relations]))
        height, width = self._image(heads.shape[-1])
        images = pixels.reshape(*pixels.shape[:-1], 2 * height, width)
        maps = convolve(images, shared["filters"]) + shared["filter_bias"][:, None, None]
        features = relu(layer_norm(maps.reshape(*pixels.shape[:-1], len(shared["projection"]))))
        return relu(layer_norm(features @ shared["projection"]) * shared["gain"] + shared["bias"])

    def _image(self, dim: int) -> tuple[int, int]:
        height = self._height or max(n for n in range(1, math.isqrt(dim) + 1) if dim % n == 0)
        return height, dim // height
