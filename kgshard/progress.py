"""What a person sees while something runs: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol

_PLAIN_SECONDS = 10.0
_LIVE_SECONDS = 0.5


class Progress(Protocol):
    """Told about every step of a training."""

    def step(self, *, epoch: int, step: int, loss: float, num_triples: int) -> None:
        """Say that `num_triples` more were trained on, in a 1-based epoch and step."""

    def close(self) -> None:
        """End the line."""


class Silent:
    """Says nothing."""

    def step(self, *, epoch: int, step: int, loss: float, num_triples: int) -> None:
        pass

    def close(self) -> None:
        pass


class StderrProgress:
    """One line on stderr: epoch, triples a second, loss, time left."""

    def __init__(self, *, num_epochs: int, num_triples: int) -> None:
        """Start the clock; `num_triples` are trained on in each of `num_epochs`."""
        self._num_epochs = num_epochs
        self._total = num_epochs * num_triples
        self._done = 0
        self._began = self._last_line = time.monotonic()
        self._live = sys.stderr.isatty()
        self._loss = float("nan")

    def step(self, *, epoch: int, step: int, loss: float, num_triples: int) -> None:
        self._done += num_triples
        # A running mean over about a hundred steps; one step's loss is noise.
        self._loss = loss if self._loss != self._loss else 0.99 * self._loss + 0.01 * loss
        now = time.monotonic()
        if now - self._last_line >= (_LIVE_SECONDS if self._live else _PLAIN_SECONDS):
            self._last_line = now
            self._write(self._text(epoch, now))

    def close(self) -> None:
        if self._live and self._done:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _text(self, epoch: int, now: float) -> str:
        rate = self._done / max(now - self._began, 1e-9)
        left = (self._total - self._done) / rate
        return (
            f"epoch {epoch}/{self._num_epochs}  {100 * self._done / self._total:3.0f}%  "
            f"{rate:,.0f} triples/s  loss {self._loss:.4f}  {format_seconds(left)} left"
        )

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if self._live else f"{text}\n")
        sys.stderr.flush()


def format_seconds(seconds: float) -> str:
    """Return a duration as people write it.

    Example:
        >>> format_seconds(5), format_seconds(3725)
        ('0:05', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
