"""Answers by name, as Python objects, JSON and tables."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kgshard.models.link import SIDES
from kgshard.ranking.protocol import protocol_line
from kgshard_tools.terminal import shown

MAX_GROUPS = 20
"""Groups of a breakdown that a table shows."""
_APPROXIMATE = "      approximate: who is asked about was folded in, not trained"


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
    """Whether train, valid, test or an overlay hold this very triple."""
    split: str | None = None
    """Which of them does: a known answer in test is one the model was not told. "overlay": one of the
    triples that an entity was folded in by."""
    folded: bool = False
    """Whether this entity was folded in after training, so that its score is approximate."""
    probability: float | None = None
    """How likely this is true, fitted to valid (kgshard_tools.calibration); only where it was asked for."""

    @property
    def note(self) -> str:
        """What a table says beside the score."""
        probability = [] if self.probability is None else [f"p {self.probability:.3f}"]
        known = [f"known ({self.split})"] if self.known else []
        return ", ".join([*probability, *known, *(["folded in"] if self.folded else [])])


class Labelled(Protocol):
    """A dataclass with a label."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def label(self) -> str: ...


AnyAnswer = TypeVar("AnyAnswer", bound=Labelled)


@dataclass(frozen=True, slots=True)
class Ranked(Generic[AnyAnswer]):
    """A question and its answers, best first."""

    query: dict[str, Any]
    results: list[AnyAnswer]

    def __iter__(self) -> Iterator[AnyAnswer]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> AnyAnswer:
        return self.results[index]

    @property
    def labels(self) -> list[str]:
        return [answer.label for answer in self.results]

    def to_dict(self) -> dict[str, Any]:
        return {"query": self.query, "results": [asdict(answer) for answer in self.results]}


@dataclass(frozen=True, slots=True, repr=False)
class Answers(Ranked[Answer]):
    """A question of one link, or about neighbours, and its answers."""

    def lines(self) -> list[str]:
        """Return a table, one line an answer; and one more where the question itself is approximate."""
        labels = [shown(answer.label) for answer in self.results]
        width = max(map(len, labels), default=0)
        table = [
            f"{answer.rank:4}  {label:<{width}}  {answer.score:10.4f}  {answer.note}".rstrip()
            for answer, label in zip(self.results, labels, strict=True)
        ]
        meaning = [f"p: {self.query['probability']}"] if "probability" in self.query else []
        return [*table, *([_APPROXIMATE] if self.query.get("approximate") else []), *meaning]

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
    """Ranking metrics with the protocol that gave them; see `kgshard.evaluate`."""

    result: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """Over all sides asked for: "mrr", "mr", "hits@1", "hits@3", "hits@10", "amr", "amri"."""
        metrics: dict[str, float] = self.result["metrics"]
        return metrics

    def to_dict(self) -> dict[str, Any]:
        return self.result

    def lines(self) -> list[str]:
        """Return the protocol, a table (both sides, head, tail), and one for each breakdown."""
        lines = [shown(protocol_line(self.result["protocol"]))]
        lines.append(" " * 6 + "".join(f"{name:>10}" for name in self.metrics))
        sides = [side for side in SIDES if self.result[side]]
        if len(sides) == len(SIDES):
            lines += self._rows("both", "metrics")
        for side in sides:
            lines += self._rows(side, side)
        if "ties" in self.result:
            rules = self.result["ties"].items()
            lines.append("mrr by ties: " + ", ".join(f"{rule} {found['mrr']:.4f}" for rule, found in rules))
        for by, groups in self.result.get("by", {}).items():
            lines += ["", *_group_lines(by, groups)]
        return lines

    def _rows(self, name: str, part: str) -> list[str]:
        """Return a row of the table; where the figures are estimates, also the halves of their intervals."""
        metrics: dict[str, float] = self.result[part]
        rows = [f"{name:<6}" + "".join(_cell(metric, value) for metric, value in metrics.items())]
        intervals: dict[str, list[float]] | None = self.result.get("intervals", {}).get(part)
        if intervals:
            halves = ((metric, (high - low) / 2) for metric, (low, high) in intervals.items())
            rows.append(f"{'±95 %':<6}" + "".join(_cell(metric, half) for metric, half in halves))
        return rows

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def _cell(metric: str, value: float) -> str:
    return f"{value:10.1f}" if metric == "mr" else f"{value:10.4f}"


def _group_lines(by: str, groups: list[dict[str, Any]]) -> list[str]:
    """Return a table of one breakdown; labels come last, for they may be long."""
    asked = [part for part in ("metrics", "head", "tail") if any(group[part] for group in groups)]
    columns = [(part, metric) for part in asked for metric in ("mrr", "hits@10")]
    names = [metric if part == "metrics" else f"{part} {metric}" for part, metric in columns]
    note = " (estimates; --json has their intervals)" if "intervals" in groups[0] else ""
    lines = [f"{'triples':>9}" + "".join(f"{name:>14}" for name in names) + f"  {by}{note}"]
    for group in groups[:MAX_GROUPS]:
        cells = (f"{group[part][metric]:14.4f}" if group[part] else f"{'':>14}" for part, metric in columns)
        lines.append(f"{group['triples']:9,}{''.join(cells)}  {shown(group['label'])}")
    if len(groups) > MAX_GROUPS:
        lines.append(f"and {len(groups) - MAX_GROUPS:,} more; --json has them all")
    return lines
