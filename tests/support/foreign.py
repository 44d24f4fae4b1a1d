"""Foreign models whose tables a test chose, the files programs keep them in, and how a run scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.importers.foreign import ForeignModel

from kgshard.files import AnyPath
from kgshard.models.scoring import Side

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]

ENTITIES = [f"e{number}" for number in range(13)]
"""Labels in the foreign program's order, which is not the order of their hashes."""
RELATIONS = ["likes", "knows", "is part of"]


def draw(rows: int, width: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def draw_triples(count: int, seed: int = 0, *, entities: int = 13, relations: int = 3) -> Ids:
    source = np.random.default_rng(seed)
    return np.stack([source.integers(0, limit, count) for limit in (entities, relations, entities)], axis=1)


def toy(**changed: Any) -> ForeignModel:
    """Return a ComplEx model of 13 entities and 3 relations; e12 is in no triple."""
    parts: dict[str, Any] = {
        "program": "Toy 1.0",
        "scoring": "complex",
        "reciprocal": False,
        "entity_labels": ENTITIES,
        "relation_labels": RELATIONS,
        "entities": draw(13, 6, 1),
        "relations": draw(6 if changed.get("reciprocal") else 3, 6, 2),
        "triples": {
            "train": draw_triples(40, 3, entities=12),
            "valid": draw_triples(5, 4, entities=12),
            "test": draw_triples(6, 5, entities=12),
        },
        "decisions": ["rows are as they are"],
    }
    return ForeignModel(**parts | changed)


def labelled(ids: Ids, entities: Sequence[str], relations: Sequence[str]) -> list[tuple[str, str, str]]:
    return [(entities[h], relations[r], entities[t]) for h, r, t in ids.tolist()]


def run_scores(
    run: AnyPath | TrainedModel,
    ids: Ids,
    entities: Sequence[str] = ENTITIES,
    relations: Sequence[str] = RELATIONS,
    *,
    side: Side = "tail",
) -> npt.NDArray[np.float64]:
    """Return what a run scores triples of foreign ids [n, 3]."""
    model = run if isinstance(run, TrainedModel) else load(run)
    return model.score(labelled(ids, entities, relations), side=side)


def write_dict(path: Path, labels: Sequence[str]) -> None:
    """Write `id TAB label` lines, the last first: their order must not matter."""
    numbered = reversed(list(enumerate(labels)))
    path.write_bytes("".join(f"{number}\t{label}\n" for number, label in numbered).encode())


def write_splits(
    folder: Path,
    splits: Mapping[str, Ids],
    entities: Sequence[str] = ENTITIES,
    relations: Sequence[str] = RELATIONS,
) -> None:
    """Write train.txt, valid.txt and test.txt of labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, ids in splits.items():
        lines = ["\t".join(triple) + "\n" for triple in labelled(ids, entities, relations)]
        (folder / f"{split}.txt").write_bytes("".join(lines).encode())
