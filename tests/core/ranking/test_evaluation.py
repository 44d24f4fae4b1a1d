"""A run is evaluated as its protocol says, on any number of ranks, once or again and again in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_scores import small_dim
from ranking_functions import (
    begin_run,
    chain,
    evaluate_run,
    evaluated,
    random_tables,
    save_on_threads,
    sharded,
    validate,
)
from worlds import GlooPool, ThreadWorld

import kgshard
from kgshard.errors import ConfigError, DataError, NonFiniteError, RunError
from kgshard.exchange import Exchange, SingleExchange
from kgshard.models.link import SIDES
from kgshard.ranking.evaluation import ValidEvaluator, draw_triples
from kgshard.ranking.metrics import TIES
from kgshard.ranking.protocol import EvaluationSettings, protocol_line
from kgshard.runs import BEST_FILE, Run, checkpoint_name

Triple = tuple[str, str, str]
METRICS = {"mrr", "mr", "hits@1", "hits@3", "hits@10", "amr", "amri"}


def ranked_run(folder: Path, splits: dict[str, list[Triple]]) -> Run:
    """Save a distmult run whose true tails stand by their number: e0 above e1 above e2 ..."""
    run = begin_run(folder, train=splits["train"], valid=splits["valid"], test=splits["test"])
    names = run.dataset.entities
    entities = np.zeros((len(names), 4), np.float32)
    for row, name in enumerate(names):
        entities[row] = [1, 1, 1, 1 - int(name[1:]) / 100]
    save_on_threads(run, 1, entities, np.ones((run.model.num_relation_rows, 4), np.float32))
    return run


GRAPH: dict[str, list[Triple]] = {
    "train": [*chain(10), ("e9", "r", "e0")],
    "valid": [("e9", "r", "e1")],
    "test": [("e9", "r", "e2")],
}


def tail_rank(run: Run, split: str, *, filtered: bool) -> float:
    return float(evaluated(run, split=split, filtered=filtered)["tail"]["mr"])


def test_valid_triples_are_no_candidates_of_test(tmp_path: Path) -> None:
    """B64: train a-r-b, valid a-r-c, test a-r-d with scores b > c > d: the filtered rank of d is 1."""
    run = ranked_run(tmp_path, GRAPH)
    assert tail_rank(run, "test", filtered=True) == 1
    assert tail_rank(run, "test", filtered=False) == 3


def test_test_triples_are_candidates_of_valid(tmp_path: Path) -> None:
    """What is chosen on valid must not have looked at test."""
    swapped = GRAPH | {"valid": GRAPH["test"], "test": GRAPH["valid"]}
    run = ranked_run(tmp_path, swapped)
    assert tail_rank(run, "valid", filtered=True) == 2
    assert tail_rank(run, "valid", filtered=False) == 3
    assert tail_rank(run, "test", filtered=True) == 1


def test_the_protocol_is_written_beside_the_metrics(tmp_path: Path) -> None:
    run = ranked_run(tmp_path, GRAPH)
    results = [
        evaluated(run, split=split, filtered=filtered)
        for split, filtered in (("test", True), ("valid", True), ("train", True), ("test", False))
    ]
    protocols = [result["protocol"] for result in results]
    assert [p["filter"] for p in protocols] == [
        ["train", "valid", "test"],
        ["train", "valid"],
        ["train", "valid"],
        [],
    ]
    assert [p["filtered"] for p in protocols] == [True, True, True, False]
    assert [(p["triples"], p["queries"], p["candidates"]) for p in protocols[1:3]] == [
        (1, 2, 10),
        (10, 20, 10),
    ]
    both = results[2]
    assert set(both["metrics"]) == set(both["head"]) == set(both["tail"]) == METRICS
    assert both["metrics"]["mrr"] == pytest.approx((both["head"]["mrr"] + both["tail"]["mrr"]) / 2)
    json.dumps(results, allow_nan=False)


def test_unseen_entities_are_kept_and_counted(tmp_path: Path) -> None:
    test = [("e1", "next", "new"), ("e2", "next", "e7"), ("newer", "next", "e1")]
    run = begin_run(tmp_path, train=chain(10), test=test)
    save_on_threads(run, 1, *random_tables(run, 1))
    protocol = evaluated(run)["protocol"]
    assert (protocol["triples"], protocol["unseen"], protocol["candidates"]) == (3, 2, 12)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 661 test triples, whose tables are whole numbers, so that many candidates tie."""
    random = np.random.default_rng(13)
    drawn = random.integers(0, [135, 46, 135], (3000, 3)).tolist()
    ordered = sorted({(f"e{a}", f"r{b}", f"e{c}") for a, b, c in drawn})
    run = begin_run(
        tmp_path_factory.mktemp("tied"),
        model="complex",
        dim=8,
        train=[*chain(135), *ordered[1000:]],
        valid=ordered[661:1000],
        test=ordered[:661],
    )
    save_on_threads(run, 3, *(np.round(table) for table in random_tables(run, 14)))
    return run


