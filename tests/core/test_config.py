"""A setting that cannot be is refused at the door, by the name a person typed."""

from __future__ import annotations

import math
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kgshard.devices
from kgshard.config import (
    _NEEDS,
    DEFAULTS,
    OPTIMIZER_NAMES,
    TrainConfig,
    option,
    parse_setting,
    read_settings,
)
from kgshard.errors import ConfigError, UsageError
from kgshard.models import SCORING
from kgshard.optim import OPTIMIZERS
from kgshard.start import _toml
from kgshard.training.full_losses import FULL_LOSSES
from kgshard.training.losses import LOSSES
from kgshard.training.negatives import SOURCES
from kgshard.training.schedule import DECAYS

BAD: list[tuple[str, Any, str]] = [
    ("dim", 0, "--dim must be >= 1, got 0"),
    ("dim", -8, "--dim must be >= 1, got -8"),
    ("epochs", 0, "--epochs must be >= 1, got 0"),
    ("batch_size", 0, "--batch-size must be >= 1, got 0"),
    ("negatives", -1, "--negatives must be >= 1, got -1"),
    ("lr", 0.0, "--lr must be a number > 0, got 0.0"),
    ("lr", -0.1, "--lr must be a number > 0, got -0.1"),
    ("lr", math.nan, "--lr must be a number > 0, got nan"),
    ("lr", math.inf, "--lr must be a number > 0, got inf"),
    ("n3", -1e-9, "--n3 must be a number >= 0"),
    ("n3", math.nan, "--n3 must be a number >= 0, got nan"),
    ("n3", math.inf, "--n3 must be a number >= 0, got inf"),
    ("seed", -1, "--seed must be >= 0, got -1"),
    ("init_scale", 0.0, "--init-scale must be a number > 0, got 0.0"),
    ("accumulate", 0, "--accumulate must be >= 1, got 0"),
    ("chunk_size", -1, "--chunk-size must be >= 0, got -1"),
    ("margin", -0.5, "--margin must be a number >= 0, got -0.5"),
    ("adversarial_temperature", 0.0, "--adversarial-temperature must be a number > 0, got 0.0"),
    ("label_smoothing", 1.0, "--label-smoothing must be a number < 1, got 1.0"),
    ("label_smoothing", -0.1, "--label-smoothing must be a number >= 0, got -0.1"),
    ("relation_prediction", -1.0, "--relation-prediction must be a number >= 0, got -1.0"),
    ("l2", -1.0, "--l2 must be a number >= 0, got -1.0"),
    ("l3", math.inf, "--l3 must be a number >= 0, got inf"),
    ("dropout", 1.0, "--dropout must be a number < 1, got 1.0"),
    ("max_norm", -1.0, "--max-norm must be a number >= 0, got -1.0"),
    ("clip_norm", math.nan, "--clip-norm must be a number >= 0, got nan"),
    ("warmup", -1, "--warmup must be >= 0, got -1"),
    ("final_lr", -0.1, "--final-lr must be a number >= 0, got -0.1"),
    ("final_lr", 1.5, "--final-lr must be a number <= 1, got 1.5"),
    ("eval_every", -1, "--eval-every must be >= 0, got -1"),
    ("eval_steps", -1, "--eval-steps must be >= 0, got -1"),
    ("eval_sample", 1, "--eval-sample must be >= 2, got 1"),
    ("patience", -1, "--patience must be >= 0, got -1"),
    ("model", "nosuch", "--model: unknown scoring function 'nosuch'"),
    ("optimizer", "adams", "--optimizer: unknown value 'adams', did you mean adam?"),
    ("corruption", "tails", "--corruption: unknown value 'tails'"),
    ("train_type", "kvsal", "--train-type: unknown value 'kvsal', did you mean kvsall?"),
    ("loss", "hinge", "--loss: unknown value 'hinge'"),
    ("negatives_from", "types", "--negatives-from: unknown value 'types', did you mean typed?"),
    ("decay", "step", "--decay: unknown value 'step'"),
    ("dtype", "float16", "--dtype: unknown value 'float16', did you mean bfloat16?"),
    ("rounding", "up", "--rounding: unknown value 'up'"),
    ("eval", "some", "--eval: unknown value 'some'"),
    ("shard_relations", "yes", "--shard-relations: unknown value 'yes'"),
    ("device", "tpu", "--device: unknown value 'tpu'"),
    ("optimizer_device", "disk", "--optimizer-device: unknown value 'disk'"),
]
WRONG_KINDS: list[tuple[str, Any]] = [
    ("dim", True),
    ("dim", 8.0),
    ("dim", "8"),
    ("dim", None),
    ("epochs", False),
    ("batch_size", 1e3),
    ("negatives", [4]),
    ("lr", "0.1"),
    ("lr", True),
    ("n3", False),
    ("seed", True),
    ("seed", 1.5),
    ("model", 3),
    ("device", None),
    ("filter_negatives", 1),
    ("filter_negatives", "true"),
    ("loss", ["softmax"]),
    ("dropout", True),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_is_refused_naming_its_option(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict({name: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(("name", "value"), WRONG_KINDS)
def test_a_value_of_the_wrong_kind_is_refused_naming_its_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{option(name)} must be of type"):
        TrainConfig.from_dict({name: value})


def test_an_integer_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lr must be a number > 0"):
        TrainConfig.from_dict({"lr": 10**400})


def test_true_is_no_number_of_floats() -> None:
    with pytest.raises(ConfigError, match="--dim must be of type int, got True"):
        TrainConfig.from_dict({"dim": True})


def test_an_unknown_setting_suggests_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'dimm', did you mean dim\?"):
        TrainConfig.from_dict({"dimm": 8})
    with pytest.raises(ConfigError, match=r"unknown setting 'batchsize', did you mean batch_size\?"):
        TrainConfig.from_dict({"batchsize": 8})
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'$"):
        TrainConfig.from_dict({"zzz": 8})


def test_an_unknown_value_suggests_a_near_one_and_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict({"model": "complx"})
    assert "did you mean complex?" in str(caught.value)
    assert all(name in str(caught.value) for name in SCORING)


def test_every_choice_can_be_told_from_a_wrong_one() -> None:
    """What can be chosen is what is there."""
    chosen = {field.name: field.metadata["choices"] for field in fields(TrainConfig)}
    assert set(chosen["optimizer"]) == set(OPTIMIZER_NAMES) == set(OPTIMIZERS)
    assert set(chosen["loss"]) == set(LOSSES) >= set(FULL_LOSSES)
    assert set(chosen["negatives_from"]) == set(SOURCES)
    assert set(chosen["decay"]) == set(DECAYS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_setting_has_a_default_of_its_type_and_a_sentence_of_help(name: str) -> None:
    [field] = [field for field in fields(TrainConfig) if field.name == name]
    assert isinstance(DEFAULTS[name], {"int": int, "float": float, "str": str, "bool": bool}[str(field.type)])
    assert field.metadata["help"][0].isupper()
    assert field.metadata["help"].endswith(".")


# --- settings that mean something only beside others

SAMPLED: dict[str, Any] = {"train_type": "negative-sampling"}
EVERY: dict[str, Any] = {"eval_every": 1}
FULL: dict[str, Any] = {"train_type": "1vsall"}
NEEDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "negatives": (7, FULL, SAMPLED, "--train-type negative-sampling"),
    "negatives_from": ("degree", FULL, SAMPLED, "--train-type negative-sampling"),
    "chunk_size": (7, {"train_type": "kvsall"}, SAMPLED, "--train-type negative-sampling"),
    "filter_negatives": (True, FULL, SAMPLED, "--train-type negative-sampling"),
    "margin": (2.0, {"loss": "bce"}, {"loss": "margin"}, "--loss margin or self-adversarial"),
    "adversarial_temperature": (
        2.0,
        {"loss": "margin"},
        {"loss": "self-adversarial"},
        "--loss self-adversarial",
    ),
    "label_smoothing": (
        0.1,
        SAMPLED,
        FULL,
        "--loss bce, or softmax with --train-type 1vsall or kvsall",
    ),
    "relation_prediction": (
        0.1,
        {"model": "transe"},
        FULL,
        "a model whose score is an inner product with the relation's row, one answer a question,"
        " and relations that every rank holds",
    ),
    "n3": (0.1, {"model": "rotate"}, {"model": "distmult"}, "a model that scores by inner products"),
    "move": (
        "queries",
        {"loss": "bce"},
        {"negatives_from": "degree"},
        "--loss softmax over sampled negatives that a whole batch shares (uniform or by degree), and"
        " candidates that are the same for both sides",
    ),
    "final_lr": (0.1, {}, {"decay": "linear"}, "a --decay"),
    "dropout": (
        0.1,
        {"model": "mure"},
        {"model": "complex"},
        "a model that scores by inner products with entity rows",
    ),
    "optimizer_device": (
        "cpu",
        {"optimizer": "sgd"},
        {"optimizer": "adam"},
        "an optimizer with state, which sgd has not",
    ),
    "rounding": ("nearest", {}, {"dtype": "bfloat16"}, "--dtype bfloat16"),
    "eval": ("sampled", {}, EVERY, "--eval-every or --eval-steps"),
    "eval_sample": (7, EVERY, {**EVERY, "eval": "sampled"}, "--eval sampled"),
    "patience": (3, {}, {"eval_steps": 5}, "--eval-every or --eval-steps"),
}
"""Name: another value, settings beside which it does nothing, settings beside which it does, and words."""


def test_every_setting_that_needs_another_is_listed_here() -> None:
    assert set(NEEDS) | {"epochs"} == set(_NEEDS)


def test_steps_and_no_evaluation_need_nothing_of_a_recipe_undone_but_not_what_somebody_gave() -> None:
    for recipe, name in (
        ({"epochs": 30, "steps": 5}, "epochs"),
        ({"eval_every": 2, "patience": 3, "eval": "none"}, "patience"),
    ):
        config = TrainConfig(**recipe)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"^{option(name)} has no effect here"):
            config.check_applies([name])


@pytest.mark.parametrize("name", NEEDS)
def test_a_setting_without_effect_is_refused_with_what_it_needs(name: str) -> None:
    value, without, beside, words = NEEDS[name]
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**without, **{name: value})
    assert str(caught.value) == f"{option(name)} has no effect here: it needs {words}"
    assert getattr(TrainConfig(**beside, **{name: value}), name) == value


@pytest.mark.parametrize("name", NEEDS)
def test_a_default_that_somebody_gave_is_refused_too_where_it_has_no_effect(name: str) -> None:
    _, without, beside, words = NEEDS[name]
    with pytest.raises(ConfigError, match=f"^{option(name)} has no effect here"):
        TrainConfig(**without).check_applies(["dim", name])
    TrainConfig(**beside).check_applies(["dim", name])
    TrainConfig(**without).check_applies(["dim"])
    assert words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "margin", **FULL}, "--loss margin needs sampled negatives, not --train-type 1vsall"),
        (
            {"loss": "self-adversarial", "train_type": "kvsall"},
            "--loss self-adversarial needs sampled negatives, not --train-type kvsall",
        ),
        (
            {"model": "mure", "corruption": "both-sides", "train_type": "kvsall"},
            "--train-type kvsall needs --corruption reciprocal for mure",
        ),
        (
            {"model": "conve", "corruption": "both-sides"},
            "--corruption both-sides: conve has no query for heads; it needs reciprocal relations",
        ),
        ({"relation_prediction": 0.1, "train_type": "kvsall"}, "--relation-prediction has no effect here"),
        (
            {"relation_prediction": 0.1, "shard_relations": "always"},
            "--relation-prediction has no effect here",
        ),
        ({"label_smoothing": 0.1, "loss": "margin"}, "--label-smoothing has no effect here"),
        ({"decay": "exponential"}, "--decay exponential never arrives at 0; give a --final-lr > 0"),
        ({"chunk_size": 8, "batch_size": 8}, "--chunk-size 8 cuts no batch of 8 triples; leave it out"),
        ({"model": "keci:1"}, "--model: keci takes p,q"),
    ],
)
def test_settings_that_cannot_be_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**settings)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_sides_that_do_not_differ_are_trained_on_all_entities_either_way() -> None:
    assert TrainConfig(model="complex", corruption="both-sides", train_type="kvsall").train_type == "kvsall"


