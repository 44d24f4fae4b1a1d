"""Queries of several links: exact answers, beams that say what they may have missed, the language, the graph.

The oracle knows neither trees nor beams: it tries every assignment of every variable, in 80-bit numbers
between 0 and 1, with each query written out by hand.

Shape letters: N entities.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from graphs import begin_run, make_run, ring
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.calibration import calibration
from kgshard_tools.commands.ask import command
from kgshard_tools.multi_hop import SCALES, Calibrated, HopAnswers, MultiHop, Query, Reasoning, ask
from kgshard_tools.multi_hop import blocks as blocks_module
from kgshard_tools.multi_hop.batch import QueryBatch, read_lines, write_answers
from kgshard_tools.multi_hop.blocks import Links, Tables
from kgshard_tools.multi_hop.facts import Facts
from kgshard_tools.multi_hop.graph import Graph
from kgshard_tools.multi_hop.language import parse
from kgshard_tools.multi_hop.names import DatasetNames
from kgshard_tools.multi_hop.rendering import render
from kgshard_tools.multi_hop.scales import find_scale
from kgshard_tools.multi_hop.shaping import tree
from kgshard_tools.multi_hop.truth import FALSE, T_NORMS, TRUE, log_odds, probabilities
from kgshard_tools.questions import Question, Wanted
from kgshard_tools.stored import Stored, open_stored

from kgshard.data.dataset import Dataset
from kgshard.errors import ConfigError, DataError, NonFiniteError, UnknownEntityError, UnknownRelationError
from kgshard.models.link import SIDES
from kgshard.runs import Run

Wide = npt.NDArray[np.longdouble]


def _t(norm: str, a: Wide, b: Wide) -> Wide:
    return {"min": np.minimum(a, b), "product": a * b, "lukasiewicz": np.maximum(a + b - 1, 0)}[norm]


def _s(norm: str, a: Wide, b: Wide) -> Wide:
    return 1 - _t(norm, 1 - a, 1 - b)


class Oracle:
    """All assignments, tried.

    oracle(relation, side) is how true each link is, [N of the far end, N of the end that is asked for];
    t is the conjunction and s the disjunction.
    """

    def __init__(
        self, model: TrainedModel, norm: str, scale: str = "sigmoid", facts: npt.ArrayLike = ()
    ) -> None:
        """Take the triples [T, 3] that are true whatever their scores, by row ids."""
        self.norm = norm
        stated = np.asarray(facts, np.int64).reshape(-1, 3)
        names = list(model.entities)
        self._index = {name: row for row, name in enumerate(names)}
        self._links: dict[tuple[str, str], Wide] = {}
        for number, relation in enumerate(model.relations):
            own = stated[stated[:, 1] == number]
            is_stated = np.zeros((len(names), len(names)), bool)
            is_stated[own[:, 0], own[:, 2]] = True
            pairs = [(a, relation, b) for a, b in itertools.product(names, names)]
            for side in SIDES:
                asked = pairs if side == "tail" else [(b, r, a) for a, r, b in pairs]
                scores = model.score(asked, side=side).reshape(len(names), -1)
                told = is_stated if side == "tail" else is_stated.T
                links = _scaled(scores.astype(np.longdouble), scale, np.maximum(told.sum(axis=1), 1))
                self._links[relation, side] = np.where(told, 1, links)

    def __call__(self, relation: str, side: str = "tail") -> Wide:
        return self._links[relation, side]

    def of(self, entity: str, relation: str, side: str = "tail") -> Wide:
        return self(relation, side)[self._index[entity]]

    def t(self, *parts: Wide) -> Wide:
        found = parts[0]
        for part in parts[1:]:
            found = _t(self.norm, found, part)
        return found

    def s(self, a: Wide, b: Wide) -> Wide:
        return _s(self.norm, a, b)


def _scaled(scores: Wide, scale: str, draws: npt.NDArray[np.int64]) -> Wide:
    """Return [far, near] scores as numbers from 0 to 1, each far end by itself with its number of draws."""
    if scale == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    low, high = scores.min(axis=1, keepdims=True), scores.max(axis=1, keepdims=True)
    if scale == "minmax":
        return (scores - low) / (high - low)
    powers = np.exp(scores - high)
    return 1 - (1 - powers / powers.sum(axis=1, keepdims=True)) ** draws[:, None]


Truth = Callable[[Oracle], Wide]
"""What all assignments give for each entity, [N]."""
QUERIES: dict[str, tuple[str, Any, Truth]] = {
    "1p": ("?x: (e0, r0, ?x)", ["e0", ["r0"]], lambda o: o.of("e0", "r0")),
    "2p": (
        "?x: (e0, r0, ?y) & (?y, r1, ?x)",
        ["e0", ["r0", "r1"]],
        lambda o: o.t(o.of("e0", "r0")[:, None], o("r1")).max(axis=0),
    ),
    "3p": (
        "?x: (e0, r0, ?y) & (?y, r1, ?z) & (?z, r2, ?x)",
        ["e0", ["r0", "r1", "r2"]],
        lambda o: o.t(o.of("e0", "r0")[:, None, None], o("r1")[:, :, None], o("r2")[None]).max(axis=(0, 1)),
    ),
    "2i": (
        "?x: (e0, r0, ?x) & (e1, r1, ?x)",
        [["e0", ["r0"]], ["e1", ["r1"]]],
        lambda o: o.t(o.of("e0", "r0"), o.of("e1", "r1")),
    ),
    "3i": (
        "?x: (e0, r0, ?x) & (e1, r1, ?x) & (e2, r2, ?x)",
        [["e0", ["r0"]], ["e1", ["r1"]], ["e2", ["r2"]]],
        lambda o: o.t(o.of("e0", "r0"), o.of("e1", "r1"), o.of("e2", "r2")),
    ),
    "ip": (
        "?x: (e0, r0, ?y) & (e1, r1, ?y) & (?y, r2, ?x)",
        [[["e0", ["r0"]], ["e1", ["r1"]]], ["r2"]],
        lambda o: o.t(o.of("e0", "r0")[:, None], o.of("e1", "r1")[:, None], o("r2")).max(axis=0),
    ),
    "pi": (
        "?x: (e0, r0, ?y) & (?y, r1, ?x) & (e1, r2, ?x)",
        [["e0", ["r0", "r1"]], ["e1", ["r2"]]],
        lambda o: o.t(o.of("e0", "r0")[:, None], o("r1"), o.of("e1", "r2")[None]).max(axis=0),
    ),
    "2u": (
        "?x: (e0, r0, ?x) | (e1, r1, ?x)",
        [["e0", ["r0"]], ["e1", ["r1"]], ["u"]],
        lambda o: o.s(o.of("e0", "r0"), o.of("e1", "r1")),
    ),
    "up": (
        "?x: ((e0, r0, ?y) | (e1, r1, ?y)) & (?y, r2, ?x)",
        [[["e0", ["r0"]], ["e1", ["r1"]], ["u"]], ["r2"]],
        lambda o: o.t(o.s(o.of("e0", "r0"), o.of("e1", "r1"))[:, None], o("r2")).max(axis=0),
    ),
    "2in": (
        "?x: (e0, r0, ?x) & !(e1, r1, ?x)",
        [["e0", ["r0"]], ["e1", ["r1", "n"]]],
        lambda o: o.t(o.of("e0", "r0"), 1 - o.of("e1", "r1")),
    ),
    "3in": (
        "?x: (e0, r0, ?x) & (e1, r1, ?x) & !(e2, r2, ?x)",
        [["e0", ["r0"]], ["e1", ["r1"]], ["e2", ["r2", "n"]]],
        lambda o: o.t(o.of("e0", "r0"), o.of("e1", "r1"), 1 - o.of("e2", "r2")),
    ),
    "inp": (
        "?x: (e0, r0, ?y) & !(e1, r1, ?y) & (?y, r2, ?x)",
        [[["e0", ["r0"]], ["e1", ["r1", "n"]]], ["r2"]],
        lambda o: o.t(o.of("e0", "r0")[:, None], 1 - o.of("e1", "r1")[:, None], o("r2")).max(axis=0),
    ),
    "pin": (
        "?x: (e0, r0, ?y) & (?y, r1, ?x) & !(e1, r2, ?x)",
        [["e0", ["r0", "r1"]], ["e1", ["r2", "n"]]],
        lambda o: o.t(o.of("e0", "r0")[:, None], o("r1"), 1 - o.of("e1", "r2")[None]).max(axis=0),
    ),
    "pni": (
        "?x: !((e0, r0, ?y) & (?y, r1, ?x)) & (e1, r2, ?x)",
        [["e0", ["r0", "r1", "n"]], ["e1", ["r2"]]],
        lambda o: o.t(1 - o.t(o.of("e0", "r0")[:, None], o("r1")).max(axis=0), o.of("e1", "r2")),
    ),
}
OTHERS: dict[str, tuple[str, Truth]] = {
    "against the relation": (
        "?x: (?y, r0, e0) & (?x, r1, ?y)",
        lambda o: o.t(o.of("e0", "r0", "head")[:, None], o("r1", "head")).max(axis=0),
    ),
    "a link that must not be": (
        "?x: (e0, r0, ?y) & !(?y, r1, ?x)",
        lambda o: o.t(o.of("e0", "r0")[:, None], 1 - o("r1")).max(axis=0),
    ),
    "two branches and an alternative": (
        "?x: (e0, r0, ?y) & (?y, r1, ?x) & ((e1, r2, ?z) & (?x, r0, ?z) | (e2, r1, ?x))",
        lambda o: o.t(
            o.t(o.of("e0", "r0")[:, None], o("r1")).max(axis=0),
            o.s(o.t(o.of("e1", "r2")[:, None], o("r0", "head")).max(axis=0), o.of("e2", "r1")),
        ),
    ),
}
OTHERS["nobody near"] = (
    "?x: !((e0, r0, ?y) & (?y, r1, ?x))",
    lambda o: 1 - o.t(o.of("e0", "r0")[:, None], o("r1")).max(axis=0),
)
OTHERS["near or far"] = (
    "?x: (e0, r0, ?y) & (?y, r1, ?x) | (e1, r2, ?x)",
    lambda o: o.s(o.t(o.of("e0", "r0")[:, None], o("r1")).max(axis=0), o.of("e1", "r2")),
)
OTHERS["three steps that must not be"] = (
    "?x: (e2, r0, ?x) & !((e0, r0, ?y) & (?y, r1, ?z) & (?z, r2, ?x))",
    lambda o: o.t(
        o.of("e2", "r0"),
        1 - o.t(o.of("e0", "r0")[:, None, None], o("r1")[:, :, None], o("r2")[None]).max(axis=(0, 1)),
    ),
)
OTHERS["beyond a negation"] = (
    "?x: !((e0, r0, ?y) & (?y, r1, ?z)) & (?z, r2, ?x)",
    lambda o: o.t((1 - o.t(o.of("e0", "r0")[:, None], o("r1")).max(axis=0))[:, None], o("r2")).max(axis=0),
)
TEXTS: dict[str, tuple[str, Truth]] = {
    name: (text, truth) for name, (text, _, truth) in QUERIES.items()
} | OTHERS


def tiny(folder: Path, *, model: str = "complex", scale: float = 1.0, seed: int = 0) -> Run:
    """Make a run of 11 entities and 3 relations, rows 2 and 7 alike, 5 to a block."""
    source = np.random.default_rng(seed)
    entities = source.standard_normal((11, 8)) * scale
    entities[7] = entities[2]
    train = [*ring(11, 3), ("e0", "r0", "e5")]
    return make_run(folder, train, [("e5", "r1", "e9")], model=model, dim=8, entities=entities, seed=seed)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the table into blocks and the beams into parts, as large ones are; "all" begins with two."""
    monkeypatch.setattr("kgshard_tools.multi_hop.asking.DEFAULT_BEAM", 2)
    monkeypatch.setattr(blocks_module, "_BLOCK_ROWS", 4)
    monkeypatch.setattr("kgshard_tools.multi_hop.evaluators.PART", 3)
    monkeypatch.setattr(blocks_module, "PART", 3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("complex"))


