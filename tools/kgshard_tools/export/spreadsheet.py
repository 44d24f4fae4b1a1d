"""Comma-separated text for spreadsheets, in which no label runs as a formula.

    entities.csv, relations.csv    header id,label,degree,v0,v1,...; row i has id i
    inverse_relations.csv          only with reciprocal relations: (?, r, t) is (t, r', ?)
    config.json

RFC 4180: CR LF after each record, labels in quotation marks. A UTF-8 byte-order mark comes first, without
which Excel takes the file for something else than UTF-8. A label that begins with = + - @ (or their wide
forms), a tab, a line end, NUL or an apostrophe has an apostrophe before it; so has such a sign behind a
semicolon, tab or line end, where some spreadsheets begin a cell. This is for people, `tsv` is for programs.
"""

from __future__ import annotations

import re
from pathlib import Path

from kgshard.files import replacing
from kgshard_tools.export.delimited import counted, note_shared, quoted, write_lines
from kgshard_tools.export.format import Format
from kgshard_tools.export.tables import TABLES, Export, Rows

_FORMULA = re.compile("(?<=[;\t\r\n])(?=[=+@＝＋－＠-])|\\A(?=[=+@\t\r\n\0'＝＋－＠-])")
_MAX_ROWS, _MAX_COLUMNS, _MAX_CELL = 1_048_576, 16_384, 32_767
"""Of Excel."""
_COLUMNS = ("id", "label", "degree")


def cell(label: str) -> str:
    """Return a label that no spreadsheet takes for a formula."""
    return _FORMULA.sub("'", label)


def write_csv(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    note_shared(what)
    for name, rows in what.tables.items():
        _note_limits(what, f"{name}.csv", rows)
        _write(what, rows, folder / f"{name}.csv")
    return [
        "import csv, numpy; csv.field_size_limit(1 << 30)",
        'rows = list(csv.reader(open("entities.csv", encoding="utf-8-sig", newline="")))[1:]',
        "labels, entities = [row[1] for row in rows], numpy.array([row[3:] for row in rows], numpy.float32)",
    ]


def _write(what: Export, rows: Rows, path: Path) -> None:
    neutralised = long = 0

    def begin(position: int, label: str, degree: int) -> str:
        nonlocal neutralised, long
        text = cell(label)
        neutralised += text != label
        long += len(text) > _MAX_CELL
        return f"{position},{quoted(text)},{degree},"

    with replacing(path) as temporary, temporary.open("wb") as file:
        header = ",".join([*_COLUMNS, *(f"v{i}" for i in range(rows.dim))])
        file.write(f"\ufeff{header}\r\n".encode())
        write_lines(file, rows, begin, ",", "\r\n")
    if neutralised:
        labels = counted(neutralised, "label")
        what.note(
            f"{path.name}: {labels} that a spreadsheet might run: an apostrophe was put before what begins so"
        )
    if long:
        what.note(
            f"{path.name}: {counted(long, 'label')} longer than Excel's {_MAX_CELL:,} characters a cell"
        )


def _note_limits(what: Export, name: str, rows: Rows) -> None:
    """Say what of a file Excel does not show."""
    if len(rows) + 1 > _MAX_ROWS:
        what.note(f"{name}: Excel shows its first {_MAX_ROWS:,} lines, and it has {len(rows) + 1:,}")
    columns = len(_COLUMNS) + rows.dim
    if columns > _MAX_COLUMNS:
        what.note(f"{name}: Excel shows its first {_MAX_COLUMNS:,} columns, and it has {columns:,}")


FORMAT = Format(
    "comma-separated text for spreadsheets; no label runs as a formula",
    write_csv,
    tuple(f"{table}.csv" for table in TABLES),
    dtypes=("float32", "float16", "bfloat16"),
)
