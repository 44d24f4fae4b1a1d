"""A whole training: what it writes as it goes, which checkpoint it keeps, and when it stops."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import Triple, write_graph
from rank_functions import Floats
from runs import begun_run
from training_functions import train_run
from worlds import ThreadWorld

import kgshard.api
from kgshard.config import TrainConfig
from kgshard.errors import ConfigError, DataError, NonFiniteError
from kgshard.ranking.protocol import valid_mrr
from kgshard.runs import Checkpoint, Run, open_run

SETTINGS: dict[str, Any] = {
    "model": "complex",
    "dim": 8,
    "epochs": 6,
    "batch_size": 16,
    "negatives": 16,
    "lr": 0.3,
    "device": "cpu",
}
EPOCH_STEPS = 4
"""55 triples in batches of 16."""


def wheel(num_entities: int = 30) -> list[Triple]:
    """Return links to the next entity and to the one after it, around a wheel."""
    return [
        (f"e{i}", relation, f"e{(i + step) % num_entities}")
        for i in range(num_entities)
        for relation, step in (("next", 1), ("second", 2))
    ]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    triples = wheel()
    valid = triples[::12]
    train = [triple for triple in triples if triple not in valid]
    return write_graph(tmp_path_factory.mktemp("graph"), train, valid, triples[:1])


@pytest.fixture
def start(here: None, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train in this process; return the result and the run."""
    # Threads that wait for each other take long where other tests run beside these.
    monkeypatch.setattr("kgshard.training.tasks.num_threads", lambda _: 1)

    def call(name: str = "run", *, quiet: bool = True, **settings: Any) -> tuple[dict[str, Any], Run]:
        config = TrainConfig.from_dict(SETTINGS | settings)
        result = kgshard.api.train_config(graph, tmp_path / name, config, quiet=quiet)
        return result, open_run(tmp_path / name)

    return call


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that hold a loss, or an evaluation ("valid")."""
    every = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(("loss" in line) != ("valid" in line) for line in every)
    return [line for line in every if kind in line]


def when(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(line["epoch"], line["step"]) for line in found]


def as_complex(rows: Floats) -> Any:
    real, imaginary = np.split(rows, 2, axis=-1)
    return real + 1j * imaginary


def brute_force_mrr(run: Run, checkpoint: Checkpoint) -> float:
    """Return the MRR of valid, both sides, filtered by train and valid, by ComplEx's paper."""
    entities, relations = (
        as_complex(table.read(range(table.num_rows)).astype(np.float64))
        for table in (checkpoint.entities, checkpoint.relations)
    )
    known = {tuple(t) for split in ("train", "valid") for t in run.dataset.triples(split).tolist()}
    reciprocal_ranks = []
    for h, r, t in run.dataset.triples("valid").tolist():
        tails = np.real((entities[h] * relations[r]) @ entities.conj().T)
        heads = np.real((entities[t] * relations[r + run.model.num_relations]) @ entities.conj().T)
        for scores, truth, others in (
            (tails, t, [e for e in range(len(entities)) if (h, r, e) not in known]),
            (heads, h, [e for e in range(len(entities)) if (e, r, t) not in known]),
        ):
            higher, same = (scores[others] > scores[truth]).sum(), (scores[others] == scores[truth]).sum()
            reciprocal_ranks.append(1 / (1 + higher + same / 2))
    return float(np.mean(reciprocal_ranks))


# --- what it writes


def test_a_line_an_epoch_and_a_line_an_evaluation_are_written(start: Any) -> None:
    """Every second epoch, and the last."""
    _, run = start(epochs=5, eval_every=2)
    losses, valid = lines(run, "loss"), lines(run, "valid")
    assert when(losses) == [(epoch, epoch * EPOCH_STEPS) for epoch in range(1, 6)]
    assert when(valid) == [(epoch, epoch * EPOCH_STEPS) for epoch in (2, 4, 5)]
    assert set(losses[0]) == {"epoch", "step", "loss", "seconds"}
    assert set(valid[0]["valid"]) == {"mrr", "mr", "hits@1", "hits@3", "hits@10"}
    seconds = [line["seconds"] for line in losses]
    assert seconds == sorted(seconds)
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert losses[0]["loss"] == pytest.approx(math.log(30), abs=0.2)