@pytest.fixture(scope="module")
def model(finished: Run) -> TrainedModel:
    return load(finished.folder)


@pytest.fixture(scope="module")
def oracles(model: TrainedModel) -> dict[tuple[str, str], Oracle]:
    """An oracle for every t-norm and scale."""
    return {
        (norm, scale): Oracle(model, norm, scale)
        for norm in T_NORMS
        for scale in ("sigmoid", "minmax", "softmax")
    }


def answers(run: Run, query: Query, **how: Any) -> HopAnswers:
    return ask(opened(run.folder), query, how.pop("k", 11), **{"scores": "sigmoid", "facts": "none"} | how)


@functools.cache
def opened(folder: Path) -> Stored:
    return open_stored(folder)


def check_best(found: HopAnswers, truth: Wide, atol: float = 1e-15) -> None:
    """Compare answers with the truth of all entities: who, in which order, how true."""
    scores = np.array([answer.score for answer in found])
    ids = [answer.id for answer in found]
    np.testing.assert_allclose(scores, truth[ids].astype(float), rtol=1e-12, atol=atol)
    best = np.sort(truth)[::-1][: len(ids)].astype(float)
    np.testing.assert_allclose(scores, best, rtol=1e-12, atol=atol)
    degrees = [answer.log_odds for answer in found]
    assert sorted(zip([-degree for degree in degrees], ids, strict=True)) == list(
        zip([-degree for degree in degrees], ids, strict=True)
    )


