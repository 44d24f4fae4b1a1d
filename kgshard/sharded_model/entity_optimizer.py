"""Optimizers of touched rows behind the face of torch.optim.Optimizer, and what they stand for there."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isabstract, signature
from numbers import Real
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from kgshard.embedding import cannot_copy
from kgshard.errors import ConfigError
from kgshard.optim import OPTIMIZERS, RowOptimizer, SparseAdam, Storage
from kgshard.routing import RowGradient

MakeRowOptimizer = partial[RowOptimizer]
"""Given a table's rows, by keyword where they begin and a seed for rounding: an optimizer of them."""

_SAME_AS: dict[type, str] = {
    torch.optim.SparseAdam: "adam",
    torch.optim.Adagrad: "adagrad",
    torch.optim.SGD: "sgd",
}
"""Classes of torch that do to the rows of a sparse gradient what one of OPTIMIZERS does."""
_OURS_TO_SET = {"device": "adam_device", "table": "", "first_row": "", "make_zeros": "", "seed": "seed"}
"""Keywords of every row optimizer that are set elsewhere, and by which argument of setup_fsdp_training."""


def choose_row_optimizer(
    optimizer_cls: type | None,
    optimizer_kwargs: Mapping[str, Any] | None,
    *,
    lr: float,
    device: torch.device | str | None,
) -> MakeRowOptimizer:
    """Return what makes the optimizer that the arguments of `setup_fsdp_training` ask for.

    Args:
        optimizer_cls: A RowOptimizer; torch.optim's SparseAdam, Adagrad or SGD, which mean the same; None for
            SparseAdam. torch.optim.Adam is none of them: it also moves rows that have no gradient.
        optimizer_kwargs: Its settings. `lr` may be among them, if it says the same.
        lr: Learning rate, a number > 0.
        device: Where its state lives; None for where the rows are.

    Raises:
        ConfigError: An argument is unknown, out of range, or cannot take effect.
    """
    row_class = _row_class(optimizer_cls)
    _check_rate(lr)
    settings = dict(optimizer_kwargs or {})
    if settings.pop("lr", lr) != lr:
        raise ConfigError(f"lr is {lr}, but optimizer_kwargs says {dict(optimizer_kwargs or {})['lr']}")
    _check_names(row_class, settings)
    settings["lr"] = float(lr)
    if device is not None:
        settings["device"] = _device(device)
    try:
        # A table of no rows tells whether the values will do.
        row_class(torch.empty(0, 1), table="entity", first_row=0, seed=0, **settings)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"optimizer_kwargs: {row_class.__name__} refuses {settings}: {error}") from error
    return partial(row_class, table="entity", **settings)


def _check_rate(lr: object) -> None:
    if isinstance(lr, bool) or not isinstance(lr, Real):
        raise ConfigError(f"lr must be a number > 0, got {lr!r}")
    if not 0 < float(lr) < math.inf:
        raise ConfigError(f"lr must be > 0, got {lr}")


def _device(name: torch.device | str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"adam_device: {str(error).splitlines()[0]}") from error


def _row_class(optimizer_cls: type | None) -> type[RowOptimizer]:
    if optimizer_cls is None:
        return SparseAdam
    if isinstance(optimizer_cls, type):
        if issubclass(optimizer_cls, RowOptimizer) and not isabstract(optimizer_cls):
            return optimizer_cls
        if optimizer_cls in _SAME_AS:
            return OPTIMIZERS[_SAME_AS[optimizer_cls]]
    ours = sorted(f"kgshard.optim.{known.__name__}" for known in OPTIMIZERS.values())
    theirs = sorted(f"torch.optim.{known.__name__}" for known in _SAME_AS)
    name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
    raise ConfigError(
        f"optimizer_cls: {name} cannot be made to touch only rows with a gradient"
        f" (known: {', '.join([*theirs, *ours])})"
    )


def _check_names(row_class: type[RowOptimizer], settings: Mapping[str, Any]) -> None:
    known = _setting_names(row_class)
    for name in settings:
        if name in _OURS_TO_SET:
            instead = f"; use the argument {_OURS_TO_SET[name]}" if _OURS_TO_SET[name] else ""
            raise ConfigError(f"optimizer_kwargs: {name} is not to be set here{instead}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            names = ", ".join(known)
            raise ConfigError(
                f"optimizer_kwargs: {row_class.__name__} has no setting {name}{hint} (known: {names})"
            )


def _setting_names(row_class: type[RowOptimizer]) -> list[str]:
    parameters = signature(row_class).parameters.values()
    names = {item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)}
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        names |= set(Storage.__annotations__)
    return sorted(names - {"weight", "lr"} - set(_OURS_TO_SET))


class EntityOptimizer(torch.optim.Optimizer):
    """Steps this rank's rows of a sharded table by their gradient; no communication.

    An ordinary optimizer: schedulers set `param_groups[0]["lr"]`, `state_dict` holds this rank's state.

    Attributes:
        rows: The kgshard optimizer that does the work.
    """

    def __init__(self, weight: nn.Parameter, rows: RowOptimizer) -> None:
        """Wrap `rows`, whose table is weight.data."""
        super().__init__([weight], {"lr": rows.lr})
        self._weight = weight
        self.rows = rows

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows that have a gradient. Every rank calls it as often: steps are counted."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._weight.grad is not None:
            self.apply_gradient(self._weight.grad)
        return loss

    def apply_gradient(self, gradient: Tensor) -> None:
        """Make one step with a gradient of this rank's rows: sparse, or dense where every row has one."""
        self.rows.weight = self._weight.data  # Module.to() may have replaced them.
        self.rows.lr = self.param_groups[0]["lr"]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            self.rows.step(RowGradient(gradient.indices()[0], gradient.values()))
        else:
            self.rows.step_dense(gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, not copied, in torch's layout."""
        self.state[self._weight] = {"num_steps": self.rows.num_steps, **self.rows.state()}
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state that `state_dict` returned on this rank, at this world size.

        Raises:
            ValueError: It is of another optimizer or of other rows, or of none, as torch's are before a step.
        """
        saved, mine = state_dict.get("state", {}).get(0, {}), self.rows.state()
        groups = state_dict.get("param_groups") or [{}]
        found = _shapes(saved)
        expected = {"num_steps": (), **_shapes(mine)}
        if found != expected:
            raise ValueError(f"optimizer state of entity rows: expected {expected}, got {found}")
        for name, values in mine.items():
            values.copy_(saved[name])
        self.rows.num_steps = saved["num_steps"]
        group = {name: value for name, value in groups[0].items() if name != "params"}
        self.param_groups[0].update(group)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuse to be copied or pickled, which `copy` and `pickle` do through here.

        Raises:
            TypeError: Always.
        """
        raise cannot_copy(self)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each value; a number's is ()."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}


class ReferenceAdapter:
    """A sharded table as dicee's trainer sees it: it takes gradients away and steps with them in a thread."""

    def __init__(self, weight: nn.Parameter, optimizer: EntityOptimizer) -> None:
        self.weight = weight
        self._local_adam = self
        self._optimizer = optimizer

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight]

    def step(self, weight: Tensor, gradient: Tensor) -> None:
        self._optimizer.apply_gradient(gradient)
