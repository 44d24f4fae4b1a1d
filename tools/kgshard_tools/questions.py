"""What can be asked of a trained run, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kgshard.errors import ConfigError
from kgshard_tools.search import Ids

Asked = Literal["head", "relation", "tail"]


@dataclass(frozen=True, slots=True)
class Question:
    """A triple with one part missing: (?, relation, tail), (head, ?, tail) or (head, relation, ?)."""

    head: str | None = None
    relation: str | None = None
    tail: str | None = None

    @property
    def asked(self) -> Asked:
        """The missing part.

        Raises:
            ConfigError: None is missing, or more than one.
        """
        parts: dict[Asked, str | None] = {"head": self.head, "relation": self.relation, "tail": self.tail}
        missing = [part for part, name in parts.items() if name is None]
        if len(missing) != 1:
            given = ", ".join(part for part in parts if part not in missing) or "nothing"
            raise ConfigError(f"a question gives two of head, relation and tail; this one gives {given}")
        return missing[0]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the answers to some questions must be like."""

    k: int = 10
    """How many, at most."""
    known: bool = False
    """Whether triples that train, valid or test hold are answers too."""
    candidates: Sequence[str] | Ids | Literal["seen"] | None = None
    """The only entities that may answer, by name or as rows; "seen": those at this end of the relation in
    train. None: all."""
    min_score: float | None = None
    """Leave out what scores lower."""
    exact: bool = False
    """Look at every row, also where an approximate index was built."""
    calibrate: bool = False
    """Say how likely each answer is, as fitted to valid."""

    @property
    def only_seen(self) -> bool:
        """Whether only entities may answer that are at this end of the relation in train."""
        return isinstance(self.candidates, str) and self.candidates == "seen"

    def check(self, asked: Asked) -> None:
        """Raise ConfigError where a question for a part cannot be answered like this."""
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise ConfigError(f"--min-score must be a finite number, got {self.min_score}")
        if self.candidates is not None and not len(self.candidates):
            raise ConfigError("candidates: the list is empty, so nobody may answer")
        if isinstance(self.candidates, str) and not self.only_seen:
            raise ConfigError(f"candidates: {self.candidates!r} is neither a list of names nor 'seen'")
        if asked == "relation" and self.calibrate:
            raise ConfigError("--calibrate is for heads and tails, and the question asks for a relation")
        if asked == "relation" and self.candidates is not None:
            raise ConfigError("candidates are entities, and the question asks for a relation")
