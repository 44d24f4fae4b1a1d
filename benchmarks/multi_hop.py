"""How well a trained run answers queries of several links, by the literature's structures.

    python benchmarks/multi_hop.py RUN [--queries 100] [--split test] [--beam 64] [--scores sigmoid ...]

One JSON line for each structure and choice of t-norm, scale and facts. Queries are drawn from all triples up
to a split, backwards from an answer, along relations and against them, as Ren et al. (2020) do. Only hard
answers count: those that the splits before it do not yield; choices are made on valid. Each is ranked among
all entities but the query's other answers; metrics are means over a query's answers, then over queries.
`certified` is the share of queries whose ten best answers are those of all assignments. `published_hits@3`
is CQD-Beam on FB15k-237 with queries of its own (github.com/snap-stanford/KGReasoning, CQD.md); its t-norm,
scale and beam were chosen for each structure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
from common import emit, median
from kgshard_tools.multi_hop import MultiHop, Reasoning
from kgshard_tools.multi_hop.graph import Holds
from kgshard_tools.multi_hop.trees import Hop, Node, Not, all_of, any_of, structure
from kgshard_tools.multi_hop.truth import Degrees

from kgshard.data.dataset import SPLITS

PUBLISHED = {
    "1p": 0.512,
    "2p": 0.287,
    "3p": 0.200,
    "2i": 0.377,
    "3i": 0.489,
    "ip": 0.182,
    "pi": 0.268,
    "2u": 0.324,
    "up": 0.225,
}
MAX_ANSWERS = 100
"""Queries with more are too vague to mean anything."""


class Sampler:
    """Draws queries that hold for an entity."""

    def __init__(self, triples: npt.NDArray[np.int64], num_entities: int, seed: int) -> None:
        self._triples = triples
        self._num_entities = num_entities
        self._random = np.random.default_rng(seed)
        ends = np.concatenate([triples[:, 0], triples[:, 2]])
        self._order = np.argsort(ends, kind="stable")
        self._starts = np.searchsorted(ends[self._order], np.arange(num_entities + 1))

    def anybody(self) -> int:
        """Return an entity with as many links as an end of a triple drawn at random."""
        return int(self._random.choice(self._triples[self._random.integers(len(self._triples)), [0, 2]]))

    def path(self, answer: int, length: int) -> Node:
        """Draw a path of some links that ends at an answer."""
        at = int(self._order[self._random.integers(self._starts[answer], self._starts[answer + 1])])
        head, relation, tail = self._triples[at % len(self._triples)].tolist()
        side, far = ("head", tail) if at < len(self._triples) else ("tail", head)
        if length == 1:
            return Hop(relation, side, far)
        return Hop(relation, side, self.path(far, length - 1), f"y{length}")

    def step(self, answer: int, source: Callable[[int], Node]) -> Node:
        """Draw a link that ends at an answer, from what a source says of its other end."""
        link = self.path(answer, 1)
        assert isinstance(link, Hop)
        assert isinstance(link.source, int)
        return replace(link, source=source(link.source), variable="y")

    def draw(self, name: str) -> Node:
        """Draw a query of a structure."""
        answer = self.anybody()
        path, other = self.path, self.anybody()
        match name:
            case "1p" | "2p" | "3p":
                return path(answer, int(name[0]))
            case "2i" | "3i":
                return all_of([path(answer, 1) for _ in range(int(name[0]))])
            case "ip":
                return self.step(answer, lambda far: all_of([path(far, 1), path(far, 1)]))
            case "pi":
                return all_of([path(answer, 2), path(answer, 1)])
            case "2u":
                return any_of([path(answer, 1), path(other, 1)])
            case "up":
                return self.step(answer, lambda far: any_of([path(far, 1), path(other, 1)]))
            case "2in":
                return all_of([path(answer, 1), Not(path(other, 1))])
        raise ValueError(name)


@dataclass(frozen=True)
class Query:
    """A query, and which entities answer it."""

    tree: Node
    answers: Holds
    easy: Holds
    """By the splits before the one that is asked for."""


def hard_queries(model: MultiHop, sampler: Sampler, name: str, split: str, count: int) -> list[Query]:
    """Draw queries of a structure that have hard answers, and not too many answers."""
    found: list[Query] = []
    place = SPLITS.index(split)
    while len(found) < count:
        tree = sampler.draw(name)
        known = model.graph.known(tree)
        answers, easy = known[place], known[place - 1]
        if structure(tree) == name and (answers & ~easy).any() and answers.sum() <= MAX_ANSWERS:
            found.append(Query(tree, answers, easy))
    return found


def ranks_of_hard_answers(query: Query, degrees: Degrees) -> npt.NDArray[np.float64]:
    """Return the filtered ranks of a query's hard answers; ties count half."""
    others = degrees[~query.answers]
    hard = degrees[query.answers & ~query.easy]
    better = (others[None] > hard[:, None]).sum(axis=1)
    ties = (others[None] == hard[:, None]).sum(axis=1)
    return 1 + better + ties / 2


def measure(model: MultiHop, name: str, queries: list[Query]) -> None:
    """Answer queries of one structure; print how well that went."""
    metrics: dict[str, list[float]] = {metric: [] for metric in ("mrr", "hits@1", "hits@3", "hits@10")}
    certified, seconds = [], []
    for query in queries:
        began = time.perf_counter()
        certified.append(model.best(query.tree)[1].is_certain)
        seconds.append(time.perf_counter() - began)
        ranks = ranks_of_hard_answers(query, model.degrees(query.tree))
        metrics["mrr"].append(float((1 / ranks).mean()))
        for k in (1, 3, 10):
            metrics[f"hits@{k}"].append(float((ranks <= k).mean()))
    emit(
        "hard answers of multi-hop queries",
        structure=name,
        scores=model.how.scores,
        facts=model.how.facts,
        t_norm=model.how.t_norm,
        beam=model.how.beam,
        queries=len(queries),
        **{metric: float(np.mean(values)) for metric, values in metrics.items()},
        **({"published_hits@3": PUBLISHED[name]} if name in PUBLISHED else {}),
        certified=float(np.mean(certified)),
        seconds=median(seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--beam", type=int, default=64)
    parser.add_argument("--split", default="test", choices=SPLITS[1:])
    parser.add_argument("--t-norms", nargs="*", default=["product"])
    parser.add_argument("--scores", nargs="*", default=["sigmoid", "minmax", "softmax", "calibrated"])
    parser.add_argument("--facts", nargs="*", default=["none", "train"])
    parser.add_argument("--structures", nargs="*", default=[*PUBLISHED, "2in"])
    options = parser.parse_args()
    models = [
        MultiHop(options.run, Reasoning(10, t_norm, options.beam, scores, facts))
        for t_norm, scores, facts in product(options.t_norms, options.scores, options.facts)
    ]
    dataset = models[0].dataset
    splits = SPLITS[: SPLITS.index(options.split) + 1]
    triples = np.concatenate([dataset.triples(split) for split in splits]).astype(np.int64)
    for name in options.structures:
        sampler = Sampler(triples, dataset.num_entities, 0)
        queries = hard_queries(models[0], sampler, name, options.split, options.queries)
        for model in models:
            measure(model, name, queries)


if __name__ == "__main__":
    main()
