"""A stranger's module, made sharded, trains as it does without kgshard."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharded_models import (
    NUM_RELATIONS,
    Course,
    Ints,
    Stranger,
    dense_start,
    first_rows,
    first_rows_seeded_apart,
    gathered_tables,
    sharded,
    step_as_the_reference_does,
    train_on_default_group,
    train_plain,
    train_sharded,
)
from torch import nn
from worlds import GlooPool, ThreadWorld

import kgshard.sharded_model.gather
from kgshard.embedding import RowWiseShardedEmbedding
from kgshard.errors import ConfigError
from kgshard.exchange import SingleExchange
from kgshard.sharded_model.lifecycle import FSDPShardedEntityModel, create_fsdp_sharded_model_class


def course(optimizer: type[torch.optim.Optimizer], num_entities: int = 7, **changes: Any) -> Course:
    """Return twelve global batches of 8 triples, the last of a single one."""
    source = np.random.default_rng(5)
    columns = [source.integers(0, size, size=(12, 8)) for size in (num_entities, NUM_RELATIONS, num_entities)]
    batches: list[Ints] = list(np.stack(columns, axis=2))
    shape = (8, num_entities) if changes.get("k_vs_all") else (8,)
    return Course([*batches, batches[0][:1]], source.normal(size=shape), optimizer, **changes)


def assert_trained_alike(
    run: Callable[..., list[dict[str, torch.Tensor]]], model: Stranger, plan: Course
) -> None:
    """Assert that ranks train a model to the weights to which torch trains it alone."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outcomes = run(model, plan)
    truth = train_plain(model, plan)
    for name, weight in truth.items():
        assert float((weight - before[name]).abs().max()) > 0.05, name
        holders = outcomes[:1] if "entity" in name else outcomes
        for outcome in holders:
            torch.testing.assert_close(outcome[name], weight, rtol=0, atol=1e-5)


def stranger(num_entities: int = 7, **settings: Any) -> Stranger:
    torch.manual_seed(11)
    return Stranger(num_entities, **settings)


PLANS = {
    "adagrad": (False, course(torch.optim.Adagrad)),
    "adagrad with eps": (False, course(torch.optim.Adagrad, settings={"eps": 1e-2})),
    "sparse adam": (True, course(torch.optim.SparseAdam)),
    "sparse adam with betas": (True, course(torch.optim.SparseAdam, settings={"betas": (0.5, 0.8)})),
    "sgd": (False, course(torch.optim.SGD, lr=0.3)),
    "adagrad, one against all": (False, course(torch.optim.Adagrad, k_vs_all=True)),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_train_a_strangers_module_as_torch_does(name: str, world_size: int) -> None:
    sparse, plan = PLANS[name]

    def run(*call: Any) -> list[Any]:
        return ThreadWorld(world_size).run(train_sharded, *call)

    assert_trained_alike(run, stranger(sparse=sparse), plan)


@pytest.mark.parametrize("k_vs_all", [False, True])
def test_ranks_without_rows_train_along(k_vs_all: bool) -> None:
    def run(*call: Any) -> list[Any]:
        return ThreadWorld(4).run(train_sharded, *call)

    assert_trained_alike(run, stranger(2), course(torch.optim.Adagrad, 2, k_vs_all=k_vs_all))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["sparse adam", "adagrad, one against all"])
def test_gloo_ranks_train_a_strangers_module_as_torch_does(
    gloo_pool: GlooPool, tmp_path: Path, name: str
) -> None:
    sparse, plan = PLANS[name]

    def run(*call: Any) -> list[Any]:
        return gloo_pool.run(3, tmp_path, train_on_default_group, *call)

    assert_trained_alike(run, stranger(sparse=sparse), plan)


# --- the class


def test_a_class_has_one_variant_which_is_both() -> None:
    variant = create_fsdp_sharded_model_class(Stranger)
    assert create_fsdp_sharded_model_class(Stranger) is variant
    assert create_fsdp_sharded_model_class(variant) is variant
    assert issubclass(variant, Stranger)
    assert issubclass(variant, FSDPShardedEntityModel)
    assert (variant.__name__, variant.__module__) == ("FSDPStranger", Stranger.__module__)
    assert isinstance(variant(), Stranger)
    assert variant.forward is Stranger.forward


def test_what_is_no_module_class_is_refused() -> None:
    for wrong in (int, Stranger(2), "Stranger"):
        with pytest.raises(TypeError, match=r"expected an nn\.Module class, got"):
            create_fsdp_sharded_model_class(wrong)  # type: ignore[arg-type]


