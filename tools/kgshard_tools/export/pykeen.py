"""PyKEEN: its triples factories and a model's weights under its own names.

    training_triples/      what TriplesFactory.from_path_binary reads
        numeric_triples.tsv.gz    head, relation, tail: ids, which are our rows
        entity_to_id.tsv.gz       id, label
        relation_to_id.tsv.gz     id, label
        base.pth                  counts; a torch archive of a plain dictionary
    validation_triples/, testing_triples/    the same for valid and test
    model.safetensors      the tensors of the model's state_dict
    config.json            ours, and `pykeen`: the model's class and its arguments

Complex numbers and quaternions are interleaved there. With reciprocal relations, relation r has rows 2 r
and, for its inverse, 2 r + 1; the factory of train says so (create_inverse_triples).

base.pth is written by hand, pickle being a format that kgshard neither reads nor imports: a dictionary of
text, numbers and truth values takes a dozen opcodes of it.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError
from kgshard.files import copy_file, replacing
from kgshard.models.link import LinkModel
from kgshard.shards import Floats
from kgshard_tools.export.escapes import Spelling, choose_spelling
from kgshard_tools.export.format import Format
from kgshard_tools.export.graph import (
    Derived,
    csv_quoted,
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
    interleave,
    part,
    shifts_in_planes,
    unit_normals,
)
from kgshard_tools.export.tables import Export, Rows
from kgshard_tools.rows import Part, Values

_PROGRAM = "PyKEEN"
_FOLDERS = {"train": "training_triples", "valid": "validation_triples", "test": "testing_triples"}

_MISSING = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"),
    *("N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""What pandas.read_csv takes for a missing value, quoted or not; so it does the empty label."""
_NUMBER = r"\s*[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*|[-+]?(?i:inf|infinity)"
_TRUTH = r"(?i:true|false)"
_PANDAS_ROWS = 1 << 18
"""Rows of two columns that pandas looks at together to choose a type."""


@dataclass(frozen=True)
class _Layout:
    """How PyKEEN has a model."""

    model: str
    """Its class."""
    arguments: Callable[[LinkModel], dict[str, object]]
    entities: tuple[Make, ...] = (as_they_are,)
    """Makes each of its entity representations."""
    relations: tuple[Make, ...] = (as_they_are,)
    shared: Callable[[dict[str, Floats]], dict[str, Floats]] = lambda shared: {}
    note: str = ""
    """What people should know."""


def _negative_quaternions(rows: Floats) -> Floats:
    # PyKEEN's QuatE is the negative of the product that its documentation and the paper have.
    return interleave(4)(-rows)


def _rotations(rows: Floats) -> npt.NDArray[np.float64]:
    """Return float64[B, 2 D]: cos and sin of angles, side by side."""
    angles = rows.astype(np.float64)
    return interleave(2)(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))


def _vectors_of_mure(rows: Floats) -> Floats:
    return rows[:, :-2]


