"""Ranks are started, heard and ended: their words and exit codes come through, none is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import begun_run

from kgshard import launch
from kgshard.api import train
from kgshard.config import TrainConfig
from kgshard.errors import (
    ConfigError,
    DataError,
    ExchangeMismatchError,
    KgshardError,
    NonFiniteError,
    RankFailureError,
    RunError,
    ShardError,
)
from kgshard.launch import is_rank, run_on_ranks
from kgshard.runs import Run, open_run
from kgshard.training.tasks import train_rank

PRELUDE = """
import json, os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
def say(kind, message, exit_code):
    words = {"kind": kind, "message": message, "exit_code": exit_code}
    (folder / f"error-{rank}.json").write_text(json.dumps(words))
    sys.exit(1)
def other_has_ended():
    while not (folder / "ending").exists():
        time.sleep(0.01)
"""
SLEEP = "time.sleep(600)"

Script = Callable[[str], list[subprocess.Popen[bytes]]]


@pytest.fixture
def ranks_run(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Let ranks run a few lines of Python in place of kgshard.rank; returns the processes to come."""

    def use(lines: str) -> list[subprocess.Popen[bytes]]:
        started: list[subprocess.Popen[bytes]] = []
        popen = subprocess.Popen

        def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            assert command[1:4] == ["-P", "-m", "kgshard.rank"]
            started.append(popen([command[0], "-c", PRELUDE + lines, command[-1]], **options))
            return started[-1]

        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(launch, "_WORDS_SECONDS", 0.3)
        monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.3)
        return started

    return use


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Callable[[], Any], what: str) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"waited in vain for {what}")


# --- the launcher alone


def test_rank_0s_result_is_handed_back(ranks_run: Script) -> None:
    started = ranks_run(
        """
job = json.loads((folder / "job.json").read_text())
if rank == 0:
    (folder / "result.json").write_text(json.dumps({"folder": str(folder), **job}))
"""
    )
    result = run_on_ranks("train", {"run": "r", "quiet": True}, 3)
    assert not Path(result.pop("folder")).exists()
    assert result == {"task": "train", "arguments": {"run": "r", "quiet": True}, "world_size": 3}
    assert [process.returncode for process in started] == [0, 0, 0]