def test_an_odd_dim_is_refused_for_complex_models_naming_both_options() -> None:
    with pytest.raises(ConfigError, match="--dim 7, --model complex: dim must be even"):
        TrainConfig(model="complex", dim=7)
    with pytest.raises(ConfigError, match="--dim 7, --model rotate: dim must be even"):
        TrainConfig(model="rotate", dim=7)
    assert TrainConfig(model="distmult", dim=7).dim == 7


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_known_devices_are_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kgshard.devices, "num_cuda_devices", lambda: 2)
    assert TrainConfig(device=device).device == device


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_here_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kgshard.devices, "num_cuda_devices", lambda: 0)
    with pytest.raises(ConfigError, match=f"--optimizer-device {device}: this machine has no CUDA devices"):
        TrainConfig(optimizer_device=device)


@pytest.mark.parametrize("device", ["cpu:1", "auto:3", "cuda:", "cuda:x", "gpu", ""])
def test_words_that_name_no_device_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="--device: unknown value"):
        TrainConfig(device=device)


def test_an_integer_will_do_where_a_float_is_meant() -> None:
    assert TrainConfig.from_dict({"lr": 1, "n3": 0}).lr == 1


def test_settings_survive_their_dict_form() -> None:
    config = TrainConfig(model="rotate", dim=10, epochs=3, lr=0.5, seed=2**70, device="cpu")
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.from_dict({}) == TrainConfig()