@pytest.mark.parametrize("norm", sorted(T_NORMS))
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_all_beams_together_are_every_assignment(
    finished: Run, oracles: dict[tuple[str, str], Oracle], name: str, norm: str
) -> None:
    text, truth = TEXTS[name]
    found = answers(finished, text, t_norm=norm, beam="all")
    assert (found.query["exact"], found.query["certified"]) == (True, True)
    wanted = truth(oracles[norm, "sigmoid"])
    check_best(found, wanted)
    check_best(answers(finished, text, t_norm=norm, beam="all", k=2), wanted)


@pytest.mark.parametrize("scale", ["minmax", "softmax"])
@pytest.mark.parametrize("name", ["2p", "3p", "pi", "up", "pni"])
def test_scores_among_all_entities_are_every_assignment_too(
    finished: Run, oracles: dict[tuple[str, str], Oracle], name: str, scale: str
) -> None:
    text, truth = TEXTS[name]
    for norm in T_NORMS:
        found = answers(finished, text, t_norm=norm, beam="all", scores=scale)
        check_best(found, truth(oracles[norm, scale]))
        check_best(
            answers(finished, text, t_norm=norm, beam="all", scores=scale, k=2), truth(oracles[norm, scale])
        )


@pytest.mark.parametrize("scale", ["sigmoid", "softmax"])
@pytest.mark.parametrize("norm", sorted(T_NORMS))
def test_what_train_states_is_true_whatever_the_model_says(
    finished: Run, model: TrainedModel, norm: str, scale: str
) -> None:
    stated = finished.dataset.triples("train")
    oracle = Oracle(model, norm, scale, stated)
    for text, truth in TEXTS.values():
        for k in (2, 11):
            found = answers(finished, text, t_norm=norm, beam="all", scores=scale, facts="train", k=k)
            check_best(found, truth(oracle), atol=1e-14)


def test_stated_links_come_first_in_the_order_of_the_model(tmp_path: Path) -> None:
    train = [("e0", "r0", f"e{tail}") for tail in (4, 9, 1, 6)] + ring(11, 1)
    run = make_run(tmp_path, train, [("e0", "r0", "e7")], model="complex", dim=8)
    plain = answers(run, "?x: (e0, r0, ?x)")
    stated = [answer for answer in plain if answer.split == "train"]
    assert [answer.id for answer in plain[: len(stated)]] != [answer.id for answer in stated]
    for facts, splits in (("train", {"train"}), ("all", {"train", "valid"})):
        first = [answer for answer in plain if answer.split in splits]
        rest = [answer for answer in plain if answer.split not in splits]
        found = answers(run, "?x: (e0, r0, ?x)", facts=facts)
        assert [answer.id for answer in found] == [answer.id for answer in [*first, *rest]]
        assert len({answer.log_odds for answer in found}) == len(plain)
    assert set(answers(run, "?x: (?x, r0, e4)", facts="train").labels[:2]) == {"e0", "e3"}


def test_chains_of_as_many_links_as_may_be_are_answered(finished: Run) -> None:
    chain = "".join(f"(?y{n}, r0, ?y{n + 1}) & " for n in range(126))
    text = answers(finished, f"?x: (e0, r0, ?y0) & {chain}(?y126, r0, ?x)", beam=2)
    assert len(text) == len(answers(finished, ["e0", ["r0"] * 64], beam=2)) == 11


@pytest.mark.parametrize("scale", ["minmax", "softmax", "sigmoid"])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_no_link_that_is_not_stated_is_truer_than_one_that_is(
    tmp_path: Path, scale: str, size: float
) -> None:
    run = tiny(tmp_path, scale=size)
    for head, relation, _ in ring(11, 3):
        found = answers(run, [head, [relation]], scores=scale, facts="all")
        stated = [answer.known for answer in found]
        assert stated == sorted(stated, reverse=True)
        assert any(stated)


