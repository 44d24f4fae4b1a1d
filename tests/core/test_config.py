"""A setting that cannot be is refused at the door, by the name a person typed."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kgshard.devices
from kgshard.config import TrainConfig, option
from kgshard.errors import ConfigError, UsageError
from kgshard.models import SCORING

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
    ("model", "conve", "--model: unknown value 'conve'"),
    ("optimizer", "sgd", "--optimizer: unknown value 'sgd'"),
    ("corruption", "tails", "--corruption: unknown value 'tails'"),
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
