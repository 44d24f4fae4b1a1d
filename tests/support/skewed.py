"""Tables whose norms are as skewed as trained ones, on which inner products are hard to search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


def skewed_rows(num_rows: int, dim: int, *, seed: int = 0, clusters: int = 20) -> Rows:
    """Return float32[num_rows, dim]: directions around centres, norms up to some six times the median."""
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((clusters, dim))
    rows = centres[draw.integers(0, clusters, num_rows)] + 0.7 * draw.standard_normal((num_rows, dim))
    norms = np.exp(draw.normal(0.0, 0.45, num_rows))
    rows *= (norms / np.linalg.norm(rows, axis=1))[:, None]
    return rows.astype(np.float32)
