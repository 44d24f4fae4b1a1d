"""Fold entities into a run from a file of triples, and write them as an overlay."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kgshard.config import TrainConfig
from kgshard.errors import ConfigError, RunError
from kgshard.files import AnyPath, check_replaceable, replacing, replacing_directory, write_json
from kgshard.records import OverlayInfo, describe_file
from kgshard.shards import ENTITIES
from kgshard_tools.overlay.reading import NewTriples, read_new
from kgshard_tools.overlay.stored import (
    DATA_FILES,
    ENTITIES_FILE,
    OVERLAY_FILE,
    OVERLAY_NAMES,
    TRIPLES_FILE,
    VECTORS_FILE,
    is_overlay,
)
from kgshard_tools.rows import Values, write_safetensors
from kgshard_tools.stored import Stored, check_outside, open_stored
from kgshard_tools.written import Written, describe_folder

if TYPE_CHECKING:
    from kgshard.folding import FoldedRows

DEFAULT_STEPS = 100
_MAX_STEPS = 100_000
_SHOWN = 20


@dataclass(frozen=True)
class FoldedEntity:
    """One entity that was folded in."""

    id: int
    label: str
    triples: int
    """Distinct triples that name it."""
    loss_before: float
    """The mean loss of its questions at the start."""
    loss_after: float
    norm: float
    """The 2-norm of its row."""
    steps: int
    converged: bool

    def line(self) -> str:
        losses = f"loss {self.loss_before:.4g} -> {self.loss_after:.4g}"
        unfinished = "" if self.converged else ", not converged"
        triples = f"{self.triples:,} triple{'s' * (self.triples != 1)}"
        return f"#{self.id} {self.label!r}: {triples}, {losses}, norm {self.norm:.4g}{unfinished}"


@dataclass(frozen=True)
class FoldedIn(Written):
    """What `fold_in` wrote."""

    approximate: bool = True
    typical_norm: float = 0.0
    """The median 2-norm of trained rows."""
    counts: dict[str, int] = field(default_factory=dict)
    """See `OverlayInfo.counts`."""
    settings: dict[str, int | str] = field(default_factory=dict)
    entities: list[FoldedEntity] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Say in words what was written, and of each entity how it was fitted."""
        counts = self.counts
        shown = [entity.line() for entity in self.entities[:_SHOWN]]
        more = [f"... and {len(self.entities) - _SHOWN:,} more"] if len(self.entities) > _SHOWN else []
        return [
            *super().lines(),
            f"{counts['lines']:,} lines = {counts['triples']:,} triples + {counts['duplicates']:,} duplicates"
            f" + {counts['blank']:,} blank + {counts['known']:,} that name no new entity",
            *shown,
            *more,
            f"a trained row's norm is typically {self.typical_norm:.4g}",
        ]


def fold_in(
    run: AnyPath,
    source: AnyPath,
    out: AnyPath,
    *,
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda num_entities: None,
) -> FoldedIn:
    """Fit rows to entities that a run does not know, from their triples, and write them as an overlay.

    Args:
        run: A run, or one of its checkpoint folders. It stays as it is.
        source: Triples as `read_triples` takes them; "-" is stdin. Those that name no new entity are counted.
        out: The folder to write.
        steps: Steps for each entity at most.
        seed: Fixes what is sampled.
        overwrite: Replace an overlay that is there.
        advance: Told how many entities more are done.

    Raises:
        DataError: A line is malformed, nothing is to be folded in, or an entity is tied to no trained one.
        UnknownRelationError: A triple's relation is none of the run; names its line.
        RunError: `out` may not be replaced, or `run` is no run.
        NonFiniteError: A row is NaN or infinite.
    """
    began = time.monotonic()
    _check_settings(steps, seed)
    stored, out = open_stored(run), Path(out)
    _check_out(out, stored, overwrite=overwrite)
    read = read_new(Path("/dev/stdin" if os.fspath(source) == "-" else source), stored)
    folded = _fit(stored, read, steps, seed, advance)
    settings = {"steps": steps, "seed": seed, **_settings(stored, folded)}
    place = Path(os.path.realpath(out))
    _write(out, stored, read, folded, settings)
    written = describe_folder(out, place, len(read.labels), began, _notes(stored, folded))
    entities = _entities(stored.model.num_entities, read, folded)
    return FoldedIn(
        **vars(written),
        typical_norm=folded.typical_norm,
        counts=read.counts,
        settings=settings,
        entities=entities,
    )