def test_661_triples_count_661_in_every_world(tied: Run) -> None:
    """Metrics must not change with the number of ranks: no padding, no triple twice (B68)."""
    results = [evaluated(tied, world_size=world_size) for world_size in (1, 2, 3, 4)]
    assert results[0]["protocol"]["triples"] == 661
    assert results[0]["protocol"]["queries"] == 1322
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("ties", TIES)
def test_all_tie_rules_are_in_every_result_and_one_is_chosen(tied: Run, ties: str) -> None:
    result = evaluated(tied, ties=ties, by=["cardinality"])
    assert result["protocol"]["ties"] == ties
    assert set(result["ties"]) == set(TIES)
    for found in (result, *result["by"]["cardinality"]):
        assert found["metrics"].items() <= found["ties"][ties].items()
        assert found["ties"][ties]["head"] == found["head"]
        rules = [found["ties"][rule]["mrr"] for rule in ("pessimistic", "realistic", "optimistic")]
        assert rules == sorted(rules)
    assert rules[0] < rules[2]


@pytest.mark.parametrize("side", SIDES)
def test_one_side_is_that_side_of_both(tied: Run, side: str) -> None:
    both, one = evaluated(tied), evaluated(tied, sides=side)
    [other] = {*SIDES} - {side}
    assert one[side] == one["metrics"] == both[side]
    assert one[other] is one["ties"]["realistic"][other] is None
    assert (one["protocol"]["sides"], one["protocol"]["queries"]) == ([side], 661)


def test_breakdowns_come_when_asked_for_and_add_up(tied: Run) -> None:
    assert "by" not in evaluated(tied)
    result = evaluated(tied, world_size=2, by=["relation", "side", "relation"])
    assert list(result["by"]) == ["relation", "side"]
    groups = result["by"]["relation"]
    assert sum(group["triples"] for group in groups) == 661
    weighted = sum(group["metrics"]["mrr"] * group["queries"] for group in groups)
    assert weighted / 1322 == pytest.approx(result["metrics"]["mrr"])
    by_side = {group["label"]: group["metrics"] for group in result["by"]["side"]}
    assert by_side == {side: result[side] for side in SIDES}
    json.dumps(result, allow_nan=False)


def test_a_sample_is_ranked_like_all_and_labelled_as_an_estimate(tied: Run) -> None:
    """The mean over many seeds is the full figure; each one's interval is around it."""
    full = evaluated(tied)
    assert full["protocol"]["split_triples"] is None
    assert "intervals" not in full
    estimates = [evaluated(tied, sample=100, seed=seed) for seed in range(40)]
    for seed, estimate in enumerate(estimates):
        protocol = estimate["protocol"]
        counts = [protocol[name] for name in ("triples", "queries", "split_triples", "seed", "candidates")]
        assert counts == [100, 200, 661, seed, 135]
        for part in ("metrics", *SIDES):
            for name, (low, high) in estimate["intervals"][part].items():
                assert (low + high) / 2 == pytest.approx(estimate[part][name])
    found = [estimate["metrics"]["mrr"] for estimate in estimates]
    width = estimates[0]["intervals"]["metrics"]["mrr"][1] - found[0]
    assert abs(np.mean(found) - full["metrics"]["mrr"]) < 1.5 * width / 40**0.5  # three standard errors
    assert np.std(found) * 1.96 == pytest.approx(width, rel=0.5)


