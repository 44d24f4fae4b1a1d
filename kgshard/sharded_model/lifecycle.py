"""Any nn.Module with an entity table, trained with that table cut row-wise over ranks.

    Sharded = create_fsdp_sharded_model_class(Model)    # Model makes self.entity_embeddings, an nn.Embedding
    model = Sharded(...)                                # no rows yet
    model.setup_fsdp_training(device, lr=0.1)           # this rank's rows, and their optimizer
    optimizer = torch.optim.Adagrad(model.dense_parameters(), lr=0.1)
    for batch in ...:                                   # this rank's part of a global batch
        optimizer.zero_grad()
        model.entity_optimizer.zero_grad()
        (summed loss of the part / size of the global batch).backward()
        model.sync_dense_gradients()
        optimizer.step()
        model.entity_optimizer.step()
    table = model.gather_entity_embeddings_on_rank_zero()

Lookups, their backward pass and every method below but `dense_parameters` are collective: all ranks make
the same calls in the same order, with as many or as few triples as they have. Names and order of calls are
those of dicee.models.fsdp_models (0.3.3), whose trainer finds what it looks for here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kgshard.distributed import current_exchange
from kgshard.embedding import RowWiseShardedEmbedding, cannot_copy
from kgshard.errors import ConfigError
from kgshard.exchange import Exchange
from kgshard.models.scoring import Init
from kgshard.sharded_model.agreement import check_same_request, refusing_together, request_of
from kgshard.sharded_model.construction import deferring_entity_rows
from kgshard.sharded_model.deferred import ENTITIES, DeferredEmbedding, check_untied, describe_rows
from kgshard.sharded_model.dense import (
    check_summable,
    copy_from_rank_zero,
    has_foreign_shards,
    sum_gradients,
)
from kgshard.sharded_model.entity_optimizer import (
    EntityOptimizer,
    ReferenceAdapter,
    choose_row_optimizer,
)
from kgshard.sharded_model.gather import gather_on_rank_zero
from kgshard.sharded_model.k_vs_all import score_all_entities

Floats = npt.NDArray[np.float32]

_OPTIMIZER = "_entity_optimizer"
"""The attribute of a sharded table that holds the optimizer of its rows."""


class FSDPShardedEntityModel(nn.Module):
    """Mixin that defers a model's entity table and shards it row-wise for training.

    Lifecycle:
        1. `__init__`: entity_embeddings has a size and no rows; it can be initialised and given rows
           (`load_state_dict` of the unsharded model, of which each rank copies its part in step 2).
           `state_dict` has no rows yet, and loads into a model at this step with strict=False.
        2. `setup_fsdp_training(device, lr)`: entity_embeddings is a RowWiseShardedEmbedding, and
           `state_dict` holds this rank's rows; the model itself can be neither copied nor pickled.
        3. `gather_entity_embeddings_on_rank_zero()`: after training.

    Rows start from the distribution that `__init__` asks for (`nn.init` functions, `normal_`, ...), with
    values that depend on the seed and the row only: the same at any world size, not those of the unsharded
    class. Rows that are given start as they are given.
    """

    entity_embeddings: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Run the model's own `__init__`, without the memory of its entity table.

        Raises:
            ConfigError: The table does what a sharded one cannot: padding_idx, max_norm, tied weights, ...
        """
        with deferring_entity_rows(self):
            super().__init__(*args, **kwargs)
        table = self._modules.get(ENTITIES)
        if isinstance(table, nn.Embedding):
            check_untied(self, table)
            self.entity_embeddings = DeferredEmbedding(table, type(self).__name__)

    def setup_fsdp_training(
        self,
        device: torch.device | str,
        lr: float,
        optimizer_cls: type | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        adam_device: torch.device | str | None = None,
        *,
        seed: int | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Create this rank's rows and their optimizer; give all ranks rank 0's other parameters and buffers.

        Args:
            device: Where the rows live; the rest of the model moves there too.
            lr: Learning rate of entity rows, a number > 0.
            optimizer_cls: kgshard.optim's SparseAdam by default, or another RowOptimizer; torch.optim's
                SparseAdam, Adagrad and SGD mean kgshard's of the same name. torch.optim.Adam is refused: it
                also moves rows without a gradient.
            optimizer_kwargs: Settings of that optimizer, such as betas, eps, state_dtype.
            adam_device: Where its state lives; by default where the rows do.
            seed: Row r starts the same for one seed, at any world size; by default rank 0's
                `torch.initial_seed()`, which `torch.manual_seed` sets.
            exchange: The other ranks; by default the process group of torch.distributed, or a world of one.

        Raises:
            ConfigError: An argument is unknown, out of range, cannot take effect, or differs between ranks;
                there is no table; or a trainable parameter is complex.
            RuntimeError: It was called before.
            RankFailureError: Another rank raised one of these.
        """
        device = torch.device(device)
        exchange = exchange or current_exchange(device)
        with refusing_together(exchange):
            make = choose_row_optimizer(optimizer_cls, optimizer_kwargs, lr=lr, device=adam_device)
            table = self._deferred_table()
            if not has_foreign_shards(self):
                check_summable(self._named_dense_parameters())
        check_same_request(exchange, request_of(table, make, seed))
        self.to(device)
        if not has_foreign_shards(self):
            copy_from_rank_zero([*self.parameters(), *self.buffers()], exchange)
        known_seed = _seed_of_rank_zero(exchange) if seed is None else seed
        sharded = RowWiseShardedEmbedding(
            table.num_embeddings,
            table.embedding_dim,
            exchange.rank,
            exchange.world_size,
            device,
            table.dtype,
            fill=lambda weight, rows: table.write(weight, rows, seed=known_seed),
            exchange=exchange,
        )
        sharded.weight.requires_grad_(table.weight.requires_grad)
        optimizer = make(sharded.weight.data, first_row=sharded.start_row, seed=known_seed)
        # With the table, not the model: who takes the table out takes both, and can copy the model again.
        sharded.__dict__[_OPTIMIZER] = EntityOptimizer(sharded.weight, optimizer)
        self.entity_embeddings = sharded

    def _deferred_table(self) -> DeferredEmbedding:
        table, name = getattr(self, ENTITIES, None), type(self).__name__
        if isinstance(table, RowWiseShardedEmbedding):
            raise RuntimeError(f"{name}: setup_fsdp_training was called before")
        if table is None:
            table = self._table_by_convention()
        if not isinstance(table, nn.Embedding):
            raise ConfigError(
                f"{name}.{ENTITIES} must be an nn.Embedding after __init__, found {type(table).__name__}"
            )
        return table if isinstance(table, DeferredEmbedding) else DeferredEmbedding(table, name)

    def _table_by_convention(self) -> nn.Embedding | None:
        """Return the table of a model that left it out, as dicee's do, and says only how large it is."""
        num_entities, dim = getattr(self, "num_entities", None), getattr(self, "embedding_dim", None)
        if not isinstance(num_entities, int) or not isinstance(dim, int):
            return None
        table = describe_rows(num_entities, dim, Init("normal", dim**-0.5), torch.get_default_dtype())
        param_init = getattr(self, "param_init", None)
        if callable(param_init):
            param_init(table.weight.data)
        return table

    @property
    def entity_optimizer(self) -> EntityOptimizer:
        """The optimizer of this rank's entity rows.

        Raises:
            RuntimeError: Before setup_fsdp_training.
        """
        return cast(EntityOptimizer, self._sharded_table().__dict__[_OPTIMIZER])

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Let `copy` and `pickle` do what they do, but not while the table is sharded.

        Raises:
            TypeError: It is.
        """
        if isinstance(self._modules.get(ENTITIES), RowWiseShardedEmbedding):
            raise cannot_copy(self)
        return super().__reduce_ex__(protocol)

    def _sharded_table(self) -> RowWiseShardedEmbedding:
        table = getattr(self, ENTITIES, None)
        if not isinstance(table, RowWiseShardedEmbedding):
            raise RuntimeError(f"{type(self).__name__}: call setup_fsdp_training(device, lr) first")
        return table

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter but the entity rows: what an ordinary optimizer trains."""
        for _, parameter in self._named_dense_parameters():
            yield parameter

    def _named_dense_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        entities = getattr(self._modules.get(ENTITIES), "weight", None)
        for name, parameter in self.named_parameters():
            if parameter is not entities:
                yield name, parameter

    def sync_dense_gradients(self) -> None:
        """Sum the gradients of `dense_parameters` over ranks, after backward: one all-reduce for each dtype.

        Entity rows get their sum in the backward pass already. Wrappers that reduce gradients themselves
        (DDP, FSDP) average them instead: with one, do not call this, and know that entity rows get
        world_size times the gradient of the mean of the ranks' losses.

        Raises:
            ConfigError: A gradient is sparse, or FSDP reduces them.
        """
        if has_foreign_shards(self):
            raise ConfigError(f"{type(self).__name__}: FSDP reduces the gradients of these parameters itself")
        parameters = [(name, p) for name, p in self._named_dense_parameters() if p.requires_grad]
        sum_gradients(parameters, self._sharded_table().table.exchange)

    def gather_entity_embeddings_on_rank_zero(self) -> nn.Embedding | None:
        """Return the whole table on rank 0, in host memory, float32 (float64 where rows are); None elsewhere.

        Rows travel to rank 0 alone, a block at a time. The sharded table stays as it is.

        Raises:
            RuntimeError: Before setup_fsdp_training.
        """
        whole = gather_on_rank_zero(self._sharded_table())
        return None if whole is None else nn.Embedding(len(whole), whole.shape[1], _weight=whole)

    def get_embeddings(self) -> tuple[Floats | None, Floats | None]:
        """Return the entity and relation embedding matrices as numpy arrays, float32.

        While the table is sharded this is a collective call; ranks other than 0 get None for entities. Where
        entity_embeddings is a whole nn.Embedding (a gathered one, say), it is no collective call.

        Returns:
            entity_embeddings: [num_entities, embedding_dim].
            relation_embeddings: [num_relations, dim], or None where the model has no such nn.Embedding.

        Raises:
            RuntimeError: Before setup_fsdp_training.
        """
        relations = getattr(self, "relation_embeddings", None)
        relation_rows = _to_numpy(relations.weight) if isinstance(relations, nn.Embedding) else None
        table = getattr(self, ENTITIES, None)
        if isinstance(table, nn.Embedding) and not isinstance(table, DeferredEmbedding):
            return _to_numpy(table.weight), relation_rows
        whole = gather_on_rank_zero(self._sharded_table())
        return (None if whole is None else _to_numpy(whole)), relation_rows

    def forward_k_vs_all(self, *args: Any, **kwargs: Any) -> Tensor:
        """Score a (head, relation) batch against every entity; no rank holds the table.

        The model's own method runs on each rank for the batches of all ranks, and sees this rank's rows as
        `entity_embeddings.weight`. That fits methods that score entities one by one; others are refused. In
        training mode a batch norm over entity rows sees one rank's rows.

        Returns:
            float[batch_size, num_entities]: of this rank's batch, with a gradient.

        Raises:
            ValueError: The model has no such method.
            ConfigError: Its method does not score entities one by one.
        """
        forward = getattr(super(), "forward_k_vs_all", None)
        if forward is None:
            raise ValueError(f"{type(self).__name__}: the model has no forward_k_vs_all of its own")
        if isinstance(self._modules.get(ENTITIES), RowWiseShardedEmbedding):
            return score_all_entities(self, forward, args, kwargs)
        return cast(Tensor, forward(*args, **kwargs))

    @property
    def _fsdp_adapter(self) -> ReferenceAdapter | None:
        """What dicee's trainer takes the entity rows and their optimizer from."""
        table = getattr(self, ENTITIES, None)
        if not isinstance(table, RowWiseShardedEmbedding):
            return None
        return ReferenceAdapter(table.weight, self.entity_optimizer)


_VARIANTS: dict[type[nn.Module], type[FSDPShardedEntityModel]] = {}


def create_fsdp_sharded_model_class(model_class: type[nn.Module]) -> type[FSDPShardedEntityModel]:
    """Return a variant of `model_class` whose entity table is sharded row-wise.

    It is a subclass of both, and inherits all but the lifecycle from `model_class`. One class has one
    variant; a variant is its own.

    Args:
        model_class: Any nn.Module that keeps its entity table, an nn.Embedding, as `entity_embeddings`.

    Raises:
        TypeError: It is no nn.Module class.
    """
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise TypeError(f"expected an nn.Module class, got {model_class!r}")
    if issubclass(model_class, FSDPShardedEntityModel):
        return model_class
    if model_class not in _VARIANTS:
        contents = {
            "__module__": model_class.__module__,
            "__doc__": f"Row-wise sharded variant of {model_class.__name__}.",
        }
        _VARIANTS[model_class] = types.new_class(
            f"FSDP{model_class.__name__}",
            (FSDPShardedEntityModel, model_class),
            exec_body=lambda namespace: namespace.update(contents),
        )
    return _VARIANTS[model_class]


def _seed_of_rank_zero(exchange: Exchange) -> int:
    return int(exchange.gather_bytes(str(torch.initial_seed()).encode())[0])


def _to_numpy(rows: Tensor) -> Floats:
    return rows.detach().to("cpu", torch.float32).numpy()