def _check_settings(steps: int, seed: int) -> None:
    if not 0 <= steps <= _MAX_STEPS:
        raise ConfigError(f"--steps must be from 0 to {_MAX_STEPS:,}, got {steps}")
    if seed < 0:
        raise ConfigError(f"--seed must be >= 0, got {seed}")


def _check_out(out: Path, stored: Stored, *, overwrite: bool) -> None:
    check_outside(out, stored.run)
    check_replaceable(out, ours=is_overlay(out), names=OVERLAY_NAMES, what="an overlay")
    if is_overlay(out) and not overwrite:
        raise RunError(f"{out}: holds an overlay already; choose another folder or pass --overwrite")


def _settings(stored: Stored, folded: FoldedRows) -> dict[str, int | str]:
    """Return what the overlay says of how its rows were found, beside what the caller chose."""
    return {
        "loss": str(stored.run.info.config.get("loss", "softmax")),
        "regulariser": folded.regulariser,
        "rivals": folded.num_rivals,
        "train_questions": folded.num_train_questions,
    }


def _notes(stored: Stored, folded: FoldedRows) -> list[str]:
    notes = ["approximate: these rows were fitted to their triples alone, while the run stayed as it is"]
    if folded.num_rivals < stored.model.num_entities:
        notes.append(f"answers competed with {folded.num_rivals:,} of {stored.model.num_entities:,} entities")
    unfinished = int((~folded.converged).sum())
    if unfinished:
        notes.append(f"{unfinished:,} had not converged; more --steps would fit them better")
    return notes


def _entities(first: int, read: NewTriples, folded: FoldedRows) -> list[FoldedEntity]:
    norms = np.linalg.norm(folded.rows.astype(np.float64), axis=1)
    columns = (
        read.degrees,
        folded.loss_before,
        folded.loss_after,
        norms,
        folded.steps,
        folded.converged,
    )
    values = zip(*(column.tolist() for column in columns), strict=True)
    return [
        FoldedEntity(first + place, label, *each)
        for place, (label, each) in enumerate(zip(read.labels, values, strict=True))
    ]


def _fit(
    stored: Stored, read: NewTriples, steps: int, seed: int, advance: Callable[[int], None]
) -> FoldedRows:
    from kgshard.folding import FrozenModel, fold_in

    first, entities = stored.model.num_entities, stored.dataset.entities

    def name(row: int) -> str:
        return entities.row_name(row) if row < first else f"new entity {read.labels[row - first]!r}"

    frozen = FrozenModel(
        model=stored.model,
        entities=stored.checkpoint.entities,
        relations=stored.checkpoint.relations,
        shared=stored.checkpoint.shared,
        train=stored.dataset.triples("train"),
        config=_config(stored.run.info.config),
        row_name=name,
    )
    return fold_in(frozen, read.triples, len(read.labels), steps=steps, seed=seed, advance=advance)


def _config(settings: Mapping[str, Any]) -> TrainConfig:
    """Return a run's settings; devices it was trained on need not be here."""
    return TrainConfig.from_dict({**settings, "device": "auto", "optimizer_device": "auto"})


def _write(
    out: Path, stored: Stored, read: NewTriples, folded: FoldedRows, settings: dict[str, int | str]
) -> None:
    with replacing_directory(out) as temporary:
        _write_entities(temporary / ENTITIES_FILE, read, stored.model.num_entities)
        write_safetensors(temporary / VECTORS_FILE, {ENTITIES: Values(folded.rows)})
        with (temporary / TRIPLES_FILE).open("wb") as file:
            np.save(file, read.triples.astype("<i8"), allow_pickle=False)
        info = OverlayInfo(
            format="kgshard.overlay/1",
            run_id=stored.run.info.id,
            step=stored.checkpoint.step,
            vocabulary_sha256=stored.dataset.vocabulary_sha256,
            model=stored.model.name,
            approximate=True,
            first_id=stored.model.num_entities,
            num_entities=len(read.labels),
            dim=stored.model.dim,
            settings=settings,
            counts=read.counts,
            files={name: describe_file(temporary / name) for name in DATA_FILES},
        )
        write_json(temporary / OVERLAY_FILE, info)


def _write_entities(path: Path, read: NewTriples, first: int) -> None:
    table = pa.table(
        {
            "id": pa.array(np.arange(first, first + len(read.labels))),
            "label": pa.array(read.labels, pa.large_string()),
            "degree": pa.array(read.degrees),
        }
    )
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
