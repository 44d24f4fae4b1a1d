"""Tab-separated text for data tools. Labels are written as they are.

    entities.tsv, relations.tsv    label TAB v TAB v ... LF, no header line
    inverse_relations.tsv          only with reciprocal relations: (?, r, t) is (t, r', ?)
    config.json

Quotation marks are data, and nothing is a missing value: readers must be told so. A label may hold no tab,
line feed or carriage return, and not begin with U+FEFF, which readers take for a byte-order mark.
"""

from __future__ import annotations

from pathlib import Path

from kgshard.files import replacing
from kgshard_tools.export.delimited import note_shared, write_lines
from kgshard_tools.export.escapes import choose_spelling
from kgshard_tools.export.format import Format
from kgshard_tools.export.tables import TABLES, Export

_UNSAYABLE = r"[\t\n\r]|\A\ufeff"


def write_tsv(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    kinds = {"entity": what.entities, "relation": what.relations}
    field = choose_spelling(what, "tsv", _UNSAYABLE, kinds).writer()
    note_shared(what)
    for name, rows in what.tables.items():
        with replacing(folder / f"{name}.tsv") as temporary, temporary.open("wb") as file:
            write_lines(file, rows, lambda _, label, __: f"{field(label)}\t", "\t")
    lines = [
        "import numpy",
        r'rows = [line[:-1].split("\t") for line in open("entities.tsv", encoding="utf-8", newline="\n")]',
        "labels, entities = [row[0] for row in rows], numpy.array([row[1:] for row in rows], numpy.float32)",
    ]
    if what.label_escape == "percent":
        lines.append("from urllib.parse import unquote")
        lines.append("labels = [unquote(label) for label in labels]")
    return lines


FORMAT = Format(
    "tab-separated text for data tools; labels as they are",
    write_tsv,
    tuple(f"{table}.tsv" for table in TABLES),
    dtypes=("float32", "float16", "bfloat16"),
    escapes=True,
)
