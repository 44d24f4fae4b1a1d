"""docs/models.md says of every model what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kgshard.models import SCORING, find_scoring
from kgshard.models.metric import DOT, METRICS
from kgshard.models.scoring import Scoring

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
TABLE = {
    match[1]: [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]]
    for line in PAGE.split("## ")[0].splitlines()
    if (match := re.match(r"\| `([a-z0-9-]+)` \|", line))
}
"""Cells after the name: score, paper, metric, floats a relation, heads, relations, N3."""
WIDTHS = {
    "dim": 24,
    "dim / 2": 12,
    "dim × dim": 576,
    "min(dim, 30)": 24,
    "2 dim": 48,
    "2 (dim − 2)": 44,
}
"""What the page's formulas are at dim 24."""


def test_every_model_has_its_line_in_the_order_of_the_registry() -> None:
    assert list(TABLE) == list(SCORING)


@pytest.mark.parametrize("name", SCORING)
def test_the_table_says_what_the_model_does(name: str) -> None:
    scoring = SCORING[name]
    _, paper, metric, floats, heads, relations, n3 = TABLE[name]
    assert re.search(r", (19|20)\d\d$", paper)
    assert metric == scoring.metric.name
    assert WIDTHS[floats] == scoring.relation_dim(24)
    assert heads == ("yes" if scoring.has_head_queries else "no")
    assert relations == ("yes" if scoring.has_relation_queries else "no")
    assert (n3 == "–") == (scoring.metric is not DOT)


def test_every_metric_is_explained() -> None:
    explained = PAGE.split("## Metrics")[1].split("## ")[0]
    assert all(re.search(rf"\| (\w+, )?{name}(, \w+)? \|", explained) for name in METRICS)


def test_arguments_on_the_page_are_taken() -> None:
    section = PAGE.split("## Arguments")[1].split("## ")[0]
    named = set(re.findall(r"`([a-z]+):[a-z,]+`", section))
    assert named == {"keci", "ckeci", "tucker", "conve"}
    for name in named:
        find_scoring(f"{name}:2,3" if "keci" in name else f"{name}:2")


def test_the_example_of_a_users_model_works() -> None:
    source = PAGE.split("```python\n")[1].split("```")[0]
    found: dict[str, type[Scoring]] = {}
    exec(source, found)
    scoring = found["Mine"]()
    heads, relations, tails = np.random.default_rng(1).standard_normal((3, 4, 6))
    forwards = scoring.metric.score_pairs(scoring.query_tails(heads, relations), tails)
    backwards = scoring.metric.score_pairs(scoring.query_heads(tails, relations), heads)
    np.testing.assert_allclose(forwards, backwards)
