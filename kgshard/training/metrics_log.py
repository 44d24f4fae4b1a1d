"""What a training says about itself as it goes: RUN/metrics.jsonl, and TensorBoard's events on request.

A line an epoch: {"epoch", "step", "loss", "seconds"}; a line an evaluation: {"epoch", "step", "valid":
{"mrr", "mr", "hits@k", ...}, "seconds"}, and where these are estimates their "intervals". Seconds count from
the first step.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from kgshard.errors import ConfigError
from kgshard.runs import METRICS_FILE


class MetricsLog:
    """Appends to a run's records; one rank does."""

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        """Start the clock.

        Raises:
            ConfigError: TensorBoard's events are wanted, and it is not installed.
        """
        self._path = folder / METRICS_FILE
        self._events = _event_writer(folder) if tensorboard else None
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the first step."""
        return time.monotonic() - self._began

    def epoch(self, *, epoch: int, step: int, loss: float) -> None:
        """Record an epoch's mean loss a question."""
        self._append({"epoch": epoch, "step": step, "loss": loss}, {"loss": loss})

    def evaluation(self, *, epoch: int, step: int, figures: dict[str, Any]) -> None:
        """Record how valid triples were ranked; see `ValidEvaluator.figures`."""
        named = {f"valid/{name.replace('@', '_at_')}": value for name, value in figures["valid"].items()}
        self._append({"epoch": epoch, "step": step, **figures}, named)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def _append(self, line: dict[str, Any], scalars: dict[str, float]) -> None:
        line["seconds"] = round(self.seconds, 3)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, line["step"])


def _event_writer(folder: Path) -> Any:
    check_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def check_tensorboard() -> None:
    """Raise ConfigError where TensorBoard is not installed."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs the package tensorboard: pip install 'kgshard[tensorboard]'")
