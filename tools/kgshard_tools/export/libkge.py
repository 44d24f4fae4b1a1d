"""LibKGE: a dataset folder, and a model's weights with the configuration that makes the model.

    dataset.yaml                   counts, and which file is what
    train.del, valid.del, test.del     subject, predicate, object: ids, which are our rows
    entity_ids.del, relation_ids.del   id, label
    config.yaml                    the model, its norm and dimensions
    model.safetensors              the embeddings under the names of the model's state_dict
    config.json                    ours

Complex numbers are halves and angles are radians, as here. Reciprocal relations are LibKGE's
reciprocal_relations_model, whose inverses come behind the relations, as here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kgshard.data.dataset import SPLITS
from kgshard.files import write_text
from kgshard.models.link import LinkModel
from kgshard.shards import Floats
from kgshard_tools.export.escapes import choose_spelling
from kgshard_tools.export.format import Format
from kgshard_tools.export.graph import (
    entity_tensor,
    find_layout,
    note_offset,
    numbered_lines,
    relation_tensor,
    triple_lines,
    write_text_blocks,
    write_weights,
    written_labels,
)
from kgshard_tools.export.layouts import (
    Make,
    as_they_are,
    shifts_in_planes,
    unit_normals,
)
from kgshard_tools.export.tables import Export

_PROGRAM = "LibKGE"
_RECIPROCAL = "reciprocal_relations_model"
_DATASET = "kgshard"
_UNSAYABLE = r"[\n\r]"
"""LibKGE reads a label a line."""


@dataclass(frozen=True)
class _Layout:
    """How LibKGE has a model."""

    model: str
    norm: int | None = None
    """Its l_norm, of distances."""
    relations: Make = as_they_are


def _in_planes(rows: Floats) -> npt.NDArray[np.float64]:
    """Return TransH's relations [shift | normal], the shift in the plane and the normal a unit."""
    return np.concatenate([shifts_in_planes(rows), unit_normals(rows)], axis=1)


_LAYOUTS = {
    "distmult": _Layout("distmult"),
    "cp": _Layout("cp"),
    "simple": _Layout("simple"),
    "rescal": _Layout("rescal"),
    "complex": _Layout("complex"),
    "transe": _Layout("transe", norm=2),
    "transe-l1": _Layout("transe", norm=1),
    "transh": _Layout("transh", norm=2, relations=_in_planes),
    "rotate": _Layout("rotate", norm=2),
    "rotate-moduli": _Layout("rotate", norm=1),
}
_REASONS = {
    "conve": "its ConvE normalises batches, and not layers",
    "tucker": "its Relational Tucker3 has tucker's core in its relation embedder, which is not written here",
}


def write_libkge(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    layout = find_layout(what, _PROGRAM, _LAYOUTS, _REASONS)
    kinds = {"entity": what.entities, "relation": what.relations}
    write = choose_spelling(what, "libkge", _UNSAYABLE, kinds).writer()
    _say_what_differs(what)
    for kind, rows in kinds.items():
        write_text_blocks(folder / f"{kind}_ids.del", numbered_lines(written_labels(rows, write)))
    for split in SPLITS:
        write_text_blocks(folder / f"{split}.del", triple_lines(what, split))
    write_text(folder / "dataset.yaml", _dataset_yaml(what))
    write_text(folder / "config.yaml", _config_yaml(what.stored.model, layout))
    write_weights(
        folder / "model.safetensors",
        {
            "_entity_embedder._embeddings.weight": entity_tensor(what, as_they_are),
            "_relation_embedder._embeddings.weight": relation_tensor(what, layout.relations),
        },
    )
    return [
        "import kge, kge.model, safetensors.torch",
        'config = kge.Config(); config.load("config.yaml")',
        'dataset = kge.Dataset.create(config, folder=".")',
        "model = kge.model.KgeModel.create(config, dataset).eval()",
        'model.load_state_dict(safetensors.torch.load_file("model.safetensors"), strict=False)',
    ]


def _say_what_differs(what: Export) -> None:
    note_offset(what, _PROGRAM)
    for split in SPLITS:
        if len(what.stored.dataset.triples(split)) == 1:
            what.note(f"{split} is one triple, which {_PROGRAM} reads as three numbers (numpy.loadtxt)")


def _dataset_yaml(what: Export) -> str:
    model = what.stored.model
    lines = [f"name: {_DATASET}", f"num_entities: {model.num_entities}"]
    lines.append(f"num_relations: {model.num_relations}")
    for kind in ("entity", "relation"):
        for key in ("ids", "strings"):  # Labels are both: LibKGE's names, and what people read.
            lines += [
                f"files.{kind}_{key}.filename: {kind}_ids.del",
                f"files.{kind}_{key}.type: map",
            ]
    for split in SPLITS:
        lines += [
            f"files.{split}.filename: {split}.del",
            f"files.{split}.type: triples",
            f"files.{split}.split_type: {split}",
            f"files.{split}.size: {len(what.stored.dataset.triples(split))}",
        ]
    return "dataset:\n" + "".join(f"  {line}\n" for line in lines)


def _config_yaml(model: LinkModel, layout: _Layout) -> str:
    name = layout.model
    norm = [] if layout.norm is None else [f"  l_norm: {layout.norm}.0"]
    reciprocal = [f"{_RECIPROCAL}:", "  base_model:", f"    type: {name}"]
    lines = [
        f"import: [{_RECIPROCAL}, {name}]" if model.reciprocal else f"import: [{name}]",
        f"model: {_RECIPROCAL if model.reciprocal else name}",
        # LibKGE's default is cuda, and to leave pickles beside the files that it reads.
        "job:",
        "  device: cpu",
        "dataset:",
        f"  name: {_DATASET}",
        "  pickle: False",
        *(reciprocal if model.reciprocal else []),
        f"{name}:",
        *norm,
        "  entity_embedder:",
        f"    dim: {model.dim}",
        "  relation_embedder:",
        f"    dim: {model.relation_dim}",
    ]
    return "".join(f"{line}\n" for line in lines)


FORMAT = Format(
    "LibKGE's dataset folder, configuration and weights",
    write_libkge,
    (
        *("model.safetensors", "config.yaml", "dataset.yaml", "entity_ids.del", "relation_ids.del"),
        *(f"{split}.del" for split in SPLITS),
    ),
    whole=True,
    escapes=True,
)
