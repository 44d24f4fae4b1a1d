"""OpenKE: its benchmark files, and a model's parameters as JSON.

    entity2id.txt, relation2id.txt                   how many, then label and id a line
    train2id.txt, valid2id.txt, test2id.txt          how many, then head, tail, relation a line, in this order
    parameters.json                                  what load_parameters reads: {name: rows of numbers}
    config.json                                      ours, and `openke`: the model's class and its arguments

Complex numbers are two tables, but in RotatE, where they are halves. RotatE's angles are in units of
(margin + 2) / dim / pi, and scores of distances are the margin less the distance, so the margin is what this
run adds to scores. `model(data)` then is our score for every model; OpenKE's `predict` gives lower numbers to
better triples. Reciprocal relations are relations of their own there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from kgshard.data.dataset import SPLITS
from kgshard.models.link import LinkModel
from kgshard.shards import Floats
from kgshard_tools.export.escapes import choose_spelling
from kgshard_tools.export.format import Format
from kgshard_tools.export.graph import (
    Derived,
    entity_tensor,
    find_layout,
    name_inverses,
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
    part,
    phases,
    shifts_in_planes,
    unit_normals,
)
from kgshard_tools.export.tables import Export

_PROGRAM = "OpenKE"
_UNSAYABLE = r"[\t\n\r]"
"""There is a label and a number a line, and a tab between them."""


@dataclass(frozen=True)
class _Layout:
    """How OpenKE has a model."""

    model: str
    """Its class."""
    arguments: Callable[[LinkModel], dict[str, object]]
    entities: dict[str, Make]
    """Makes each of its parameters."""
    relations: Callable[[LinkModel], dict[str, Make]]
    takes_margin: bool = False


def _negative(rows: Floats) -> Floats:
    return -rows


_ENTITIES: dict[str, Make] = {"ent_embeddings": as_they_are}


def _distance(norm: int) -> Callable[[LinkModel], dict[str, object]]:
    return lambda m: {"dim": m.dim, "p_norm": norm, "norm_flag": False, "margin": m.offset}


def _transe(norm: int) -> _Layout:
    return _Layout(
        "TransE", _distance(norm), _ENTITIES, lambda m: {"rel_embeddings": as_they_are}, takes_margin=True
    )


_LAYOUTS = {
    "distmult": _Layout(
        "DistMult", lambda m: {"dim": m.dim}, _ENTITIES, lambda m: {"rel_embeddings": as_they_are}
    ),
    # OpenKE's RESCAL returns -h R t, and then ranks by the wrong end of it; -R puts both right.
    "rescal": _Layout("RESCAL", lambda m: {"dim": m.dim}, _ENTITIES, lambda m: {"rel_matrices": _negative}),
    "complex": _Layout(
        "ComplEx",
        lambda m: {"dim": m.dim // 2},
        {"ent_re_embeddings": part(0, 2), "ent_im_embeddings": part(1, 2)},
        lambda m: {"rel_re_embeddings": part(0, 2), "rel_im_embeddings": part(1, 2)},
    ),
    "transe": _transe(2),
    "transe-l1": _transe(1),
    "transh": _Layout(
        "TransH",
        _distance(2),
        _ENTITIES,
        lambda m: {"rel_embeddings": shifts_in_planes, "norm_vector": unit_normals},
        takes_margin=True,
    ),
    "rotate-moduli": _Layout(
        "RotatE",
        lambda m: {"dim": m.dim // 2, "margin": m.offset, "epsilon": 2.0},
        _ENTITIES,
        lambda m: {"rel_embeddings": phases(m, _PROGRAM)},
        takes_margin=True,
    ),
}
_REASONS = {
    "rotate": "its RotatE adds moduli, as kgshard's rotate-moduli does",
    "simple": "its SimplE has one vector for each entity",
}


def write_openke(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    layout, model = find_layout(what, _PROGRAM, _LAYOUTS, _REASONS), what.stored.model
    relations = layout.relations(model)
    kinds = {"entity": what.entities, "relation": what.relations}
    write = choose_spelling(what, "openke", _UNSAYABLE, kinds).writer()
    inverses = name_inverses(what, _PROGRAM, write)
    _say_what_differs(what, layout)
    for kind, size, labels in (
        ("entity", model.num_entities, written_labels(what.entities, write)),
        ("relation", model.num_relation_rows, chain(written_labels(what.relations, write), inverses)),
    ):
        lines = numbered_lines(labels, id_first=False)
        write_text_blocks(folder / f"{kind}2id.txt", chain(_count(size), lines))
    for split in SPLITS:
        size = len(what.stored.dataset.triples(split))
        lines = triple_lines(what, split, columns=(0, 2, 1), separator=" ")
        write_text_blocks(folder / f"{split}2id.txt", chain(_count(size), lines))
    tensors = {f"{name}.weight": entity_tensor(what, make) for name, make in layout.entities.items()}
    tensors |= {f"{name}.weight": relation_tensor(what, make) for name, make in relations.items()}
    write_text_blocks(folder / "parameters.json", _parameters(tensors))
    arguments = {
        "ent_tot": model.num_entities,
        "rel_tot": model.num_relation_rows,
        **layout.arguments(model),
    }
    what.config["openke"] = {"model": layout.model, **arguments}
    keywords = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return [
        f"from openke.module.model import {layout.model}",
        f"model = {layout.model}({keywords})",
        'model.load_parameters("parameters.json")',
    ]


def _say_what_differs(what: Export, layout: _Layout) -> None:
    if not layout.takes_margin:
        note_offset(what, _PROGRAM)
    what.note(
        f"{_PROGRAM}'s model(data) is this run's score, its predict(data) the lower the better; "
        "there is no type_constrain.txt, so load data with type_constrain=False"
    )


def _count(number: int) -> Iterator[bytes]:
    yield f"{number}\n".encode()


def _parameters(tensors: dict[str, Derived]) -> Iterator[bytes]:
    """Yield the JSON of {name: rows of numbers}, a block at a time; nine digits say a float32 exactly."""
    opening = "{"
    for name, tensor in tensors.items():
        yield f"{opening}{msgspec.json.encode(name).decode()}: [".encode()
        opening, between = ",\n", ""
        for values in tensor.blocks():
            rows = (",".join(map(_number, row)) for row in values.reshape(len(values), -1).tolist())
            yield (between + ",\n".join(f"[{row}]" for row in rows)).encode()
            between = ",\n"
        yield b"]"
    yield b"}\n"


def _number(value: float) -> str:
    text = f"{value:.9g}"
    return text if text != "-0" else "-0.0"  # JSON's -0 is a whole number, which has no sign.


FORMAT = Format(
    "OpenKE's benchmark files and parameters",
    write_openke,
    (
        *("entity2id.txt", "relation2id.txt", "parameters.json"),
        *(f"{split}2id.txt" for split in SPLITS),
    ),
    whole=True,
    escapes=True,
)