@pytest.mark.parametrize("kind", ["transe", "rotate", "mure"])
def test_every_kind_of_model_is_asked_in_both_directions(tmp_path: Path, kind: str) -> None:
    run = tiny(tmp_path, model=kind)
    oracle = Oracle(load(run.folder), "product")
    for name in ("3p", "against the relation", "two branches and an alternative"):
        text, truth = TEXTS[name]
        check_best(answers(run, text, beam="all"), truth(oracle))


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("norm", sorted(T_NORMS))
def test_what_a_beam_certifies_is_what_all_assignments_give(
    finished: Run, oracles: dict[tuple[str, str], Oracle], norm: str, beam: int
) -> None:
    certified = 0
    for text, truth in TEXTS.values():
        found = answers(finished, text, t_norm=norm, beam=beam, k=2)
        if found.query["certified"]:
            certified += found.query["exact"] is False
            check_best(found, truth(oracles[norm, "sigmoid"]))
    assert certified or beam == 1


def test_what_narrow_beams_certify_step_after_step_is_right(
    finished: Run, oracles: dict[tuple[str, str], Oracle]
) -> None:
    oracle, certified = oracles["product", "sigmoid"], 0
    for entity, first, second, beam in itertools.product(range(0, 11, 4), "012", "012", (1, 2)):
        path = [f"e{entity}", [f"r{first}", f"r{second}"]]
        middle = oracle.t(oracle.of(f"e{entity}", f"r{first}")[:, None], oracle(f"r{second}")).max(axis=0)
        both = oracle.t(middle, oracle.of("e1", "r2"))
        for source, ways in ((path, middle), ([path, ["e1", ["r2"]]], both)):
            found = answers(finished, [source, ["r0"]], k=1, beam=beam)
            if found.query["certified"]:
                certified += 1
                check_best(found, oracle.t(ways[:, None], oracle("r0")).max(axis=0))
    assert 10 < certified < 98


def test_all_that_is_below_what_was_found_still_counts_in_a_negation(
    finished: Run, oracles: dict[tuple[str, str], Oracle]
) -> None:
    oracle = oracles["product", "sigmoid"]
    for entity, relation in itertools.product(range(11), "012"):
        near = oracle.t(oracle.of(f"e{entity}", f"r{relation}")[:, None], oracle("r1")).max(axis=0)
        found = answers(finished, f"?x: !((e{entity}, r{relation}, ?y) & (?y, r1, ?x))", k=1, beam="all")
        check_best(found, 1 - near)


def test_a_beam_that_misses_the_best_says_so(tmp_path: Path) -> None:
    """e1 is the best neighbour of e0, but only e2, the next best, leads on."""
    train = [("e0", "r0", "e1"), ("e0", "r0", "e2"), ("e2", "r1", "e3"), ("e1", "r0", "e0")]
    entities = {"e0": [1, 0, 0, 0], "e1": [3, 0, 0, 0], "e2": [2.9, 4, 0, 0], "e3": [0, 5, 0, 0]}
    settings: dict[str, Any] = {"model": "distmult", "dim": 4, "corruption": "both-sides"}
    names = list(begin_run(tmp_path / "names", train, **settings).dataset.entities)
    rows = [entities[name] for name in names]
    run = make_run(tmp_path, train, entities=rows, relations=[[1, 0, 0, 0], [0, 1, 0, 0]], **settings)
    query = "?x: (e0, r0, ?y) & (?y, r1, ?x)"
    narrow, wide = (answers(run, query, beam=beam, k=1) for beam in (1, 2))
    assert narrow.query["certified"] is False
    assert (wide.query["certified"], wide.query["exact"]) == (True, False)
    assert wide.labels == answers(run, query, beam="all", k=1).labels
    assert wide[0].score > narrow[0].score
    assert wide[0].variables["y"].label == "e2"


def test_without_a_variable_in_between_there_is_nothing_to_leave_out(finished: Run) -> None:
    found = answers(finished, TEXTS["3in"][0], beam=1)
    assert (found.query["exact"], found.query["certified"]) == (True, True)


@pytest.mark.parametrize("beam", [2, "all"])
def test_rows_that_are_alike_tie_and_the_lower_comes_first(finished: Run, beam: int | str) -> None:
    for text, _ in TEXTS.values():
        found = answers(finished, text, beam=beam)
        places = {answer.id: place for place, answer in enumerate(found)}
        assert found[places[2]].log_odds == found[places[7]].log_odds
        assert places[7] == places[2] + 1


@pytest.mark.parametrize("beam", [3, "all"])
def test_who_stands_for_a_variable_is_the_lower_of_those_that_are_alike(
    finished: Run, beam: int | str
) -> None:
    used = {
        entity.id
        for text, _ in TEXTS.values()
        for answer in answers(finished, text, beam=beam)
        for entity in answer.variables.values()
    }
    assert 2 in used
    assert 7 not in used


@pytest.mark.parametrize("seed", range(3))
def test_sums_that_run_in_another_order_in_another_block_do_not_part_ties(tmp_path: Path, seed: int) -> None:
    """Every row is there a hundred times."""
    source = np.random.default_rng(seed)
    entities = np.tile(source.standard_normal((5, 46)), (100, 1))
    run = make_run(tmp_path, ring(500, 2), model="complex", dim=46, entities=entities, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "_BLOCK_ROWS", 37)
        for query in (
            "?x: (e0, r0, ?x)",
            "?x: (e0, r0, ?y) & (?y, r1, ?x)",
            "?x: (e0, r0, ?x) & (e1, r1, ?x)",
        ):
            ids = [answer.id for answer in answers(run, query, k=150, beam=20)]
            first, second = ids[0] % 5, ids[100] % 5
            assert ids == [*range(first, 500, 5), *range(second, 250, 5)]