_LAYOUTS = {
    "distmult": _Layout("DistMult", lambda m: {"embedding_dim": m.dim, "entity_constrainer": None}),
    "cp": _Layout(
        "CP",
        lambda m: {"embedding_dim": m.relation_dim, "rank": 1},
        entities=(part(0, 2), part(1, 2)),
    ),
    "simple": _Layout(
        "CP",
        lambda m: {"embedding_dim": m.dim, "rank": 1},
        entities=(as_they_are, lambda rows: np.roll(rows, rows.shape[1] // 2, axis=1)),
        relations=(lambda rows: rows / 2,),
        note="written as PyKEEN's CP, whose scores are this run's; in PyKEEN 1.11.1's SimplE both entities "
        "give the vector of one role",
    ),
    "rescal": _Layout("RESCAL", lambda m: {"embedding_dim": m.dim}),
    "tucker": _Layout(
        "TuckER",
        lambda m: {
            "embedding_dim": m.dim,
            "relation_dim": m.relation_dim,
            "apply_batch_normalization": False,
        },
        shared=lambda shared: {"interaction.core_tensor": shared["core"].swapaxes(0, 1)},
    ),
    "complex": _Layout(
        "ComplEx",
        lambda m: {"embedding_dim": m.dim // 2},
        entities=(interleave(2),),
        relations=(interleave(2),),
    ),
    "qmult": _Layout(
        "QuatE",
        lambda m: {"embedding_dim": m.dim // 4, "relation_normalizer": None},
        entities=(interleave(4),),
        relations=(_negative_quaternions,),
    ),
    "quate": _Layout(
        "QuatE",
        lambda m: {"embedding_dim": m.dim // 4},
        entities=(interleave(4),),
        relations=(_negative_quaternions,),
    ),
    "transe": _Layout(
        "TransE", lambda m: {"embedding_dim": m.dim, "scoring_fct_norm": 2, "entity_constrainer": None}
    ),
    "transe-l1": _Layout(
        "TransE", lambda m: {"embedding_dim": m.dim, "scoring_fct_norm": 1, "entity_constrainer": None}
    ),
    "transh": _Layout(
        "TransH",
        lambda m: {"embedding_dim": m.dim, "scoring_fct_norm": 2},
        # PyKEEN 1.11.1 declares the shift first, and takes the first for the normal when it scores.
        relations=(unit_normals, shifts_in_planes),
    ),
    "mure": _Layout(
        "MuRE",
        lambda m: {"embedding_dim": m.dim - 2},
        entities=(_vectors_of_mure, lambda rows: rows[:, -2:-1], lambda rows: rows[:, -1:]),
        relations=(part(1, 2), part(0, 2)),
    ),
    "rotate": _Layout(
        "RotatE",
        lambda m: {"embedding_dim": m.dim // 2},
        entities=(interleave(2),),
        relations=(_rotations,),
    ),
}
_REASONS = {
    "rotate-moduli": "its RotatE compares by the 2-norm, as kgshard's rotate does",
    "conve": "its ConvE normalises batches, and not layers",
}


def write_pykeen(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    layout = find_layout(what, _PROGRAM, _LAYOUTS, _REASONS)
    tables = {"entity_to_id": what.entities, "relation_to_id": what.relations}
    write = _choose_spelling(what).writer()
    note_offset(what, _PROGRAM)
    if layout.note:
        what.note(layout.note)
    first = folder / _FOLDERS["train"]
    for split, name in _FOLDERS.items():
        (folder / name).mkdir()
        _write_triples(what, split, folder / name)
        for table, rows in tables.items():
            path = folder / name / f"{table}.tsv.gz"
            if split == "train":
                lines = numbered_lines(csv_quoted(written_labels(rows, write)))
                write_text_blocks(path, chain([b"id\tlabel\n"], lines))
            else:
                with replacing(path) as temporary:
                    copy_file(first / path.name, temporary)
    write_weights(folder / "model.safetensors", _tensors(what, layout))
    arguments = layout.arguments(what.stored.model)
    what.config["pykeen"] = {"model": layout.model, **arguments}
    return _loading(layout.model, arguments)


def _choose_spelling(what: Export) -> Spelling:
    """Return how labels are written so that pandas reads them back as they are."""
    kinds = {"entity": what.entities, "relation": what.relations}
    whole = [*map(re.escape, _MISSING)]
    whole += [kind for kind in (_NUMBER, _TRUTH) if any(_some_are_all(rows, kind) for rows in kinds.values())]
    # To escape its first character is enough for a label to be text.
    unsayable = rf"\A(?=(?:{'|'.join(whole)})\Z).|\A\Z"
    try:
        return choose_spelling(what, "pykeen", unsayable, kinds)
    except ConfigError as error:
        raise ConfigError(
            f"{error} ({_PROGRAM} reads labels by pandas, which takes such for missing values or numbers)"
        ) from error


def _some_are_all(rows: Rows, pattern: str) -> bool:
    """Whether all labels match that pandas looks at together, so that it takes none of them for text."""
    matches = re.compile(pattern).fullmatch
    return any(all(map(matches, labels)) for labels in rows.labels(_PANDAS_ROWS))


def _loading(model: str, arguments: dict[str, object]) -> list[str]:
    keywords = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return [
        "import pykeen.models, pykeen.triples, safetensors.torch",
        'triples = pykeen.triples.TriplesFactory.from_path_binary("training_triples")',
        f"model = pykeen.models.{model}(triples_factory=triples{keywords}).eval()",
        'model.load_state_dict(safetensors.torch.load_file("model.safetensors"), strict=False)',
    ]


def _tensors(what: Export, layout: _Layout) -> dict[str, Part]:
    tensors: dict[str, Part] = {}
    made: dict[str, list[Derived]] = {
        "entity": [entity_tensor(what, make) for make in layout.entities],
        "relation": [relation_tensor(what, make, interleaved=True) for make in layout.relations],
    }
    for kind, parts in made.items():
        for number, tensor in enumerate(parts):
            tensors[f"{kind}_representations.{number}._embeddings.weight"] = tensor
    return tensors | {name: Values(array) for name, array in layout.shared(what.shared).items()}


def _write_triples(what: Export, split: str, folder: Path) -> None:
    lines = triple_lines(what, split)
    write_text_blocks(folder / "numeric_triples.tsv.gz", chain([b"head\trelation\ttail\n"], lines))
    model = what.stored.model
    base: dict[str, object] = {
        "num_entities": model.num_entities,
        "num_relations": model.num_relations,
        "create_inverse_triples": model.reciprocal and split == "train",
        "metadata": {},
    }
    with replacing(folder / "base.pth") as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, content in (
            ("data.pkl", b"\x80\x02" + _opcodes(base) + b"."),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(f"base/{name}"), content)


def _opcodes(value: object) -> bytes:
    """Return what builds a dictionary, text, a whole number or a truth value in pickle's protocol 2."""
    if isinstance(value, dict):
        return b"}(" + b"".join(_opcodes(item) for pair in value.items() for item in pair) + b"u"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(content)]) + content
    if isinstance(value, str):
        return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()
    raise TypeError(f"no such value is written: {value!r}")


def _names() -> Iterator[str]:
    for folder in _FOLDERS.values():
        yield f"{folder}/base.pth"
        yield from (
            f"{folder}/{name}.tsv.gz" for name in ("numeric_triples", "entity_to_id", "relation_to_id")
        )


FORMAT = Format(
    "PyKEEN's triples factories and weights",
    write_pykeen,
    ("model.safetensors", *_names()),
    whole=True,
    escapes=True,
)
