"""word2vec's formats, as gensim and the original tools read them.

    entities.vec (text) or entities.bin (binary)    line 1: number of rows, number of floats
    relations.vec, relations.bin                    the same; their rows may have another width
    inverse_relations.vec, .bin                     only with reciprocal relations: (?, r, t) is (t, r', ?)
    config.json

Text rows are `key SP v SP v ... LF`; binary rows `key SP` float32[D] little-endian, and LF, which the
original tools write and all readers skip. A key may hold no white space and no NUL, and not be empty:
readers split there, the binary ones without noticing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kgshard.files import replacing
from kgshard_tools.export.delimited import note_shared, write_lines
from kgshard_tools.export.escapes import Spell, choose_spelling
from kgshard_tools.export.format import Format
from kgshard_tools.export.tables import TABLES, Export, Rows

# What str.split, str.splitlines and C's isspace split at, and what ends a string of C.
_UNSAYABLE = r"[\s\x00]|\A\Z"

_Write = Callable[[BinaryIO, Rows, Spell], None]


def _fill(name: str, ending: str, write: _Write, what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    kinds = {"entity": what.entities, "relation": what.relations}
    key = choose_spelling(what, name, _UNSAYABLE, kinds).writer()
    note_shared(what)
    for table, rows in what.tables.items():
        with replacing(folder / f"{table}.{ending}") as temporary, temporary.open("wb") as file:
            file.write(f"{len(rows)} {rows.dim}\n".encode())
            write(file, rows, key)
    return _loading(ending, escaped=what.label_escape == "percent")


def _loading(ending: str, *, escaped: bool) -> list[str]:
    binary = ", binary=True" if ending == "bin" else ""
    lines = [
        "from gensim.models import KeyedVectors",
        *(f'{table} = KeyedVectors.load_word2vec_format("{table}.{ending}"{binary})' for table in TABLES[:2]),
    ]
    if escaped:
        lines.append("from urllib.parse import unquote")
        lines.append('labels = [unquote(key) if key != "%" else "" for key in entities.index_to_key]')
    return lines


def _write_text(file: BinaryIO, rows: Rows, key: Spell) -> None:
    write_lines(file, rows, lambda _, label, __: f"{key(label)} ", " ")


def _write_binary(file: BinaryIO, rows: Rows, key: Spell) -> None:
    for labels, (_, values) in zip(rows.labels(), rows.blocks(), strict=True):
        vectors = np.ascontiguousarray(values, "<f4")
        parts = [
            part
            for label, vector in zip(labels, vectors, strict=True)
            for part in (f"{key(label)} ".encode(), vector.data, b"\n")
        ]
        file.write(b"".join(parts))


TEXT = Format(
    "word2vec text, for gensim, spaCy and whoever reads .vec files",
    partial(_fill, "word2vec", "vec", _write_text),
    tuple(f"{table}.vec" for table in TABLES),
    dtypes=("float32", "float16", "bfloat16"),
    escapes=True,
)
BINARY = Format(
    "word2vec binary, for gensim: a quarter of the text's size, and faster",
    partial(_fill, "word2vec-bin", "bin", _write_binary),
    tuple(f"{table}.bin" for table in TABLES),
    escapes=True,
)
