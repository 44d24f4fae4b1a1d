"""What `--model` can name, which dimensions fit, and how values start."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from cases import NAMES, fitting_dim

from kgshard.errors import ConfigError
from kgshard.models import find_scoring
from kgshard.models.metric import METRICS
from kgshard.models.scoring import Columns, Init

OURS = """
from kgshard.models.metric import METRICS
from kgshard.models.scoring import Scoring

class Sum(Scoring):
    "A user's model."
    metric = METRICS["dot"]

    def query_tails(self, heads, relations):
        return heads + relations

class Unfinished(Scoring):
    metric = METRICS["dot"]

class WithoutMetric(Sum):
    metric = None

class Demanding(Sum):
    def __init__(self, wish):
        self.wish = wish

number = 3
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_models.py").write_text(OURS)
    (tmp_path / "users_broken.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    return "users_models"


def test_a_users_class_is_found_by_module_and_name(users_module: str) -> None:
    scoring = find_scoring(f"{users_module}:Sum")
    heads, relations = np.random.default_rng(1).standard_normal((2, 3, 4))
    np.testing.assert_array_equal(scoring.query_tails(heads, relations), heads + relations)
    assert (scoring.relation_dim(4), scoring.metric) == (4, METRICS["dot"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("users_models:Missing", "module 'users_models' has no attribute 'Missing'"),
        ("users_models:number", "users_models:number is no subclass of kgshard.models.scoring.Scoring"),
        ("users_models:Unfinished", "must be complete and take no arguments: .*query_tails"),
        ("users_models:Demanding", "must be complete and take no arguments: .*wish"),
        ("users_models:WithoutMetric", "has no metric; set one of kgshard.models.metric.METRICS"),
        ("users_broken:Model", "unknown scoring function 'users_broken:Model': no licence"),
        ("no_such_module:Model", "No module named 'no_such_module'"),
        (":Model", "unknown scoring function ':Model'"),
        ("users_models:", "unknown scoring function 'users_models:'"),
        ("kecy:0,1", "unknown scoring function 'kecy:0,1', did you mean keci?"),
        ("complx", r"unknown scoring function 'complx', did you mean complex\? \(known: distmult, cp, "),
        ("", r"unknown scoring function '' \(known: "),
    ],
)
def test_what_names_no_model_is_refused_in_words(users_module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_scoring(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("distmult:2", "distmult takes no arguments, got '2'"),
        ("rotate:", "rotate takes no arguments, got ''"),
        ("keci:1", "keci takes p,q, whole numbers from 0 to 9999, got '1'"),
        ("keci:1,2,3", "keci takes p,q, whole numbers from 0 to 9999, got '1,2,3'"),
        ("ckeci:-1,2", "ckeci takes p,q, whole numbers from 0 to 9999, got '-1,2'"),
        ("keci:1, 2", "keci takes p,q, whole numbers from 0 to 9999"),
        ("keci:٣,1", "keci takes p,q, whole numbers from 0 to 9999"),
        ("tucker:0", "tucker takes the relation dim, a whole number from 1 to 9999, got '0'"),
        ("tucker:x", "tucker takes the relation dim, a whole number from 1 to 9999, got 'x'"),
        ("tucker:10000", "tucker takes the relation dim, a whole number from 1 to 9999"),
        ("conve:1", "conve takes the images' height, a whole number from 2 to 9999, got '1'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_scoring(name)
    assert words in str(caught.value)


def test_arguments_choose_the_variant() -> None:
    assert find_scoring("tucker:7").relation_dim(50) == 7
    assert find_scoring("tucker:7").shared_init(50)["core"].shape == (7, 50, 50)
    assert [find_scoring("tucker").relation_dim(dim) for dim in (8, 30, 200)] == [8, 30, 30]
    assert find_scoring("conve:4").shared_init(24)["projection"].shape == (32 * 6 * 4, 24)
    assert find_scoring("conve").shared_init(200)["projection"].shape == (32 * 18 * 18, 200)
    assert find_scoring("keci:2,1").shared_init(8)["coefficients"].shape == (3,)
    assert find_scoring("tucker").relation_dim(50) == 30  # Not what another variant was told.


RELATION_DIMS = {
    "cp": 12,
    "rescal": 576,
    "tucker:5": 5,
    "transh": 48,
    "mure": 44,
    "rotate": 12,
    "rotate-moduli": 12,
}
"""Floats for each relation at dim 24, where they are not 24."""


@pytest.mark.parametrize("name", NAMES)
def test_relation_rows_are_as_wide_as_the_model_says(name: str) -> None:
    assert find_scoring(name).relation_dim(24) == RELATION_DIMS.get(name, 24)


@pytest.mark.parametrize("dim", [0, -2])
@pytest.mark.parametrize("name", NAMES)
def test_a_dim_below_one_is_refused(name: str, dim: int) -> None:
    with pytest.raises(ConfigError, match=f"dim must be >= 1, got {dim}"):
        find_scoring(name).check_dim(dim)


REFUSED = {
    "cp": (7, "dim must be even for two-role embeddings, got 7"),
    "simple": (7, "dim must be even for two-role embeddings, got 7"),
    "complex": (7, "dim must be even for complex embeddings, got 7"),
    "rotate": (7, "dim must be even for complex embeddings, got 7"),
    "rotate-moduli": (7, "dim must be even for complex embeddings, got 7"),
    "qmult": (6, "dim must be a multiple of 4 for quaternion embeddings, got 6"),
    "quate": (6, "dim must be a multiple of 4 for quaternion embeddings, got 6"),
    "omult": (12, "dim must be a multiple of 8 for octonion embeddings, got 12"),
    "duale": (12, "dim must be a multiple of 8 for dual quaternion embeddings, got 12"),
    "keci": (7, "dim must be even for Cl(0,1) embeddings, got 7"),
    "keci:1,0": (7, "dim must be even for Cl(1,0) embeddings, got 7"),
    "ckeci": (7, "dim must be even for Cl(0,1) embeddings, got 7"),
    "keci:2,3": (8, "dim must be a multiple of 6 for Cl(2,3) embeddings, got 8"),
    "ckeci:3,0": (6, "dim must be a multiple of 4 for Cl(3,0) embeddings, got 6"),
    "mure": (2, "dim must be >= 3, a vector and two biases, got 2"),
    "conve": (7, "dim must be height (2 or more) x width (3 or more) for images, got 7"),
    "conve:4": (10, "dim must be 4 x width (3 or more) for images, got 10"),
}


@pytest.mark.parametrize("name", NAMES)
def test_dims_without_a_form_are_refused_and_others_taken(name: str) -> None:
    scoring = find_scoring(name)
    scoring.check_dim(24)
    if name not in REFUSED:
        scoring.check_dim(1)
        scoring.check_dim(7)
        return
    dim, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        scoring.check_dim(dim)
    assert str(caught.value) == words


@pytest.mark.parametrize("dim", [4, 8])
def test_images_narrower_than_a_filter_are_refused(dim: int) -> None:
    with pytest.raises(ConfigError, match="4 x width"):
        find_scoring("conve:4").check_dim(dim)


def as_columns(init: Init | Columns, width: int) -> Columns:
    return ((width, init),) if isinstance(init, Init) else init


@pytest.mark.parametrize("at_least", [3, 50])
@pytest.mark.parametrize("name", NAMES)
def test_initial_columns_are_usable_and_fill_the_row(name: str, at_least: int) -> None:
    scoring, dim = find_scoring(name), fitting_dim(name, at_least)
    relation_dim = scoring.relation_dim(dim)
    for init, width in ((scoring.entity_init(dim), dim), (scoring.relation_init(dim), relation_dim)):
        columns = as_columns(init, width)
        assert sum(part for part, _ in columns) == width
        assert all(math.isfinite(how.scale) and how.scale >= 0 for _, how in columns)
        assert any(how.scale > 0 for _, how in columns)
    for how in scoring.shared_init(dim).values():
        assert how.init.scale > 0 or how.shape[0] <= dim  # Only biases, gains and weights are constant.


def test_mure_starts_as_the_identity_without_biases() -> None:
    scoring = find_scoring("mure")
    (_, vectors), (biases, none) = as_columns(scoring.entity_init(20), 20)
    (stretches, one), (shifts, _) = as_columns(scoring.relation_init(20), 36)
    assert (biases, none.scale, none.center) == (2, 0, 0)
    assert (stretches, one.scale, one.center, shifts) == (18, 0, 1, 18)
    assert vectors.scale > 0


def test_distances_start_as_wide_as_published_and_angles_on_an_arc() -> None:
    for name in ("transe", "transe-l1", "transh", "rotate", "rotate-moduli"):
        assert find_scoring(name).entity_init(100) == Init("uniform", 0.6)
    assert find_scoring("rotate").relation_init(100) == Init("uniform", math.pi)
    for init in (find_scoring("protate").entity_init(100), find_scoring("protate").relation_init(100)):
        assert isinstance(init, Init)
        assert 0 < init.scale < math.pi / 4


@pytest.mark.parametrize("name", NAMES)
def test_bound_values_belong_to_one_copy(name: str) -> None:
    scoring, values = find_scoring(name), {"core": np.ones(1)}
    bound = scoring.bind(values)
    assert bound.shared == values
    assert find_scoring(name).shared == scoring.shared == {}
    assert scoring.bind({}) is scoring