def test_a_sample_is_drawn_without_replacement_and_every_triple_as_often() -> None:
    """20 of 30 triples, 300 seeds: each triple 200 times, within four standard errors."""
    triples = np.arange(90, dtype=np.int32).reshape(30, 3)
    counts = np.zeros(30, int)
    for seed in range(300):
        drawn = draw_triples(triples, EvaluationSettings(sample=20, seed=seed))
        rows = (drawn[:, 0] // 3).tolist()
        assert rows == sorted(set(rows))
        assert len(rows) == 20
        np.testing.assert_array_equal(drawn, triples[rows])
        counts[rows] += 1
    assert (abs(counts - 200) < 4 * (300 * 2 / 9) ** 0.5).all()


def test_a_sample_is_fixed_by_its_seed_in_every_world(tied: Run) -> None:
    first, again, other = (evaluated(tied, sample=30, seed=seed) for seed in (5, 5, 6))
    assert first == again == evaluated(tied, world_size=3, sample=30, seed=5)
    assert first["metrics"] != other["metrics"]


@pytest.mark.parametrize("sample", [661, 662, 10**9])
def test_a_sample_of_all_triples_is_no_estimate(tied: Run, sample: int) -> None:
    assert evaluated(tied, sample=sample, seed=3) == evaluated(tied)


def test_a_checkpoint_can_be_chosen_and_is_named(tmp_path: Path) -> None:
    run = ranked_run(tmp_path, GRAPH)
    first, second = checkpoint_name(1), checkpoint_name(2)
    (run.folder / BEST_FILE).write_text(first + "\n")
    zeros = np.zeros((run.model.num_entities, 4), np.float32)
    save_on_threads(run, 1, zeros, np.zeros((run.model.num_relation_rows, 4), np.float32), step=2)
    wanted = {None: first, "best": first, "latest": second, first: first, second: second}
    for name, expected in wanted.items():
        result = ThreadWorld(1).run(evaluate_checkpoint, run, name)[0]
        protocol = result["protocol"]
        assert (protocol["checkpoint"], checkpoint_name(protocol["step"])) == (expected, expected)
        assert (result["tail"]["mrr"] == 1) == (expected == first)
    (run.folder / BEST_FILE).unlink()
    assert ThreadWorld(2).run(evaluate_checkpoint, run, None)[0]["protocol"]["checkpoint"] == second
    with pytest.raises(RunError, match="no best checkpoint"):
        ThreadWorld(2).run(evaluate_checkpoint, run, "best")


def evaluate_checkpoint(exchange: Exchange, run: Run, name: str | None) -> dict[str, Any]:
    return kgshard.ranking.evaluation.evaluate_on_ranks(exchange, run, name)


@pytest.mark.processes
def test_gloo_ranks_give_the_same_metrics(tmp_path: Path, gloo_pool: GlooPool) -> None:
    test = [("e3", "next", "e8"), ("e1", "next", "e7"), ("e1", "next", "e9")]
    run = begin_run(tmp_path, model="rotate", dim=6, train=chain(40), test=test)
    save_on_threads(run, 2, *random_tables(run, 15))
    settings = {"by": ["degree"], "sample": 2}
    alone = evaluated(run, **settings)
    assert gloo_pool.run(3, tmp_path, evaluate_run, str(run.folder), settings) == [alone] * 3


def test_a_table_of_zeros_has_the_middle_mrr(tmp_path: Path) -> None:
    run = begin_run(tmp_path, train=chain(1000), test=[("e3", "next", "e900")])
    save_on_threads(run, 2, np.zeros((1000, 4), np.float32), np.zeros((1, 4), np.float32))
    metrics = evaluated(run, filtered=False)["metrics"]
    assert metrics["mr"] == 500.5
    assert metrics["mrr"] == pytest.approx(1 / 500.5)
    assert (metrics["hits@10"], metrics["amr"], metrics["amri"]) == (0, 1, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_row_that_is_not_finite_is_an_error_on_every_rank(
    tmp_path: Path, world_size: int, value: float
) -> None:
    """Every comparison with NaN is false, so nothing would rank above it (B60)."""
    run = begin_run(tmp_path, train=chain(9), test=[("e0", "next", "e5")])
    entities, relations = random_tables(run, 16)
    entities[7, 2] = value
    save_on_threads(run, 2, entities, relations)
    errors = errors_of(world_size, run)
    name = run.dataset.entities[7]
    assert all(f"entity 7 ({name!r}) is not finite" in str(error) for error in errors)
    assert any(isinstance(error, NonFiniteError) for error in errors)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_relation_row_that_is_not_finite_is_named_too(tmp_path: Path, world_size: int) -> None:
    run = begin_run(tmp_path, train=[*chain(9), ("e0", "odd", "e1")], test=[("e0", "next", "e5")])
    entities, relations = random_tables(run, 17)
    odd = run.dataset.relations.id_of("odd")
    relations[odd, 0] = np.nan
    save_on_threads(run, 2, entities, relations)
    for error in errors_of(world_size, run):
        assert f"relation row {odd} ('odd') is not finite" in str(error)
        assert isinstance(error, NonFiniteError)


def test_relations_that_training_sharded_are_sharded_again(tmp_path: Path) -> None:
    links = [(f"e{i}", f"r{i % 7}", f"e{3 * i % 20}") for i in range(40)]
    results = []
    for name, shard_relations in (("whole", False), ("sharded", True)):
        run = begin_run(
            tmp_path / name, model="rotate", dim=6, train=[*chain(20), *links[20:]], test=links[:20]
        )
        save_on_threads(run, 3, *random_tables(run, 23), shard_relations=shard_relations)
        assert len(run.checkpoint.relations.pieces) == (3 if shard_relations else 1)
        results += [evaluated(run, world_size=world_size) for world_size in (1, 2)]
    assert results[1:] == results[:1] * 3
    entities, relations = random_tables(run, 23)
    relations[5, 1] = np.nan
    save_on_threads(run, 3, entities, relations, step=2, shard_relations=True)
    label = run.dataset.relations[5]
    for error in errors_of(2, run):
        assert f"relation row 5 ({label!r}) is not finite" in str(error)


def shared_tables(run: Run, seed: int) -> dict[str, np.ndarray]:
    random, scoring = np.random.default_rng(seed), run.model.scoring
    drawn = {
        key: random.standard_normal(how.shape) for key, how in scoring.shared_init(run.model.dim).items()
    }
    return {key: values.astype(np.float32) for key, values in drawn.items()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_shared_parameter_that_is_not_finite_is_named_too(tmp_path: Path, world_size: int) -> None:
    run = begin_run(tmp_path, model="tucker", train=chain(9), test=[("e0", "next", "e5")])
    shared = shared_tables(run, 18)
    shared["core"][1, 2, 3] = -np.inf
    save_on_threads(run, 2, *random_tables(run, 18), shared=shared)
    for error in errors_of(world_size, run):
        assert "shared parameter 'core' is not finite" in str(error)
        assert isinstance(error, NonFiniteError)


def errors_of(world_size: int, run: Run) -> list[BaseException]:
    """Return the errors of all ranks; every rank must have one of its own, not a broken barrier."""
    outcomes: list[Any] = ThreadWorld(world_size).run(catch_evaluation, str(run.folder))
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    return outcomes


def catch_evaluation(exchange: Any, folder: str) -> object:
    try:
        return evaluate_run(exchange, folder)
    except Exception as error:
        return error


def test_an_empty_split_is_refused_by_name(tmp_path: Path) -> None:
    run = begin_run(tmp_path, train=chain(5))
    save_on_threads(run, 1, *random_tables(run, 18))
    with pytest.raises(DataError, match="split 'test' holds no triples"):
        evaluated(run)
    with pytest.raises(DataError, match="no split 'dev'"):
        evaluated(run, split="dev")
    with pytest.raises(DataError, match="split 'valid' holds no triples"):
        ValidEvaluator(run.model, run.dataset)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"sides": "tails"}, r"--sides: unknown value 'tails' \(known: both, tail, head\)"),
        ({"ties": "random"}, r"--ties: unknown value 'random' \(known: realistic, optimistic, pessimistic\)"),
        ({"by": ["relation", "size"]}, r"--by: unknown value 'size' \(known: relation, side, degree, card"),
        ({"by": "relation"}, r"--by takes several names, got the text 'relation'"),
        ({"sample": 1}, "--sample must be a whole number >= 2, got 1; one triple has no interval"),
        ({"sample": True}, "--sample must be a whole number >= 2, got True"),
        ({"sample": 2.5}, "--sample must be a whole number >= 2, got 2.5"),
        ({"seed": -1}, "--seed must be a whole number >= 0, got -1"),
    ],
)
def test_a_wrong_setting_is_refused_before_ranks_start(
    tied: Run, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(kgshard.api, "run_on_ranks", None)
    with pytest.raises(ConfigError, match=words):
        kgshard.evaluate(tied, **setting)


def kept(run: Run) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in (run.folder / "eval").iterdir()}


