"""Queries of several links and variables, asked of a trained run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kgshard.data.dataset import SPLITS, Dataset
from kgshard.errors import ConfigError
from kgshard.files import AnyPath
from kgshard_tools.multi_hop.blocks import Block, Tables
from kgshard_tools.multi_hop.building import Builder
from kgshard_tools.multi_hop.evaluators import Evaluator, Step
from kgshard_tools.multi_hop.explanation import Explainer
from kgshard_tools.multi_hop.facts import Facts
from kgshard_tools.multi_hop.graph import Graph, Holds
from kgshard_tools.multi_hop.language import parse
from kgshard_tools.multi_hop.names import DatasetNames
from kgshard_tools.multi_hop.nested import nested_tree
from kgshard_tools.multi_hop.picking import Picked, pick
from kgshard_tools.multi_hop.rendering import render
from kgshard_tools.multi_hop.results import HopAnswer, HopAnswers
from kgshard_tools.multi_hop.scales import Scale, find_scale
from kgshard_tools.multi_hop.shaping import tree
from kgshard_tools.multi_hop.trees import Node, structure
from kgshard_tools.multi_hop.truth import FALSE, T_NORMS, Degrees, TNorm, probabilities
from kgshard_tools.stored import Stored, open_stored

Query = str | Sequence[object]
"""Text (kgshard_tools.multi_hop.language), or nested lists (kgshard_tools.multi_hop.nested)."""
Beam = int | Literal["all"]
DEFAULT_BEAM = 64
DEFAULT_SCORES = "softmax"
FACTS: dict[str, tuple[str, ...]] = {"none": (), "train": SPLITS[:1], "all": SPLITS}
"""Names of what is taken to be true, and the splits that state it."""
DEFAULT_FACTS = "train"
MAX_K = 1_000_000


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How queries are answered."""

    k: int = 10
    """How many answers, at most."""
    t_norm: str = "product"
    """A key of T_NORMS."""
    beam: Beam = DEFAULT_BEAM
    """How many entities a variable may be; "all" finds the best of all assignments."""
    scores: str | Scale = DEFAULT_SCORES
    """How scores become degrees of truth: a name of SCALES."""
    facts: str = DEFAULT_FACTS
    """Which triples are true whatever their scores: a key of FACTS."""
    known: bool = True
    """Whether what the graph yields by itself is an answer too."""

    @property
    def norm(self) -> TNorm:
        return T_NORMS[self.t_norm]

    def check(self) -> None:
        """Raise ConfigError where something is out of range."""
        if not isinstance(self.k, int) or not 1 <= self.k <= MAX_K:
            raise ConfigError(f"-k must be a whole number from 1 to {MAX_K:,}, got {self.k}")
        if self.t_norm not in T_NORMS:
            raise ConfigError(f"--t-norm: unknown value {self.t_norm!r} (known: {', '.join(T_NORMS)})")
        if self.facts not in FACTS:
            raise ConfigError(f"--facts: unknown value {self.facts!r} (known: {', '.join(FACTS)})")
        if self.beam != "all" and not (isinstance(self.beam, int) and self.beam >= 1):
            raise ConfigError(f"--beam must be a whole number >= 1 or 'all', got {self.beam!r}")


