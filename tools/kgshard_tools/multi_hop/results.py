"""Answers to a query, each with the assignment that makes it true."""

from __future__ import annotations

from dataclasses import dataclass

from kgshard_tools.results import Ranked
from kgshard_tools.terminal import shown


@dataclass(frozen=True, slots=True)
class NamedEntity:
    label: str
    id: int
    """Row of the entity table."""


@dataclass(frozen=True, slots=True)
class LinkUsed:
    """A link that the assignment of an answer relies on."""

    head: str
    relation: str
    tail: str
    score: float
    """How true the link is by itself, in [0, 1]."""
    negated: bool
    """Whether the query wants that it does not hold."""
    split: str | None
    """The first of train, valid and test that holds this very triple."""


@dataclass(frozen=True, slots=True)
class HopAnswer:
    """One entity that answers a query."""

    rank: int
    """From 1, the truest."""
    label: str
    id: int
    score: float
    """How true the query is for it, in [0, 1]."""
    log_odds: float
    """The same without the ties of numbers near 0 or 1: log(score / (1 - score)); +-1e300 for 1 and 0."""
    known: bool
    """Whether the graph yields this answer by itself, link by link."""
    split: str | None
    """What of the graph that takes: "train" alone, "valid" too, "test" too."""
    variables: dict[str, NamedEntity]
    """The best entity for each other variable; none where nobody makes a part true."""
    links: list[LinkUsed]

    @property
    def note(self) -> str:
        """What a table says beside the score."""
        where = ", ".join(f"?{name} = {shown(entity.label)}" for name, entity in self.variables.items())
        known = f"known ({self.split})" if self.known else ""
        return "  ".join(part for part in (where, known) if part)


@dataclass(frozen=True, slots=True, repr=False)
class HopAnswers(Ranked[HopAnswer]):
    """A query and its answers."""

    def lines(self) -> list[str]:
        """Return a table, one line an answer, and a line on how sure it is that these are the best."""
        labels = [shown(answer.label) for answer in self.results]
        width = max(map(len, labels), default=0)
        rows = [
            f"{answer.rank:4}  {label:<{width}}  {_number(answer)}  {answer.note}".rstrip()
            for answer, label in zip(self.results, labels, strict=True)
        ]
        return [*rows, self._how()]

    def _how(self) -> str:
        query = self.query
        beam = "" if query["exact"] else f", the best {query['beam']:,} for each variable"
        sure = "the best of all" if query["certified"] else "better answers may exist: try --beam all"
        return shown(f"{query['formula']}  ({query['t_norm']} of {query['scores']}{beam}: {sure})")

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def _number(answer: HopAnswer) -> str:
    """Return a score, with digits where it is neither nearly 0 nor nearly 1."""
    return f"{answer.score:10.3e}" if 0 < answer.score < 0.0001 else f"{answer.score:10.4f}"
