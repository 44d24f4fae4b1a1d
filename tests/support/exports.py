"""Runs with any labels and awkward numbers, and plain readers of what was exported from them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from graphs import save_tables
from kgshard_tools.export.tables import Export, Rows
from kgshard_tools.stored import open_stored
from runs import begun_run

from kgshard.config import TrainConfig
from kgshard.data.prepare import Numbered, prepare_numbered
from kgshard.runs import Run

Floats = npt.NDArray[np.float32]

AWKWARD = [
    *(-0.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 0.1, 1 / 3, 1.0),
    # Its shortest text is 7.038531e-26, which as a double and rounded is the float above.
    float(np.nextafter(np.float32(7.038531e-26), np.float32(0))),
    *(123456789.0, 16777216.0, 1e16, 1e21, 1e-5, 1e-7, 9.999999e-5, 65504.0, 6e-8),
]
"""Float32 values that are easily written or read wrong."""


def labelled_run(
    folder: Path,
    entities: Sequence[str],
    relations: Sequence[str] = ("likes",),
    *,
    dtype: torch.dtype = torch.float32,
    world_size: int = 1,
    seed: int = 0,
    **settings: Any,
) -> Run:
    """Make folder/run, whose labels may hold anything, line ends too.

    Every entity has a triple to the next one; a third of the triples each are valid's and test's from the
    fourth on. Rows are drawn, and the first ones hold AWKWARD values. `settings` are those of TrainConfig.
    """
    links = np.arange(max(len(entities), len(relations)))
    triples = np.stack(
        [links % len(entities), links % len(relations), (links + 1) % len(entities)], axis=1
    ).astype(np.int32)
    splits = {name: triples[3:][which::3] for which, name in enumerate(("train", "valid", "test"))}
    splits["train"] = np.concatenate([triples[:3], splits["train"]])
    numbered = Numbered("labels", "a test", entities, relations, splits)
    data = prepare_numbered(numbered, folder / "data").dataset
    run = begun_run(data.folder, folder / "run", TrainConfig(**settings))
    source, model = np.random.default_rng(seed), run.model
    tables = [
        source.standard_normal(shape).astype(np.float32)
        for shape in ((model.num_entities, model.dim), (model.num_relation_rows, model.relation_dim))
    ]
    awkward = np.array(AWKWARD, np.float32)
    awkward = awkward[np.isfinite(torch.from_numpy(awkward).to(dtype).float().numpy())]
    flat = tables[0].reshape(-1)
    flat[: len(awkward)] = awkward[: len(flat)]
    shared = {
        name: source.standard_normal(how.shape) for name, how in model.scoring.shared_init(model.dim).items()
    }
    save_tables(run, tables[0], tables[1], shared, dtype=dtype, world_size=world_size)
    return run


def stored_rows(run: Run) -> dict[str, dict[str, Floats]]:
    """Return the rows of every table by label: what each export must hold."""
    dataset, checkpoint = run.dataset, run.checkpoint
    relations = checkpoint.relations.read(range(run.model.num_relation_rows))
    tables = {
        "entities": dict(
            zip(dataset.entities, checkpoint.entities.read(range(run.model.num_entities)), strict=True)
        ),
        "relations": dict(zip(dataset.relations, relations, strict=False)),
    }
    if run.model.reciprocal:
        behind = relations[run.model.num_relations :]
        tables["inverse_relations"] = dict(zip(dataset.relations, behind, strict=True))
    return tables


def exported(run: Run, *, escape: str = "refuse", labels: Path | None = None) -> Export:
    """Return what a format is given: all rows of a run, with the labels of another vocabulary if named."""
    stored = open_stored(run.folder)
    kinds = {}
    for name, table in (("entities", stored.checkpoint.entities), ("relations", stored.checkpoint.relations)):
        ids = range(getattr(run.model, f"num_{name}"))
        own = stored.dataset.folder / f"{name}.parquet"
        path = labels if labels is not None and name == "entities" else own
        kinds[name] = Rows(table=table, ids=ids, vocabulary=path, label_ids=ids, dtype="F32")
    return Export(stored, kinds["entities"], kinds["relations"], None, label_escape=escape)  # type: ignore[arg-type]


def bits(rows: Iterable[npt.ArrayLike]) -> list[list[int]]:
    """Return float32 rows as their bits: -0.0 is not 0.0."""
    return [np.asarray(row, np.float32).view(np.uint32).tolist() for row in rows]


def same_rows(found: dict[str, Floats], wanted: dict[str, Floats]) -> bool:
    """Whether both have the same labels in the same order, and the same rows to the bit."""
    return list(found) == list(wanted) and bits(found.values()) == bits(wanted.values())


def by_double(text: str) -> float:
    """Read a number as a double, then round it to a float32."""
    return float(np.float32(float(text)))


_libc = ctypes.CDLL(None)
_libc.strtof.restype = ctypes.c_float
_libc.strtof.argtypes = [ctypes.c_char_p, ctypes.c_void_p]


def by_float(text: str) -> float:
    """Read a number as a float32 straight away, as C's strtof does."""
    return float(_libc.strtof(text.encode(), None))


WAYS: tuple[Callable[[str], float], ...] = (by_double, by_float)
"""How programs read numbers."""


def floats(texts: Sequence[str], way: Callable[[str], float] = by_double) -> Floats:
    """Return float32[D] that one row of text says."""
    return np.array([way(text) for text in texts], np.float32)


def run_lines(lines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run lines of Python in a folder; return the names they leave."""
    names: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for line in lines:
            exec(line, names)
    finally:
        os.chdir(before)
    return names
