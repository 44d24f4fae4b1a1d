"""Showing a model some rows instead of its sharded table, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kgshard.embedding import RowWiseShardedEmbedding
from kgshard.errors import ConfigError
from kgshard.sharded_model.deferred import ENTITIES


class ShownRows(nn.Module):
    """Stands in for a sharded table: `weight` is some rows of it, ids are still looked up on all ranks.

    The lookups, which are collective, happen for the first rows shown; when others are shown, the same ids
    are asked for and get the same answers.
    """

    weight: Tensor

    def __init__(self, lookup: Callable[[Tensor], Tensor], dim: int) -> None:
        super().__init__()
        self.embedding_dim = dim
        self._lookup = lookup
        self._answers: list[tuple[Tensor, Tensor]] = []
        self._num_asked = 0

    def show(self, rows: Tensor) -> None:
        self.weight = rows
        self.num_embeddings = len(rows)
        self._num_asked = 0

    def forward(self, ids: Tensor) -> Tensor:
        if self._num_asked == len(self._answers):
            self._answers.append((ids, self._lookup(ids)))
        asked, rows = self._answers[self._num_asked]
        self._num_asked += 1
        if not torch.equal(asked, ids):
            raise ConfigError("forward_k_vs_all looks up other ids when it is shown other rows of the table")
        return rows


@contextmanager
def showing(model: nn.Module, table: RowWiseShardedEmbedding) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that shows a model some rows instead of its sharded table, in a `with` block.

    `num_entities`, where the model has it, is then the number of those rows.
    """
    shown = ShownRows(table.forward, table.embedding_dim)
    attributes = model.__dict__
    knows_count = attributes.get("num_entities") == table.num_embeddings

    def show(rows: Tensor) -> None:
        shown.show(rows)
        if knows_count:
            attributes["num_entities"] = len(rows)

    model._modules[ENTITIES] = shown
    try:
        yield show
    finally:
        model._modules[ENTITIES] = table
        if knows_count:
            attributes["num_entities"] = table.num_embeddings


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Let every module of a model be in evaluation mode, in a `with` block."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
