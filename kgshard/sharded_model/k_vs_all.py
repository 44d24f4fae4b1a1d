"""A model's own `forward_k_vs_all` over a sharded table: queries move, rows stay.

Every rank gathers all ranks' batches and lets the model score them against its own rows, shown as if they
were the whole table. Then scores travel to whose batch they are for, and their gradients back.

Shape letters: B queries of this rank, G queries of all ranks, L rows of this rank, N rows of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from kgshard.embedding import RowWiseShardedEmbedding
from kgshard.errors import ConfigError, ExchangeMismatchError
from kgshard.exchange import Exchange
from kgshard.sharded_model.agreement import refusing_together
from kgshard.sharded_model.deferred import ENTITIES
from kgshard.sharded_model.shown import in_eval_mode, showing, uneven_parameters

_BLOCK_ROWS = 8192
"""Rows scored at a time where no gradient is wanted, so that a model's temporaries stay small."""

_CHECKED = "_scores_rows_alone"
"""Set on a model whose method was found to score rows one by one."""

Forward = Callable[..., Tensor]


def score_all_entities(model: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Tensor:
    """Return float[B, N]: this rank's batch against every entity. A collective call, and so is its backward.

    Args:
        model: Its entity_embeddings is a RowWiseShardedEmbedding.
        forward: The model's own method; returns float[B, rows of entity_embeddings.weight].
        args, kwargs: Of that method; tensors in them have one row for each query.

    Raises:
        ConfigError: The method does not score rows one by one, takes no tensor, or tensors of other lengths.
        RankFailureError, ExchangeMismatchError: It failed on another rank, before a lookup or after.
    """
    table = model._modules[ENTITIES]
    assert isinstance(table, RowWiseShardedEmbedding)
    exchange = table.table.exchange
    mine = args, kwargs
    sizes, args, kwargs = _gather_batches(args, kwargs, exchange)
    num_queries = sum(sizes)
    own = _OwnMethod(model, table, lambda: forward(*args, **kwargs), num_queries)
    if num_queries and not model.__dict__.get(_CHECKED):
        with _stopping_together(exchange):
            own.check_rows_are_scored_alone()
        model.__dict__[_CHECKED] = True
    if exchange.world_size == 1:
        return forward(*mine[0], **mine[1])
    draws = _same_draws(exchange) if model.training else nullcontext()
    with draws, _stopping_together(exchange):
        scores = own.score_local_rows()
    rows = [len(table.table.partition.rows_of(rank)) for rank in range(exchange.world_size)]
    swapped: Tensor = _SwapScores.apply(scores, sizes, rows, exchange)  # type: ignore[no-untyped-call]
    return swapped


def _gather_batches(args: Any, kwargs: Any, exchange: Exchange) -> tuple[list[int], Any, Any]:
    """Return how many queries each rank has, and args and kwargs of all ranks' queries in rank order."""
    leaves, structure = tree_flatten((args, kwargs))
    batches = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with refusing_together(exchange):
        _check_batches(batches)
    parts = [_gather(batch, exchange) for batch in batches]
    whole = iter([torch.cat(part) for part in parts])
    everyone = [next(whole) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(everyone, structure)
    return [len(part) for part in parts[0]], args, kwargs


def _check_batches(batches: Sequence[Tensor]) -> None:
    wrong = not batches or any(batch.dim() == 0 or batch.requires_grad for batch in batches)
    if wrong or len({len(batch) for batch in batches}) > 1:
        raise ConfigError("forward_k_vs_all on a sharded table takes tensors of ids, one row for each query")


def _gather(batch: Tensor, exchange: Exchange) -> list[Tensor]:
    shape = batch.shape[1:]
    rows = batch.reshape(len(batch), math.prod(shape))
    return [part.view(-1, *shape) for part in exchange.all_gather(rows)]


class _OwnMethod:
    """A model's own method on all ranks' queries, shown some rows at a time."""

    def __init__(
        self,
        model: nn.Module,
        table: RowWiseShardedEmbedding,
        forward: Callable[[], Tensor],
        num_queries: int,
    ) -> None:
        self._model = model
        self._table = table
        self._forward = forward
        self._num_queries = num_queries
        self._refusal = f"{type(model).__name__}.forward_k_vs_all cannot be scored in shards:"

    def score_local_rows(self) -> Tensor:
        """Return float[G, L]: this rank's rows, some at a time where no gradient is wanted."""
        weight = self._table.weight
        if self._table.local_rows == 0:  # Models need not know of tables without rows.
            return self._score([weight.new_ones(1, weight.shape[1])])[:, :0]
        whole = self._model.training or torch.is_grad_enabled()
        return self._score(torch.split(weight, len(weight) if whole else _BLOCK_ROWS))

    @torch.no_grad()
    def check_rows_are_scored_alone(self) -> None:
        """Score two rows together, then the second alone, with a stand-in for the other parameters.

        Raises:
            ConfigError: It cannot, or the scores differ: there is a softmax or a norm over entities, say, or
                a bias for each of them.
        """
        weight = self._table.weight
        two = torch.linspace(-1, 1, 2 * weight.shape[1]).view(2, -1).to(weight)
        try:
            with in_eval_mode(self._model), uneven_parameters(self._model, weight):
                _, together, alone = self._score([two, two[1:]]).unbind(dim=1)
        except RuntimeError as error:
            words = f"{self._refusal} it fails for 2 rows of {ENTITIES}.weight: {error}"
            raise ConfigError(words) from error
        close = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 5e-2
        if not torch.allclose(together, alone, rtol=close, atol=close, equal_nan=True):
            raise ConfigError(
                f"{self._refusal} an entity's score depends on other entities' rows or on its place in the"
                " table (a softmax or norm over all of them belongs after it; a bias of each entity can be a"
                f" column of {ENTITIES})"
            )

    def _score(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return float[G, rows of all blocks]."""
        with showing(self._model, self._table) as show:
            scores = [self._score_block(show, rows) for rows in blocks]
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=1)

    def _score_block(self, show: Callable[[Tensor], None], rows: Tensor) -> Tensor:
        show(rows)
        scores = self._forward()
        expected = (self._num_queries, len(rows))
        if tuple(scores.shape) != expected:
            raise ConfigError(
                f"{self._refusal} for {len(rows)} rows of {ENTITIES}.weight it must return shape {expected},"
                f" got {tuple(scores.shape)}"
            )
        return scores


@contextmanager
def _same_draws(exchange: Exchange) -> Iterator[None]:
    """Let all ranks draw the same in a `with` block, so that a query's dropout is one at every owner's."""
    seed = torch.randint(2**62, (1,)).to(exchange.device)
    seed = exchange.all_gather(seed)[0]
    devices = [exchange.device] if exchange.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield


@contextmanager
def _stopping_together(exchange: Exchange) -> Iterator[None]:
    """Let no rank wait for one that failed in a `with` block, in which they also call each other."""
    if exchange.world_size == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except ExchangeMismatchError:
        raise  # On all ranks alike.
    except Exception as failure:
        error = failure
    try:
        exchange.share_failure(error)
    except ExchangeMismatchError as mismatch:
        # The others are at a lookup that this rank did not reach; now they know.
        raise error or mismatch from None


class _SwapScores(torch.autograd.Function):
    """Scores of all queries against the rows here become scores of the queries here against all rows."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, sizes: list[int], rows: list[int], exchange: Exchange) -> Tensor:
        """Return float[B, N].

        Args:
            scores: float[G, L].
            sizes: Queries of each rank.
            rows: Rows of each rank.
        """
        ctx.sizes, ctx.rows, ctx.exchange = sizes, rows, exchange
        mine = sizes[exchange.rank]
        chunks = [part.reshape(-1) for part in torch.split(scores, sizes)]
        received = exchange.all_to_all(chunks, [mine * count for count in rows], kind="rows")
        return torch.cat([part.view(mine, count) for part, count in zip(received, rows, strict=True)], dim=1)

    @staticmethod
    @once_differentiable  # Second derivatives would need exchanges of their own: refused, not left out.
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        count = ctx.rows[ctx.exchange.rank]
        chunks = [part.reshape(-1) for part in torch.split(gradients[0], ctx.rows, dim=1)]
        expected = [size * count for size in ctx.sizes]
        received = ctx.exchange.all_to_all(chunks, expected, kind="gradients")
        parts = [part.view(size, count) for part, size in zip(received, ctx.sizes, strict=True)]
        return torch.cat(parts), None, None, None
