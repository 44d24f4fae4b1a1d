"""What a plan counts is what a training takes: stored bytes exactly, a step's within a factor."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graphs import ring, tree, write_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from training_functions import Job, assembled, peak_of_a_step, random_job
from worlds import GlooPool, ThreadWorld

import kgshard
from kgshard.config import OPTIMIZER_NAMES, TrainConfig
from kgshard.errors import ConfigError
from kgshard.exchange import Exchange, SingleExchange
from kgshard.machine import available_memory, total_memory
from kgshard.models import SCORING
from kgshard.models.link import SIDES
from kgshard.optim import RowOptimizer
from kgshard.planning.plan import plan_training
from kgshard.planning.stored import GraphSize
from kgshard.planning.training import Machine, Training, check_tables, size_words
from kgshard.table import held_rows
from kgshard.training.assemble import build_sampler

FACTOR = 4
"""What a step is said to take is at most so many times what it takes."""
PLENTY = 1 << 60
STORED = [
    *({"optimizer": name, "dtype": dtype} for name in OPTIMIZER_NAMES for dtype in ("float32", "bfloat16")),
    {"shard_relations": "always", "optimizer": "adam-rowstep"},
    {"model": "tucker", "optimizer": "adagrad-rowwise", "dtype": "bfloat16"},
    {"model": "conve", "dim": 12},
    {"model": "mure", "corruption": "both-sides"},
]


def planned(job: Job, world_size: int = 1) -> Training:
    size = GraphSize(job.num_entities, job.num_relations, len(job.triples))
    return Training(job.config, size, world_size)


def stored_bytes(exchange: Exchange, job: Job) -> tuple[int, int, int]:
    """Return the bytes of this rank's entity rows, of all else that is trained, and of optimizer state."""
    trainer = assembled(exchange, job)[1]
    parameters, optimizers = trainer.parameters, trainer.optimizers
    others = [held_rows(parameters.relations), *parameters.shared.values()]
    every: list[RowOptimizer] = [optimizers.entities, optimizers.relations, *optimizers.shared.values()]
    state = [values for optimizer in every for values in optimizer.state().values()]
    return (
        parameters.entities.weight.nbytes,
        sum(values.nbytes for values in others),
        sum(values.nbytes for values in state),
    )


@pytest.mark.parametrize("case", STORED, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_tables_and_optimizer_state_are_counted_exactly(case: dict[str, Any], world_size: int) -> None:
    job = random_job(num_relations=4, **case)
    counted = planned(job, world_size).rank_bytes()
    everyone = ThreadWorld(world_size).run(stored_bytes, job)
    assert everyone[0] == (counted.entities, counted.relations, counted.optimizer)
    assert max(sum(each) for each in everyone) == sum(everyone[0])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "case",
    [
        {"optimizer": "adam-rowstep", "dtype": "bfloat16"},
        {"model": "tucker", "optimizer": "adagrad"},
        {"save_optimizer": False, "shard_relations": "always"},
    ],
    ids=str,
)
def test_a_checkpoint_is_as_large_as_planned_up_to_headers(tmp_path: Path, case: dict[str, Any]) -> None:
    graph = write_graph(tmp_path / "graph", ring(300, 3))
    case = {"dim": 8, "epochs": 1} | case
    plan = kgshard.plan(graph, probe=0, **case)
    run = kgshard.train(graph, out=tmp_path / "run", quiet=True, **case)
    files = run.checkpoint.manifest.files
    headers = sum(file.bytes for file in files.values()) - plan.checkpoint
    assert 0 < headers < 1000 * len(files)


def large_job(**settings: Any) -> Job:
    is_sampled = settings.get("train_type", "negative-sampling") == "negative-sampling"
    sizes = {"dim": 96, "batch_size": 256, **({"negatives": 512} if is_sampled else {})}
    return random_job(1024, 5000, 20, **sizes | settings)


