"""Rows and shared parameters drawn for the tests of every model, and ways to score them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from papers import PAPER, Row

from kgshard.errors import ConfigError
from kgshard.models import find_scoring
from kgshard.models.scoring import SIDES, Scoring, Side

NAMES = sorted(PAPER)
"""Every registered model, and some with arguments."""
BOTH_WAYS = [name for name in NAMES if find_scoring(name).has_head_queries]
"""Those that ask for heads by themselves."""
QUESTIONS: list[tuple[str, Side]] = [
    (name, side) for name in NAMES for side in SIDES if side == "tail" or name in BOTH_WAYS
]


def fitting_dim(name: str, at_least: int) -> int:
    """Return the least dimension from `at_least` on that the model has a form of."""
    for dim in range(at_least, at_least + 50):
        try:
            find_scoring(name).check_dim(dim)
        except ConfigError:
            continue
        return dim
    raise AssertionError(f"{name} takes no dim from {at_least} on")


@dataclass
class Case:
    """Triples drawn at random."""

    name: str
    heads: Row
    """float64[n, dim]."""
    relations: Row
    """float64[n, relation_dim]."""
    tails: Row
    shared: dict[str, Row]

    @property
    def scoring(self) -> Scoring:
        return find_scoring(self.name).bind(self.shared)

    @property
    def dim(self) -> int:
        return self.heads.shape[1]

    def paper_scores(self) -> Row:
        triples = zip(self.heads, self.relations, self.tails, strict=True)
        return np.array([PAPER[self.name](*triple, self.shared) for triple in triples])

    def scores(self, side: Side) -> Row:
        """Score each triple by the model's query for `side`."""
        return score(self.scoring, side, self.heads, self.relations, self.tails)


def draw(name: str, seed: int, num_rows: int, at_least: int) -> Case:
    """Return triples with at least so many floats for each entity, all values standard normal."""
    random = np.random.default_rng(seed)
    scoring, dim = find_scoring(name), fitting_dim(name, at_least)
    heads, tails = random.standard_normal((2, num_rows, dim))
    relations = random.standard_normal((num_rows, scoring.relation_dim(dim)))
    shared = {key: random.standard_normal(how.shape) for key, how in scoring.shared_init(dim).items()}
    return Case(name, heads, relations, tails, shared)


def ask(scoring: Scoring, side: Side, heads: Any, relations: Any, tails: Any) -> tuple[Any, Any]:
    """Return queries for `side`, and the entity rows that answer them."""
    if side == "tail":
        return scoring.query_tails(heads, relations), tails
    return scoring.query_heads(tails, relations), heads


def score(scoring: Scoring, side: Side, heads: Any, relations: Any, tails: Any) -> Any:
    """Return the scores [...] of triples [...] by the query for `side`, on arrays or tensors."""
    queries, answers = ask(scoring, side, heads, relations, tails)
    return scoring.metric.score_pairs(queries, scoring.candidates(side, answers))


def tensors(values: dict[str, Row], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=dtype) for name, value in values.items()}


def arrays(values: dict[str, Row], dtype: npt.DTypeLike) -> dict[str, npt.NDArray[Any]]:
    return {name: value.astype(dtype) for name, value in values.items()}
