"""Ranking metrics from ranks, in float64.

Ranks are realistic: 1 + (candidates that score higher) + (other candidates that score the same) / 2,
the expected rank among ties (Berrendorf et al., 2020). A constant model gets the middle, not rank 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HITS_AT = (1, 3, 10)


def realistic_ranks(
    num_higher: npt.NDArray[np.int64], num_ties: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return float64[n] ranks, from how many other candidates beat or equal the true one."""
    return 1.0 + num_higher + num_ties / 2


def ranking_metrics(ranks: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return "mrr", "mr" and "hits@k"; NaN where there are no ranks.

    Args:
        ranks: float64[n], each >= 1.
    """
    if len(ranks) == 0:
        return {name: float("nan") for name in ("mrr", "mr", *(f"hits@{k}" for k in HITS_AT))}
    metrics = {"mrr": float(np.mean(1 / ranks)), "mr": float(np.mean(ranks))}
    return metrics | {f"hits@{k}": float(np.mean(ranks <= k)) for k in HITS_AT}
