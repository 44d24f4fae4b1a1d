"""The stages of a search: exact, prefix, words, fuzzy. Where labels come from is a `Names`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

from kgshard.errors import ConfigError
from kgshard_tools.labels.rules import EditDistance, allowed_edits, fold, is_text, wanted_words

Kind = Literal["entity", "relation"]
How = Literal["exact", "prefix", "words", "fuzzy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class LabelMatch:
    """A label that fits what was looked for."""

    id: int
    label: str
    kind: Kind
    degree: int
    """Train triples that name it."""
    how: How

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Row(NamedTuple):
    """A label where it is kept."""

    n: int
    """1, 2, ... in order of degree, the highest first, then of id."""
    id: int
    degree: int
    label: str


class Names(Protocol):
    """The labels of one kind. Everything comes in order of n, and is asked for by folded text."""

    def equal(self, folded: str) -> list[Row]:
        """Return the labels that fold to a text."""

    def starting(self, folded: str, limit: int) -> list[Row]:
        """Return the first labels that begin with a text."""

    def with_words(self, words: list[str], limit: int) -> list[Row]:
        """Return the first labels in which every one of some words, at least one, begins a word."""

    def sharing(self, folded: str) -> list[Row]:
        """Return the labels of about its length that share the most trigrams with a text."""


class _Found(NamedTuple):
    """A match, and what it is sorted by: how it was found, edits, degree, kind, id."""

    order: tuple[int, int, int, int, int]
    match: LabelMatch


class LabelSource:
    """Labels of both kinds, found by text. A context manager that closes what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open; nothing can be asked then."""

    def names(self, kind: Kind) -> Names:
        """Return the labels of one kind."""
        raise NotImplementedError

    def search(self, text: str, limit: int = 10, kind: Kind | Literal["both"] = "entity") -> list[LabelMatch]:
        """Return the labels that fit `text` best.

        First those that are the text (the very same before those that differ in case or accents), then those
        that begin with it, then those in which each of its words begins a word, then those at one typing
        error (two from 7 characters on; none below 3). Within each the higher degree first, then the lower
        id; of those with typing errors first the fewer.

        Args:
            text: Any text. One that is empty begins every label.
            limit: How many; fewer come back where there are no more.
            kind: "entity", "relation" or "both".

        Raises:
            ConfigError: An unknown kind, or a limit out of range.
            RunError: labels.sqlite is damaged.
        """
        limit = checked_limit(limit)
        if kind not in (*KINDS, "both"):
            raise ConfigError(f"--kind: unknown value {kind!r} (known: {', '.join(KINDS)}, both)")
        if not is_text(text):
            return []
        wanted = [one for one in KINDS if kind in (one, "both")]
        found = [each for one in wanted for each in _search(self.names(one), text, limit, one)]
        return [each.match for each in sorted(found)[:limit]]

    def find(self, text: str, kind: Kind = "entity") -> int | None:
        """Return the id of the label that is `text`, or None where there is none."""
        if not is_text(text):
            return None
        return next((row.id for row in self.names(kind).equal(fold(text)) if row.label == text), None)

    def complete(self, prefix: str, limit: int = 50, kind: Kind = "entity") -> list[str]:
        """Return the labels that begin with a text, whatever its case; the higher degree first."""
        if not is_text(prefix):
            return []
        return [row.label for row in self.names(kind).starting(fold(prefix), checked_limit(limit))]


def checked_limit(limit: int) -> int:
    """Return how many matches are wanted, as an int."""
    if isinstance(limit, bool) or not hasattr(limit, "__index__") or not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"--limit must be a whole number from 1 to {MAX_LIMIT:,}, got {limit!r}")
    return operator.index(limit)


def _search(names: Names, text: str, limit: int, kind: Kind) -> list[_Found]:
    """Return the best matches of one kind, in order; each label once, as the first stage found it."""
    folded = fold(text)
    found: dict[int, _Found] = {}

    def add(rows: Iterable[Row], stage: int, how: How, edits: int = 0) -> None:
        for row in rows:
            order = (stage, edits, -row.degree, KINDS.index(kind), row.id)
            found.setdefault(row.n, _Found(order, LabelMatch(row.id, row.label, kind, row.degree, how)))

    equal = names.equal(folded)
    add((row for row in equal if row.label == text), 0, "exact")
    add(equal, 1, "exact")
    if len(found) < limit:
        add(names.starting(folded, limit + len(found)), 2, "prefix")
    words = wanted_words(folded)
    if len(found) < limit and words:
        add(names.with_words(words, limit + len(found)), 3, "words")
    most = allowed_edits(len(folded))
    if len(found) < limit and most:
        distance = EditDistance(folded, most)
        for row in names.sharing(folded):
            edits = distance(fold(row.label))
            if edits <= most:
                add([row], 4, "fuzzy", edits)
    return sorted(found.values())[:limit]
