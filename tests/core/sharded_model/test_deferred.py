"""A model is made without its entity table, and the table starts as the model says."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_models import Stranger
from torch import nn

from kgshard.errors import ConfigError
from kgshard.sharded_model.deferred import DeferredEmbedding, DeferredRows
from kgshard.sharded_model.lifecycle import create_fsdp_sharded_model_class

Initialise = Callable[[nn.Embedding], Any]


class Recipe(nn.Module):
    """Makes a table of any size and has it initialised by a function, before it is an attribute or after."""

    def __init__(
        self,
        initialise: Initialise = lambda table: None,
        num_entities: int = 4000,
        dim: int = 25,
        before: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        table = nn.Embedding(num_entities, dim, **settings)
        if before:
            initialise(table)
        self.entity_embeddings = table
        if not before:
            initialise(self.entity_embeddings)


def made(initialise: Initialise = lambda table: None, **settings: Any) -> Any:
    return create_fsdp_sharded_model_class(Recipe)(initialise, **settings)


def first_rows(model: Any, seed: int = 1) -> torch.Tensor:
    model.setup_fsdp_training("cpu", 0.1, seed=seed)
    rows: torch.Tensor = model.entity_embeddings.weight.detach()
    return rows


def test_a_table_that_fits_nowhere_can_be_made() -> None:
    """2^40 rows of 64 floats are 281 terabytes."""
    model = made(lambda table: nn.init.xavier_normal_(table.weight.data), num_entities=2**40, dim=64)
    assert model.entity_embeddings.num_embeddings == 2**40
    assert list(model.parameters()) == []
    assert model.state_dict() == {}


def reassigned(table: nn.Embedding) -> None:
    table.weight.data = table.weight.data.normal_(2.0).mul_(0.5)


def in_place(table: nn.Embedding) -> None:
    with torch.no_grad():
        table.weight.uniform_(0, 2).mul_(0.5).sub_(0.5).clamp_(-0.25, 0.25)


DISTRIBUTIONS: dict[str, tuple[Initialise, Callable[[torch.Tensor], Any]]] = {
    "nothing": (lambda table: None, lambda w: w.normal_()),
    "normal": (lambda table: nn.init.normal_(table.weight, 3.0, 0.2), lambda w: w.normal_(3.0, 0.2)),
    "std by name": (lambda table: table.weight.data.normal_(std=0.2), lambda w: w.normal_(std=0.2)),
    "uniform": (lambda table: nn.init.uniform_(table.weight, 1, 4), lambda w: w.uniform_(1, 4)),
    "plain uniform": (lambda table: table.weight.data.uniform_(), lambda w: w.uniform_()),
    "xavier normal": (lambda table: nn.init.xavier_normal_(table.weight.data), nn.init.xavier_normal_),
    "xavier uniform": (lambda table: nn.init.xavier_uniform_(table.weight), nn.init.xavier_uniform_),
    "kaiming": (lambda table: nn.init.kaiming_uniform_(table.weight), nn.init.kaiming_uniform_),
    "constant": (lambda table: nn.init.constant_(table.weight, 2.5), lambda w: w.fill_(2.5)),
    "zeros": (lambda table: nn.init.zeros_(table.weight), lambda w: w.zero_()),
    "in place": (in_place, lambda w: w.uniform_(-0.5, 0.5).clamp_(-0.25, 0.25)),
    "reassigned": (reassigned, lambda w: w.normal_(1.0, 0.5)),
    "again": (lambda table: table.reset_parameters(), lambda w: w.normal_()),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rows_start_with_the_models_own_distribution(name: str, before: bool) -> None:
    """Against torch's draws of the same distribution: mean, spread, and every quantile."""
    initialise, draw = DISTRIBUTIONS[name]
    truth = torch.empty(4000, 25)
    torch.manual_seed(0)
    draw(truth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = first_rows(made(initialise, before=before))
    spread = float(truth.std()) + 1e-9
    assert abs(float(rows.mean() - truth.mean())) <= 0.02 * spread
    levels = torch.linspace(0.01, 0.99, 21)
    gap = rows.flatten().quantile(levels) - truth.flatten().quantile(levels)
    assert float(gap.abs().max()) <= 0.04 * spread


def test_what_needs_the_whole_table_makes_it_and_says_so() -> None:
    """Then rows are the unsharded model's, to the bit."""
    for initialise in (
        lambda table: nn.init.orthogonal_(table.weight),
        lambda table: nn.init.trunc_normal_(table.weight, std=0.02),
        lambda table: table.weight.data[3].fill_(7),
        lambda table: table.weight.data.div_(table.weight.data.norm(dim=1, keepdim=True)),
        lambda table: setattr(table.weight, "data", nn.functional.normalize(table.weight.data)),
        lambda table: table.weight.data.copy_(torch.arange(100.0).view(20, 5)),
        lambda table: nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(4)),
    ):
        for before in (False, True):
            torch.manual_seed(2)
            truth = Recipe(initialise, num_entities=20, dim=5).entity_embeddings.weight.detach()
            torch.manual_seed(2)
            with pytest.warns(UserWarning, match="FSDPRecipe.entity_embeddings is initialised by a"):
                model = made(initialise, num_entities=20, dim=5, before=before)
            assert torch.equal(first_rows(model), truth)


