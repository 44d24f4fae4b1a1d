"""The settings of a training run, checked once at the door. Classes below never see them.

Every setting is declared once, with its default, its help and its range; the command line, recipes and
`kgshard.train` all take them from here.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kgshard.devices import check_device
from kgshard.errors import ConfigError
from kgshard.models import SCORING, find_scoring
from kgshard.models.check import check_formula
from kgshard.models.link import LinkModel
from kgshard.models.metric import DOT
from kgshard.training.schedule import DECAYS

OPTIMIZER_NAMES = ("adagrad", "adagrad-rowwise", "adam", "adam-rowstep", "sgd")
LARGE_BYTES = 1 << 30
"""A relation table larger than this is sharded, unless settings say otherwise."""
_VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def _setting(default: Any, help: str, *, choices: tuple[str, ...] = (), **limits: float) -> Any:
    """Declare a setting. Limits: `at_least`, `above`, `at_most`, `below`."""
    return field(default=default, metadata={"help": help, "choices": choices, "limits": limits})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What `kgshard train` can be told. Equal settings and data give equal tables at any world size."""

    model: str = _setting("complex", "Scoring function: one that `kgshard models` lists, or module:Class.")
    dim: int = _setting(128, "Floats for each entity.", at_least=1)
    corruption: str = _setting(
        "reciprocal",
        "How heads are asked for: by inverse relations of their own, or by the model's own query.",
        choices=("reciprocal", "both-sides"),
    )
    init_scale: float = _setting(
        1.0, "Factor on the spread of rows' initial values, not of shared parameters'.", above=0
    )
    shard_relations: str = _setting(
        "auto",
        "Cut the relation table over ranks too; auto does beyond 1 GiB, unless relations are predicted.",
        choices=("auto", "always", "never"),
    )
    epochs: int = _setting(20, "Passes over the train triples.", at_least=1)
    steps: int = _setting(
        0,
        "Batches in place of epochs, to the end of the last one's update; 0 is by epochs.",
        at_least=0,
    )
    batch_size: int = _setting(512, "Triples (kvsall: questions) for each step, over all ranks.", at_least=1)
    accumulate: int = _setting(1, "Batches for each update.", at_least=1)
    train_type: str = _setting(
        "negative-sampling",
        "What a true answer competes with: sampled negatives; all entities; all entities, each question once"
        " with all its answers.",
        choices=("negative-sampling", "1vsall", "kvsall"),
    )
    loss: str = _setting(
        "softmax",
        "What is minimised; over all entities softmax or bce.",
        choices=("softmax", "self-adversarial", "margin", "bce"),
    )
    negatives: int = _setting(1024, "Negative entities that a batch or chunk shares.", at_least=1)
    negatives_from: str = _setting(
        "uniform",
        "What negatives are drawn from: all entities alike, or by degree, or the relation's domain or range.",
        choices=("uniform", "degree", "typed"),
    )
    chunk_size: int = _setting(0, "Triples that share negatives; 0 is the whole batch.", at_least=0)
    filter_negatives: bool = _setting(False, "Leave known answers out of the negatives.")
    move: str = _setting(
        "auto",
        "Between ranks, for shared negatives: their rows, or the questions' queries; auto is fewer bytes.",
        choices=("auto", "rows", "queries"),
    )
    margin: float = _setting(1.0, "Of the margin and self-adversarial losses.", at_least=0)
    adversarial_temperature: float = _setting(1.0, "Of the self-adversarial loss.", above=0)
    label_smoothing: float = _setting(
        0.0, "What labels lose to all candidates together.", at_least=0, below=1
    )
    relation_prediction: float = _setting(0.0, "Weight of predicting the relation too.", at_least=0)
    n3: float = _setting(0.0, "Weight of the N3 regulariser: cubed moduli of a question's rows.", at_least=0)
    l2: float = _setting(0.0, "Weight of the squares of a question's rows.", at_least=0)
    l3: float = _setting(0.0, "Weight of the absolute cubes of a question's rows.", at_least=0)
    dropout: float = _setting(0.0, "Chance that a query's coordinate is dropped.", at_least=0, below=1)
    max_norm: float = _setting(0.0, "The longest 2-norm of an entity row; 0 is any.", at_least=0)
    optimizer: str = _setting("adagrad", "Optimizer of touched rows.", choices=OPTIMIZER_NAMES)
    lr: float = _setting(0.1, "Learning rate, once warm.", above=0)
    warmup: int = _setting(0, "Updates over which the learning rate rises.", at_least=0)
    decay: str = _setting(
        "constant",
        "How the learning rate falls from then to the last epoch.",
        choices=tuple(DECAYS),
    )
    final_lr: float = _setting(
        0.0, "Where a decay ends, as a share of the learning rate.", at_least=0, at_most=1
    )
    clip_norm: float = _setting(
        0.0, "The longest gradient, over all parameters and ranks; 0 is any.", at_least=0
    )
    dtype: str = _setting("float32", "Of tables and optimizer state.", choices=tuple(_VALUE_BYTES))
    exchange_dtype: str = _setting(
        "float32",
        "Of rows and gradients on their way between ranks.",
        choices=("float32", "bfloat16", "float16"),
    )
    rounding: str = _setting("stochastic", "How results become bfloat16.", choices=("stochastic", "nearest"))
    seed: int = _setting(0, "Fixes initial values, shuffles, negatives and rounding.", at_least=0)
    save_optimizer: bool = _setting(True, "Keep optimizer state in checkpoints, to go on from.")
    eval_every: int = _setting(0, "Epochs between evaluations on valid; 0 is never.", at_least=0)
    eval_steps: int = _setting(0, "Steps between evaluations on valid; 0 is never.", at_least=0)
    eval: str = _setting(
        "full",
        "All valid triples, or a sample of them, all entities being candidates; or no evaluation.",
        choices=("full", "sampled", "none"),
    )
    eval_sample: int = _setting(1000, "Triples of a sampled evaluation.", at_least=2)
    patience: int = _setting(
        0, "Evaluations without a better MRR before training stops; 0 is to go on.", at_least=0
    )
    device: str = _setting("auto", "Where tables live: auto, cpu, cuda or cuda:N.")
    optimizer_device: str = _setting("auto", "Where optimizer state lives; auto is beside the table.")
    table_storage: str = _setting(
        "ram",
        "Where entity rows and their optimizer state lie: in memory, or in files that are mapped.",
        choices=("ram", "mmap"),
    )
    transport: str = _setting(
        "auto",
        "What carries rows between ranks: torch, or auto, which is shared memory among ranks of one machine.",
        choices=("auto", "torch"),
    )

    def __post_init__(self) -> None:
        for declared in fields(self):
            _check(declared.name, getattr(self, declared.name), declared.metadata)
        for name in ("device", "optimizer_device"):
            check_device(option(name), getattr(self, name))
        self._check_model()
        if self.decay == "exponential" and self.final_lr == 0:
            raise ConfigError("--decay exponential never arrives at 0; give a --final-lr > 0")
        if self.chunk_size >= self.batch_size:
            raise ConfigError(
                f"--chunk-size {self.chunk_size} cuts no batch of {self.batch_size} triples; leave it out"
            )
        changed = {declared.name for declared in fields(self) if self._differs(declared.name)}
        # What cuts a recipe short should not need the recipe's other settings undone.
        gives_way = {"epochs"} if self.steps else set()
        gives_way |= {"patience", "eval_sample"} if self.eval == "none" else set()
        self.check_applies(changed - gives_way)

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != DEFAULTS[name])

    def _check_model(self) -> None:
        try:
            find_scoring(self.model).check_dim(self.dim)
        except ConfigError as error:
            where = f"--dim {self.dim}, --model {self.model}" if str(error).startswith("dim") else "--model"
            raise ConfigError(f"{where}: {error}") from None
        try:
            model = self.link_model(num_entities=1, num_relations=1)
        except ConfigError as error:
            raise ConfigError(f"--corruption {self.corruption}: {error}") from None
        if self.model.partition(":")[0] not in SCORING:
            check_formula(model)
        if self.train_type == "negative-sampling":
            return
        if self.loss not in ("softmax", "bce"):
            raise ConfigError(
                f"--loss {self.loss} needs sampled negatives, not --train-type {self.train_type}"
            )
        if model.sides_differ:
            raise ConfigError(
                f"--train-type {self.train_type} needs --corruption reciprocal for {self.model}"
            )

    def check_applies(self, given: Collection[str]) -> None:
        """Check that settings that somebody gave have an effect.

        Raises:
            ConfigError: One has none, beside the others.
        """
        for name in given:
            if name in _NEEDS:
                applies, needed = _NEEDS[name]
                if not applies(self):
                    raise ConfigError(f"{option(name)} has no effect here: it needs {needed}")

    def link_model(self, *, num_entities: int, num_relations: int) -> LinkModel:
        """Return the model that these settings mean for a graph of this size."""
        return LinkModel(
            name=self.model,
            dim=self.dim,
            num_entities=num_entities,
            num_relations=num_relations,
            reciprocal=self.corruption == "reciprocal",
        )

    @property
    def value_bytes(self) -> int:
        """Bytes of a number of a table, or of its optimizer's state."""
        return _VALUE_BYTES[self.dtype]

    def shards_relations(self, model: LinkModel) -> bool:
        """Whether a model's relation rows are cut over ranks as entity rows are."""
        if self.shard_relations != "auto":
            return self.shard_relations == "always"
        num_bytes = model.num_relation_rows * model.relation_dim * self.value_bytes
        return not self.relation_prediction and num_bytes > LARGE_BYTES

    @property
    def evaluates(self) -> bool:
        """Whether the run is evaluated while it trains."""
        return self.eval != "none" and bool(self.eval_every or self.eval_steps)

    @property
    def can_move_queries(self) -> bool:
        """Whether sampled negatives can be scored where they lie."""
        model = self.link_model(num_entities=1, num_relations=1)
        shared = self.chunk_size == 0 and self.negatives_from != "typed"
        return _sampled(self) and self.loss == "softmax" and shared and not model.sides_differ

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(value: dict[str, Any]) -> TrainConfig:
        """Build from names and values.

        Raises:
            ConfigError: A name is unknown, or a value is of the wrong kind or out of range.
        """
        _check_names(value)
        return TrainConfig(**value)


