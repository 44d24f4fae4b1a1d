"""Showing a model some rows instead of its sharded table, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kgshard.embedding import RowWiseShardedEmbedding
from kgshard.errors import ConfigError
from kgshard.sharded_model.deferred import ENTITIES
from kgshard.sharded_model.dense import has_foreign_shards


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


@contextmanager
def uneven_parameters(model: nn.Module, entities: Tensor) -> Iterator[None]:
    """Let no two values of a model's floating parameters be alike in a `with` block, but for `entities`.

    Parameters often start with equal values (a bias of zeros), which hide that a method takes some of them
    by an entity's place in the table. What FSDP shards keeps its values: it manages their memory itself.
    """
    drawn = torch.Generator().manual_seed(0)
    own = [] if has_foreign_shards(model) else list(model.parameters())
    own = [p for p in own if p is not entities and not is_lazy(p)]
    kept = [(p, p.data) for p in own if p.is_floating_point()]
    try:
        for parameter, values in kept:
            parameter.data = values + _noise_for(values, drawn)
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values


def _noise_for(values: Tensor, drawn: torch.Generator) -> Tensor:
    """Return normal noise half as large as `values` are; of deviation 0.5 where all are 0."""
    # In proportion, so that a deep model's scores stay of the size that its author meant.
    size = float(values.float().square().mean().sqrt()) if values.numel() else 0.0
    return torch.randn(values.shape, generator=drawn).to(values) * (0.5 * (size or 1.0))