def test_initialising_after_init_counts_too() -> None:
    model = made(num_entities=4000)
    model.apply(lambda m: nn.init.normal_(m.weight, 5.0) if isinstance(m, nn.Embedding) else None)
    model.entity_embeddings.weight.data.mul_(2)
    rows = first_rows(model)
    assert float(rows.mean()) == pytest.approx(10, abs=0.1)
    assert float(rows.std()) == pytest.approx(2, rel=0.02)


# --- rows that are given


def test_each_rank_takes_its_rows_of_a_loaded_model() -> None:
    plain = Stranger()
    model: Any = create_fsdp_sharded_model_class(Stranger)()
    assert model.load_state_dict(plain.state_dict()) == ([], [])
    model.setup_fsdp_training("cpu", 0.1)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_a_loaded_table_is_not_copied_before_setup() -> None:
    rows = torch.zeros(4000, 25)
    model = made()
    model.load_state_dict({"entity_embeddings.weight": rows})
    assert model.entity_embeddings.weight.data_ptr() == rows.data_ptr()
    assert first_rows(model).data_ptr() != rows.data_ptr()


def test_a_table_of_another_shape_is_not_loaded() -> None:
    words = r"entity_embeddings.weight: expected shape \(4000, 25\), got \(3, 25\)"
    with pytest.raises(RuntimeError, match=words):
        made().load_state_dict({"entity_embeddings.weight": torch.zeros(3, 25)})


def test_a_state_dict_without_the_table_leaves_it_described() -> None:
    model: Any = create_fsdp_sharded_model_class(Stranger)()
    assert model.load_state_dict(model.state_dict(), strict=False).missing_keys == [
        "entity_embeddings.weight"
    ]
    assert float(first_rows(model).std()) > 0


@pytest.mark.parametrize("model_class", [Stranger, create_fsdp_sharded_model_class(Stranger)])
def test_a_strict_load_misses_the_table_as_the_unsharded_model_does(model_class: Any) -> None:
    state = {name: value for name, value in Stranger().state_dict().items() if "entity" not in name}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "entity_embeddings.weight"'):
        model_class().load_state_dict(state)


class Pretrained(nn.Module):
    """Is made from rows."""

    def __init__(self, rows: torch.Tensor, freeze: bool = False) -> None:
        super().__init__()
        self.entity_embeddings = nn.Embedding.from_pretrained(rows, freeze=freeze)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_pretrained_table_starts_as_it_is(freeze: bool) -> None:
    rows = torch.arange(12.0).view(4, 3)
    model: Any = create_fsdp_sharded_model_class(Pretrained)(rows, freeze)
    assert torch.equal(first_rows(model), rows)
    assert model.entity_embeddings.weight.requires_grad is not freeze
    assert model.entity_embeddings(torch.tensor([1])).requires_grad is not freeze


def test_another_tensor_can_take_the_place_of_the_rows() -> None:
    rows = torch.arange(8.0).view(4, 2)
    for value in (rows, nn.Parameter(rows)):
        model = made(num_entities=4, dim=2)
        model.entity_embeddings.weight = value
        assert list(model.parameters()) == []
        assert torch.equal(first_rows(model), rows)
        assert model.entity_embeddings.weight.requires_grad


def test_a_frozen_table_stays_frozen() -> None:
    model = made(lambda table: table.weight.requires_grad_(False))
    assert not first_rows(model).requires_grad
    assert not model.entity_embeddings.weight.requires_grad


# --- dtypes, devices, copies


