"""What an evaluation is asked to do, and what is said beside its figures. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kgshard.data.dataset import SPLITS
from kgshard.errors import ConfigError
from kgshard.models.link import SIDES, Side
from kgshard.ranking.metrics import TIES

ASKED_SIDES: dict[str, tuple[Side, ...]] = {"both": SIDES, "tail": ("tail",), "head": ("head",)}
GROUPINGS = ("relation", "side", "degree", "cardinality")
"""By what figures can be broken down; see `kgshard.ranking.breakdown`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """What `kgshard evaluate` can be told about the ranking itself."""

    split: str = "test"
    """Whose triples are ranked. That there is such a split is checked where it is opened."""
    filtered: bool = True
    """Known triples other than the ranked one are no candidates."""
    sides: str = "both"
    """Which ends are asked for: a key of ASKED_SIDES."""
    ties: str = "realistic"
    """One of kgshard.ranking.metrics.TIES."""
    by: Sequence[str] = ()
    """Break the figures down by these; see GROUPINGS."""
    sample: int | None = None
    """Rank only so many triples, drawn without replacement; None ranks all."""
    seed: int = 0
    """Fixes the sample."""

    def __post_init__(self) -> None:
        _one_of("--sides", self.sides, ASKED_SIDES)
        _one_of("--ties", self.ties, TIES)
        if isinstance(self.by, str):
            raise ConfigError(f"--by takes several names, got the text {self.by!r}")
        for name in self.by:
            _one_of("--by", name, GROUPINGS)
        if self.sample is not None:
            _whole("--sample", self.sample, 2, "; one triple has no interval")
        _whole("--seed", self.seed, 0)
        if self.seed and self.sample is None:
            raise ConfigError("--seed has no effect here: it fixes what --sample draws")

    @property
    def asked(self) -> tuple[Side, ...]:
        """The ends that are asked for."""
        return ASKED_SIDES[self.sides]

    @property
    def filters(self) -> tuple[str, ...]:
        """The splits whose triples are no candidates.

        For "test" these are all three; else train and valid, so that nothing is chosen by looking at test.
        """
        if not self.filtered:
            return ()
        return SPLITS if self.split == "test" else ("train", "valid")

    def file_name(self, *, is_estimate: bool, checkpoint: str | None = None) -> str:
        """Return the file in RUN/eval for such a result, of a checkpoint that was asked for by name."""
        asked = (self.sides if self.sides != "both" else "", self.ties if self.ties != "realistic" else "")
        end = "".join(f"-{part}" for part in (*asked, checkpoint) if part)
        how = "sample" if is_estimate else "full"
        return f"{self.split}-{how}-{'filtered' if self.filtered else 'raw'}{end}.json"


def _one_of(option: str, value: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    if value not in known:
        raise ConfigError(f"{option}: unknown value {value!r} (known: {', '.join(known)})")


def _whole(option: str, value: object, least: int, why: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{option} must be a whole number >= {least}, got {value!r}{why}")


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """How figures came about: without it no two of them can be compared."""

    split: str
    triples: int
    """Ranked triples."""
    queries: int
    """Each asked for every one of `sides`."""
    candidates: int
    """All entities of the graph; the filter's are taken off query by query."""
    filtered: bool
    filter: list[str]
    """The splits whose triples are no candidates."""
    ties: str
    """The tie rule of "metrics", "head" and "tail"."""
    sides: list[Side]
    head_queries: str
    """How heads are asked for."""
    step: int | None = None
    """Of the checkpoint, where there is one."""
    checkpoint: str = ""
    model: str = ""
    """Its score function and dimension."""
    split_triples: int | None = None
    """Triples of the split, where only some of them were ranked: the figures are estimates."""
    seed: int | None = None
    """Of the sample, where only some were ranked."""
    unseen: int = 0
    """Triples of the split that name an entity which train does not. They are ranked like all others."""

    def line(self) -> str:
        """Return the line that stands beside every figure."""
        counted = f"all {self.triples:,} triples"
        if self.split_triples is not None:
            counted = f"ESTIMATE from {self.triples:,} of {self.split_triples:,} triples, seed {self.seed}"
        parts = [
            f"{self.split}: {counted}, {self.queries:,} queries among all {self.candidates:,} entities",
            f"filtered by {'+'.join(self.filter) or 'nothing'}",
            f"{self.ties} ranks",
            f"{' and '.join(f'{side}s' for side in self.sides)} asked",
            *([f"heads by {self.head_queries}"] if "head" in self.sides else []),
            f"{self.unseen:,} triples with an entity unseen in train kept",
            *([self.model] if self.model else []),
            *([self.checkpoint] if self.checkpoint else []),
            *([f"step {self.step}"] if self.step is not None else []),
        ]
        return "; ".join(parts)


def valid_mrr(figures: Mapping[str, Any]) -> str:
    """Return the words of a training's evaluation, from what `ValidEvaluator.figures` returned."""
    words = f"valid MRR {figures['valid']['mrr']:.4f}"
    if "intervals" not in figures:
        return words
    low, high = figures["intervals"]["mrr"]
    return f"{words} (ESTIMATE, 95 % interval {low:.4f} to {high:.4f})"


def protocol_line(protocol: Mapping[str, Any]) -> str:
    """Return the line that stands beside every figure, from the "protocol" of a result."""
    return msgspec.convert(protocol, Protocol).line()
