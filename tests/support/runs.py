"""Runs that begin and are not trained, for tests that train or fill them themselves."""

from __future__ import annotations

from pathlib import Path

from kgshard.config import TrainConfig
from kgshard.runs import Run, open_run
from kgshard.start import started_run


def begun_run(data: Path, out: Path, config: TrainConfig) -> Run:
    """Make a run folder without a checkpoint, and let go of it."""
    with started_run(data, out, config):
        pass
    return open_run(out)
