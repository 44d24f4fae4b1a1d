"""The settings of a training run, checked once at the door. Classes below never see them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any

from kgshard.devices import check_device
from kgshard.errors import ConfigError
from kgshard.models import SCORING

OPTIMIZER_NAMES = ("adagrad", "adagrad-rowwise", "adam")
CORRUPTIONS = ("reciprocal", "both-sides")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What `kgshard train` can be told. Equal settings and data give equal tables at any world size."""

    model: str = "complex"
    """A name in kgshard.models.SCORING."""
    dim: int = 128
    """Floats for each entity."""
    epochs: int = 20
    """Passes over the train triples."""
    batch_size: int = 512
    """Positive triples for each step, over all ranks."""
    negatives: int = 1024
    """Negative entities for each step, shared by all positives of the batch."""
    corruption: str = "reciprocal"
    """How heads are asked for: by inverse relations of their own, or by the model's own heads' query."""
    optimizer: str = "adagrad"
    lr: float = 0.1
    n3: float = 0.0
    """Weight of the N3 regulariser."""
    seed: int = 0
    device: str = "auto"
    """Where tables live: auto, cpu, or cuda."""
    optimizer_device: str = "auto"
    """Where optimizer state lives: auto is where the table is."""

    def __post_init__(self) -> None:
        _one_of("model", self.model, SCORING)
        _one_of("optimizer", self.optimizer, OPTIMIZER_NAMES)
        _one_of("corruption", self.corruption, CORRUPTIONS)
        for name in ("device", "optimizer_device"):
            check_device(option(name), getattr(self, name))
        for name in ("dim", "epochs", "batch_size", "negatives"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{option(name)} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.lr <= sys.float_info.max:
            raise ConfigError(f"--lr must be a number > 0, got {self.lr}")
        if not 0 <= self.n3 <= sys.float_info.max:
            raise ConfigError(f"--n3 must be a number >= 0, got {self.n3}")
        if self.n3 and SCORING[self.model].metric != "dot":
            raise ConfigError(f"--n3 regularises inner products; it does not apply to --model {self.model}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be >= 0, got {self.seed}")
        try:
            SCORING[self.model].check_dim(self.dim)
        except ConfigError as error:
            raise ConfigError(f"--dim {self.dim}, --model {self.model}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(value: dict[str, Any]) -> TrainConfig:
        """Build from names and values.

        Raises:
            ConfigError: A name is unknown, or a value is of the wrong kind or out of range.
        """
        known = {field.name: field.default for field in fields(TrainConfig)}
        for name, setting in value.items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}{_did_you_mean(name, known)}")
            _check_kind(name, setting, known[name])
        return TrainConfig(**value)


def option(name: str) -> str:
    """Return how a setting is spelt on the command line."""
    return "--" + name.replace("_", "-")


def _check_kind(name: str, setting: object, default: object) -> None:
    accepted = (int, float) if isinstance(default, float) else type(default)
    # True is an int to Python, but not to a person.
    if not isinstance(setting, accepted) or isinstance(setting, bool):
        raise ConfigError(f"{option(name)} must be of type {type(default).__name__}, got {setting!r}")


def _one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"{option(name)}: unknown value {value!r}{_did_you_mean(value, known)}"
            f" (known: {', '.join(known)})"
        )


def _did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else ""
