"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import GlooPool

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