STEPS = [
    *({"model": name} for name in SCORING),
    *({"model": "complex", "loss": loss} for loss in ("self-adversarial", "margin", "bce")),
    *({"model": "transe-l1", "loss": loss} for loss in ("self-adversarial", "margin", "bce")),
    *({"model": "transh", "loss": loss} for loss in ("self-adversarial", "bce")),
    *({"train_type": kind, "loss": loss} for kind in ("1vsall", "kvsall") for loss in ("softmax", "bce")),
    {"train_type": "1vsall", "model": "transe-l1"},
    {"train_type": "kvsall", "model": "transh", "accumulate": 2},
    {"chunk_size": 32},
    {"negatives_from": "typed"},
    {"n3": 0.1, "l2": 0.1, "dropout": 0.1},
    {"accumulate": 4, "optimizer": "adam"},
    {"relation_prediction": 1.0},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_step_takes_no_more_than_planned_and_not_far_less(case: dict[str, Any]) -> None:
    job = large_job(**case)
    seen, bound = peak_of_a_step(SingleExchange(), job), planned(job).rank_bytes().activations
    assert seen <= bound <= FACTOR * seen


@pytest.mark.processes
@pytest.mark.parametrize("case", [{}, {"shard_relations": "always"}, {"train_type": "1vsall"}], ids=str)
def test_a_step_among_ranks_takes_no_more_than_planned_and_not_far_less(
    gloo_pool: GlooPool, tmp_path: Path, case: dict[str, Any]
) -> None:
    job = large_job(**case)
    bytes_each = planned(job, 2).rank_bytes()
    bound = bytes_each.activations + bytes_each.exchange
    for seen in gloo_pool.run(2, tmp_path, peak_of_a_step, job):
        assert seen <= bound <= FACTOR * seen


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"negatives_from": "degree"},
        {"negatives_from": "typed", "filter_negatives": True},
        {"train_type": "kvsall"},
    ],
    ids=str,
)
def test_indexes_of_triples_take_no_more_than_planned_and_not_far_less(case: dict[str, Any]) -> None:
    job = random_job(100_000, 50_000, 20, dim=4, **case)
    tracemalloc.start()
    first = next(build_sampler(SingleExchange(), job.link_model, job.triples, job.config).epoch(0))
    seen = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first.num_questions >= len(SIDES)
    assert 0.9 * seen <= planned(job).rank_bytes().triples <= FACTOR * seen


trainings = st.builds(
    lambda sizes, ranks, **chosen: Training(TrainConfig(**chosen), GraphSize(*sizes), ranks),
    st.tuples(st.integers(1, 10**9), st.integers(1, 10**5), st.integers(1, 10**9)),
    st.integers(1, 8),
    model=st.sampled_from(["complex", "rescal", "quate", "tucker", "conve", "transe"]),
    dim=st.sampled_from([12, 64, 200]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    optimizer=st.sampled_from(OPTIMIZER_NAMES),
)
machines = st.builds(Machine, memory=st.integers(10**8, 10**12), disk=st.integers(10**8, 10**12))


@settings(max_examples=60, deadline=None)
@given(trainings, machines)
def test_what_a_plan_says_fits_does(training: Training, machine: Machine) -> None:
    plan = plan_training(training, machine)
    assert plan.fits == training.fits(machine) == (training.size.entities <= plan.largest)
    for entities in {plan.largest, plan.largest + 1} - {0}:
        other = replace(training, size=replace(training.size, entities=entities))
        assert other.fits(machine) == (entities <= plan.largest)
    assert not (plan.fits and plan.suggestions)
    for each in plan.suggestions:
        other = changed(training, each.change)
        assert each.need == other.need()
        assert other.fits_memory(machine)


def changed(training: Training, words: str) -> Training:
    """Return a training with what a suggestion says."""
    if "machines" in words:
        return replace(training, machines=int(words.split()[0]))
    if words.startswith("--nproc"):
        return replace(training, nproc_per_node=int(words.split()[1]))
    if words == "--no-save-optimizer":
        return replace(training, config=replace(training.config, save_optimizer=False))
    given = words.split()
    options = dict(zip(given[::2], given[1::2], strict=True))
    values = {
        name[2:].replace("-", "_"): int(value) if name == "--dim" else value
        for name, value in options.items()
    }
    return replace(training, config=replace(training.config, **values))


def test_the_widest_rows_that_fit_are_suggested() -> None:
    training = Training(TrainConfig(dim=200), GraphSize(10**6, 100, 10**6))
    machine = Machine(memory=training.need().memory - 400 * 10**6, disk=PLENTY)
    words = [each.change for each in plan_training(training, machine).suggestions]
    [dim] = [int(each.split()[1]) for each in words if each.startswith("--dim")]
    assert changed(training, f"--dim {dim}").fits(machine)
    assert not changed(training, f"--dim {dim + 2}").fits(machine)
    assert "--optimizer adagrad-rowwise" in words
    assert "2 machines like this one, --nproc-per-node 1 on each" in words


def test_as_many_machines_are_suggested_as_are_needed() -> None:
    training = Training(TrainConfig(optimizer="sgd", dtype="bfloat16"), GraphSize(10**8, 10, 10**6))
    machine = Machine(memory=10**10, disk=PLENTY)
    *_, last = plan_training(training, machine).suggestions
    assert last.change.startswith("3 machines like this one")
    assert not replace(training, machines=2).fits(machine)


def test_optimizer_state_is_left_out_where_only_the_disk_is_small() -> None:
    training = Training(TrainConfig(), GraphSize(10**6, 10, 10**6))
    machine = Machine(memory=PLENTY, disk=training.need().disk - 1)
    assert [each.change for each in plan_training(training, machine).suggestions] == ["--no-save-optimizer"]


def test_what_lies_on_a_gpu_is_not_counted_in_memory() -> None:
    training = Training(TrainConfig(), GraphSize(10**6, 10, 10**6), 2)
    rank, on_cpu, on_two = training.rank_bytes(), training.need(), training.need(2)
    assert on_cpu.gpu == 0
    assert on_two.gpu == rank.total - rank.triples - rank.process
    assert on_cpu.memory - on_two.memory == 2 * on_two.gpu
    assert training.need(1).gpu == 2 * on_two.gpu
    beside = replace(training, config=TrainConfig(optimizer_device="cpu")).need(2)
    assert on_two.gpu - beside.gpu == rank.optimizer == (beside.memory - on_two.memory) / 2


@pytest.mark.processes
def test_steps_are_timed_on_real_ranks_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = write_graph(tmp_path / "graph", ring(300, 3))
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = kgshard.plan(graph, nproc_per_node=2, probe=0.05, dim=8, epochs=7)
    assert tree(tmp_path) == before
    assert plan.speed is not None
    assert plan.speed.entities == 300
    assert plan.speed.epoch_seconds == pytest.approx(300 / plan.speed.triples_per_second)
    assert plan.speed.training_seconds == pytest.approx(7 * plan.speed.epoch_seconds)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["negative-sampling", "kvsall"])
