"""What can be asked of a trained run, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kgshard.errors import ConfigError

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
    candidates: Sequence[str] | Literal["seen"] | None = None
    """The only entities that may answer; "seen": those at this end of the relation in train. None: all."""
    min_score: float | None = None
    """Leave out what scores lower."""
    exact: bool = False
    """Look at every row, also where an approximate index was built."""
