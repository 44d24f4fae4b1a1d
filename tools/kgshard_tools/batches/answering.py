"""Blocks of questions, asked of a run; and what to do about those that cannot be answered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kgshard.errors import (
    ConfigError,
    DataError,
    UsageError,
)
from kgshard.files import replacing
from kgshard_tools.batches.askers import Asker
from kgshard_tools.batches.reading import Entry
from kgshard_tools.batches.writing import Outcome, choose_writer
from kgshard_tools.results import Answers
from kgshard_tools.rows import Advance, no_progress
from kgshard_tools.written import Written

OnError = Literal["stop", "skip"]
_BLOCK_QUESTIONS = 1024
_BLOCK_ANSWERS = 1 << 18
"""About 100 MB as Python objects."""
_ERRORS_WITH_SUGGESTIONS = 20


@dataclass(slots=True)
class Tally:
    """How a batch went, so far."""

    questions: int = 0
    answers: int = 0
    failed: int = 0
    first_error: str = ""

    def count(self, block: Sequence[Outcome]) -> None:
        self.questions += len(block)
        for outcome in block:
            if outcome.answers is not None:
                self.answers += len(outcome.answers)
            else:
                self.failed += 1
                self.first_error = self.first_error or located(outcome)

    def lines(self) -> list[str]:
        """Say how many questions have no answer, if any, and why the first has none."""
        if not self.failed:
            return []
        return [f"{self.failed:,} of {self.questions:,} questions failed; the first: {self.first_error}"]


def located(outcome: Outcome) -> str:
    """Return an error with the place of its question."""
    where = outcome.entry.where
    return f"{where}: {outcome.error}" if where else outcome.error


class Batch:
    """Blocks of questions to a run, answered one after the other."""

    def __init__(self, asker: Asker, blocks: Iterable[list[Entry]], *, on_error: OnError = "stop") -> None:
        """Nothing is read before `outcomes` is iterated.

        Args:
            asker: What is asked.
            blocks: Of questions; `block_size` says how many it is well to have in one.
            on_error: "stop" at the first question that cannot be answered, or "skip" it.
        """
        self.asker = asker
        self.tally = Tally()
        self._blocks = blocks
        self._on_error = on_error

    def outcomes(self) -> Iterator[list[Outcome]]:
        """Yield what became of each block's questions, in their order.

        Raises:
            DataError: A question cannot be answered, and "stop" was chosen: those before it were yielded.
                Or "skip" was, and none at all could be answered: they were yielded, too.
        """
        self.asker.answer([])  # What is wrong with all questions is said even where there are none.
        for entries in self._blocks:
            block = self._answered(entries)
            stop = next((n for n, outcome in enumerate(block) if outcome.answers is None), len(block))
            if self._on_error == "skip" or stop == len(block):
                yield self._counted(block)
                continue
            if stop:
                yield self._counted(block[:stop])
            raise DataError(located(block[stop]))
        if self.tally.failed and self.tally.failed == self.tally.questions:
            raise DataError(f"no question could be answered; the first: {self.tally.first_error}")

    def _answered(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Answer what can be answered; with "stop", only questions before the first that cannot."""
        errors = {place: entry.error for place, entry in enumerate(entries) if entry.error}
        if self._on_error == "stop" and errors:
            entries = entries[: min(errors) + 1]
        try:
            answers = self._answer_others(entries, errors)
        except UsageError:
            found = self._find_errors(entries, errors)
            if not found:  # It is about all questions, or the run.
                raise
            if self._on_error == "stop":
                entries = entries[: min(found) + 1]
            errors |= found
            answers = self._answer_others(entries, errors)
        return [
            Outcome(entry, None, errors[place]) if place in errors else Outcome(entry, next(answers))
            for place, entry in enumerate(entries)
        ]

    def _answer_others(self, entries: Sequence[Entry], errors: dict[int, str]) -> Iterator[Answers]:
        """Return the answers to all questions but those with errors."""
        good = [entry.given for place, entry in enumerate(entries) if place not in errors]
        return iter(self.asker.answer(good) if good else [])

    def _find_errors(self, entries: Sequence[Entry], known: dict[int, str]) -> dict[int, str]:
        """Return what is wrong with further questions, by place; with "stop", only the first."""
        errors: dict[int, str] = {}
        for place, entry in enumerate(entries):
            if place not in known:
                try:
                    self.asker.check(
                        entry.given, suggest=self.tally.failed + len(errors) < _ERRORS_WITH_SUGGESTIONS
                    )
                except UsageError as error:
                    errors[place] = str(error)
                    if self._on_error == "stop":
                        break
        return errors

    def _counted(self, block: list[Outcome]) -> list[Outcome]:
        self.tally.count(block)
        return block


def block_size(k: int) -> int:
    """Return how many questions with k answers each are answered together."""
    return max(1, min(_BLOCK_QUESTIONS, _BLOCK_ANSWERS // max(k, 1)))


@dataclass(frozen=True)
class AnswersWritten(Written):
    """A file of answers; `rows` are answers."""

    questions: int = 0
    failed: int = 0
    """Questions that could not be answered."""

    def lines(self) -> list[str]:
        return [
            *self.files,
            f"{self.questions:,} questions, {self.rows:,} answers, {self.bytes:,} bytes in "
            f"{self.seconds:.2f} s ({self.questions / max(self.seconds, 1e-9):,.0f} questions/s)",
            *self.notes,
        ]


def answer_to_file(batch: Batch, out: Path, *, advance: Advance = no_progress) -> AnswersWritten:
    """Write the answers to a batch, whole or not at all.

    Args:
        batch: Not yet begun.
        out: Its suffix says the format; see kgshard_tools.batches.writing.
        advance: Told how many bytes more are written.

    Raises:
        ConfigError: The name does not tell the format, is a folder's, or the format cannot say a label.
        DataError: See `Batch.outcomes`.
    """
    write = choose_writer(out)
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder")
    began = time.monotonic()
    with replacing(out) as temporary, temporary.open("wb") as file:

        def told() -> Iterator[list[Outcome]]:
            before = 0
            for block in batch.outcomes():
                yield block
                advance(file.tell() - before)
                before = file.tell()

        write(told(), file, batch.asker.columns)
    tally, size = batch.tally, out.stat().st_size
    return AnswersWritten(
        [str(out)],
        tally.answers,
        size,
        time.monotonic() - began,
        tally.lines(),
        questions=tally.questions,
        failed=tally.failed,
    )