def test_estimates_and_halves_are_kept_beside_full_figures(tmp_path: Path, here: None) -> None:
    train: list[Triple] = [*chain(30), ("e9", "r", "e0")]
    run = begin_run(tmp_path, train=train, test=[("e9", "r", f"e{i}") for i in range(1, 8)])
    save_on_threads(run, 1, *random_tables(run, 19))
    wanted: dict[str, dict[str, Any]] = {
        "test-full-filtered.json": {},
        "test-sample-filtered.json": {"sample": 3},
        "test-full-filtered-tail.json": {"sides": "tail"},
        "test-sample-raw-head.json": {"sides": "head", "sample": 4, "filtered": False},
        "train-full-raw.json": {"split": "train", "filtered": False, "sample": len(train)},
    }
    results = {name: kgshard.evaluate(run, **settings) for name, settings in wanted.items()}
    assert kept(run) == json.loads(json.dumps(results))


# --- while a model trains


def valid_evaluator(run: Run, **options: Any) -> ValidEvaluator:
    return ValidEvaluator(run.model, run.dataset, **options)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("sample", [None, 50])
def test_in_training_the_figures_are_those_of_an_evaluation_on_valid(
    tied: Run, sample: int | None, world_size: int
) -> None:
    tables = [np.round(table) for table in random_tables(tied, 14)]
    evaluator = valid_evaluator(tied, sample=sample, seed=2)
    found = ThreadWorld(world_size).run(validate, evaluator, *tables)
    assert all(outcome == found[0] for outcome in found)
    drawn = {} if sample is None else {"sample": sample, "seed": 2}
    expected = evaluated(tied, split="valid", **drawn)
    names = ("mrr", "mr", "hits@1", "hits@3", "hits@10")
    assert found[0]["valid"] == {name: expected["metrics"][name] for name in names}
    assert ("intervals" in found[0]) == (sample is not None)
    if sample is not None:
        assert found[0]["intervals"] == {name: expected["intervals"]["metrics"][name] for name in names}
    said = protocol_line(expected["protocol"])
    assert (
        said
        == f"{evaluator.protocol}; {expected['protocol']['checkpoint']}; step {expected['protocol']['step']}"
    )


