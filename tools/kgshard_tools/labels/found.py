"""The labels of a run: by labels.sqlite where it was built, else by its vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kgshard.runs import Run
from kgshard_tools.labels.matching import LabelMatch, LabelSource
from kgshard_tools.labels.scan import LabelScan
from kgshard_tools.labels.store import LabelStore, labels_path
from kgshard_tools.terminal import shown

_SHOWN = 100
"""Characters of a label in a table; JSON has all of them."""


def open_labels(run: Run) -> LabelSource:
    """Open the labels of a run.

    Raises:
        RunError: labels.sqlite is damaged, of another format, or of other labels.
    """
    path = labels_path(run.folder)
    if path.exists():
        return LabelStore(path, vocabulary_sha256=run.dataset.vocabulary_sha256)
    return LabelScan(run.dataset)


@dataclass(frozen=True, slots=True)
class LabelMatches:
    """What was looked for, and the labels that fit, the best first."""

    query: dict[str, Any]
    results: list[LabelMatch]

    def __iter__(self) -> Iterator[LabelMatch]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def to_dict(self) -> dict[str, Any]:
        return {"query": self.query, "results": [match.to_dict() for match in self.results]}

    def lines(self) -> list[str]:
        """Return a table, one line a label."""
        if not self.results:
            return ["no label fits"]
        header = ("id", "label", "kind", "degree", "how")
        rows = [header, *map(_cells, self.results)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [_line(row, widths) for row in rows]


def _cells(match: LabelMatch) -> tuple[str, ...]:
    label = shown(match.label[: _SHOWN + 1])
    cut = label if len(label) <= _SHOWN else label[: _SHOWN - 3] + "..."
    return str(match.id), cut, match.kind, str(match.degree), match.how


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    aligned = [
        cell.rjust(width) if number in (0, 3) else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()
