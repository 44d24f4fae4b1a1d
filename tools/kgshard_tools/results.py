"""Answers by name, as Python objects, JSON and tables."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kgshard_tools.terminal import shown


@dataclass(frozen=True, slots=True)
class Answer:
    """One entity that answers a question."""

    rank: int
    """From 1, the most plausible."""
    label: str
    id: int
    """Row of the entity table."""
    score: float
    """The model's score, or a similarity; higher is better."""
    known: bool
    """Whether train, valid or test hold this very triple."""
    split: str | None = None
    """Which of them does: a known answer in test is one the model was not told."""

    @property
    def note(self) -> str:
        """What a table says beside the score."""
        return f"known ({self.split})" if self.known else ""


@dataclass(frozen=True, slots=True)
class Answers:
    """A question and its answers, best first."""

    query: dict[str, Any]
    results: list[Answer]

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> Answer:
        return self.results[index]

    @property
    def labels(self) -> list[str]:
        return [answer.label for answer in self.results]

    def to_dict(self) -> dict[str, Any]:
        return {"query": self.query, "results": [asdict(answer) for answer in self.results]}

    def lines(self) -> list[str]:
        """Return a table, one line an answer."""
        labels = [shown(answer.label) for answer in self.results]
        width = max(map(len, labels), default=0)
        return [
            f"{answer.rank:4}  {label:<{width}}  {answer.score:10.4f}  {answer.note}".rstrip()
            for answer, label in zip(self.results, labels, strict=True)
        ]

    def __repr__(self) -> str:
        return "\n".join([json.dumps(self.query, ensure_ascii=False), *self.lines()])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{answer.rank}</td><td>{html.escape(answer.label)}</td>"
            f"<td>{answer.score:.4f}</td><td>{answer.note}</td></tr>"
            for answer in self.results
        )
        head = "<tr><th>rank</th><th>label</th><th>score</th><th></th></tr>"
        caption = html.escape(json.dumps(self.query, ensure_ascii=False))
        return f"<table><caption>{caption}</caption>{head}{rows}</table>"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Ranking metrics with the protocol that gave them."""

    result: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """Over both sides: "mrr", "mr", "hits@1", "hits@3", "hits@10"."""
        metrics: dict[str, float] = self.result["metrics"]
        return metrics

    def to_dict(self) -> dict[str, Any]:
        return self.result

    def lines(self) -> list[str]:
        """Return the protocol and a table: both sides, head, tail."""
        protocol = self.result["protocol"]
        filters = "+".join(protocol["filter"]) or "nothing"
        lines = [
            f"{protocol['split']}: {protocol['triples']:,} triples, {protocol['queries']:,} queries "
            f"among all {protocol['candidates']:,} entities; filtered by {filters}; "
            f"{protocol['ties']} ranks; heads by {protocol['head_queries']}; step {protocol['step']}",
            " " * 6 + "".join(f"{name:>10}" for name in self.metrics),
        ]
        for side, metrics in (
            ("both", self.metrics),
            ("head", self.result["head"]),
            ("tail", self.result["tail"]),
        ):
            cells = "".join(
                f"{value:10.1f}" if name == "mr" else f"{value:10.4f}" for name, value in metrics.items()
            )
            lines.append(f"{side:<6}{cells}")
        return lines

    def __repr__(self) -> str:
        return "\n".join(self.lines())