@pytest.mark.parametrize("kind", ["distmult", "transe", "transe-l1", "rotate-moduli", "transh"])
@pytest.mark.parametrize("scale", SCALES[:-1])
@pytest.mark.parametrize("splits", [(), ("train",)])
def test_bounds_of_blocks_hold_what_pairs_come_to(
    tmp_path: Path, kind: str, scale: str, splits: tuple[str, ...]
) -> None:
    """Scores of large numbers that cancel, where sums in another order differ most."""
    source = np.random.default_rng(0)
    entities = source.standard_normal((60, 32)) * 1e5
    entities[1::2] = -entities[::2] * (1 + 1e-6 * source.standard_normal((30, 32)))
    run = make_run(tmp_path, ring(60, 2), model=kind, dim=32, entities=entities)
    stored = open_stored(run.folder)
    tables, anchors = Tables(stored), np.random.default_rng(1).permutation(60)[:20]
    facts = Facts(Graph(stored.dataset), splits)
    links = Links(tables, 1, "tail", anchors, find_scale(scale, stored), facts)
    for block in tables.blocks():
        for start in range(0, 20, blocks_module.PART):
            low, high = links.bounds(slice(start, min(start + blocks_module.PART, 20)), block)
            places, rows = np.indices(low.shape).reshape(2, -1)
            exact = links.degrees(places + start, block.ids[rows]).reshape(low.shape)
            assert (low <= exact).all()
            assert (exact <= high).all()
            is_stated = facts.graph.split_of(1, anchors[places + start], block.ids[rows])
            told = np.array([split in splits for split in is_stated]).reshape(low.shape)
            assert (low[told] >= 50).all()


@pytest.mark.parametrize("offset", [0.0, 1.5])
def test_one_link_scores_as_predict_does(
    finished: Run, monkeypatch: pytest.MonkeyPatch, offset: float
) -> None:
    monkeypatch.setattr(type(finished), "model", dataclasses.replace(finished.model, offset=offset))
    for text, (head, tail) in (("(e0, r0, ?x)", ("e0", None)), ("(?x, r0, e0)", (None, "e0"))):
        found = ask(finished.folder, f"?x: {text}", 11, scores="sigmoid", facts="none")
        [predicted] = load(finished.folder).predict([Question(head, "r0", tail)], Wanted(11, known=True))
        assert [(answer.id, answer.log_odds) for answer in found] == [
            (answer.id, answer.score) for answer in predicted
        ]


@pytest.mark.parametrize("size", [60.0, 1e3])
def test_scores_that_no_float_between_0_and_1_can_tell_apart_do_not_tie(tmp_path: Path, size: float) -> None:
    run = tiny(tmp_path, scale=size**0.5)
    for name in ("3i", "2in", "2u"):
        degrees = [answer.log_odds for answer in answers(run, TEXTS[name][0], beam="all") if answer.id != 7]
        assert all(np.diff(degrees) < 0), name
        assert max(map(abs, degrees)) < 1e299


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_nested_lists_ask_the_same_and_have_the_name_of_the_literature(finished: Run, name: str) -> None:
    text, nested, _ = QUERIES[name]
    by_text, by_lists = answers(finished, text, k=5), answers(finished, nested, k=5)
    assert by_text.query["structure"] == by_lists.query["structure"] == name
    assert [(a.id, a.log_odds) for a in by_text] == [(a.id, a.log_odds) for a in by_lists]
    assert answers(finished, tuple(nested), k=5).results == by_lists.results


def test_nested_lists_go_against_a_relation(finished: Run) -> None:
    lists = answers(finished, ["e0", [{"inverse": "r0"}, {"inverse": "r1"}]])
    text = answers(finished, "?x: (?y, r0, e0) & (?x, r1, ?y)")
    assert [(a.id, a.log_odds) for a in text] == [(a.id, a.log_odds) for a in lists]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_links_of_an_answer_make_up_its_score(finished: Run, model: TrainedModel, name: str) -> None:
    text, _ = TEXTS[name]
    for answer in answers(finished, text, t_norm="min", beam="all", k=4):
        for link in answer.links:
            names = {answer.label, *("e0", "e1", "e2"), *(v.label for v in answer.variables.values())}
            assert {link.head, link.tail} <= names
        degrees = [1 - link.score if link.negated else link.score for link in answer.links]
        if "|" not in text and "!(" not in text:
            assert min(degrees) == pytest.approx(answer.score, rel=1e-12)
            assert answer.score in [pytest.approx(degree, rel=1e-12) for degree in degrees]
    assert name.startswith("against") or {v for a in [answer] for v in a.variables} <= {"y", "z"}


def test_known_is_what_the_triples_yield_and_split_is_how_many_of_them_that_takes(tmp_path: Path) -> None:
    train = [("a", "r", "b"), ("b", "s", "c"), ("d", "s", "e"), ("d", "r", "a"), ("f", "r", "b")]
    run = make_run(
        tmp_path, train, [("a", "r", "d")], [("b", "s", "e2"), ("e2", "s", "a")], model="complex", dim=4
    )
    found = {answer.label: answer for answer in answers(run, ["a", ["r", "s"]])}
    assert {name: answer.split for name, answer in found.items()} == {
        "c": "train",
        "e": "valid",
        "e2": "test",
        **dict.fromkeys("abdf"),
    }
    assert all(answer.known == (answer.split is not None) for answer in found.values())
    both = {link.split for link in found["e"].links if found["e"].variables["y1"].label == "d"}
    assert both <= {"train", "valid"}
    # All that a leads to is b and d, and nobody is linked to both; all that f leads to is b.
    assert all(answer.known for answer in answers(run, "?x: (a, r, ?y) & !(?y, s, ?x)"))
    lacking = answers(run, "?x: (f, r, ?y) & !(?y, s, ?x)")
    assert {answer.label for answer in lacking if not answer.known} == {"c", "e2"}
    assert not any(answer.known for answer in answers(run, "?x: (b, s, ?x) & !((a, r, ?y) & (?y, s, ?x))"))
    new = ask(run.folder, ["a", ["r", "s"]], known=False)
    assert set(new.labels) == set("abdf")


