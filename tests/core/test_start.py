"""A run begins where nothing is lost: one writer at a time, and what is finished stays."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import tree
from ranking_functions import begin_run, chain, random_tables, save_on_threads, sharded, write_graph
from runs import begun_run
from worlds import ThreadWorld

import kgshard.api
import kgshard.devices
import kgshard.start
from kgshard import evaluate, ingest, train
from kgshard.checkpoint import save_checkpoint
from kgshard.config import TrainConfig, read_settings
from kgshard.errors import ConfigError, NonFiniteError, RankFailureError, RunError
from kgshard.exchange import Exchange
from kgshard.files import TEMPORARY_PREFIX
from kgshard.runs import Run, open_run
from kgshard.start import replacing_run, started_run

CONFIG = TrainConfig(model="distmult", dim=4, epochs=1, device="cpu")
SETTINGS: dict[str, Any] = {"model": "distmult", "dim": 4, "epochs": 1, "device": "cpu"}
HOLDER = """
import os, signal, sys
from kgshard.checkpoint import save_checkpoint
from kgshard.config import TrainConfig
from kgshard.start import started_run
with started_run(sys.argv[1], sys.argv[2], TrainConfig(model="distmult", dim=4)):
    print("held", flush=True)
    signal.pause()
"""


REPLACER = """
import signal, sys
from kgshard.start import replacing_run
with replacing_run(sys.argv[1]):
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "graph", train=chain(6), test=chain(3))


@pytest.fixture
def finished(tmp_path: Path) -> Run:
    """A run with a checkpoint at step 1."""
    run = begin_run(tmp_path / "finished", train=chain(6), test=chain(3))
    save_on_threads(run, 2, *random_tables(run, 0))
    return open_run(run.folder)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- what a run begins with


def test_a_run_holds_its_settings_for_another_like_it(tmp_path: Path, graph: Path) -> None:
    config = TrainConfig(model="keci:1,1", dim=9, lr=1e-05, negatives_from="typed", filter_negatives=True)
    run = begun_run(graph, tmp_path / "run", config)
    assert TrainConfig.from_dict(read_settings(run.folder / "config.toml")) == config
    assert TrainConfig.from_dict(open_run(run.folder).info.config) == config
    assert names(run.folder) == {"config.toml", "data", "run.json"}


def test_a_run_knows_its_model_by_the_settings(tmp_path: Path, graph: Path) -> None:
    config = TrainConfig(model="tucker:3", dim=8, corruption="both-sides")
    model = begun_run(graph, tmp_path / "run", config).model
    assert model == config.link_model(num_entities=6, num_relations=1)
    assert (model.relation_dim, model.num_relation_rows) == (3, 1)


# --- --overwrite


def test_a_finished_run_is_replaced_by_its_finished_successor(finished: Run, graph: Path, here: None) -> None:
    """The name is the same, the run another; nothing is left beside it."""
    before, old = names(finished.folder.parent), finished.info.id
    new = train(graph, out=finished.folder, overwrite=True, quiet=True, **SETTINGS)
    assert new.folder == finished.folder
    assert new.info.id != old
    assert open_run(finished.folder).info.id == new.info.id
    assert open_run(finished.folder).checkpoint.manifest.run_id == new.info.id
    assert names(finished.folder.parent) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "tucker", "eval_every": 1, "epochs": 2},
        {"shard_relations": "always", "dtype": "bfloat16"},
    ],
)
def test_a_run_with_all_that_training_writes_is_replaced(
    tmp_path: Path, here: None, settings: dict[str, Any]
) -> None:
    """Every file that kgshard writes into a run is known as its own."""
    graph = write_graph(tmp_path / "graph", train=chain(6), valid=chain(4), test=chain(3))
    first = train(graph, out=tmp_path / "run", quiet=True, **SETTINGS | settings)
    evaluate(first, split="test")
    second = train(graph, out=tmp_path / "run", overwrite=True, quiet=True, **SETTINGS)
    assert open_run(tmp_path / "run").info.id == second.info.id != first.info.id