def test_a_graph_far_too_large_is_timed_with_a_part_of_its_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kgshard.planning.training._TIMED_NUMBERS", 32 * 128)
    graph = {"num_entities": 10**12, "num_relations": 10**6, "num_triples": 10**9}
    plan = kgshard.plan(**graph, probe=0.01, dim=128, batch_size=4, train_type=kind)
    assert not plan.fits
    assert plan.speed is not None
    assert plan.speed.entities == 32
    assert plan.speed.epoch_seconds == pytest.approx(10**9 / plan.speed.triples_per_second)


def test_a_step_that_does_not_fit_is_not_timed() -> None:
    plan = kgshard.plan(num_entities=9, num_relations=1, num_triples=9, dim=1 << 40)
    assert not plan.fits
    assert plan.largest == 0
    assert plan.speed is None


@pytest.mark.usefixtures("here")
def test_training_refuses_tables_that_the_machine_cannot_hold(tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "graph", ring(300, 3))
    with pytest.raises(ConfigError, match=r"need 2\.\d TB of memory, but this machine has .*kgshard plan"):
        kgshard.train(graph, out=tmp_path / "run", dim=2 * 10**9, optimizer="sgd")
    assert not (tmp_path / "run").exists()


def test_only_tables_that_cannot_be_are_refused() -> None:
    """Three ranks of two machines hold half of the rows here."""
    training = Training(TrainConfig(optimizer="sgd"), GraphSize(6 * 10**6, 1, 1), 3, machines=2)
    tables = 3 * (10**6 * 128 * 4 + 2 * 128 * 4)
    check_tables(training, tables)
    with pytest.raises(ConfigError, match=r"tables and optimizer state need 1\.5 GB of memory"):
        check_tables(training, tables - 1)


MEMINFO = "MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable: 5000 kB\nSwapTotal: 1000 kB\n"


VERSION_2 = {
    "a/memory.max": "3072000",
    "a/memory.current": "1100000",
    "a/memory.stat": "inactive_file 76000",
    "a/b/memory.max": "max",
    "a/b/memory.current": "7",
    "a/b/memory.stat": "inactive_file 1",
}
VERSION_1 = {
    "memory/a/memory.limit_in_bytes": "3072000",
    "memory/a/memory.usage_in_bytes": "1100000",
    "memory/a/memory.stat": "inactive_file 5\ntotal_inactive_file 76000",
}


@pytest.mark.parametrize(("group", "files"), [("0::/a/b", VERSION_2), ("4:cpu,memory:/a", VERSION_1)])
def test_the_limits_of_a_container_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    monkeypatch.setattr("kgshard.machine._PROC", tmp_path / "proc")
    monkeypatch.setattr("kgshard.machine._CGROUPS", tmp_path)
    assert (total_memory(), available_memory()) == (9000 * 1024, 5000 * 1024)
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert (total_memory(), available_memory()) == (4000 * 1024, 3072000 - 1024000)


SIZES = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 KB", 5312 * 10**6: "5.3 GB", 10**16: "10,000.0 TB"}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_said_in_words(size: int) -> None:
    assert size_words(size) == SIZES[size]