def test_evaluations_between_steps_are_written_with_their_step(start: Any) -> None:
    """The end of training is evaluated too, and no step twice."""
    _, run = start(epochs=3, eval_steps=5)
    assert when(lines(run, "valid")) == [(2, 5), (3, 10), (3, 12)]
    _, run = start("both", epochs=3, eval_steps=EPOCH_STEPS, eval_every=1)
    assert when(lines(run, "valid")) == [(1, 4), (2, 8), (3, 12)]


def test_the_result_names_the_run_the_best_checkpoint_and_its_metrics(start: Any) -> None:
    result, run = start(eval_every=1)
    assert set(result) == {"run", "checkpoint", "epochs", "seconds", "metrics"}
    assert result["run"] == str(run.folder)
    assert result["checkpoint"] == str(run.open_checkpoint("best").folder)
    assert result["epochs"] == 6
    metrics = result["metrics"]
    assert set(metrics) == {"loss", "triples_per_second", "valid", "protocol"}
    protocol = r"valid: all [0-9]+ triples, .*; filtered by train\+valid; realistic ranks; "
    assert re.match(protocol, metrics["protocol"])
    assert metrics["loss"] == lines(run, "loss")[-1]["loss"]
    assert metrics["triples_per_second"] > 0
    [best] = [line for line in lines(run, "valid") if line["step"] == metrics["valid"]["step"]]
    assert metrics["valid"] == {"epoch": best["epoch"], "step": best["step"], **best["valid"]}


def test_a_run_that_is_not_evaluated_says_nothing_of_valid(start: Any) -> None:
    result, run = start()
    assert "valid" not in result["metrics"]
    assert lines(run, "valid") == []
    assert result["checkpoint"] == str(run.open_checkpoint("latest").folder)
    assert not (run.folder / "BEST").exists()


# --- which checkpoint it keeps


def test_the_best_checkpoint_is_the_one_with_the_best_mrr(start: Any) -> None:
    """So few dimensions that the MRR rises and falls."""
    _, run = start(epochs=14, eval_every=1, dim=4)
    scored = {line["step"]: line["valid"]["mrr"] for line in lines(run, "valid")}
    best = max(scored, key=lambda step: (scored[step], -step))
    checkpoint, last = run.open_checkpoint("best"), run.open_checkpoint("latest")
    assert (checkpoint.step, last.step) == (best, 14 * EPOCH_STEPS)
    assert scored[best] > scored[last.step]  # A control: they differ.
    assert brute_force_mrr(run, checkpoint) == pytest.approx(scored[best], rel=1e-9)
    assert brute_force_mrr(run, last) == pytest.approx(scored[last.step], rel=1e-9)


def test_the_figure_of_the_best_is_what_evaluate_finds(start: Any) -> None:
    result, run = start(eval_every=1)
    found = kgshard.api.evaluate(run, split="valid")
    assert found["protocol"]["step"] == result["metrics"]["valid"]["step"]
    assert found["metrics"]["mrr"] == result["metrics"]["valid"]["mrr"]


def test_evaluating_does_not_change_what_is_trained(start: Any) -> None:
    (_, watched), (_, alone) = start("watched", eval_steps=1), start("alone")
    tables = [run.open_checkpoint("latest").entities.read(range(30)) for run in (watched, alone)]
    np.testing.assert_array_equal(*tables)