def test_a_training_that_fails_leaves_the_finished_run(finished: Run, graph: Path, here: None) -> None:
    before, table = names(finished.folder.parent), finished.checkpoint.entities.read(range(6))
    with pytest.raises(NonFiniteError):
        train(graph, out=finished.folder, overwrite=True, quiet=True, **SETTINGS | {"lr": 1e38, "epochs": 9})
    assert names(finished.folder.parent) == before
    kept = open_run(finished.folder)
    assert kept.info.id == finished.info.id
    np.testing.assert_array_equal(kept.checkpoint.entities.read(range(6)), table)
    assert evaluate(kept)["protocol"]["triples"] == 2


@pytest.mark.parametrize("option", ["device", "optimizer_device"])
def test_a_device_that_is_not_here_leaves_the_finished_run(
    finished: Run, graph: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(kgshard.devices, "num_cuda_devices", lambda: 0)
    before = names(finished.folder.parent)
    spelt = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{spelt} cuda: this machine has no CUDA devices$"):
        train(graph, out=finished.folder, overwrite=True, quiet=True, **SETTINGS | {option: "cuda"})
    assert names(finished.folder.parent) == before
    assert open_run(finished.folder).checkpoint.manifest.run_id == finished.info.id


def test_the_finished_run_stays_while_its_successor_trains(finished: Run, graph: Path) -> None:
    with started_run(graph, finished.folder, CONFIG, overwrite=True) as run:
        assert run.folder != finished.folder
        assert open_run(finished.folder).checkpoint.step == 1
        save_on_threads(run, 1, *random_tables(run, 1), step=3)
    assert open_run(finished.folder).checkpoint.step == 3


def test_a_finished_run_is_replaced_only_by_name(finished: Run, graph: Path) -> None:
    with pytest.raises(RunError, match="pass --overwrite"), started_run(graph, finished.folder, CONFIG):
        pass
    assert open_run(finished.folder).info.id == finished.info.id


def test_a_run_without_a_checkpoint_is_replaced_without_asking(tmp_path: Path, graph: Path) -> None:
    first = begun_run(graph, tmp_path / "run", CONFIG)
    second = begun_run(graph, tmp_path / "run", CONFIG)
    assert first.info.id != second.info.id
    assert open_run(tmp_path / "run").info.id == second.info.id


def test_a_link_to_a_run_stays_and_what_it_points_to_is_replaced(
    finished: Run, graph: Path, tmp_path: Path
) -> None:
    link = tmp_path / "latest"
    link.symlink_to(finished.folder)
    with started_run(graph, link, CONFIG, overwrite=True) as run:
        save_on_threads(run, 1, *random_tables(run, 1), step=3)
    assert link.is_symlink()
    assert open_run(finished.folder).info.id == open_run(link).info.id != finished.info.id


# --- what kgshard did not write


@pytest.mark.parametrize("where", ["", "checkpoints", "data"])
def test_a_run_with_a_file_of_somebody_else_is_never_replaced(finished: Run, graph: Path, where: str) -> None:
    thesis = finished.folder / where / "thesis.txt"
    thesis.write_text("mine")
    with (
        pytest.raises(RunError, match=r"thesis\.txt"),
        started_run(graph, finished.folder, CONFIG, overwrite=True),
    ):
        pass
    assert thesis.read_text() == "mine"
    assert open_run(finished.folder).info.id == finished.info.id


def test_a_file_that_comes_while_the_successor_trains_is_never_lost(
    tmp_path: Path, finished: Run, graph: Path
) -> None:
    """Training takes hours; what is true at its begin may not be at its end."""
    thesis = finished.folder / "thesis.txt"
    with suppress(RunError), started_run(graph, finished.folder, CONFIG, overwrite=True) as run:
        save_on_threads(run, 1, *random_tables(run, 1), step=3)
        thesis.write_text("mine")
    assert list(tmp_path.rglob("thesis.txt"))


def test_an_unfinished_run_with_a_file_of_somebody_else_stays(tmp_path: Path, graph: Path) -> None:
    run = begun_run(graph, tmp_path / "run", CONFIG)
    (run.folder / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match=r"thesis\.txt"):
        begun_run(graph, tmp_path / "run", CONFIG)
    assert (run.folder / "thesis.txt").read_text() == "mine"
    assert open_run(run.folder).info.id == run.info.id


def test_a_prepared_dataset_is_replaced_only_with_overwrite(tmp_path: Path, graph: Path) -> None:
    data = tmp_path / "data"
    ingest(graph, data)
    other = write_graph(tmp_path / "other", train=chain(4))
    with pytest.raises(RunError, match="pass --overwrite"):
        ingest(other, data)
    assert ingest(graph, data, overwrite=True).num_entities == 6
    assert ingest(other, data, overwrite=True).num_entities == 4
    (data / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match=r"thesis\.txt"):
        ingest(graph, data, overwrite=True)
    assert (data / "thesis.txt").read_text() == "mine"


# --- one writer


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_writer_is_refused_and_told_who_is_there(
    tmp_path: Path, graph: Path, overwrite: bool
) -> None:
    held_by = rf"is being written by pid {os.getpid()} on {socket.gethostname()}$"
    with started_run(graph, tmp_path / "run", CONFIG) as run:
        with pytest.raises(RunError, match=held_by):
            begun_run(graph, run.folder, CONFIG)
        if overwrite:
            save_on_threads(run, 1, *random_tables(run, 1))
            with (
                pytest.raises(RunError, match=held_by),
                started_run(graph, run.folder, CONFIG, overwrite=True),
            ):
                pass
        assert open_run(run.folder).info.id == run.info.id
    assert "lock" not in names(run.folder)


def test_a_second_successor_of_a_finished_run_is_refused(finished: Run, graph: Path) -> None:
    """Else both train for hours, and one of them for nothing."""
    with started_run(graph, finished.folder, CONFIG, overwrite=True) as run:
        with (
            pytest.raises(RunError, match=rf"is being written by pid {os.getpid()} on "),
            started_run(graph, finished.folder, CONFIG, overwrite=True),
        ):
            pass
        save_on_threads(run, 1, *random_tables(run, 1), step=3)
    assert open_run(finished.folder).checkpoint.step == 3


def test_the_lock_ends_with_its_process(tmp_path: Path, graph: Path) -> None:
    """However it ends: here by SIGKILL, which no process can tidy up after."""
    out = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(graph), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"is being written by pid {holder.pid} on "):
            begun_run(graph, out, CONFIG)
        holder.send_signal(signal.SIGKILL)
    begun_run(graph, out, CONFIG)
    assert not [name for name in names(tmp_path) if name.startswith(TEMPORARY_PREFIX)]