def test_crisp_answers_are_those_of_every_assignment_over_the_triples(finished: Run) -> None:
    dataset = finished.dataset
    triples = np.concatenate([dataset.triples(split) for split in ("train", "valid", "test")])
    held = {tuple(triple) for triple in triples.tolist()}
    for name, (text, truth) in TEXTS.items():
        oracle = _Crisp(dataset, held)
        known = {answer.id for answer in answers(finished, text) if answer.known}
        assert known == set(np.flatnonzero(truth(oracle) > 0.5).tolist()), name  # type: ignore[arg-type]


class _Crisp(Oracle):
    """Links that are in the graph are true, the others false."""

    def __init__(self, dataset: Dataset, held: set[tuple[int, ...]]) -> None:
        self.norm = "min"
        names = list(dataset.entities)
        self._index = {name: row for row, name in enumerate(names)}
        every = range(len(names))
        self._links = {}
        for number, relation in enumerate(dataset.relations):
            table = np.array([[(a, number, b) in held for b in every] for a in every], np.longdouble)
            self._links[relation, "tail"], self._links[relation, "head"] = table, table.T


def test_a_calibration_of_ones_own_may_be_any_rising_function(finished: Run) -> None:
    seen = set()

    def calibrate(scores: npt.NDArray[np.float64], relation: int, side: str) -> npt.NDArray[np.float64]:
        seen.add((relation, side))
        return np.asarray(probabilities(scores / 2 - 1))

    found = answers(finished, TEXTS["against the relation"][0], scores=Calibrated(calibrate), k=3)
    assert found.query["scores"] == "calibrated"
    assert {side for _, side in seen} == {"head"}
    plain = answers(finished, "?x: (e0, r0, ?x)", scores=Calibrated(calibrate))
    assert [a.id for a in plain] == [a.id for a in answers(finished, "?x: (e0, r0, ?x)")]


def test_calibrated_degrees_are_the_probabilities_that_were_fitted(tmp_path: Path) -> None:
    valid = [(f"e{i % 40}", f"r{i % 2}", f"e{(i * 7 + 3 + i // 40) % 40}") for i in range(120)]
    run = make_run(tmp_path, ring(40, 2), valid, model="complex", dim=8)
    found = answers(run, "?x: (e0, r0, ?x)", scores="calibrated", k=40)
    ids = np.array([answer.id for answer in found])
    scores = np.array([a.score for a in load(run.folder).predict_tails("e0", "r0", 40, known=True)])
    fitted = calibration(open_stored(run.folder)).probabilities(scores, np.zeros_like(ids), "tail")
    assert [answer.score for answer in found] == pytest.approx(fitted.tolist(), rel=1e-9)


