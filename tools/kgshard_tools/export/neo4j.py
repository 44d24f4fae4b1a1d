"""A graph for `neo4j-admin database import full`, each node with its embedding.

    nodes.csv              id:ID,label,degree:int,embedding:float[]; numbers of an array are separated by ;
    relationships.csv      :START_ID,:END_ID,:TYPE,split: the triples of train, valid and test
    relations.csv          label,degree:int,embedding:float[]: a row for each relationship type
    inverse_relations.csv  the same, only with reciprocal relations: (?, r, t) is (t, r', ?)
    config.json

Neo4j has no place for the embeddings of relationship types: Graph Data Science is given those of
relations.csv when it scores. Labels and types are in quotation marks, those inside doubled; a backslash is
data. A type must have a name, without NUL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kgshard.data.dataset import SPLITS, Dataset
from kgshard.files import replacing
from kgshard_tools.export.delimited import note_shared, quoted, write_lines
from kgshard_tools.export.escapes import Spell, choose_spelling
from kgshard_tools.export.format import Format
from kgshard_tools.export.tables import Export, Rows

_UNSAYABLE = r"\x00|\A\Z"
_LINE_END = re.compile(r"[\n\r]")
_BLOCK_TRIPLES = 1 << 16
_SCORED = ("transe", "distmult")
"""What Graph Data Science scores by."""


def write_neo4j(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    type_name = choose_spelling(what, "neo4j", _UNSAYABLE, {"relation": what.relations}).writer()
    note_shared(what)
    multiline = _write_nodes(what.entities, folder / "nodes.csv")
    types = [type_name(label) for labels in what.relations.labels() for label in labels]
    _write_relationships(what.stored.dataset, types, folder / "relationships.csv")
    _write_types(what.relations, type_name, folder / "relations.csv")
    if what.inverses is not None:
        _write_types(what.inverses, type_name, folder / "inverse_relations.csv")
    multiline = multiline or any(map(_LINE_END.search, types))
    what.note(f"to import it: {_import_command(multiline=multiline)}")
    model = what.stored.model.name
    if model in _SCORED:
        what.note(
            f'to score with GDS: gds.model.{model}.create(G, "embedding", relations)'
            '.predict_stream("Entity", "Entity", TYPE, 10), with relations as below'
        )
    return [
        "import csv; csv.field_size_limit(1 << 30)",
        'read = lambda name: {row["label"]: list(map(float, row["embedding:float[]"].split(";")))'
        ' for row in csv.DictReader(open(name, encoding="utf-8", newline=""))}',
        'entities, relations = read("nodes.csv"), read("relations.csv")',
    ]


def _import_command(*, multiline: bool) -> str:
    options = "--id-type=integer " + ("--multiline-fields=true " if multiline else "")
    files = "--nodes=Entity=nodes.csv --relationships=relationships.csv"
    return f"neo4j-admin database import full neo4j {options}{files}"


def _write_nodes(rows: Rows, path: Path) -> bool:
    """Write the nodes; return whether a label holds a line end."""
    multiline = False

    def begin(position: int, label: str, degree: int) -> str:
        nonlocal multiline
        multiline = multiline or _LINE_END.search(label) is not None
        return f"{position},{quoted(label)},{degree},"

    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(b"id:ID,label,degree:int,embedding:float[]\n")
        write_lines(file, rows, begin, ";")
    return multiline


def _write_types(rows: Rows, type_name: Spell, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(b"label,degree:int,embedding:float[]\n")
        write_lines(file, rows, lambda _, label, degree: f"{quoted(type_name(label))},{degree},", ";")


def _write_relationships(dataset: Dataset, types: list[str], path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(b":START_ID,:END_ID,:TYPE,split\n")
        for lines in _relationships(dataset, [quoted(name) for name in types]):
            file.write(lines.encode())


def _relationships(dataset: Dataset, types: list[str]) -> Iterator[str]:
    """Yield the lines of some triples at a time."""
    for split in SPLITS:
        triples = dataset.triples(split)
        for start in range(0, len(triples), _BLOCK_TRIPLES):
            block = triples[start : start + _BLOCK_TRIPLES].tolist()
            yield "".join(f"{head},{tail},{types[relation]},{split}\n" for head, relation, tail in block)


FORMAT = Format(
    "CSV for neo4j-admin import: the graph, with an embedding at each node",
    write_neo4j,
    ("nodes.csv", "relationships.csv", "relations.csv", "inverse_relations.csv"),
    dtypes=("float32", "float16", "bfloat16"),
    whole=True,
    escapes=True,
)
