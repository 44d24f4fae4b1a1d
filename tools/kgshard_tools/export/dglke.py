"""DGL-KE: embeddings as its own training saves them, and the graph as it reads one.

    kgshard_MODEL_entity.npy, kgshard_MODEL_relation.npy    float32
    entities.tsv, relations.tsv      id, label; quoted as csv.reader, which reads them, unquotes
    train.tsv, valid.tsv, test.tsv   head, relation, tail: ids (format udd_hrt)
    config.json                      ours, and the keys that DGL-KE 0.1.2 and its main branch read

Complex numbers are halves, as here. RotatE's angles are in units of emb_init / pi with emb_init = (gamma + 2)
/ hidden_dim, and scores of distances are gamma less the distance, so gamma is what this run adds to scores.
Reciprocal relations are relations of their own there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from kgshard.data.dataset import SPLITS
from kgshard.files import replacing
from kgshard.models.link import LinkModel
from kgshard_tools.export.escapes import choose_spelling
from kgshard_tools.export.format import Format
from kgshard_tools.export.graph import (
    Derived,
    csv_quoted,
    entity_tensor,
    find_layout,
    name_inverses,
    note_empty_splits,
    note_offset,
    numbered_lines,
    relation_tensor,
    triple_lines,
    write_text_blocks,
    written_labels,
)
from kgshard_tools.export.layouts import (
    Make,
    as_they_are,
    phases,
)
from kgshard_tools.export.tables import Export

_PROGRAM = "DGL-KE"
_DATASET = "kgshard"
_UNSAYABLE = r"[\n\r\0]"
"""What would break a line of entities.tsv: DGL-KE counts them."""


@dataclass(frozen=True)
class _Layout:
    """How DGL-KE has a model."""

    model: str
    relations: Callable[[LinkModel], Make] = lambda model: as_they_are
    double_entities: bool = False
    """Whether an entity has twice the floats of hidden_dim."""
    takes_gamma: bool = False


_LAYOUTS = {
    "distmult": _Layout("DistMult"),
    "rescal": _Layout("RESCAL"),
    "complex": _Layout("ComplEx"),
    "transe": _Layout("TransE_l2", takes_gamma=True),
    "transe-l1": _Layout("TransE_l1", takes_gamma=True),
    "rotate-moduli": _Layout(
        "RotatE", lambda model: phases(model, _PROGRAM), double_entities=True, takes_gamma=True
    ),
}
_REASONS = {"rotate": "its RotatE adds moduli, as kgshard's rotate-moduli does"}


def write_dglke(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    layout, model = find_layout(what, _PROGRAM, _LAYOUTS, _REASONS), what.stored.model
    entities = entity_tensor(what, as_they_are)
    relations = relation_tensor(what, layout.relations(model))
    kinds = {"entity": what.entities, "relation": what.relations}
    write = choose_spelling(what, "dglke", _UNSAYABLE, kinds).writer()
    inverses = name_inverses(what, _PROGRAM, write)
    _say_what_differs(what, layout)
    for name, labels in (
        ("entities", written_labels(what.entities, write)),
        ("relations", chain(written_labels(what.relations, write), inverses)),
    ):
        write_text_blocks(folder / f"{name}.tsv", numbered_lines(csv_quoted(labels)))
    for split in SPLITS:
        write_text_blocks(folder / f"{split}.tsv", triple_lines(what, split))
    _write_array(entities, folder / f"{_DATASET}_{layout.model}_entity.npy")
    _write_array(relations, folder / f"{_DATASET}_{layout.model}_relation.npy")
    what.config.update(_config(model, layout))
    scores = "logsigmoid" if model.offset and layout.takes_gamma else "none"
    return [
        "import json; from dglke.models.infer import ScoreInfer",
        f'scorer = ScoreInfer(-1, json.load(open("config.json")), ".", {scores!r})',
        "scorer.load_model()",
    ]


def _say_what_differs(what: Export, layout: _Layout) -> None:
    offset = what.stored.model.offset
    if not layout.takes_gamma:
        note_offset(what, _PROGRAM)
    elif offset:
        what.note(
            f"gamma is {offset:g}, which this run adds to scores; dglke_predict takes it for 0 but with "
            "--score_func logsigmoid, and then turns RotatE's relations by other angles"
        )
    if layout.model == "RESCAL":
        what.note(
            f"{_PROGRAM}'s evaluation ranks RESCAL's tails by transposed matrices; dglke_predict does not"
        )
    note_empty_splits(
        what, f"{_PROGRAM} stops at empty files; give it entities.tsv, relations.tsv and train.tsv only"
    )


def _config(model: LinkModel, layout: _Layout) -> dict[str, object]:
    hidden_dim = model.dim // 2 if layout.double_entities else model.dim
    return {
        "dataset": _DATASET,
        "model": layout.model,
        "model_name": layout.model,
        "emb_size": hidden_dim,
        "hidden_dim": hidden_dim,
        "gamma": model.offset if layout.takes_gamma else 0.0,
        "double_ent": layout.double_entities,
        "double_rel": False,
        "emap_file": "entities.tsv",
        "emp_file": "entities.tsv",  # So spelt on DGL-KE's main branch.
        "rmap_file": "relations.tsv",
    }


def _write_array(tensor: Derived, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": tensor.shape}
        np.lib.format.write_array_header_1_0(file, header)
        tensor.write(file)


FORMAT = Format(
    "DGL-KE's embeddings, config and data files",
    write_dglke,
    (
        *(f"{_DATASET}_*_{kind}.npy" for kind in ("entity", "relation")),
        *(f"{name}.tsv" for name in ("entities", "relations", *SPLITS)),
    ),
    whole=True,
    escapes=True,
)
