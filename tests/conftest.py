"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worlds import GlooPool

import kgshard.api
from kgshard.rank import run_task

_SHARED_DATA = Path(
    os.environ.get("KGSHARD_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
)


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Three warm processes; see worlds.GlooPool."""
    pool = GlooPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs; tests skip where it is absent."""
    if not _SHARED_DATA.is_dir():
        pytest.skip(f"no real graphs at {_SHARED_DATA} (set KGSHARD_TEST_DATA)")
    return _SHARED_DATA


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the one rank of kgshard.train and kgshard.evaluate be this process: it has torch already."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(kgshard.api, "run_on_ranks", lambda task, arguments, nproc: run_task(task, arguments))
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
