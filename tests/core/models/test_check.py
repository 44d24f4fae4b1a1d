"""A scoring function of somebody's own is tried before a run is begun with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kgshard.config import TrainConfig
from kgshard.errors import ConfigError
from kgshard.models import SCORING
from kgshard.models.check import check_formula
from kgshard.models.link import LinkModel

HEAD = """
import torch
from kgshard.models.metric import DOT
from kgshard.models.scoring import Init, Scoring, SharedInit

class Mine(Scoring):
    metric = DOT
    has_head_queries = False

    def query_tails(self, heads, relations):
        return heads * relations
"""

BAD = {
    "company": ("def query_tails(self, h, r): return (h - h.mean(0)) * r", "alone and .* among others"),
    "torch only": ("def query_tails(self, h, r): return torch.tanh(h * r)", "fails on numpy rows: TypeError"),
    "too narrow": ("def query_tails(self, h, r): return (h * r)[..., 1:]", "fails on numpy rows: ValueError"),
    "a row of scores": ("def query_tails(self, h, r): return (h * r)[..., None]", "fails on|scores of 3"),
    "not finite": ("def query_tails(self, h, r): return h * r / 0.0", "expected as many finite numbers"),
    "no relation": ("def relation_dim(self, dim): return 0", "relation_dim is 0, expected >= 1"),
    "a path as a name": (
        "def shared_init(self, dim): return {'a/b': SharedInit((2,), Init('normal', 1.0))}",
        "shared parameter 'a/b'",
    ),
    "one factor": ("def factors(self, h, r, t): return (abs(h * r * t),)", "factors returns 1 arrays"),
    "another query for relations": (
        "has_relation_queries = True\n    def query_relations(self, h, t): return h + t",
        "by query_relations and .* without it",
    ),
    "no query for relations": ("has_relation_queries = True", "has no query for relations"),
    "an empty shape": (
        "def shared_init(self, dim): return {'a': SharedInit((), Init('normal', 1.0))}",
        "holds nothing",
    ),
}


def write_model(folder: Path, name: str, extra: str) -> str:
    module = f"mine_{re.sub('[^a-z]', '_', name)}"
    (folder / f"{module}.py").write_text(HEAD + f"\n    {extra}\n")
    return f"{module}:Mine"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BAD)
def test_a_formula_that_cannot_work_is_refused_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    extra, words = BAD[name]
    with pytest.raises(ConfigError, match=words):
        TrainConfig(model=write_model(tmp_path, name, extra), dim=8)


def test_a_good_one_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert TrainConfig(model=write_model(tmp_path, "good", "a = 1"), dim=8).dim == 8


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", sorted(SCORING))
def test_every_model_of_ours_passes(name: str, reciprocal: bool) -> None:
    if reciprocal or SCORING[name].has_head_queries:
        check_formula(LinkModel(name=name, dim=24, num_entities=3, num_relations=3, reciprocal=reciprocal))
