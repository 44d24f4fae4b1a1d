"""What a person sees while training runs."""

from __future__ import annotations

import math
import sys
import time
from typing import Protocol

import rich.console
import rich.progress
import rich.text

from kgshard.stderr import tell

_PLAIN_SECONDS = 10.0


class Progress(Protocol):
    """Told about every step of a training."""

    def step(self, *, epoch: int, loss: float, num_triples: int) -> None:
        """Say that `num_triples` more were trained on, in an epoch counted from 1."""

    def say(self, line: str) -> None:
        """Say something else, such as how valid triples were ranked."""

    def close(self) -> None:
        """Training is over, or failed."""


class Silent:
    """Says nothing."""

    def step(self, *, epoch: int, loss: float, num_triples: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


class PlainProgress:
    """A line on stderr every ten seconds: epoch, triples a second, loss, time left."""

    def __init__(self, *, num_epochs: int, num_triples: int) -> None:
        """Start the clock; `num_triples` are trained on in all epochs together."""
        self._num_epochs = num_epochs
        self._total = num_triples
        self._done = 0
        self._loss = float("nan")
        self._began = self._last_line = time.monotonic()

    def step(self, *, epoch: int, loss: float, num_triples: int) -> None:
        self._done += num_triples
        self._loss = running_mean(self._loss, loss)
        now = time.monotonic()
        if now - self._last_line >= _PLAIN_SECONDS:
            self._last_line = now
            rate = self._done / (now - self._began)
            self.say(
                f"epoch {epoch}/{self._num_epochs}  {100 * self._done / self._total:.0f}%  "
                f"{rate:,.0f} triples/s  loss {self._loss:.4f}  "
                f"{format_seconds((self._total - self._done) / rate)} left"
            )

    def say(self, line: str) -> None:
        tell(line)

    def close(self) -> None:
        pass


class _RateColumn(rich.progress.ProgressColumn):
    """Triples a second, once there are any."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(f"{task.speed or 0:,.0f} triples/s")


class LiveProgress:
    """One line that stays in place, on a terminal."""

    def __init__(self, *, num_epochs: int, num_triples: int) -> None:
        """Start the clock; `num_triples` are trained on in all epochs together."""
        self._num_epochs = num_epochs
        self._loss = float("nan")
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("epoch {task.fields[epoch]}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            _RateColumn(),
            rich.progress.TextColumn("loss {task.fields[loss]:.4f}"),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=num_triples, epoch=f"0/{num_epochs}", loss=self._loss)
        self._bar.start()

    def step(self, *, epoch: int, loss: float, num_triples: int) -> None:
        self._loss = running_mean(self._loss, loss)
        label = f"{epoch}/{self._num_epochs}"
        self._bar.update(self._task, advance=num_triples, epoch=label, loss=self._loss)

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def training_progress(*, num_epochs: int, num_triples: int, quiet: bool) -> Progress:
    """Return what suits stderr: a live line on a terminal, plain lines elsewhere."""
    if quiet:
        return Silent()
    kind = LiveProgress if sys.stderr is not None and sys.stderr.isatty() else PlainProgress
    return kind(num_epochs=num_epochs, num_triples=num_triples)


def running_mean(mean: float, value: float) -> float:
    """Return a mean over about a hundred steps (one step's loss is noise); NaN stands for none yet."""
    return value if math.isnan(mean) else 0.99 * mean + 0.01 * value


def format_seconds(seconds: float) -> str:
    """Return a duration as people write it.

    Example:
        >>> format_seconds(5), format_seconds(3725)
        ('0:05', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
