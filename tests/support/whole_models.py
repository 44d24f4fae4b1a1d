"""Runs exported as whole models, and what other programs must score: papers' formulas over stored rows."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from brute_force import random_graph
from foreign import toy
from graphs import make_run, tree
from kgshard_tools.export import export
from kgshard_tools.importers.writer import write_run
from kgshard_tools.written import Written
from papers import PAPER

from kgshard.errors import ConfigError
from kgshard.models import SCORING
from kgshard.models.link import Side
from kgshard.runs import Run

Array = npt.NDArray[Any]
GRAPH = random_graph(7, 30, 3)
CORRUPTIONS = ("reciprocal", "both-sides")


@dataclass(frozen=True)
class Exported:
    """An exported run, and questions with the scores that its own rows give them."""

    run: Run
    folder: Path
    written: Written

    @cached_property
    def questions(self) -> npt.NDArray[np.int64]:
        """int64[60, 3]: head, relation and tail rows."""
        model, draw = self.run.model, np.random.default_rng(3)
        limits = (model.num_entities, model.num_relations, model.num_entities)
        return np.stack([draw.integers(0, limit, 60) for limit in limits], axis=1)

    @cached_property
    def entities(self) -> npt.NDArray[np.float64]:
        return self.run.checkpoint.entities.read(range(self.run.model.num_entities)).astype(np.float64)

    @cached_property
    def relations(self) -> npt.NDArray[np.float64]:
        """Inverses behind the relations, where there are some."""
        return self.run.checkpoint.relations.read(range(self.run.model.num_relation_rows)).astype(np.float64)

    def as_asked(self, side: Side) -> npt.NDArray[np.int64]:
        """Return the questions as a program must ask them that has inverses as relations of their own."""
        if side == "tail" or not self.run.model.reciprocal:
            return self.questions
        return self.questions[:, ::-1] + np.array([0, self.run.model.num_relations, 0])

    def wanted(self, side: Side) -> npt.NDArray[np.float64]:
        """Return float64[60]: the questions' scores when this side is asked for."""
        paper, shared = PAPER[self.run.model.name], self.run.checkpoint.shared
        wide = {name: values.astype(np.float64) for name, values in shared.items()}
        scores = [
            paper(self.entities[h], self.relations[r], self.entities[t], wide)
            for h, r, t in self.as_asked(side).tolist()
        ]
        return np.array(scores) + self.run.model.offset

    def assert_scored(self, side: Side, found: npt.ArrayLike) -> None:
        wanted = self.wanted(side)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())

    def assert_replaceable(self) -> None:
        """An export knows its own files and replaces them, by equal ones."""
        before = tree(self.folder)
        export(
            self.run.folder,
            json.loads((self.folder / "config.json").read_text())["export_format"],
            self.folder,
        )
        assert tree(self.folder) == before

    def triples(self, split: str) -> list[list[int]]:
        rows: list[list[int]] = self.run.dataset.triples(split).tolist()
        return rows


def export_whole(
    folder: Path, format: str, model: str, corruption: str = "both-sides", **settings: Any
) -> Exported:
    """Export a run of random rows."""
    settings = {"dim": 12, "world_size": 2, "seed": 5} | settings
    run = make_run(folder, *GRAPH.values(), model=model, corruption=corruption, **settings)
    return Exported(run, folder / "out", export(run.folder, format, folder / "out"))


def export_with_offset(folder: Path, format: str, model: str, offset: float) -> Exported:
    """Export a run that adds a number to each score, as imported ones do."""
    width = {"rotate-moduli": 3, "rotate": 3, "transh": 12}.get(model, 6)
    rows = np.random.default_rng(8).standard_normal((3, width)).astype(np.float32)
    run = write_run(toy(scoring=model, relations=rows, offset=offset), folder / "run")
    return Exported(run, folder / "out", export(run.folder, format, folder / "out"))


def assert_others_are_refused(folder: Path, format: str, known: set[str]) -> None:
    """Every model but those known is refused by name, and nothing is written."""
    for name in sorted(set(SCORING) - known):
        run = make_run(folder / name, *GRAPH.values(), model=name, dim=16)
        before = tree(folder)
        with pytest.raises(ConfigError, match=r"cannot score as this run does: .*; it can take ") as error:
            export(run.folder, format, folder / name / "out")
        assert name.split("-")[0] in str(error.value).lower() or "2-norms" in str(error.value)
        assert tree(folder) == before
    assert known <= set(SCORING)


def module_of(package: str, path: str) -> ModuleType:
    """Import one file of an installed package without the package, or skip the test."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: it reads the files back")
    file = Path(spec.submodule_search_locations[0], path)
    loaded = importlib.util.spec_from_file_location(file.stem, file)
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    return module


def as_complex(rows: Array) -> npt.NDArray[np.complex128]:
    """Read halves [re | im]."""
    real, imaginary = np.split(rows.astype(np.float64), 2, axis=1)
    return real + 1j * imaginary