def test_a_sampled_evaluation_ranks_as_many_triples_and_the_same_ones(start: Any) -> None:
    (_, run), (_, again), (_, full) = (
        start("run", eval_every=3, eval="sampled", eval_sample=3),
        start("again", eval_every=3, eval="sampled", eval_sample=3),
        start("full", eval_every=3),
    )
    found = [[line["valid"]["mrr"] for line in lines(one, "valid")] for one in (run, again, full)]
    assert found[0] == found[1] != found[2]
    estimate = kgshard.api.evaluate(run, split="valid", sample=3, checkpoint="latest")
    assert estimate["metrics"]["mrr"] == found[0][-1]
    last = lines(run, "valid")[-1]
    assert last["intervals"]["mrr"] == list(estimate["intervals"]["metrics"]["mrr"])
    assert not any("intervals" in line for line in lines(full, "valid"))


def test_a_sampled_evaluation_is_called_an_estimate(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result, run = start(eval_every=6, eval="sampled", eval_sample=3, quiet=False)
    [line] = lines(run, "valid")
    low, high = line["intervals"]["mrr"]
    words = f"valid MRR {line['valid']['mrr']:.4f} (ESTIMATE, 95 % interval {low:.4f} to {high:.4f})"
    said = capsys.readouterr().err
    assert f"epoch 6/6  {words}\n" in said
    assert "valid: ESTIMATE from 3 of " in said
    assert valid_mrr(result["metrics"]) == words


# --- when it stops


def test_training_stops_when_patience_is_lost(start: Any) -> None:
    """A rate so small that nothing ever changes: after the first evaluation none is better."""
    result, run = start(epochs=50, eval_every=1, patience=3, lr=1e-12)
    assert result["epochs"] == 4
    assert len(lines(run, "valid")) == 4
    assert run.open_checkpoint("best").step == EPOCH_STEPS
    assert run.open_checkpoint("latest").step == 4 * EPOCH_STEPS


def test_patience_is_lost_in_the_middle_of_an_epoch_too(start: Any) -> None:
    result, run = start(epochs=9, eval_steps=1, patience=2, lr=1e-12)
    assert (result["epochs"], when(lines(run, "valid"))) == (1, [(1, 1), (1, 2), (1, 3)])
    assert run.open_checkpoint("latest").step == 3


def test_nothing_is_evaluated_before_an_update_is_complete(start: Any) -> None:
    """Batches in between change nothing, so another look at them would only cost patience."""
    _, run = start(epochs=2, eval_steps=1, accumulate=3)
    assert when(lines(run, "valid")) == [(1, 3), (1, 4), (2, 7), (2, 8)]


def test_steps_take_the_place_of_epochs_and_end_with_an_update(start: Any) -> None:
    """Six steps are an epoch of four and two more; of updates of three batches, one ends with step 7."""
    result, run = start("six", epochs=1, steps=6)
    assert (result["epochs"], run.open_checkpoint("latest").step) == (2, 6)
    assert start("together", steps=6, accumulate=3)[1].open_checkpoint("latest").step == 7
    assert start("few", steps=2)[0]["epochs"] == 1


def test_a_decay_ends_with_the_last_step(start: Any) -> None:
    """As many steps, counted either way, are the same training."""
    ends = [
        start(name, decay="linear", **length)[1].open_checkpoint("latest").entities
        for name, length in (("epochs", {"epochs": 2}), ("steps", {"steps": 2 * EPOCH_STEPS}))
    ]
    assert np.array_equal(*(table.read(range(table.num_rows)) for table in ends))


def test_no_evaluation_is_made_whatever_else_a_recipe_says(start: Any) -> None:
    _, run = start(epochs=2, eval_every=1, patience=1, eval="none")
    assert lines(run, "valid") == []


def test_a_checkpoint_in_the_middle_of_an_epoch_has_finished_one_less(start: Any) -> None:
    _, run = start(epochs=9, eval_steps=1, patience=2, lr=1e-12)
    assert [run.open_checkpoint(name).manifest.epoch for name in ("best", "latest")] == [0, 0]


def test_training_goes_on_without_patience_or_while_it_gets_better(start: Any) -> None:
    assert start("endless", epochs=5, eval_every=1, lr=1e-12)[0]["epochs"] == 5
    result, run = start("better", epochs=5, eval_every=1, patience=2)
    mrrs = [line["valid"]["mrr"] for line in lines(run, "valid")]
    records = records_of(mrrs)
    assert max(after - before for before, after in pairwise(records)) <= 2  # Patience was tried.
    assert result["epochs"] == 5


def records_of(values: list[float]) -> list[int]:
    """Return where values exceed all before them."""
    return [i for i, value in enumerate(values) if value > max(values[:i], default=-1.0)]


def test_a_loss_that_is_not_finite_ends_training_with_its_step(start: Any, tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteError, match=r"^loss is (nan|inf|-inf) at step [1-9][0-9]* \(rank 0\); lower --lr$"
    ):
        start(optimizer="sgd", lr=1e30, epochs=50)
    with pytest.raises(kgshard.errors.RunError, match="no checkpoint yet"):
        open_run(tmp_path / "run").open_checkpoint()


def test_a_warm_up_longer_than_the_run_is_refused(start: Any) -> None:
    with pytest.raises(ConfigError, match=r"warm-up must be 0 to 24 steps, .* got 25"):
        start(warmup=25)
    assert start("all of it", warmup=24)[0]["epochs"] == 6


def test_a_mistake_that_only_ranks_can_see_leaves_no_run_behind(start: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--warmup 25"):
        start(warmup=25)
    assert not (tmp_path / "run").exists()


def test_a_graph_without_valid_triples_cannot_be_evaluated(here: None, tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "graph", wheel(5))
    config = TrainConfig(**SETTINGS, eval_every=1)
    with pytest.raises(DataError, match="'valid' holds no triples"):
        kgshard.api.train_config(graph, tmp_path / "run", config, quiet=True)


# --- on any world, with any tables


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_write_the_run_that_one_writes(graph: Path, tmp_path: Path, world_size: int) -> None:
    config = TrainConfig(**SETTINGS, eval_every=2)
    runs = [begun_run(graph, tmp_path / str(size), config) for size in (1, world_size)]
    [alone] = ThreadWorld(1).run(train_run, str(runs[0].folder))
    together = ThreadWorld(world_size).run(train_run, str(runs[1].folder))
    assert {result["epochs"] for result in together} == {6}
    for result in together:
        assert result["metrics"]["valid"] == together[0]["metrics"]["valid"]
        assert result["metrics"]["loss"] == pytest.approx(alone["metrics"]["loss"], rel=1e-5)
    for kind in ("loss", "valid"):
        assert when(lines(runs[1], kind)) == when(lines(runs[0], kind))
    tables = [run.open_checkpoint("latest").entities for run in runs]
    np.testing.assert_allclose(tables[1].read(range(30)), tables[0].read(range(30)), rtol=0, atol=1e-4)
    assert len(tables[1].pieces) == world_size


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "optimizer": "adam", "lr": 0.05},
        {"model": "tucker", "train_type": "kvsall"},
        {"model": "conve", "dim": 12, "train_type": "1vsall", "loss": "bce", "dropout": 0.1},
        {"model": "mure", "corruption": "both-sides", "loss": "self-adversarial"},
        {"shard_relations": "always"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_what_is_trained_is_evaluated_and_read_again(start: Any, settings: dict[str, Any]) -> None:
    if settings.get("train_type"):
        settings = {"negatives": DEFAULT_NEGATIVES, **settings}
    result, run = start(epochs=8, eval_every=4, **settings)
    checkpoint = run.open_checkpoint("latest")
    assert checkpoint.entities.dtype == ("BF16" if settings.get("dtype") else "F32")
    assert set(checkpoint.shared) == set(run.model.scoring.shared_init(run.model.dim))
    logged = lines(run, "valid")[-1]["valid"]["mrr"]
    assert kgshard.api.evaluate(run, split="valid", checkpoint="latest")["metrics"]["mrr"] == logged
    assert result["metrics"]["loss"] < lines(run, "loss")[0]["loss"]


DEFAULT_NEGATIVES = TrainConfig().negatives