HOSTILE = ["a, b", "(a)", 'say "a"', "?x", "!a", "a & b | c", " a ", "#3", "日本", "a\nb", "", "\\", "a:b"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> DatasetNames:
    train = [
        (a, "r, s", b) for a, b in itertools.pairwise([label for label in HOSTILE if label.strip()] + ["z"])
    ]
    train = [triple for triple in train if "\n" not in triple[0] + triple[2]]
    run = make_run(tmp_path_factory.mktemp("hostile"), [*train, ("z", "n", "a:b")], model="complex", dim=4)
    return DatasetNames(run.dataset)


def test_any_label_can_be_asked_for(hostile: DatasetNames) -> None:
    for label in ["a, b", "(a)", 'say "a"', "?x", "!a", "a & b | c", "日本", "\\", "a:b"]:
        query = f'?x: ({json.dumps(label)}, "r, s", ?x)'
        node = tree(parse(query)[1], "x", hostile)
        assert hostile.entity_label(node.source) == label  # type: ignore[union-attr,arg-type]
    bare = tree(parse('?x: (  a & b | c , "r, s", ?x )')[1], "x", hostile)
    assert hostile.entity_label(bare.source) == "a & b | c"  # type: ignore[union-attr,arg-type]
    assert tree(parse('?x: (#3, "r, s", ?x)')[1], "x", hostile).source == hostile.entity("#3")  # type: ignore[union-attr]


leaf = st.sampled_from(["({e}, {r}, ?{v})", "(?{v}, {r}, {e})", "!({e}, {r}, ?{v})"])


@st.composite
def queries(draw: st.DrawFn, variable: str = "x", path: str = "v") -> str:
    """Draw a tree-shaped query about a variable; `path` names places in it, each once."""
    kind = draw(st.sampled_from(["leaf", "hop", "and", "or", "not"] if len(path) < 4 else ["leaf"]))
    if kind == "leaf":
        entity, relation = draw(st.integers(0, 10)), draw(st.integers(0, 2))
        return draw(leaf).format(e=f"e{entity}", r=f"r{relation}", v=variable)
    if kind == "hop":
        inner = draw(queries(path, path + "h"))
        return f"({inner}) & {draw(st.sampled_from(['', '!']))}(?{path}, r1, ?{variable})"
    parts = [draw(queries(variable, path + side)) for side in "ab"]
    if kind == "not":
        return f"!({parts[0]})"
    return f"({parts[0]}) {'&' if kind == 'and' else '|'} ({parts[1]})"


@given(queries())
@settings(max_examples=100, deadline=None)
def test_a_query_that_is_written_out_again_is_the_same_tree(text: str) -> None:
    class Names:
        def entity(self, name: str) -> int:
            return int(name[1:])

        relation = entity

        def entity_label(self, row: int) -> str:
            return f"e{row}"

        def relation_label(self, row: int) -> str:
            return f"r{row}"

    names = Names()
    node = tree(parse(f"?x: {text}")[1], "x", names)
    assert tree(parse(render(node, "x", names))[1], "x", names) == node


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "expected the variable that is asked for"),
        ("(e0, r0, ?x)", "character 1: expected the variable"),
        ("?x (e0, r0, ?x)", "character 4: expected ':'"),
        ("?x: (e0, r0 ?x)", "expected ','"),
        ("?x: (e0, r0, ?x", "expected '\\)', found the end"),
        ("?x: (e0, r0, ?x) (e1, r0, ?x)", "expected '&', '\\|' or the end"),
        ("?x: (e0, r0, ?x) & ", "expected '\\(', found the end"),
        ('?x: ("e0, r0, ?x)', "a label in quotes"),
        ("?x: (e0, r0, ?)", "begins with \\? goes in quotes"),
        ("?x: (, r0, ?x)", "expected a label or a \\?variable"),
        ("?x: (e0, ?r, ?x)", "\\?r stands for a relation"),
        ("?x: (e0, r0, ?y)", "\\?x is asked for but does not occur"),
        ("?x: (e0, r0, ?x) & (e1, r0, ?z)", "\\?z has no link to \\?x"),
        ("?x: (e0, r0, ?x) & (e1, r0, e2)", "\\(e1, r0, e2\\) does not say anything about \\?x"),
        ("?x: (?x, r0, ?x) & (e0, r0, ?x)", "\\?x is linked to itself"),
        ("?x: (?y, r0, ?x)", "\\?y is tied to no entity"),
        ("?x: (e0, r0, ?y) & (?y, r0, ?x) & (?y, r1, ?x)", "\\?y is tied to \\?x in more than one way"),
        (
            "?x: (e0, r0, ?y) & (?y, r0, ?z) & (?z, r0, ?x) & (?y, r1, ?x)",
            "in more than one way; a query with a",
        ),
        ("?x: (e0, r0, ?y) & (?y, r0, ?x) | (e1, r0, ?y) & (?y, r0, ?x)", "\\?y is on both sides of \\|"),
        ("?x: (e0, r0, ?x) | (e1, r0, ?z)", "\\?x is missing from one side of \\|"),
        ("?x: (e0, r0, ?y) & ((?y, r0, ?x) | (e1, r0, ?x))", "\\?y is used inside and outside of a part"),
        ("?x: " + "(" * 70 + "(e0, r0, ?x)" + ")" * 70, "more than 64 parentheses"),
        ("?x: " + " & ".join(["(e0, r0, ?x)"] * 129), "more than 128 links"),
        ("?x: (e0, r0, ?x)" + "".join(f" & (?x, r0, ?y{n})" for n in range(128)), "more than 128 links"),
        (["e0", ["r0"] * 65], "more than 64 links and lists in a row"),
        ([["e0", ["r0"] * 40], ["r0"] * 30], "more than 64 links and lists in a row"),
        ([], "\\[\\] is neither an entity with relations"),
        (["e0", []], "is neither an entity with relations"),
        (["e0", ["n"]], "'n' stands before any relation"),
        ([["e0", ["r0", 3]], ["e1", ["r0"]]], "is neither an entity with relations"),
        (["e0", ["r0"], ["r1"]], "'e0' is neither an entity with relations"),
        (["e0", [{"reverse": "r0"}]], "is neither an entity with relations"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_variable_at_fault(
    finished: Run, query: Query, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        answers(finished, query)
    assert "\n" not in str(caught.value)


def test_names_that_do_not_exist_are_told_from_names_that_do(finished: Run) -> None:
    with pytest.raises(UnknownEntityError, match="no entity 'e99'"):
        answers(finished, "?x: (e99, r0, ?x)")
    with pytest.raises(UnknownRelationError, match="no relation 'r77'"):
        answers(finished, ["e0", ["r77"]])


def test_a_relation_named_n_is_not_taken_for_a_negation(hostile: DatasetNames) -> None:
    from kgshard_tools.multi_hop.nested import nested_tree

    with pytest.raises(ConfigError, match="is a negation, and here a relation too"):
        nested_tree(["z", ["r, s", "n"]], hostile)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"k": 0}, "-k must be a whole number"),
        ({"beam": 0}, "--beam must be a whole number >= 1 or 'all'"),
        ({"t_norm": "drastic"}, "unknown value 'drastic' \\(known: min, product, lukasiewicz\\)"),
        ({"scores": "logit"}, "--scores: unknown value 'logit'"),
    ],
)
def test_options_out_of_range_are_refused(finished: Run, how: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answers(finished, "?x: (e0, r0, ?x)", **how)


def test_a_row_that_is_not_finite_is_named(tmp_path: Path) -> None:
    entities = np.ones((5, 4))
    entities[3, 1] = np.nan
    run = make_run(tmp_path, ring(5), model="complex", dim=4, entities=entities)
    with pytest.raises(NonFiniteError, match=r"entity 3 .* is not finite"):
        answers(run, [f"#{2}", ["r0"]])


@given(st.lists(st.floats(-700, 700), min_size=3, max_size=3), st.sampled_from(sorted(T_NORMS)))
@settings(max_examples=200, deadline=None)
def test_t_norms_keep_the_laws_of_t_norms(degrees: Sequence[float], name: str) -> None:
    norm = T_NORMS[name]
    a, b, c = (np.array([degree]) for degree in degrees)
    both = norm.both(a, b)
    assert both == norm.both(b, a)
    assert both <= np.minimum(a, b)
    assert norm.either(a, b) == -norm.both(-a, -b)
    assert norm.both(a, np.array([TRUE])) == pytest.approx(a, rel=1e-14)
    assert norm.both(a, np.array([FALSE])) == FALSE
    links, ways = np.stack([np.concatenate([b, c, a]), np.concatenate([c, a, b])]), np.concatenate([a, b])
    best = norm.both(ways[:, None], links).max(axis=0)
    assert norm.best(ways, links) == pytest.approx(best, rel=1e-12, abs=1e-12)


@given(st.floats(-40, 40), st.floats(-40, 40), st.sampled_from(sorted(T_NORMS)))
@settings(max_examples=200, deadline=None)
def test_t_norms_are_what_they_are_called(a: float, b: float, name: str) -> None:
    degrees = np.array([a]), np.array([b])
    for ours, theirs in ((T_NORMS[name].both, _t), (T_NORMS[name].either, _s)):
        wanted = theirs(name, *map(_precise, degrees)).astype(float)
        assert probabilities(ours(*degrees)) == pytest.approx(wanted, rel=1e-12, abs=1e-17)


def _precise(degrees: npt.NDArray[np.float64]) -> Wide:
    return 1 / (1 + np.exp(-degrees.astype(np.longdouble)))


def test_degrees_near_1_and_near_0_are_told_apart() -> None:
    near_one = np.array([800.0, 801.0])
    for norm in T_NORMS.values():
        once, twice = norm.both(near_one, np.array([TRUE])), norm.both(-near_one, np.array([TRUE]))
        assert once[0] < once[1]
        assert twice[0] > twice[1]
    assert T_NORMS["product"].both(near_one, near_one)[0] == pytest.approx(800 - np.log(2), abs=1e-12)
    assert log_odds(np.array([0.0, 0.5, 1.0])).tolist() == [FALSE, 0.0, TRUE]


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit | click.ClickException):
        raise done.exception
    return done.exit_code, done.output