def test_options_are_spelt_with_dashes() -> None:
    assert option("optimizer_device") == "--optimizer-device"


# --- files and single words


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("dim=64", "dim", 64),
        ("batch-size=7", "batch_size", 7),
        ("batch_size = 7", "batch_size", 7),
        ("lr=1e-3", "lr", 1e-3),
        ("lr=1", "lr", 1.0),
        ("model=keci:1,1", "model", "keci:1,1"),
        ("model=a=b", "model", "a=b"),
        ("filter-negatives=true", "filter_negatives", True),
        ("filter_negatives=False", "filter_negatives", False),
    ],
)
def test_a_setting_is_read_from_one_word(text: str, name: str, value: Any) -> None:
    assert parse_setting(text) == (name, value)
    assert type(parse_setting(text)[1]) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dim", "--set dim: expected NAME=VALUE"),
        ("", "--set : expected NAME=VALUE"),
        ("=3", "--set =3: expected NAME=VALUE"),
        ("batchsize=3", "--set batchsize=3: expected NAME=VALUE, did you mean batch_size?"),
        ("dim=8.0", "--set dim=8.0: '8.0' is no int"),
        ("dim=", "--set dim=: '' is no int"),
        ("lr=fast", "--set lr=fast: 'fast' is no float"),
        ("filter_negatives=1", "--set filter_negatives=1: '1' is no bool"),
    ],
)
def test_a_word_that_is_no_setting_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_setting(text)
    assert str(caught.value).startswith(words)


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.toml"
    path.write_bytes(text.encode())
    return path


