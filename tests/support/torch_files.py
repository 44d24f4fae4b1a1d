"""Files as other programs have torch.save write them, without those programs.

A pickle names classes by module and name; `StandIns` makes empty classes of any such name, which pickle
finds while files are written, and which are gone when they are read.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
_PROGRAMS = ("pykeen", "kge")


class StandIns:
    """Classes by the full names that a program gives its own, importable inside `with`."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> StandIns:
        self._stack.enter_context(patch.dict(sys.modules))
        for name in [name for name in sys.modules if name.split(".")[0] in _PROGRAMS]:
            del sys.modules[name]  # The real program, where it is installed, has classes of these names.
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def named(self, name: str, base: type = object) -> type:
        """Return the class of a name, an empty subclass of `base` when it is first asked for."""
        module_name, _, class_name = name.rpartition(".")
        for parts in range(module_name.count(".") + 1):
            part = module_name.rsplit(".", parts)[0]
            sys.modules.setdefault(part, ModuleType(part))
        module = sys.modules[module_name]
        if not hasattr(module, class_name):
            setattr(module, class_name, type(class_name, (base,), {"__module__": module_name}))
        found: type = getattr(module, class_name)
        return found

    def module(self, name: str, **attributes: object) -> torch.nn.Module:
        """Return a torch.nn.Module of a class of this name, with these attributes and children."""
        made: torch.nn.Module = self.named(name, torch.nn.Module)()
        for attribute, value in attributes.items():
            setattr(made, attribute, value)
        return made


def pykeen_representation(
    stand_ins: StandIns, rows: Array, *, kind: str = "Embedding", normalizer: str | None = None
) -> torch.nn.Module:
    """Return PyKEEN's representation by a table of rows [n, ...], numbers of two parts being complex."""
    flat = torch.from_numpy(np.ascontiguousarray(rows.reshape(len(rows), -1)))
    table = torch.nn.Embedding(len(flat), flat.shape[1], _weight=flat)
    return stand_ins.module(
        f"pykeen.nn.representation.{kind}",
        _embeddings=table,
        _shape=rows.shape[1:],
        normalizer=None if normalizer is None else stand_ins.named(normalizer),
    )


def save_pykeen(
    folder: Path,
    model: torch.nn.Module,
    triples: npt.NDArray[np.int64],
    entities: Sequence[str],
    relations: Sequence[str],
) -> None:
    """Write a folder as PipelineResult.save_to_directory of PyKEEN 1.11 does."""
    training = folder / "training_triples"
    training.mkdir(parents=True)
    torch.save(model, folder / "trained_model.pkl")
    base = {"num_entities": len(entities), "num_relations": len(relations), "create_inverse_triples": False}
    torch.save(base | {"metadata": {}}, training / "base.pth")
    for name, labels in (("entity_to_id", entities), ("relation_to_id", relations)):
        lines = [f"{number}\t{_as_pandas_quotes(label)}\n" for number, label in enumerate(labels)]
        (training / f"{name}.tsv.gz").write_bytes(gzip.compress(("id\tlabel\n" + "".join(lines)).encode()))
    rows = ["\t".join(map(str, triple)) + "\n" for triple in triples.tolist()]
    text = "head\trelation\ttail\n" + "".join(rows)
    (training / "numeric_triples.tsv.gz").write_bytes(gzip.compress(text.encode()))


def _as_pandas_quotes(label: str) -> str:
    return '"' + label.replace('"', '""') + '"' if any(mark in label for mark in '\t\n"') else label