def test_the_command_prints_a_table_or_one_object(finished: Run) -> None:
    text = TEXTS["2p"][0]
    code, table = said(finished.folder, text, "-k", 2)
    assert code == 0
    lines = table.splitlines()
    assert len(lines) == 3
    assert "?y = e" in lines[0]
    assert lines[-1].startswith("?x: (e0, r0, ?y) & (?y, r1, ?x)  (product of softmax")
    code, out = said(
        finished.folder, '["e0", ["r0", "r1"]]', "-k", 2, "--json", "--beam", "all", "--t-norm", "min"
    )
    value = json.loads(out)
    assert (value["query"]["structure"], value["query"]["exact"], value["query"]["t_norm"]) == (
        "2p",
        True,
        "min",
    )
    assert list(value["results"][0]) == [
        *("rank", "label", "id", "score", "log_odds", "known", "split", "variables", "links")
    ]
    assert said(finished.folder, text, "--beam", "-1")[0] == 2
    assert said(finished.folder)[0] == 2


def test_a_file_of_queries_is_answered_line_by_line(finished: Run, tmp_path: Path) -> None:
    text, nested, _ = QUERIES["ip"]
    source, out = tmp_path / "q.ndjson", tmp_path / "a.ndjson"
    source.write_text(f"{json.dumps(text)}\n\n{json.dumps(nested)}\n{json.dumps({'query': text})}\n")
    code, printed = said(finished.folder, "--queries", source, "-k", 3)
    assert code == 0
    found = [json.loads(line) for line in printed.splitlines()]
    assert [value["query"]["query"] for value in found] == [text, nested, text]
    alone = answers(finished, text, k=3, scores="softmax", facts="train")
    assert [result["id"] for result in found[1]["results"]] == [answer.id for answer in alone]
    assert said(finished.folder, "--queries", source, "-k", 3, "-o", out)[0] == 0
    assert out.read_text() == printed
    program = "from kgshard_tools.commands.ask import command; command()"
    arguments = [sys.executable, "-c", program, str(finished.folder), "--queries", "-", "-k", "3"]
    done = subprocess.run(arguments, input=source.read_text(), capture_output=True, text=True, check=True)
    assert [json.loads(line)["query"]["structure"] for line in done.stdout.splitlines()] == ["ip"] * 3


def test_answers_replace_neither_the_queries_nor_what_kgshard_wrote(finished: Run, tmp_path: Path) -> None:
    source = tmp_path / "q.ndjson"
    source.write_text(json.dumps(QUERIES["1p"][0]))
    for out in (source, finished.folder / "answers.ndjson"):
        with pytest.raises(ConfigError, match=f"--out {re.escape(str(out))}: "):
            said(finished.folder, "--queries", source, "-o", out)
    assert source.read_text() == json.dumps(QUERIES["1p"][0])
    assert not (finished.folder / "answers.ndjson").exists()


def test_a_query_that_cannot_be_answered_stops_a_batch_or_is_skipped(finished: Run, tmp_path: Path) -> None:
    source = tmp_path / "q.ndjson"
    source.write_text('"?x: (e0, r0, ?x)"\n"?x: (e0, r0, ?y)"\n{"question": 1}\nnonsense\n')
    model = MultiHop(finished.folder, Reasoning(k=2))
    with pytest.raises(DataError, match=r"q.ndjson:2: query: \?x is asked for"):
        write_answers(QueryBatch(model, read_lines(str(source))), tmp_path / "a.ndjson")
    assert not (tmp_path / "a.ndjson").exists()
    batch = QueryBatch(model, read_lines(str(source)), on_error="skip")
    values = [json.loads(line) for line in batch.answers()]
    assert [value.get("line") for value in values] == [None, 2, 3, 4]
    assert "expected the field query" in values[2]["error"]
    assert batch.tally.lines() == [f"3 of 4 queries failed; the first: {source}:2: {values[1]['error']}"]
    with pytest.raises(ConfigError, match=r"answers are written as \.ndjson"):
        write_answers(batch, tmp_path / "a.tsv")


def test_memory_depends_on_the_beam_and_a_block_not_on_the_table(tmp_path: Path) -> None:
    import tracemalloc

    rows, dim, beam = 8_000, 16, 256
    entities = np.random.default_rng(0).standard_normal((rows, dim)).astype(np.float32)
    run = make_run(tmp_path, ring(rows), model="complex", dim=dim, entities=entities)
    hop = MultiHop(run.folder, Reasoning(k=5, beam=beam))
    hop.ask(["#0", ["r0"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "_BLOCK_ROWS", 128)
        patch.setattr(blocks_module, "PART", 256)
        patch.setattr(blocks_module, "_KEPT_SCORES", rows * beam - 1)
        patch.setattr("kgshard_tools.multi_hop.evaluators.PART", 256)
        tracemalloc.start()
        hop.ask(["#0", ["r0", "r0", "r0"]])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < beam * rows * 8 / 2