def as_toml(config: TrainConfig) -> str:
    """Return what a run's config.toml says."""
    return "".join(_toml(*item) for item in config.to_dict().items())


def test_settings_of_a_file_are_those_it_names(tmp_path: Path) -> None:
    path = write(tmp_path, 'model = "transe"  # with comments\ndim = 10\nlr = 1\nfilter_negatives = true\n')
    assert read_settings(path) == {"model": "transe", "dim": 10, "lr": 1, "filter_negatives": True}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dim = ", "Invalid value"),
        ("dimm = 8\n", "unknown setting 'dimm', did you mean dim?"),
        ("[train]\ndim = 8\n", "unknown setting 'train'"),
        ("dim = 8.0\n", "--dim must be of type int, got 8.0"),
        ("dim = 0\n", "--dim must be >= 1, got 0"),
    ],
)
def test_a_file_with_a_wrong_setting_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_a_file_may_hold_what_means_something_only_beside_other_settings(tmp_path: Path) -> None:
    assert read_settings(write(tmp_path, "final_lr = 0.1\n")) == {"final_lr": 0.1}


def test_a_file_that_is_not_there_or_no_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_settings(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.toml: "):
        read_settings(tmp_path / "bytes.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(model="rotate", dim=10, lr=1e-05, seed=2**62, loss="self-adversarial", margin=9.0),
        TrainConfig(train_type="kvsall", loss="bce", label_smoothing=0.1, n3=1e-300, corruption="both-sides"),
        TrainConfig(dtype="bfloat16", rounding="nearest", decay="exponential", final_lr=0.01),
        TrainConfig(eval_steps=7, eval="sampled", eval_sample=50, patience=3, filter_negatives=True),
    ],
)
def test_a_runs_config_toml_gives_its_settings_again(tmp_path: Path, config: TrainConfig) -> None:
    settings = read_settings(write(tmp_path, as_toml(config)))
    assert set(settings) == set(DEFAULTS)
    assert TrainConfig.from_dict(settings) == config


@given(lr=st.floats(1e-300, 1e300), name=st.text(st.characters(codec="utf-8", exclude_characters="\x7f")))
def test_any_number_and_any_text_survive_toml(lr: float, name: str) -> None:
    """A model's name may be a module and a class, and so in any script."""
    assert tomllib.loads(_toml("lr", lr) + _toml("model", name)) == {"lr": lr, "model": name}
