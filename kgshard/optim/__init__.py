"""Optimizers that touch only the rows that got a gradient. One file a family, one line in OPTIMIZERS."""

from __future__ import annotations

from kgshard.optim.adagrad import Adagrad, RowWiseAdagrad
from kgshard.optim.adam import RowStepAdam, SparseAdam
from kgshard.optim.base import Rounding, RowOptimizer, Rows, Storage
from kgshard.optim.sgd import SGD

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Rounding",
    "RowOptimizer",
    "RowStepAdam",
    "RowWiseAdagrad",
    "Rows",
    "SparseAdam",
    "Storage",
]

OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "adam": SparseAdam,
    "adam-rowstep": RowStepAdam,
    "adagrad": Adagrad,
    "adagrad-rowwise": RowWiseAdagrad,
    "sgd": SGD,
}
"""Every optimizer by the name that `--optimizer` takes."""
