"""The query language: `?x: (Austria, borders, ?y) & (?y, uses currency, ?x)`.

    query     ?x: formula                    ?x is asked for; other variables may be anybody
    formula   conjunction | conjunction ...  at least one holds
              part & part ...                all hold; & binds closer than |
    part      (head, relation, tail)         a link; a head or tail is a label, or a ?variable
              !part                          does not hold
              (formula)

A label stands as it is, without the spaces around it, or in quotes as in JSON. It must be in quotes if it
holds , ( ) or ", or begins with ? or !. `#12` names row 12. A variable belongs to the smallest part that
holds all its links: in !((Austria, borders, ?y) & (?y, borders, ?x)) no neighbour of Austria borders ?x.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from kgshard.errors import ConfigError

MAX_DEPTH = 64
"""Of parentheses and negations in each other."""
MAX_LINKS = 128
_VARIABLE = re.compile(r"\?\w+")
_BARE = re.compile(r'[^,()"]+')
_NEEDS_QUOTES = re.compile(r'[,()"]|^[?!]|^\s|\s$|^$')
_IN_QUOTES = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Variable:
    name: str


Term = Variable | str


@dataclass(frozen=True, slots=True)
class Link:
    """An atom, by names."""

    head: Term
    relation: str
    tail: Term

    def __str__(self) -> str:
        return f"({', '.join(map(_written, (self.head, self.relation, self.tail)))})"


@dataclass(frozen=True, slots=True)
class And:
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Or:
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Negation:
    part: Formula


Formula = Link | And | Or | Negation


def parse(text: str) -> tuple[str, Formula]:
    """Return the variable that is asked for and its formula.

    Raises:
        ConfigError: The text is no query; says where it stops being one.
    """
    reader = _Reader(text)
    head = reader.take(_VARIABLE, "the variable that is asked for, as in ?x:")
    reader.expect(":")
    formula = reader.formula(0)
    reader.end()
    return head[1:], formula


class _Reader:
    """A text, and how far it was read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._num_links = 0

    def _peek(self) -> str:
        """Return the next character that is no space, or nothing at the end."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _refuse(self, expected: str) -> ConfigError:
        rest = self._text[self._at : self._at + 20]
        found = repr(rest) if rest else "the end"
        return ConfigError(f"query, character {self._at + 1}: expected {expected}, found {found}")

    def expect(self, char: str) -> None:
        if self._peek() != char:
            raise self._refuse(repr(char))
        self._at += 1

    def end(self) -> None:
        if self._peek():
            raise self._refuse("'&', '|' or the end")

    def take(self, pattern: re.Pattern[str], expected: str) -> str:
        self._peek()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._refuse(expected)
        self._at = match.end()
        return match[0]

    def formula(self, depth: int) -> Formula:
        parts = self._joined("|", depth)
        return parts[0] if len(parts) == 1 else Or(parts)

    def _joined(self, sign: str, depth: int) -> tuple[Formula, ...]:
        parts = [self._conjunction(depth) if sign == "|" else self._part(depth)]
        while self._peek() == sign:
            self._at += 1
            parts.append(self._conjunction(depth) if sign == "|" else self._part(depth))
        return tuple(parts)

    def _conjunction(self, depth: int) -> Formula:
        parts = self._joined("&", depth)
        return parts[0] if len(parts) == 1 else And(parts)

    def _part(self, depth: int) -> Formula:
        if depth > MAX_DEPTH:
            raise ConfigError(f"query: more than {MAX_DEPTH} parentheses and negations in each other")
        if self._peek() == "!":
            self._at += 1
            return Negation(self._part(depth + 1))
        self.expect("(")
        if self._peek() in ("(", "!"):
            inner = self.formula(depth + 1)
            self.expect(")")
            return inner
        return self._link()

    def _link(self) -> Link:
        self._num_links += 1
        if self._num_links > MAX_LINKS:
            raise ConfigError(f"query: more than {MAX_LINKS} links")
        head = self._term()
        self.expect(",")
        relation = self._term()
        self.expect(",")
        tail = self._term()
        self.expect(")")
        if isinstance(relation, Variable):
            raise ConfigError(
                f"query: ?{relation.name} stands for a relation; only entities can be asked for"
            )
        return Link(head, relation, tail)

    def _term(self) -> Term:
        if self._peek() == '"':
            try:
                name, self._at = _IN_QUOTES.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                raise self._refuse("a label in quotes, as in JSON") from None
            return str(name)
        begin = self._at
        text = self.take(_BARE, "a label or a ?variable").strip()
        if not text.startswith("?"):
            return text
        if _VARIABLE.fullmatch(text) is None:
            self._at = begin
            raise self._refuse("a ?variable (a label that begins with ? goes in quotes)")
        return Variable(text[1:])


def _written(term: Term) -> str:
    if isinstance(term, Variable):
        return f"?{term.name}"
    return json.dumps(term, ensure_ascii=False) if _NEEDS_QUOTES.search(term) else term