def test_every_rank_knows_its_place(ranks_run: Script, tmp_path: Path) -> None:
    ranks_run(
        f"""
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "KGSHARD_RENDEZVOUS", "OMP_NUM_THREADS"]
place = {{name: os.environ[name] for name in names}}
(pathlib.Path({str(tmp_path)!r}) / f"{{rank}}.json").write_text(json.dumps(place))
if rank == 0:
    (folder / "result.json").write_text("{{}}")
"""
    )
    run_on_ranks("train", {}, 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (first.pop("RANK"), first.pop("LOCAL_RANK")) == ("0", "0")
    assert (second.pop("RANK"), second.pop("LOCAL_RANK")) == ("1", "1")
    assert first == second
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert int(first["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert Path(first["KGSHARD_RENDEZVOUS"]).is_absolute()


def test_two_launches_at_once_do_not_meet(ranks_run: Script) -> None:
    """B27: the place to meet is the launch's own."""
    ranks_run(
        """
meeting = os.environ["KGSHARD_RENDEZVOUS"]
if rank == 0:
    (folder / "result.json").write_text(json.dumps({"meeting": meeting}))
"""
    )
    meetings: list[str] = []
    threads = [
        threading.Thread(target=lambda: meetings.append(run_on_ranks("train", {}, 2)["meeting"]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(meetings)) == 2


def test_a_ranks_words_and_exit_code_come_through(ranks_run: Script) -> None:
    started = ranks_run(f"say('DataError', 'no such thing', 2) if rank == 1 else {SLEEP}")
    with pytest.raises(KgshardError, match=r"^no such thing$") as caught:
        run_on_ranks("train", {}, 3)
    assert caught.value.exit_code == 2
    assert not any(is_alive(process.pid) for process in started)


@pytest.mark.parametrize("loser", [0, 1])
def test_the_cause_is_told_not_its_echo(ranks_run: Script, loser: int) -> None:
    """A rank that only lost its peer may be heard first."""
    ranks_run(
        f"""
if rank == {loser}:
    (folder / "ending").touch()
    say("RankFailureError", "lost a peer: Connection closed", 1)
other_has_ended()
time.sleep(0.05)
say("OSError", "rank x: OSError: disk full", 1)
"""
    )
    with pytest.raises(KgshardError, match=r"^rank x: OSError: disk full$"):
        run_on_ranks("train", {}, 2)


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_rank_is_named_with_its_pid_and_signal(ranks_run: Script, killed: int) -> None:
    started = ranks_run(f"os.kill(os.getpid(), signal.SIGKILL) if rank == {killed} else {SLEEP}")
    with pytest.raises(RankFailureError) as caught:
        run_on_ranks("train", {}, 3)
    pid = started[killed].pid
    assert str(caught.value) == f"rank {killed} (pid {pid}) ended by signal SIGKILL, with no message"
    assert caught.value.exit_code == 1
    assert not any(is_alive(process.pid) for process in started)


def test_a_rank_that_leaves_without_a_word_is_named_with_its_exit_code(ranks_run: Script) -> None:
    started = ranks_run(f"os._exit(3) if rank == 1 else {SLEEP}")
    with pytest.raises(RankFailureError) as caught:
        run_on_ranks("train", {}, 2)
    assert str(caught.value) == f"rank 1 (pid {started[1].pid}) ended by exit code 3, with no message"


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_named_though_its_peer_complains(
    ranks_run: Script, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """Both have ended when the launcher looks: whose complaint is read first must not matter."""
    started = ranks_run(
        f"""
if rank == {killed}:
    (folder / "ending").touch()
    os.kill(os.getpid(), signal.SIGKILL)
other_has_ended()
say("RankFailureError", f"rank {{rank}}: lost a peer: Connection closed", 1)
"""
    )

    def wait(ranks: list[subprocess.Popen[bytes]]) -> bool:
        for process in ranks:
            process.wait()
        return ended(ranks)

    ended = launch._wait
    monkeypatch.setattr(launch, "_wait", wait)
    with pytest.raises(RankFailureError) as caught:
        run_on_ranks("train", {}, 2)
    assert f"rank {killed} (pid {started[killed].pid}) ended by signal SIGKILL" in str(caught.value)


def test_a_rank_that_leaves_early_without_a_result_is_a_failure(ranks_run: Script) -> None:
    """Exit code 0 is no success where nothing was made."""
    ranks_run("os._exit(0)")
    with pytest.raises(RankFailureError, match="rank 0"):
        run_on_ranks("train", {}, 2)


def test_ranks_that_ignore_a_polite_end_are_killed(ranks_run: Script) -> None:
    started = ranks_run(
        f"""
if rank == 1:
    other_has_ended()
    say("DataError", "over", 2)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / "ending").touch()
{SLEEP}
"""
    )
    with pytest.raises(KgshardError, match="over"):
        run_on_ranks("train", {}, 2)
    assert started[0].returncode == -signal.SIGKILL
    assert not is_alive(started[0].pid)


def test_ranks_end_when_the_launcher_is_interrupted(
    ranks_run: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = ranks_run(SLEEP)

    def interrupt(ranks: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_on_ranks("train", {}, 2)
    assert len(started) == 2
    assert not any(is_alive(process.pid) for process in started)


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_leaves_early_with_exit_code_0_is_the_cause_of_a_lost_peer(
    ranks_run: Script, early: int
) -> None:
    started = ranks_run(
        f"""
if rank == {early}:
    (folder / "ending").touch()
    os._exit(0)
other_has_ended()
time.sleep(0.1)
say("RankFailureError", f"rank {{rank}}: lost a peer", 1)
"""
    )
    with pytest.raises(RankFailureError) as caught:
        run_on_ranks("train", {}, 2)
    assert str(caught.value).startswith(f"rank {early} (pid {started[early].pid}) ended by exit code 0")


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (ConfigError, 2),
        (DataError, 2),
        (RunError, 2),
        (ShardError, 2),
        (ExchangeMismatchError, 1),
        (NonFiniteError, 1),
    ],
)
def test_an_error_keeps_its_type_on_the_way_from_a_rank(
    ranks_run: Script, kind: type[KgshardError], exit_code: int
) -> None:
    """So that `except DataError` means the same whatever the number of ranks."""
    ranks_run(f"say({kind.__name__!r}, 'these words', {exit_code})")
    with pytest.raises(KgshardError, match=r"^these words$") as caught:
        run_on_ranks("train", {}, 2)
    assert type(caught.value) is kind
    assert caught.value.exit_code == exit_code


def test_ranks_that_could_not_all_be_started_leave_none(
    ranks_run: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = ranks_run(SLEEP)
    start = subprocess.Popen

    def start_one(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(BlockingIOError):
        run_on_ranks("train", {}, 2)
    assert len(started) == 1
    assert not is_alive(started[0].pid)


@pytest.mark.parametrize("nproc", ["2", True, 2.0, None])
def test_a_number_of_ranks_that_is_no_number_is_refused(tmp_path: Path, nproc: Any) -> None:
    with pytest.raises(ConfigError, match="--nproc-per-node must be a whole number, got "):
        train("world", out=tmp_path / "run", nproc_per_node=nproc)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nproc", [0, -1])
def test_no_ranks_are_refused_before_anything_is_written(tmp_path: Path, nproc: int) -> None:
    with pytest.raises(ConfigError, match=f"--nproc-per-node must be >= 1, got {nproc}"):
        train("world", out=tmp_path / "run", nproc_per_node=nproc)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, False),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"KGSHARD_RENDEZVOUS": "/x", "RANK": "0", "WORLD_SIZE": "2"}, True),
    ],
)
def test_a_rank_is_who_a_launcher_started(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "KGSHARD_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_rank() == expected


# --- real ranks

SETTINGS: dict[str, Any] = {
    "model": "complex",
    "dim": 6,
    "epochs": 3,
    "batch_size": 8,
    "negatives": 5,
    "n3": 0.01,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty triples about nine entities."""
    folder = tmp_path_factory.mktemp("graph")
    source = np.random.default_rng(0)
    lines = [f"e{h}\tr{r}\te{t}\n" for h, r, t in source.integers(0, [9, 2, 9], size=(20, 3))]
    (folder / "train.tsv").write_text("".join(lines))
    for split in ("valid", "test"):
        (folder / f"{split}.tsv").write_text(lines[0])
    return folder


@pytest.fixture(scope="module")
def trained_on_two_ranks(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(graph, out=tmp_path_factory.mktemp("two") / "run", nproc_per_node=2, quiet=True, **SETTINGS)


@pytest.fixture
def denormals() -> Iterator[None]:
    """Put back what train_rank sets for its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def tensor_files(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.checkpoint.folder.glob("*.safetensors"))}


def losses(run: Run) -> list[float]:
    return [json.loads(line)["loss"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.processes
def test_torchrun_makes_the_same_bytes(graph: Path, trained_on_two_ranks: Run, tmp_path: Path) -> None:
    options = [
        text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", f"{value}")
    ]
    launcher = ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [*launcher, "--nproc-per-node", "2", "-m", "kgshard", "train", str(graph), *options]
    done = subprocess.run(
        [sys.executable, "-m", *command, "-o", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    expected = tensor_files(trained_on_two_ranks)
    assert sorted(expected) == [
        "entity-00001-of-00002.safetensors",
        "entity-00002-of-00002.safetensors",
        "optim-00001-of-00002.safetensors",
        "optim-00002-of-00002.safetensors",
        "optim-relation.safetensors",
        "relation.safetensors",
    ]
    assert tensor_files(run) == expected
    assert losses(run) == losses(trained_on_two_ranks)
    # One rank speaks.
    assert done.stdout.count("next: kgshard evaluate") == done.stderr.count("\ntrain: ") == 1


@pytest.mark.processes
def test_one_rank_trains_the_same_tables(
    graph: Path, trained_on_two_ranks: Run, tmp_path: Path, denormals: None
) -> None:
    run = begun_run(graph, tmp_path / "run", TrainConfig.from_dict(SETTINGS))
    train_rank(str(run.folder), quiet=True)
    np.testing.assert_allclose(losses(run), losses(trained_on_two_ranks), rtol=1e-5)
    one, two = run.checkpoint, trained_on_two_ranks.checkpoint
    assert (one.world_size, two.world_size, one.step, two.step) == (1, 2, 9, 9)
    for name in ("entities", "relations"):
        tables = [getattr(checkpoint, name) for checkpoint in (one, two)]
        ours, theirs = (table.read(range(table.shape[0])) for table in tables)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.processes
def test_another_run_is_noticed(
    graph: Path, trained_on_two_ranks: Run, tmp_path: Path, denormals: None
) -> None:
    """Negative control: a seed of its own changes losses and bytes."""
    run = begun_run(graph, tmp_path / "run", TrainConfig.from_dict(SETTINGS | {"seed": 1}))
    train_rank(str(run.folder), quiet=True)
    assert not np.allclose(losses(run), losses(trained_on_two_ranks), rtol=1e-5)
    name = "relation.safetensors"
    assert tensor_files(run)[name] != tensor_files(trained_on_two_ranks)[name]


@pytest.mark.processes
def test_a_real_ranks_error_comes_through_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(KgshardError) as caught:
        run_on_ranks("evaluate", {"run": str(tmp_path / "none")}, 2)
    assert caught.value.exit_code == 2
    assert str(tmp_path / "none") in str(caught.value)
    assert "\n" not in str(caught.value)


LAUNCHER = """
import sys
from kgshard.launch import run_on_ranks
try:
    run_on_ranks("train", {"run": sys.argv[1], "quiet": True}, 2)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def endless(graph: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher in its own process whose two ranks are in the midst of training; and their pids."""
    run = begun_run(graph, tmp_path / "run", TrainConfig.from_dict(SETTINGS | {"epochs": 10**8}))
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run.folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        metrics = run.folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() or process.poll() is not None, "the first epoch")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        pids = [int(pid) for pid in children.split()]
        assert len(pids) == 2
        yield process, pids
        for pid in (process.pid, *pids):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.processes
def test_a_rank_killed_in_training_is_named_and_none_is_left(
    endless: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, pids = endless
    os.kill(pids[1], signal.SIGKILL)
    said, _ = process.communicate()
    assert re.fullmatch(
        rf"RankFailureError rank 1 \(pid {pids[1]}\) ended by signal SIGKILL, with no message\n", said
    )
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.processes
def test_no_rank_outlives_its_launcher(endless: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = endless
    process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "the ranks to end")


@pytest.mark.processes
def test_modules_beside_the_users_data_are_not_imported(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A numpy.py in the working directory, and relative names that still mean the same there."""
    shutil.copytree(graph, tmp_path / "graph")
    for name in ("numpy", "torch", "msgspec", "kgshard", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    run = train("graph", out="run", quiet=True, **SETTINGS | {"epochs": 1})
    assert run.checkpoint.manifest.epoch == 1
    assert (tmp_path / "run" / "LATEST").is_file()