def test_a_place_where_no_run_is_yet_is_held_too(tmp_path: Path, graph: Path) -> None:
    """Else two imports to one new folder both end well, and one of them is gone."""
    out = tmp_path / "there" / "run"
    with replacing_run(out) as temporary:
        for begin in (lambda: replacing_run(out), lambda: started_run(graph, out, CONFIG)):
            with pytest.raises(RunError, match=rf"is being written by pid {os.getpid()} on "), begin():
                pass
        (temporary / "run.json").write_text("the run")
    assert names(out) == {"run.json"}


def test_a_place_that_was_held_by_a_killed_process_is_free(tmp_path: Path, graph: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", REPLACER, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"is being written by pid {holder.pid} on "):
            begun_run(graph, out, CONFIG)
        holder.send_signal(signal.SIGKILL)
    begun_run(graph, out, CONFIG)
    assert names(tmp_path) == {"graph", "run"}
    assert names(out) == {"config.toml", "data", "run.json"}


def test_what_fails_leaves_no_folder_that_was_made_for_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing_run(tmp_path / "a" / "b" / "run"):
        raise ZeroDivisionError
    assert names(tmp_path) == set()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ZeroDivisionError), replacing_run(tmp_path / "empty"):
        raise ZeroDivisionError
    assert names(tmp_path) == {"empty"}
    assert names(tmp_path / "empty") == set()