DEFAULTS: dict[str, Any] = {declared.name: declared.default for declared in fields(TrainConfig)}
"""Every setting's default, by name."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file: a recipe, or the config.toml of a run.

    Raises:
        ConfigError: There is no such file, it is no TOML, or a setting is none.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_names(settings)
        for name, value in settings.items():
            _check(name, value, TrainConfig.__dataclass_fields__[name].metadata)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return settings


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the name and value that NAME=VALUE gives to a setting.

    Raises:
        ConfigError: It is not of that form, or names no setting, or the value is of another kind.
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in DEFAULTS:
        raise ConfigError(f"--set {text}: expected NAME=VALUE{_did_you_mean(name, DEFAULTS)}")
    kind = type(DEFAULTS[name])
    try:
        if kind is bool:
            return name, {"true": True, "false": False}[value.strip().lower()]
        return name, kind(value.strip())
    except (ValueError, KeyError):
        raise ConfigError(f"--set {text}: {value.strip()!r} is no {kind.__name__}") from None


def _sampled(config: TrainConfig) -> bool:
    return config.train_type == "negative-sampling"


_NEEDS: dict[str, tuple[Callable[[TrainConfig], bool], str]] = {
    **dict.fromkeys(
        ("negatives", "negatives_from", "chunk_size", "filter_negatives"),
        (_sampled, "--train-type negative-sampling"),
    ),
    "move": (
        lambda c: c.can_move_queries,
        "--loss softmax over sampled negatives that a whole batch shares (uniform or by degree), and"
        " candidates that are the same for both sides",
    ),
    "margin": (lambda c: c.loss in ("margin", "self-adversarial"), "--loss margin or self-adversarial"),
    "adversarial_temperature": (lambda c: c.loss == "self-adversarial", "--loss self-adversarial"),
    "label_smoothing": (
        lambda c: c.loss == "bce" or (c.loss == "softmax" and not _sampled(c)),
        "--loss bce, or softmax with --train-type 1vsall or kvsall",
    ),
    "relation_prediction": (
        lambda c: (
            c.train_type != "kvsall"
            and find_scoring(c.model).has_relation_queries
            and c.shard_relations != "always"
        ),
        "a model whose score is an inner product with the relation's row, one answer a question,"
        " and relations that every rank holds",
    ),
    "n3": (lambda c: find_scoring(c.model).metric is DOT, "a model that scores by inner products"),
    "dropout": (
        lambda c: find_scoring(c.model).metric is DOT and find_scoring(c.model).takes_dropout,
        "a model that scores by inner products with entity rows",
    ),
    "optimizer_device": (lambda c: c.optimizer != "sgd", "an optimizer with state, which sgd has not"),
    "final_lr": (lambda c: c.decay != "constant", "a --decay"),
    "rounding": (lambda c: c.dtype == "bfloat16", "--dtype bfloat16"),
    "epochs": (lambda c: not c.steps, "--steps 0"),
    "eval": (lambda c: c.evaluates or c.eval == "none", "--eval-every or --eval-steps"),
    "patience": (lambda c: c.evaluates, "--eval-every or --eval-steps"),
    "eval_sample": (lambda c: c.evaluates and c.eval == "sampled", "--eval sampled"),
}
"""Settings that mean something only beside others: when they do, in a condition and in words."""


def option(name: str) -> str:
    """Return how a setting is spelt on the command line."""
    return "--" + name.replace("_", "-")


def _check(name: str, value: Any, declared: Any) -> None:
    """Raise ConfigError where a value is none of the choices, or outside the limits."""
    if declared["choices"] and value not in declared["choices"]:
        known = declared["choices"]
        raise ConfigError(
            f"{option(name)}: unknown value {value!r}{_did_you_mean(value, known)}"
            f" (known: {', '.join(known)})"
        )
    is_real = isinstance(DEFAULTS[name], float)
    kind = "a number " if is_real else ""
    signs = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<"}
    for limit, bound in declared["limits"].items():
        fits = {">=": value >= bound, ">": value > bound, "<=": value <= bound, "<": value < bound}
        if not fits[signs[limit]] or (is_real and not _is_finite(value)):
            raise ConfigError(f"{option(name)} must be {kind}{signs[limit]} {bound}, got {value}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int beyond all floats.
        return False


def _check_names(settings: dict[str, Any]) -> None:
    """Raise ConfigError where a setting is none, or of the wrong kind."""
    for name, setting in settings.items():
        if name not in DEFAULTS:
            raise ConfigError(f"unknown setting {name!r}{_did_you_mean(name, DEFAULTS)}")
        _check_kind(name, setting)


def _check_kind(name: str, setting: object) -> None:
    default = DEFAULTS[name]
    accepted = (int, float) if isinstance(default, float) else type(default)
    # True is an int to Python, but not to a person.
    if not isinstance(setting, accepted) or (isinstance(setting, bool) and not isinstance(default, bool)):
        raise ConfigError(f"{option(name)} must be of type {type(default).__name__}, got {setting!r}")


def _did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else ""