def test_an_evaluator_follows_its_tables_and_takes_shared_parameters(tmp_path: Path) -> None:
    run = begin_run(
        tmp_path, model="tucker", train=chain(30), valid=[("e1", "next", "e9"), ("e0", "next", "e3")]
    )
    shared = shared_tables(run, 20)
    save_on_threads(run, 2, *random_tables(run, 20), shared=shared)
    evaluator = valid_evaluator(run)
    live = {name: torch.tensor(values) for name, values in shared.items()}
    entities, relations = random_tables(run, 20)
    table = sharded(SingleExchange(), entities)
    first = evaluator.figures(table, torch.tensor(relations), live)["valid"]
    assert first.items() <= evaluated(run, split="valid")["metrics"].items()
    live["core"].copy_(torch.tensor(shared_tables(run, 21)["core"]))
    second = evaluator.figures(table, torch.tensor(relations), live)["valid"]
    table.weight.zero_()
    assert first != second != evaluator.figures(table, torch.tensor(relations), live)["valid"]


def test_an_evaluator_of_test_filters_test_too(tmp_path: Path) -> None:
    run = ranked_run(tmp_path, GRAPH | {"test": [("e9", "r", "e2"), ("e9", "r", "e3")]})
    table = sharded(SingleExchange(), run.checkpoint.entities.read(range(10)))
    relations = torch.ones(run.model.num_relation_rows, 4)
    found = valid_evaluator(run, split="test").figures(table, relations)["valid"]
    assert found["mrr"] == evaluated(run)["metrics"]["mrr"]


def test_bfloat16_tables_in_training_rank_as_their_checkpoint_does(tmp_path: Path) -> None:
    valid = [(f"e{i}", "next", f"e{i + 7}") for i in range(20)]
    run = begin_run(tmp_path, model="mure", dim=small_dim("mure", 8), train=chain(60), valid=valid)
    entities, relations = (torch.tensor(table).bfloat16() for table in random_tables(run, 22))
    table = sharded(SingleExchange(), entities.float().numpy())
    table.weight = entities
    found = valid_evaluator(run).figures(table, relations)["valid"]
    save_on_threads(run, 2, entities.float().numpy(), relations.float().numpy())
    assert found.items() <= evaluated(run, split="valid")["metrics"].items()