def test_the_signature_is_the_references() -> None:
    parameters = inspect.signature(FSDPShardedEntityModel.setup_fsdp_training).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert positional == {
        "self": inspect.Parameter.empty,
        "device": inspect.Parameter.empty,
        "lr": inspect.Parameter.empty,
        "optimizer_cls": None,
        "optimizer_kwargs": None,
        "adam_device": None,
    }


# --- setup


def test_setup_makes_this_ranks_rows() -> None:
    model = sharded(SingleExchange(), Stranger(5, 3))
    table = model.entity_embeddings
    assert isinstance(table, RowWiseShardedEmbedding)
    assert (table.num_embeddings, table.embedding_dim, table.local_rows) == (5, 3, 5)
    assert table.weight.dtype == torch.float32
    names = [name for name, _ in model.named_parameters()]
    assert names.count("entity_embeddings.weight") == 1
    assert len(list(model.dense_parameters())) == len(names) - 1


@pytest.mark.parametrize("method", ["sync_dense_gradients", "gather_entity_embeddings_on_rank_zero"])
def test_before_setup_there_is_nothing_to_train(method: str) -> None:
    model: Any = create_fsdp_sharded_model_class(Stranger)()
    words = r"FSDPStranger: call setup_fsdp_training\(device, lr\) first"
    for call in (getattr(model, method), model.get_embeddings, lambda: model.entity_optimizer):
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(
        RuntimeError, match="rows of entity_embeddings are not there yet: call setup_fsdp_train"
    ):
        model(torch.zeros(1, 3, dtype=torch.int64))
    assert model._fsdp_adapter is None


def test_setup_happens_once() -> None:
    model = sharded(SingleExchange(), Stranger())
    with pytest.raises(RuntimeError, match="FSDPStranger: setup_fsdp_training was called before"):
        model.setup_fsdp_training("cpu", 0.1)


class Bare(nn.Module):
    """Has no entity table."""


class OwnTable(nn.Module):
    """Keeps its entities as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.entity_embeddings = nn.Parameter(torch.zeros(3, 2))


@pytest.mark.parametrize(("model_class", "found"), [(Bare, "NoneType"), (OwnTable, "Parameter")])
def test_a_model_without_an_entity_table_is_refused(model_class: type[nn.Module], found: str) -> None:
    model = create_fsdp_sharded_model_class(model_class)()
    words = (
        f"FSDP{model_class.__name__}.entity_embeddings must be an nn.Embedding after __init__, found {found}"
    )
    with pytest.raises(ConfigError, match=words):
        model.setup_fsdp_training("cpu", 0.1)


class LeftOut(nn.Module):
    """Follows dicee's convention: no table, but its size and how it starts."""

    def __init__(self, param_init: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.entity_embeddings = None
        self.num_entities, self.embedding_dim = 3000, 16
        self.param_init = param_init


@pytest.mark.parametrize(
    ("param_init", "std"),
    [(None, 1 / 4), (nn.init.xavier_normal_, (2 / 3016) ** 0.5), (lambda data: None, 1 / 4)],
)
def test_a_model_may_leave_its_table_out_and_say_how_large_it_is(param_init: Any, std: float) -> None:
    model = create_fsdp_sharded_model_class(LeftOut)(param_init)
    model.setup_fsdp_training("cpu", 0.1)
    assert model.entity_embeddings.weight.shape == (3000, 16)
    assert float(model.entity_embeddings.weight.detach().std()) == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_start_with_the_dense_part_of_rank_zero(world_size: int) -> None:
    outcomes = ThreadWorld(world_size).run(dense_start)
    assert [tensor.tolist() for tensor in outcomes[0][-2:]] == [[False, True], 5]
    for outcome in outcomes[1:]:
        for mine, first in zip(outcome, outcomes[0], strict=True):
            assert mine.dtype == first.dtype
            assert torch.equal(mine, first)


@pytest.mark.parametrize("world_size", [2, 3, 9])
def test_rows_start_the_same_at_any_world_size(world_size: int) -> None:
    alone = ThreadWorld(1).run(first_rows, Stranger, 4)[0]
    assert len({tuple(row) for row in alone.tolist()}) == 7
    assert torch.equal(ThreadWorld(world_size).run(first_rows, Stranger, 4)[0], alone)
    assert not torch.equal(ThreadWorld(1).run(first_rows, Stranger, 5)[0], alone)


def test_rows_follow_torchs_seed_unless_told_otherwise() -> None:
    starts = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        starts.append(first_rows(SingleExchange(), Stranger, None))
    assert starts[0] is not None
    assert starts[1] is not None
    assert starts[2] is not None
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[1])