@pytest.mark.parametrize("content", ["mine", "pid 7 on host\nand more\n"])
def test_a_file_named_lock_of_somebody_else_is_never_lost(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text(content)
    with pytest.raises(RunError, match="is not a kgshard run"), replacing_run(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "lock").read_text() == content


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_that_comes_while_a_run_is_made_is_never_lost(
    tmp_path: Path, finished: Run, is_there: bool
) -> None:
    out = finished.folder if is_there else tmp_path / "new"
    words = r"thesis\.txt.*" if is_there else "exists and is not a kgshard run.*"

    def make() -> None:
        with replacing_run(out, overwrite=is_there) as temporary:
            (out / "thesis.txt").write_text("mine")
            (temporary / "run.json").write_text("the run")

    with pytest.raises(RunError, match=words + "; the new run is ") as caught:
        make()
    assert (out / "thesis.txt").read_text() == "mine"
    kept = Path(str(caught.value).rpartition("the new run is ")[2])
    assert (kept / "run.json").read_text() == "the run"
    if is_there:
        assert open_run(out).info.id == finished.info.id


def test_a_run_that_comes_while_another_is_made_is_replaced_only_by_name(
    tmp_path: Path, finished: Run
) -> None:
    """Somebody moved it there, past the lock."""
    out = tmp_path / "new"

    def make() -> None:
        with replacing_run(out):
            shutil.rmtree(out)
            finished.folder.rename(out)

    with pytest.raises(RunError, match=r"holds a run already.*the new run is"):
        make()
    assert open_run(out).info.id == finished.info.id


def test_a_file_that_comes_while_data_are_prepared_is_never_lost(
    tmp_path: Path, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = kgshard.start._place_dataset
    out = tmp_path / "new"

    def slowly(*arguments: Any) -> Any:
        (out / "thesis.txt").write_text("mine")
        return place(*arguments)

    monkeypatch.setattr(kgshard.start, "_place_dataset", slowly)
    with pytest.raises(RunError, match="exists and is not a kgshard run"):
        begun_run(graph, out, CONFIG)
    assert (out / "thesis.txt").read_text() == "mine"


def test_a_path_that_is_no_text_is_refused_in_one_line(tmp_path: Path, graph: Path) -> None:
    out = tmp_path / os.fsdecode(b"\xff")
    for begin in (lambda: replacing_run(out), lambda: started_run(graph, out, CONFIG)):
        with pytest.raises(RunError, match=r"udcff': a path that is not UTF-8") as caught, begin():
            pass
        str(caught.value).encode()
    assert names(tmp_path) == {"graph"}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_that_was_replaced_meanwhile_gets_no_checkpoint_of_the_old_one(
    tmp_path: Path, graph: Path, world_size: int
) -> None:
    old = begun_run(graph, tmp_path / "run", CONFIG)
    new = begun_run(graph, tmp_path / "run", CONFIG)
    tables = [torch.from_numpy(table) for table in random_tables(new, 0)]
    errors = ThreadWorld(world_size).run(_save_as, old, *tables)
    assert [type(error) for error in errors] == [RunError] + [RankFailureError] * (world_size - 1)
    assert all("was replaced by another run" in str(error) for error in errors)
    assert not list((new.folder / "checkpoints").glob("*"))
    assert "LATEST" not in names(new.folder)


def _save_as(
    exchange: Exchange, run: Run, entities: torch.Tensor, relations: torch.Tensor
) -> Exception | None:
    try:
        save_checkpoint(run, sharded(exchange, entities.numpy()), relations, step=1, epoch=1)
    except Exception as error:
        return error
    return None


def a_link(lock: Path, mine: Path) -> None:
    lock.symlink_to(mine)


def a_dangling_link(lock: Path, mine: Path) -> None:
    lock.symlink_to(mine.with_name("nowhere"))


def a_second_name(lock: Path, mine: Path) -> None:
    os.link(mine, lock)


def a_file(lock: Path, mine: Path) -> None:
    lock.write_text("my notes")


def a_pipe(lock: Path, mine: Path) -> None:
    os.mkfifo(lock)


def a_folder(lock: Path, mine: Path) -> None:
    lock.mkdir()


@pytest.mark.parametrize("what", [a_link, a_dangling_link, a_second_name, a_file, a_pipe, a_folder])
def test_nothing_named_lock_in_a_run_is_written_to_but_our_own(
    tmp_path: Path, finished: Run, what: Callable[[Path, Path], None]
) -> None:
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    what(finished.folder / "lock", mine)
    before, data = tree(finished.folder), finished.dataset.folder
    with pytest.raises(RunError), started_run(data, finished.folder, TrainConfig(dim=2), overwrite=True):
        pass
    with pytest.raises(RunError), replacing_run(finished.folder, overwrite=True):
        pass
    assert tree(finished.folder) == before
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_a_killed_process_left_is_taken_over(finished: Run) -> None:
    (finished.folder / "lock").write_text("pid 1 on elsewhere\n")
    with replacing_run(finished.folder, overwrite=True) as temporary:
        (temporary / "run.json").write_text("{}")
    assert [path.name for path in finished.folder.iterdir()] == ["run.json"]
