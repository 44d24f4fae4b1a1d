"""What the indexes of a run hold: what a model's queries are compared with, or rows of length 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kgshard.models.link import SIDES, Side
from kgshard.models.metric import DOT, Metric
from kgshard_tools.lifts import UNIT_LENGTH, Lift, link_lift
from kgshard_tools.stored import Stored

Purpose = Literal["links", "neighbors"]
PURPOSES: tuple[Purpose, Purpose] = ("links", "neighbors")


@dataclass(frozen=True, slots=True)
class Contents:
    """What an index holds, and how it compares."""

    name: str
    """Its key in index.json; its file is name.faiss."""
    metric: Metric
    lift: Lift
    """What is made of entity rows before they are added."""
    sides: tuple[Side, ...] = ()
    """Which ends of links it finds; none where it finds neighbours."""


def neighbor_contents() -> Contents:
    """Return what answers which entities are most like another."""
    return Contents("neighbors", DOT, UNIT_LENGTH)


def link_contents(stored: Stored, side: Side) -> Contents:
    """Return what answers questions for one side of a link; mostly one index answers for both."""
    model, differ = stored.model, stored.model.sides_differ
    name = f"links-{side}" if differ else "links"
    return Contents(name, model.metric, link_lift(model, side), (side,) if differ else SIDES)


def contents_of(stored: Stored, purpose: Purpose) -> list[Contents]:
    """Return all that answers one kind of question."""
    if purpose == "neighbors":
        return [neighbor_contents()]
    every = (link_contents(stored, side) for side in SIDES)
    return list({contents.name: contents for contents in every}.values())


def identity(stored: Stored, contents: Contents) -> dict[str, Any]:
    """Return what an index must say of itself to answer."""
    return {
        "metric": contents.metric.name,
        "transform": contents.lift.name,
        "run_id": stored.run.info.id,
        "step": stored.checkpoint.step,
        "vocabulary_sha256": stored.dataset.vocabulary_sha256,
    }