@pytest.mark.processes
def test_rank_zeros_seed_is_everyones(gloo_pool: GlooPool, tmp_path: Path) -> None:
    torch.manual_seed(8)
    alone = first_rows(SingleExchange(), Stranger, None)
    assert alone is not None
    rows = gloo_pool.run(3, tmp_path, first_rows_seeded_apart, 8)[0]
    assert torch.equal(rows, alone)


def test_device_is_where_rows_and_model_go() -> None:
    """The meta device stands for any other device."""
    model = create_fsdp_sharded_model_class(Stranger)()
    model.setup_fsdp_training("meta", 0.1, seed=0)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.entity_optimizer.rows.device.type == "meta"


def test_adam_device_is_where_moments_go() -> None:
    model = sharded(SingleExchange(), Stranger(), adam_device="meta")
    assert model.entity_embeddings.weight.device.type == "cpu"
    assert {value.device.type for value in model.entity_optimizer.rows.state().values()} == {"meta"}


# --- the whole table again


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
@pytest.mark.parametrize("block_rows", [1, 2, 100])
def test_gathering_brings_every_row_to_rank_zero_alone(
    world_size: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kgshard.sharded_model.gather, "_BLOCK_BYTES", 4 * 4 * block_rows)
    model = stranger()
    outcomes = ThreadWorld(world_size).run(gathered_tables, model)
    truth = model.entity_embeddings.weight.detach().numpy()
    assert outcomes[0]["type"] is nn.Embedding
    for whole in (outcomes[0]["table"], outcomes[0]["entities"]):
        assert np.array_equal(whole, truth)
        assert whole.dtype == np.float32
    assert max(outcomes[0]["received"], default=0) <= block_rows
    for outcome in outcomes:
        assert np.array_equal(outcome["relations"], model.relation_embeddings.weight.detach().numpy())
    for outcome in outcomes[1:]:
        assert outcome["table"] is outcome["entities"] is None
        assert sum(outcome["received"]) == 0


@pytest.mark.processes
def test_gloo_ranks_gather(gloo_pool: GlooPool, tmp_path: Path) -> None:
    model = stranger()
    outcomes = gloo_pool.run(3, tmp_path, gathered_tables, model)
    assert np.array_equal(outcomes[0]["table"], model.entity_embeddings.weight.detach().numpy())
    assert [sum(outcome["received"]) for outcome in outcomes[1:]] == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "gathered"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)
def test_a_gathered_table_loses_nothing(dtype: torch.dtype, gathered: torch.dtype) -> None:
    model: Any = create_fsdp_sharded_model_class(Stranger)().to(dtype)
    model.setup_fsdp_training("cpu", 0.1)
    assert model.entity_embeddings.weight.dtype == dtype
    table = model.gather_entity_embeddings_on_rank_zero()
    assert table is not None
    assert table.weight.dtype == gathered
    assert torch.equal(table.weight.to(dtype), model.entity_embeddings.weight)
    assert table.weight.requires_grad
    entities, relations = model.get_embeddings()
    assert entities.dtype == relations.dtype == np.float32


def test_a_gathered_table_can_take_its_place_in_the_model() -> None:
    torch.manual_seed(3)
    model = sharded(SingleExchange(), stranger())
    pairs = torch.tensor([[3, 1], [0, 2]])
    scores = model.forward_k_vs_all(pairs)
    model.entity_embeddings = model.gather_entity_embeddings_on_rank_zero()
    assert torch.equal(model.forward_k_vs_all(pairs), scores)
    assert np.array_equal(model.get_embeddings()[0], stranger().entity_embeddings.weight.detach().numpy())
    model.setup_fsdp_training("cpu", 0.1)
    assert np.array_equal(model.get_embeddings()[0], stranger().entity_embeddings.weight.detach().numpy())


class Entities(nn.Module):
    """Has nothing but entities."""

    def __init__(self) -> None:
        super().__init__()
        self.entity_embeddings = nn.Embedding(4, 2)


def test_a_model_without_relations_has_no_relation_matrix() -> None:
    model = create_fsdp_sharded_model_class(Entities)()
    model.setup_fsdp_training("cpu", 0.1)
    entities, relations = model.get_embeddings()
    assert entities is not None
    assert entities.shape == (4, 2)
    assert relations is None


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_trainer_written_for_the_reference_steps_the_rows(world_size: int) -> None:
    plan = course(torch.optim.SparseAdam)
    for ours, theirs in ThreadWorld(world_size).run(step_as_the_reference_does, stranger(), plan):
        assert torch.equal(ours, theirs)
