"""Progress of files: bytes and MB/s on a terminal, nothing elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from graphs import make_run, ring
from kgshard_tools.progress import byte_progress
from kgshard_tools.rows import no_progress

import kgshard
from kgshard.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path, ring(2000), dim=128, world_size=2)


def seen_on_a_terminal(command: list[str]) -> str:
    """Run a command with a terminal for its stderr; return what the terminal was sent."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        sent = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # The other end was closed.
                break
            if not block:
                break
            sent += block
    os.close(ours)
    assert process.returncode == 0
    return sent.decode()


@pytest.mark.parametrize("task", [["merge-shards", "--dtype", "bfloat16"], ["export", "--format", "tsv"]])
def test_a_terminal_shows_bytes_and_their_rate(run: Run, task: list[str]) -> None:
    command = [sys.executable, "-m", "kgshard", task[0], str(run.folder), *task[1:]]
    sent = seen_on_a_terminal(command)
    assert "B/s" in sent
    assert seen_on_a_terminal([*command, "--quiet"]) == ""


def test_elsewhere_nobody_is_told(capfd: pytest.CaptureFixture[str], run: Run) -> None:
    with byte_progress(quiet=False) as advance:
        assert advance is no_progress
    kgshard.merge_shards(run.folder)
    assert capfd.readouterr() == ("", "")
