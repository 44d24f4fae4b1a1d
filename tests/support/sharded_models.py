"""Models of strangers, and what runs on a rank in tests of the sharded lifecycle.

The models know nothing of kgshard. Functions for ranks take an Exchange first; all are module-level, so
threads and gloo processes run the same ones.

Shape letters: N entities, R relations, D floats for each entity, B queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kgshard.exchange import Exchange
from kgshard.partition import RowPartition
from kgshard.sharded_model.lifecycle import create_fsdp_sharded_model_class

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NUM_RELATIONS = 3


class Stranger(nn.Module):
    """An entity table, a relation table, two linear layers and a score of their own making."""

    def __init__(self, num_entities: int = 7, dim: int = 4, sparse: bool = False) -> None:
        super().__init__()
        self.num_entities = num_entities
        self.entity_embeddings = nn.Embedding(num_entities, dim, sparse=sparse)
        nn.init.normal_(self.entity_embeddings.weight, std=0.5)
        self.relation_embeddings = nn.Embedding(NUM_RELATIONS, dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def query(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Return [B, D]."""
        both = torch.cat([self.entity_embeddings(heads), self.relation_embeddings(relations)], dim=-1)
        rows: Tensor = self.out(torch.tanh(self.mix(both)))
        return rows

    def forward(self, triples: Tensor) -> Tensor:
        """Return [B] scores of [B, 3] triples."""
        heads, relations, tails = triples.unbind(dim=1)
        return (self.query(heads, relations) * self.entity_embeddings(tails)).sum(dim=-1)

    def forward_k_vs_all(self, pairs: Tensor) -> Tensor:
        """Return [B, N] scores of [B, 2] heads and relations."""
        return self.query(pairs[:, 0], pairs[:, 1]) @ self.entity_embeddings.weight.T


class DistanceStranger(Stranger):
    """Knows how many entities there are, and compares with each of them apart."""

    def forward_k_vs_all(self, pairs: Tensor) -> Tensor:
        rows = self.entity_embeddings.weight.view(1, self.num_entities, -1)
        return -(self.query(pairs[:, 0], pairs[:, 1])[:, None] - rows).norm(dim=-1)


class SoftmaxStranger(Stranger):
    """Lets the score of an entity depend on all others."""

    def forward_k_vs_all(self, pairs: Tensor) -> Tensor:
        return super().forward_k_vs_all(pairs).softmax(dim=1)


class NarrowStranger(Stranger):
    """Scores a fixed number of entities, whatever table it sees."""

    def forward_k_vs_all(self, pairs: Tensor) -> Tensor:
        return super().forward_k_vs_all(pairs)[:, :1]