@pytest.mark.parametrize(
    "move", [lambda m: m.double(), lambda m: m.to(torch.float64), lambda m: m.double().cpu()]
)
def test_the_rows_get_the_dtype_that_the_model_was_moved_to(move: Callable[[nn.Module], Any]) -> None:
    assert first_rows(move(made())).dtype == torch.float64


def test_the_rows_keep_the_dtype_of_the_table() -> None:
    assert first_rows(made(dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert made(dtype=torch.float16).entity_embeddings.weight.dtype == torch.float16


@pytest.mark.parametrize("initialise", [lambda table: None, lambda table: table.weight.data[0].fill_(9)])
@pytest.mark.filterwarnings("ignore:FSDPRecipe.entity_embeddings is initialised")
def test_a_copy_of_a_deferred_model_goes_its_own_way(initialise: Initialise) -> None:
    model = made(initialise, num_entities=50)
    other = copy.deepcopy(model)
    other.entity_embeddings.weight.data.zero_()
    assert float(first_rows(other).abs().max()) == 0
    assert float(first_rows(model).abs().max()) > 1
    assert model.entity_embeddings.weight.requires_grad


def test_it_says_what_it_is() -> None:
    model = made()
    assert "(entity_embeddings): DeferredEmbedding(4000, 25)" in repr(model)
    assert repr(model.entity_embeddings.weight) == "DeferredRows(4000, 25)"


# --- every other embedding


class Others(nn.Module):
    """Makes embeddings in every way but one that is the entity table."""

    def __init__(self) -> None:
        super().__init__()
        self.relation_embeddings = nn.Embedding(3, 4)
        local = nn.Embedding(5, 4)
        nn.init.xavier_uniform_(local.weight)
        local.weight.data[2] = 1.5
        self.local = local
        other = nn.Embedding(2, 3)
        other.weight.data = nn.functional.normalize(other.weight.data)
        self.other = other
        self.entity_embeddings = nn.Embedding(6, 4, padding_idx=None)
        self.tables = nn.ModuleList([nn.Embedding(2, 4)])
        self.tables.append(nn.Embedding(2, 4, padding_idx=1))
        self.chain = nn.Sequential(nn.Embedding(4, 3))
        self.hidden = [nn.Embedding(3, 3)]
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.relation_embeddings.weight
        self.optimizer = torch.optim.SGD(self.relation_embeddings.parameters(), lr=0.1)


def test_other_embeddings_are_as_without_kgshard() -> None:
    """Drawn from torch's generator in the order in which they join the model, entities apart."""
    torch.manual_seed(6)
    model: Any = create_fsdp_sharded_model_class(Others)()
    torch.manual_seed(6)
    draws = {"relation_embeddings.weight": torch.empty(3, 4).normal_()}
    draws["local.weight"] = nn.init.xavier_uniform_(torch.empty(5, 4).normal_())
    draws["local.weight"][2] = 1.5
    draws["other.weight"] = nn.functional.normalize(torch.empty(2, 3).normal_())
    for name, shape in {
        "tables.0.weight": (2, 4),
        "tables.1.weight": (2, 4),
        "chain.0.weight": (4, 3),
    }.items():
        draws[name] = torch.empty(shape).normal_()
    draws["tables.1.weight"][1] = 0
    for name, values in draws.items():
        weight = model.get_parameter(name)
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, values), name
    assert type(model.hidden[0].weight) is nn.Parameter
    assert model.tied.weight is model.relation_embeddings.weight
    assert model.optimizer.param_groups[0]["params"][0] is model.relation_embeddings.weight
    assert type(model.entity_embeddings) is DeferredEmbedding


class Twice(Stranger):
    """Throws its first table away, as models do that call super().__init__ first."""

    def __init__(self) -> None:
        super().__init__(2**40, 64)
        self.entity_embeddings = nn.Embedding(9, 2)


def test_a_table_that_is_thrown_away_costs_nothing() -> None:
    assert create_fsdp_sharded_model_class(Twice)().entity_embeddings.num_embeddings == 9


class Pair(nn.Module):
    """Makes a sharded model inside a sharded model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = create_fsdp_sharded_model_class(Stranger)()
        self.entity_embeddings = nn.Embedding(5, 2)
        self.types = nn.Embedding(5, 2)


def test_sharded_models_can_hold_sharded_models() -> None:
    model: Any = create_fsdp_sharded_model_class(Pair)()
    assert type(model.inner.entity_embeddings) is DeferredEmbedding
    assert type(model.inner.relation_embeddings.weight) is nn.Parameter
    assert type(model.types.weight) is nn.Parameter
    assert first_rows(model).shape == (5, 2)


class Around(nn.Module):
    """Trains a model of its own, whose entities are its own business."""

    def __init__(self) -> None:
        super().__init__()
        self.entity_embeddings = nn.Embedding(5, 2)
        self.inner = Stranger()
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)


def test_a_plain_model_inside_keeps_its_table() -> None:
    model: Any = create_fsdp_sharded_model_class(Around)()
    assert type(model.entity_embeddings) is DeferredEmbedding
    weight = model.inner.entity_embeddings.weight
    assert type(weight) is nn.Parameter
    assert any(weight is other for other in model.optimizer.param_groups[0]["params"])


class Failing(nn.Module):
    """Fails after its table was made."""

    def __init__(self) -> None:
        super().__init__()
        self.entity_embeddings = nn.Embedding(5, 2)
        raise ValueError("no")


def test_torch_is_left_as_it_was() -> None:
    original = nn.Embedding.__init__
    made()
    with pytest.raises(ValueError, match="no"):
        create_fsdp_sharded_model_class(Failing)()
    assert nn.Embedding.__init__ is original
    assert type(nn.Embedding(3, 2).weight) is nn.Parameter


class Slow(nn.Module):
    """Waits, half made, for others."""

    def __init__(self, meet: threading.Barrier) -> None:
        super().__init__()
        meet.wait(60)
        self.entity_embeddings = nn.Embedding(5, 2)
        meet.wait(60)


def test_other_threads_make_their_embeddings_meanwhile() -> None:
    meet = threading.Barrier(3)
    sharded: list[Any] = []

    def make() -> None:
        sharded.append(create_fsdp_sharded_model_class(Slow)(meet))

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    meet.wait(60)
    plain = nn.Embedding(5, 2)
    holder = nn.ModuleList([plain])
    meet.wait(60)
    for thread in threads:
        thread.join()
    assert type(plain.weight) is nn.Parameter
    assert holder[0] is plain
    assert [type(model.entity_embeddings.weight) for model in sharded] == [DeferredRows] * 2


# --- what a sharded table cannot do


class OwnForward(nn.Embedding):
    """Looks rows up in its own way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(super().forward(input))


class OwnReset(nn.Embedding):
    """Only starts differently."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 3)


class Custom(nn.Module):
    """Has a table of a class of its own."""

    def __init__(self, make: Callable[[], nn.Embedding]) -> None:
        super().__init__()
        self.entity_embeddings = make()


def hooked() -> nn.Embedding:
    table = nn.Embedding(5, 2)
    table.register_forward_hook(lambda *_: None)
    return table


def parametrized() -> nn.Embedding:
    table = nn.Embedding(5, 2)
    nn.utils.parametrize.register_parametrization(table, "weight", nn.Tanh())
    return table


@pytest.mark.filterwarnings("ignore:FSDPCustom.entity_embeddings is initialised")
def test_tables_that_do_more_than_look_rows_up_are_refused() -> None:
    for make in (lambda: OwnForward(5, 2), hooked, parametrized):
        with pytest.raises(ConfigError, match=r"FSDPCustom.entity_embeddings: .* move them to the model"):
            create_fsdp_sharded_model_class(Custom)(make)
    model: Any = create_fsdp_sharded_model_class(Custom)(lambda: OwnReset(5, 2))
    assert first_rows(model).unique().tolist() == [3]


@pytest.mark.parametrize(
    ("setting", "value"), [("padding_idx", 0), ("max_norm", 1.0), ("scale_grad_by_freq", True)]
)
def test_settings_that_a_sharded_table_lacks_are_refused(setting: str, value: Any) -> None:
    words = f"FSDPRecipe.entity_embeddings: a sharded table has no {setting}, got {setting}={value}"
    with pytest.raises(ConfigError, match=words):
        made(num_entities=5, **{setting: value})


class Tied(Stranger):
    """Scores against its entity table through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.entity_embeddings.weight


def test_a_tied_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FSDPTied.decoder.weight is tied to entity_embeddings.weight"):
        create_fsdp_sharded_model_class(Tied)()


class Listed(nn.Module):
    """Has its table in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.entity_embeddings = nn.Embedding(5, 2)
        self.tables = nn.ModuleList([self.entity_embeddings])


def test_a_table_in_two_places_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FSDPListed.tables.0.weight is tied to entity_embeddings.weight"):
        create_fsdp_sharded_model_class(Listed)()
