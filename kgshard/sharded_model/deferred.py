"""A table that is described first and filled later, on each rank its own rows.

`DeferredRows` is a tensor with a shape, a dtype and no memory. What can be repeated for some rows alone (a
draw, arithmetic with numbers) it writes down. Anything else (`orthogonal_`, a row set by hand) makes the
whole table after all, and goes on as torch would.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kgshard.errors import ConfigError
from kgshard.initialise import fill_initial_rows
from kgshard.models.scoring import Init

ENTITIES = "entity_embeddings"
"""The attribute that holds a model's entity table."""
_FILLS = {"normal_", "uniform_", "fill_", "zero_"}
"""In-place functions after which nothing of the former values is left."""
_ARITHMETIC = {"add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "neg_", "abs_"}
"""In-place functions that treat every value alike."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One in-place function with numbers for arguments."""

    function: Callable[..., Any]
    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def init(self) -> Init | None:
        """Return the distribution this draws from, or None where it draws nothing."""
        if self.name == "normal_":
            mean, std = self._two_numbers()
            return Init("normal", std, mean)
        if self.name == "uniform_":
            low, high = self._two_numbers()
            return Init("uniform", (high - low) / 2, (high + low) / 2)
        return None

    def _two_numbers(self) -> tuple[float, float]:
        """Return the arguments of a draw; 0 and 1 where torch leaves them out."""
        given = dict(enumerate(self.arguments))
        return given.get(0, 0.0), given.get(1, 1.0)


@dataclass(slots=True)
class Description:
    """How the rows of a table start."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    steps: list[_Step] = field(default_factory=list)
    held: Tensor | None = None
    """The whole table, once something needed it."""
    needed_by: str = ""
    """What that was."""

    def note(self, function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
        """Write down an in-place function; say whether it is one that some rows can repeat alone."""
        name = function.overloadpacket.__name__
        numbers = all(isinstance(value, int | float | None) for value in (*arguments, *keywords.values()))
        if self.held is not None or not numbers or name not in _FILLS | _ARITHMETIC:
            return False
        self.steps.append(_Step(function, name, tuple(arguments), keywords))
        return True

    def hold(self, needed_by: str = "") -> Tensor:
        """Return the whole table, drawn from torch's own generator."""
        if self.held is None:
            self.held = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.needed_by = needed_by
            for step in self.steps:
                step.function(self.held, *step.arguments, **step.keywords)
        return self.held

    @torch.no_grad()
    def write(self, weight: Tensor, rows: range, *, seed: int) -> None:
        """Write the first values of the global `rows` to `weight` [len(rows), dim], drawn by seed."""
        fills = [number for number, step in enumerate(self.steps) if step.name in _FILLS]
        for step in self.steps[fills[-1] if fills else 0 :]:
            init = step.init()
            if init is None:
                step.function(weight, *step.arguments, **step.keywords)
            else:
                fill_initial_rows(weight, init, seed=seed, table="entity", rows=rows)


class DeferredRows(Tensor):
    """A table's shape, dtype and description, and none of its values."""

    description: Description

    @staticmethod
    def __new__(cls, description: Description) -> DeferredRows:
        # Not on the meta device: torch's initialisers leave those alone without a word.
        rows: DeferredRows = Tensor._make_wrapper_subclass(
            cls, description.shape, dtype=description.dtype, device=description.device
        )
        rows.description = description
        return rows

    def __init__(self, description: Description) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredRows{self.description.shape}"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, rows: Tensor) -> None:
        if isinstance(rows, DeferredRows):
            self.description = rows.description
        else:
            self.description.held, self.description.needed_by = rows.detach(), "an assignment to weight.data"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        held = None if self.description.held is None else self.description.held.clone()
        rows = DeferredRows(replace(self.description, steps=list(self.description.steps), held=held))
        return nn.Parameter(rows, self.requires_grad) if isinstance(self, nn.Parameter) else rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        rows, keywords = args[0] if args else None, kwargs or {}
        if isinstance(rows, DeferredRows):
            if func is torch.ops.aten.detach.default:
                return DeferredRows(rows.description)
            if rows.description.note(func, args[1:], keywords):
                return rows
        arguments, keywords = tree_map_only(
            DeferredRows, lambda other: other.description.hold(str(func)), (args, keywords)
        )
        outcome: Any = func(*arguments, **keywords)
        changed_in_place = isinstance(rows, DeferredRows) and outcome is rows.description.held
        return rows if changed_in_place else outcome


def describe_rows(num_embeddings: int, embedding_dim: int, init: Init, dtype: torch.dtype) -> nn.Embedding:
    """Return an embedding of deferred rows, normal with mean 0."""
    rows = DeferredRows(Description((num_embeddings, embedding_dim), dtype, torch.device("cpu")))
    rows.normal_(init.center, init.scale)
    return nn.Embedding(num_embeddings, embedding_dim, _weight=rows)


class DeferredEmbedding(nn.Embedding):
    """Where the entity table will be. Its rows are no parameter: optimizers and wrappers do not see them.

    Until then they can be initialised (`apply`, `reset_parameters`, `nn.init` on `weight`) and given
    (`load_state_dict`, or another tensor for `weight`); a given tensor is not copied.

    Nor are they in `state_dict`. The unsharded model's goes in as it is; the model's own lacks the rows, and
    loading it is an error unless strict=False, which leaves the rows as they were described or given.

    Attributes:
        dtype: What the sharded rows will be; follows `Module.to`.
    """

    def __init__(self, table: nn.Embedding, model: str) -> None:
        """Take the place of `table`.

        Args:
            table: Of deferred rows, or real ones.
            model: Name of the model, for errors.

        Raises:
            ConfigError: The table does something that a sharded one does not.
        """
        nn.Module.__init__(self)
        _check_plain(table, model)
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.dtype = table.weight.dtype
        self.weight = table.weight
        if isinstance(self.weight, DeferredRows) and self.weight.description.held is not None:
            warnings.warn(
                f"{model}.{ENTITIES} is initialised by {self.weight.description.needed_by}, which needs the"
                " whole table: every rank makes it, seeded alike or not, and keeps its own rows",
                stacklevel=3,
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            if not isinstance(value, nn.Parameter):
                value = nn.Parameter(value.detach(), requires_grad=self.weight.requires_grad)
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        raise RuntimeError(f"the rows of {ENTITIES} are not there yet: call setup_fsdp_training(device, lr)")

    def write(self, weight: Tensor, rows: range, *, seed: int) -> None:
        """Write the first values of the global `rows` to `weight` [len(rows), dim]."""
        source = self.weight
        if isinstance(source, DeferredRows) and source.description.held is None:
            source.description.write(weight, rows, seed=seed)
            return
        whole = source.description.hold() if isinstance(source, DeferredRows) else source.detach()
        with torch.no_grad():
            weight.copy_(whole[rows.start : rows.stop])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeferredEmbedding:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        _, strict, missing_keys, _, error_messages = rest
        name, expected = f"{prefix}weight", (self.num_embeddings, self.embedding_dim)
        given = state_dict.get(name)
        if given is None:
            missing_keys += [name] if strict else []
        elif tuple(given.shape) == expected:
            self.weight = given
        else:
            error_messages.append(f"{name}: expected shape {expected}, got {tuple(given.shape)}")


def _check_plain(table: nn.Embedding, model: str) -> None:
    for name in ("padding_idx", "max_norm", "scale_grad_by_freq"):
        value = getattr(table, name)
        if value is not None and value is not False:
            raise ConfigError(f"{model}.{ENTITIES}: a sharded table has no {name}, got {name}={value}")
    own_forward = type(table).forward not in (nn.Embedding.forward, DeferredEmbedding.forward)
    if own_forward or hasattr(table, "parametrizations") or table._forward_hooks or table._forward_pre_hooks:
        raise ConfigError(
            f"{model}.{ENTITIES}: a sharded table looks rows up as nn.Embedding does, but"
            f" this {type(table).__name__} has a forward, hooks or parametrizations of its own; move them to"
            " the model"
        )


def check_untied(model: nn.Module, table: nn.Embedding) -> None:
    """Raise ConfigError where another part of a model holds its entity table's weight too."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is table.weight and name != f"{ENTITIES}.weight":
            raise ConfigError(
                f"{type(model).__name__}.{name} is tied to {ENTITIES}.weight, which no rank will hold whole;"
                " score against the table in forward_k_vs_all instead"
            )