class RestlessStranger(Stranger):
    """Looks up an entity of another id each time."""

    calls = 0

    def forward_k_vs_all(self, pairs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward_k_vs_all((pairs + self.calls) % NUM_RELATIONS)


class DropoutStranger(Stranger):
    """Drops half of each query in training."""

    def query(self, heads: Tensor, relations: Tensor) -> Tensor:
        return nn.functional.dropout(super().query(heads, relations), 0.5, self.training)


class LateStumbler(Stranger):
    """Cannot score two rows, except where it is tried out first; says so after its lookups."""

    def forward_k_vs_all(self, pairs: Tensor) -> Tensor:
        scores = super().forward_k_vs_all(pairs)
        if self.training and len(self.entity_embeddings.weight) == 2:
            raise ArithmeticError("two rows are too few")
        return scores


class EarlyStumbler(LateStumbler):
    """Says so before."""

    def forward_k_vs_all(self, pairs: Tensor) -> Tensor:
        if self.training and len(self.entity_embeddings.weight) == 2:
            raise ArithmeticError("two rows are too few")
        return super().forward_k_vs_all(pairs)


def sharded(exchange: Exchange, model: Any, lr: float = 0.1, **settings: Any) -> Any:
    """Return the sharded variant of a Stranger after setup, with the same weights."""
    variant: Any = create_fsdp_sharded_model_class(type(model))(
        model.entity_embeddings.num_embeddings, model.entity_embeddings.embedding_dim
    )
    variant.load_state_dict(model.state_dict())
    variant.setup_fsdp_training(exchange.device, lr, exchange=exchange, **settings)
    return variant


def part_of(batch: Ints | Floats, exchange: Exchange) -> Tensor:
    """Return this rank's rows of a global batch."""
    rows = RowPartition(len(batch), exchange.world_size).rows_of(exchange.rank)
    return torch.from_numpy(batch[rows.start : rows.stop])


@dataclass(frozen=True)
class Course:
    """A training, the same for a sharded model and a plain one."""

    batches: list[Ints]
    """int64[B, 3] global batches of triples."""
    targets: Floats
    """[B] wanted score of each triple in each batch, or [B, N] with k_vs_all."""
    optimizer: type[torch.optim.Optimizer]
    """Of entity rows."""
    lr: float = 0.1
    k_vs_all: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the optimizer of entity rows."""

    def loss(self, model: Any, triples: Tensor, targets: Tensor, global_size: int) -> Tensor:
        """Return the summed squared error of some triples over the size of the global batch."""
        scores = model.forward_k_vs_all(triples[:, :2]) if self.k_vs_all else model(triples)
        return (scores - targets).square().sum() / global_size


def train_plain(model: Any, course: Course) -> dict[str, Tensor]:
    """Train as one does without kgshard: torch's own optimizers on whole batches."""
    dense = [parameter for name, parameter in model.named_parameters() if "entity" not in name]
    dense_optimizer = torch.optim.Adagrad(dense, lr=course.lr)
    entity_optimizer = course.optimizer(
        model.entity_embeddings.parameters(),
        lr=course.lr,
        **course.settings,  # type: ignore[call-arg]
    )
    for batch in course.batches:
        dense_optimizer.zero_grad()
        entity_optimizer.zero_grad()
        targets = torch.from_numpy(course.targets[: len(batch)]).float()
        course.loss(model, torch.from_numpy(batch), targets, len(batch)).backward()  # type: ignore[no-untyped-call]
        dense_optimizer.step()
        entity_optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_sharded(exchange: Exchange, model: nn.Module, course: Course) -> dict[str, Tensor]:
    """Train as the lifecycle's docstring says; return all weights, the table on rank 0."""
    variant = sharded(
        exchange, model, course.lr, optimizer_cls=course.optimizer, optimizer_kwargs=course.settings
    )
    dense_optimizer = torch.optim.Adagrad(variant.dense_parameters(), lr=course.lr)
    for batch in course.batches:
        dense_optimizer.zero_grad()
        variant.entity_optimizer.zero_grad()
        targets = part_of(course.targets[: len(batch)], exchange).float()
        course.loss(variant, part_of(batch, exchange), targets, len(batch)).backward()  # type: ignore[no-untyped-call]
        variant.sync_dense_gradients()
        dense_optimizer.step()
        variant.entity_optimizer.step()
    weights = {name: p.detach() for name, p in variant.named_parameters() if "entity" not in name}
    table = variant.gather_entity_embeddings_on_rank_zero()
    assert (table is not None) == (exchange.rank == 0)
    return weights if table is None else {**weights, "entity_embeddings.weight": table.weight.detach()}


def train_on_default_group(exchange: Exchange, model: nn.Module, course: Course) -> dict[str, Tensor]:
    """Train on ranks that find torch.distributed's process group themselves."""
    variant: Any = create_fsdp_sharded_model_class(type(model))()
    variant.load_state_dict(model.state_dict())
    variant.setup_fsdp_training(torch.device("cpu"), 0.1)
    assert variant.entity_embeddings.table.exchange.world_size == exchange.world_size
    return train_sharded(exchange, model, course)


def first_rows(exchange: Exchange, model_class: type[nn.Module], seed: int | None) -> Tensor | None:
    """Return, on rank 0, how the rows of a fresh model start."""
    variant: Any = create_fsdp_sharded_model_class(model_class)()
    variant.setup_fsdp_training("cpu", 0.1, seed=seed, exchange=exchange)
    table = variant.gather_entity_embeddings_on_rank_zero()
    return None if table is None else table.weight.detach()


def first_rows_seeded_apart(exchange: Exchange, seed: int) -> Tensor | None:
    """Return the same, torch being seeded with `seed` on rank 0 and otherwise elsewhere."""
    torch.manual_seed(seed + exchange.rank)
    return first_rows(exchange, Stranger, None)


def dense_start(exchange: Exchange) -> list[Tensor]:
    """Make a model whose dense part differs from rank to rank; return that part after setup."""
    variant: Any = create_fsdp_sharded_model_class(Stranger)()
    variant.register_buffer("flags", torch.tensor([exchange.rank > 0, True]))
    variant.register_buffer("count", torch.tensor(exchange.rank + 5))
    with torch.no_grad():
        for parameter in variant.parameters():
            parameter += exchange.rank
    variant.setup_fsdp_training("cpu", 0.1, exchange=exchange)
    return [*(p.detach() for p in variant.dense_parameters()), *variant.buffers()]


def gathered_tables(exchange: Exchange, model: nn.Module) -> dict[str, Any]:
    """Gather a table in both ways; also say how many rows each exchange brought here."""
    variant = sharded(exchange, model)
    received: list[int] = []
    swap = exchange.all_to_all

    def spy(*args: Any, **kwargs: Any) -> list[Tensor]:
        parts = swap(*args, **kwargs)
        received.append(sum(len(part) for part in parts))
        return parts

    exchange.all_to_all = spy  # type: ignore[method-assign]
    table = variant.gather_entity_embeddings_on_rank_zero()
    entities, relations = variant.get_embeddings()
    return {
        "table": None if table is None else table.weight.detach().numpy(),
        "type": type(table),
        "entities": entities,
        "relations": relations,
        "received": received,
    }


def scores_of_all(
    exchange: Exchange, model: nn.Module, pairs: Sequence[Ints], *, training: bool = True
) -> Tensor:
    """Return [B, N] scores of pairs[rank] without a gradient."""
    variant = sharded(exchange, model).train(training)
    with torch.no_grad():
        scores: Tensor = variant.forward_k_vs_all(torch.from_numpy(pairs[exchange.rank]))
    return scores


def k_vs_all_gradients(
    exchange: Exchange, model: nn.Module, pairs: Sequence[Ints], weights: Sequence[Floats]
) -> dict[str, Tensor]:
    """Backpropagate weights[rank] [B, N] through scores of pairs[rank]; return all gradients, on rank 0."""
    variant = sharded(exchange, model)
    scores = variant.forward_k_vs_all(pairs=torch.from_numpy(pairs[exchange.rank]))
    (scores * torch.from_numpy(weights[exchange.rank]).float()).sum().backward()
    variant.sync_dense_gradients()
    gradients = {name: p.grad for name, p in variant.named_parameters() if "entity" not in name}
    with torch.no_grad():
        variant.entity_embeddings.weight.copy_(variant.entity_embeddings.weight.grad.to_dense())
    table = variant.gather_entity_embeddings_on_rank_zero()
    return {**gradients, "entity_embeddings.weight": None if table is None else table.weight.detach()}


def refusal_of_all(exchange: Exchange, model: nn.Module, pairs: Ints) -> tuple[str, str]:
    """Score pairs against all entities; return the kind and the words of the refusal."""
    try:
        scores_of_all(exchange, model, [pairs] * exchange.world_size)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def attributes_after_scoring(exchange: Exchange, model: nn.Module, pairs: Ints) -> tuple[int, bool, bool]:
    """Return num_entities, whether the table is in its place, and whether all modules are training."""
    variant = sharded(exchange, model)
    table = variant.entity_embeddings
    variant.forward_k_vs_all(torch.from_numpy(pairs))
    return (
        variant.num_entities,
        variant.entity_embeddings is table,
        all(m.training for m in variant.modules()),
    )


def dropped_scores(exchange: Exchange, model: nn.Module, pairs: Ints) -> tuple[Tensor, Tensor]:
    """Score in training mode, ranks seeded apart; return the scores and what this rank draws next."""
    variant = sharded(exchange, model)
    torch.manual_seed(exchange.rank)
    scores = variant.forward_k_vs_all(torch.from_numpy(pairs))
    return scores.detach(), torch.rand(3)


def some_gradients(exchange: Exchange, having: Sequence[Sequence[int]]) -> list[Tensor | None]:
    """Sum gradients of three dense parameters over ranks, of which rank r has those in having[r]."""
    variant = sharded(exchange, Stranger())
    variant.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameters = [variant.relation_embeddings.weight, variant.mix.bias, variant.extra]
    for number in having[exchange.rank]:
        parameters[number].grad = torch.full_like(parameters[number], 10.0**exchange.rank)
    variant.sync_dense_gradients()
    return [parameter.grad for parameter in parameters]


def resumed(exchange: Exchange, model: nn.Module, course: Course, stop: int) -> tuple[Tensor, Tensor]:
    """Train in one go, and in two with all state carried over in state dicts; return both shards."""

    def steps(variant: Any, batches: Sequence[Ints]) -> Iterator[None]:
        for batch in batches:
            variant.entity_optimizer.zero_grad()
            targets = part_of(course.targets[: len(batch)], exchange).float()
            course.loss(variant, part_of(batch, exchange), targets, len(batch)).backward()  # type: ignore[no-untyped-call]
            variant.entity_optimizer.step()
            yield

    models = [sharded(exchange, model, optimizer_cls=course.optimizer) for _ in range(3)]
    straight, first, second = models
    list(steps(straight, course.batches))
    list(steps(first, course.batches[:stop]))
    second.load_state_dict(first.state_dict())
    second.entity_optimizer.load_state_dict(first.entity_optimizer.state_dict())
    list(steps(second, course.batches[stop:]))
    return straight.entity_embeddings.weight.detach(), second.entity_embeddings.weight.detach()


def step_as_the_reference_does(exchange: Exchange, model: nn.Module, course: Course) -> tuple[Tensor, Tensor]:
    """Train with the entity optimizer, and as dicee's trainer does; return both shards."""
    ours, theirs = (sharded(exchange, model) for _ in range(2))
    for batch in course.batches:
        for variant in (ours, theirs):
            targets = part_of(course.targets[: len(batch)], exchange).float()
            course.loss(variant, part_of(batch, exchange), targets, len(batch)).backward()  # type: ignore[no-untyped-call]
        ours.entity_optimizer.step()
        ours.entity_optimizer.zero_grad()
        adapter = theirs._fsdp_adapter
        gradient, adapter.weight.grad = adapter.weight.grad, None
        adapter._local_adam.step(adapter.weight, gradient)
    return ours.entity_embeddings.weight.detach(), theirs.entity_embeddings.weight.detach()
