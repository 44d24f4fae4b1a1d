"""What can go wrong, and whose it is to put right.

KgshardError                 a failure; the command line ends with exit code 1
├── UsageError               the caller's mistake; the command line ends with exit code 2
│   ├── ConfigError          an option is unknown, out of range, or cannot apply
│   ├── DataError            a source of triples is missing or says something impossible
│   ├── RunError             a folder is not a run, or lacks what was asked of it
│   │   └── ShardError       a shard or manifest is missing, damaged, or not of this run
│   └── UnknownNameError     no entity (UnknownEntityError) or relation (UnknownRelationError) of this label
├── ExchangeMismatchError    ranks disagree about what they send each other
├── NonFiniteError           NaN or infinity where a number must be
└── RankFailureError         a rank ended before its work was done
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class KgshardError(Exception):
    """Something failed. The message says what, where, and what to do."""

    exit_code = 1


class UsageError(KgshardError):
    """The caller asked for something that cannot be done."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is missing, unknown, out of range, or cannot apply."""


class DataError(UsageError):
    """A source of triples is missing, unreadable or malformed."""


class RunError(UsageError):
    """A folder is not a kgshard run, or the run lacks what was asked of it."""


class ShardError(RunError):
    """A shard or its manifest is missing, damaged, or belongs elsewhere."""

    def __init__(self, message: str, *, file: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.rank = rank


class UnknownNameError(UsageError, KeyError):
    """No entity or relation carries this label; says which labels are near."""

    kind = "name"

    def __init__(self, name: str, suggestions: Sequence[str] = ()) -> None:
        self.name = name
        self.suggestions = list(suggestions)
        hint = f". Did you mean: {', '.join(self.suggestions)}?" if self.suggestions else ""
        self.message = f"no {self.kind} {name!r}{hint}"
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class UnknownEntityError(UnknownNameError):
    """No entity carries this label."""

    kind = "entity"


class UnknownRelationError(UnknownNameError):
    """No relation carries this label."""

    kind = "relation"


class ExchangeMismatchError(KgshardError):
    """Ranks announced something else than their peers expected; no payload was used."""


class NonFiniteError(KgshardError):
    """NaN or infinity in a table, a loss or a score."""


class RankFailureError(KgshardError):
    """A rank died, or ended early; names the rank and how it ended."""

    told = False
    """Whether the rank that failed says so itself, so that others need not."""


def wants_traceback() -> bool:
    """Whether errors should come with tracebacks: KGSHARD_DEBUG is set, and not to 0, false or no."""
    return os.environ.get("KGSHARD_DEBUG", "").lower() not in ("", "0", "false", "no", "off")