class MultiHop:
    """A run, asked queries of several links and variables. Tables stay on disk."""

    def __init__(self, run: AnyPath | Stored, how: Reasoning | None = None) -> None:
        """Open a run or one of its checkpoint folders.

        Raises:
            ConfigError: Something in `how` is out of range.
        """
        self.how = how or Reasoning()
        self.how.check()
        self._stored = run if isinstance(run, Stored) else open_stored(run)
        self._tables = Tables(self._stored)
        self._names = DatasetNames(self._stored.dataset)
        self.graph = Graph(self._stored.dataset)
        self._facts = Facts(self.graph, FACTS[self.how.facts])
        scores = self.how.scores
        self._scale = find_scale(scores, self._stored) if isinstance(scores, str) else scores

    @property
    def dataset(self) -> Dataset:
        return self._stored.dataset

    def read(self, query: Query) -> tuple[str, Node]:
        """Return the variable that is asked for, and the query as a tree.

        Raises:
            ConfigError: It is no query, or not tree-shaped; says which variable is at fault.
            UnknownNameError: A name is of no entity or relation.
        """
        if isinstance(query, str):
            variable, formula = parse(query)
            return variable, tree(formula, variable, self._names)
        return "x", nested_tree(query, self._names)

    def ask(self, query: Query) -> HopAnswers:
        """Return the best answers to a query, ties by lower row.

        Raises:
            ConfigError, UnknownNameError: See `read`.
            NonFiniteError: A row or a query vector is NaN or infinite.
        """
        variable, node = self.read(query)
        known = self.graph.known(node)
        evaluator, picked, is_exact = self.best(node, None if self.how.known else known[-1])
        described = {
            "query": query,
            "formula": render(node, variable, self._names),
            "structure": structure(node),
            "k": self.how.k,
            "t_norm": self.how.t_norm,
            "scores": self._scale.name,
            "facts": self.how.facts,
            "beam": self.how.beam,
            "exact": is_exact,
            "certified": picked.is_certain,
            "known": "shown" if self.how.known else "left out",
            "num_known": int(known[-1].sum()),
        }
        return HopAnswers(described, self._answers(node, evaluator, picked, known))

    def degrees(self, query: Query | Node) -> Degrees:
        """Return float64[num_entities]: how true a query is for every entity, as log odds, to rounding."""
        node = self.read(query)[1] if isinstance(query, str | Sequence) else query
        evaluator = self._builder(self.how.beam).build(node)
        truths = [evaluator.truth(block) for block in self._tables.blocks()]
        return np.concatenate([truth.low / 2 + truth.high / 2 for truth in truths])

    def _builder(self, beam: Beam, floor: float = FALSE) -> Builder:
        size = None if beam == "all" else beam
        return Builder(self._tables, self.how.norm, self._scale, self._facts, size, floor)

    def best(self, node: Node, excluded: Holds | None = None) -> tuple[Evaluator, Picked, bool]:
        """Return what evaluates a tree, its best answers, and whether every assignment was looked at.

        Args:
            node: By row ids.
            excluded: bool[num_entities], who is no answer.
        """
        few = DEFAULT_BEAM if self.how.beam == "all" else self.how.beam
        evaluator = self._builder(few).build(node)
        picked = self._pick(evaluator, FALSE, excluded)
        if self.how.beam != "all":
            return evaluator, picked, all(step.beam.is_whole for step in _steps(evaluator))
        if picked.is_certain:
            return evaluator, picked, True
        # These answers are at least so true; what cannot be truer than the last of them need not be known.
        least = evaluator.truth(Block(self._tables, picked.ids)).least
        floor = float(least.min()) if len(least) == self.how.k else FALSE
        evaluator = self._builder("all", floor).build(node)
        return evaluator, self._pick(evaluator, floor, excluded), True

    def _pick(self, evaluator: Evaluator, floor: float, excluded: Holds | None) -> Picked:
        return pick(evaluator, self._tables, self.how.k, floor=floor, excluded=excluded)

    def _answers(
        self, node: Node, evaluator: Evaluator, picked: Picked, known: list[Holds]
    ) -> list[HopAnswer]:
        explained = Explainer(self._names, self.graph).explain(node, evaluator, picked.ids)
        rows = zip(
            picked.ids.tolist(),
            probabilities(picked.degrees).tolist(),
            picked.degrees.tolist(),
            explained,
            strict=True,
        )
        return [
            HopAnswer(
                rank=rank,
                label=self._names.entity_label(row),
                id=row,
                score=score,
                log_odds=degree,
                known=bool(known[-1][row]),
                split=_first_split(known, row),
                variables=explanation.variables,
                links=explanation.links,
            )
            for rank, (row, score, degree, explanation) in enumerate(rows, start=1)
        ]


def _first_split(known: list[Holds], row: int) -> str | None:
    """Return the last of the splits that an answer needs, if the graph yields it."""
    if not known[-1][row]:
        return None
    return next(split for split, holds in zip(SPLITS, known, strict=True) if holds[row])


def _steps(evaluator: Evaluator) -> Iterator[Step]:
    """Yield everything in an evaluator that has a beam."""
    if isinstance(evaluator, Step):
        yield evaluator
    for part in evaluator.below:
        yield from _steps(part)


def ask(
    run: AnyPath | Stored,
    query: Query,
    k: int = 10,
    *,
    t_norm: str = "product",
    beam: Beam = DEFAULT_BEAM,
    scores: str | Scale = DEFAULT_SCORES,
    facts: str = DEFAULT_FACTS,
    known: bool = True,
) -> HopAnswers:
    """Answer one query of several links and variables; for many, keep a `MultiHop`.

    Args:
        run: A run, or one of its checkpoint folders.
        query: `?x: (Austria, borders, ?y) & (?y, uses currency, ?x)`, or the same as nested lists:
            `["Austria", ["borders", "uses currency"]]`.
        k: How many answers; fewer come back where there are no more entities.
        t_norm: "min", "product" or "lukasiewicz".
        beam: How many entities a variable may be; "all" finds the best of all assignments.
        scores: How scores become degrees of truth: "softmax", "minmax", "sigmoid", "calibrated", or a Scale.
        facts: Which triples are true whatever their scores: those of "train", "all", or "none".
        known: Also return what the graph yields by itself.

    Raises:
        ConfigError: The query is malformed or not tree-shaped, or an option is out of range.
        UnknownNameError: A name is of no entity or relation.
    """
    return MultiHop(run, Reasoning(k, t_norm, beam, scores, facts, known)).ask(query)
