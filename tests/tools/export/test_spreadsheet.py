"""CSV for spreadsheets: no label runs, every other one and every number is what it was."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from exports import Floats, floats, labelled_run, run_lines, same_rows, stored_rows
from kgshard_tools.export import export, spreadsheet
from kgshard_tools.export.spreadsheet import cell

HARMLESS = [
    "a",
    'say "hi"',
    '"',
    "a,b",
    "a\nb",
    "a\r\nb",
    "NA",
    "007",
    " =1",
    "1-1",
    "日本",
    "x;y",
    "a\0b",
]
"""Labels that are written as they are."""
DANGEROUS = [
    "'tis",
    "=1+1",
    "+x",
    "-y",
    "@z",
    "\t=1",
    "-7",
    "\r=1",
    "\n=1",
    "\0=1",
    "＝1",
    "＋1",
    "－1",
    "＠1",
    "=",
    "@",
]


def read(path: Path) -> tuple[dict[str, Floats], list[tuple[int, int]]]:
    """Read as RFC 4180 says; return rows by label, and each row's id and degree."""
    text = path.read_bytes().decode()
    assert text.startswith("\ufeffid,label,degree,v0,v1")
    assert text.endswith("\r\n")
    header, *records = csv.reader(text[1:].splitlines(keepends=True), strict=True)
    assert header[3:] == [f"v{i}" for i in range(len(header) - 3)]
    rows = {label: floats(texts) for _, label, _, *texts in records}
    assert len(rows) == len(records)
    return rows, [(int(record[0]), int(record[2])) for record in records]


def test_only_labels_that_might_run_have_an_apostrophe(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, [*HARMLESS, *DANGEROUS], ["=r", "s"], dim=6, world_size=2)
    written = export(run.folder, "csv", tmp_path / "out")
    for name, wanted in stored_rows(run).items():
        found, told = read(tmp_path / "out" / f"{name}.csv")
        twice = {f"{sign}=1": f"'{sign}'=1" for sign in "\t\r\n"}
        shown = {
            twice.get(label, f"'{label}" if label in [*DANGEROUS, "=r"] else label): row
            for label, row in wanted.items()
        }
        assert same_rows(found, shown)
        kind = run.dataset.entities if name == "entities" else run.dataset.relations
        assert told == list(enumerate(kind.degrees.tolist()))
    assert f"entities.csv: {len(DANGEROUS)} labels that a spreadsheet might run" in "\n".join(written.notes)
    assert "relations.csv: 1 label that a spreadsheet might run" in "\n".join(written.notes)


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("u;=HYPERLINK(1);v", "u;'=HYPERLINK(1);v"),
        ("a\t-1", "a\t'-1"),
        ("a\r\n@b", "a\r\n'@b"),
        ("a;b=c", "a;b=c"),
    ],
)
def test_no_part_of_a_label_runs_where_other_signs_separate_cells(label: str, shown: str) -> None:
    assert cell(label) == shown


def test_no_cell_of_text_begins_with_a_trigger(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, [*HARMLESS, *DANGEROUS], dim=2)
    export(run.folder, "csv", tmp_path / "out")
    content = (tmp_path / "out" / "entities.csv").read_bytes().decode()
    for trigger in "=+-@\t\r\n\0＝＋－＠":
        assert f'"{trigger}' not in content.replace('""', "")


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, ["a", "b", "c"], dim=6)
    written = export(run.folder, "csv", tmp_path / "out")
    content = (tmp_path / "out" / "entities.csv").read_bytes()
    assert b",-" in content
    assert b"'" not in content
    assert written.notes == []


def test_the_loading_lines_it_prints_run(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, [*HARMLESS, "x" * 140_000], dim=6)
    names = run_lines(export(run.folder, "csv", tmp_path / "out").python, tmp_path / "out")
    assert names["entities"].dtype == np.float32
    assert same_rows(dict(zip(names["labels"], names["entities"], strict=True)), stored_rows(run)["entities"])


def test_what_excel_does_not_show_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (spreadsheet._MAX_ROWS, spreadsheet._MAX_COLUMNS, spreadsheet._MAX_CELL) == (
        2**20,
        2**14,
        2**15 - 1,
    )
    run = labelled_run(tmp_path, ["a", "b", "c" * 41, "=" + "d" * 39], dim=6)
    monkeypatch.setattr(spreadsheet, "_MAX_CELL", 40)
    monkeypatch.setattr(spreadsheet, "_MAX_ROWS", 5)
    monkeypatch.setattr(spreadsheet, "_MAX_COLUMNS", 9)
    notes = export(run.folder, "csv", tmp_path / "out").notes
    assert "entities.csv: 2 labels longer than Excel's 40 characters a cell" in notes
    assert not [note for note in notes if "shows" in note]
    monkeypatch.setattr(spreadsheet, "_MAX_ROWS", 4)
    monkeypatch.setattr(spreadsheet, "_MAX_COLUMNS", 8)
    notes = export(run.folder, "csv", tmp_path / "out").notes
    assert "entities.csv: Excel shows its first 4 lines, and it has 5" in notes
    assert "entities.csv: Excel shows its first 8 columns, and it has 9" in notes


@pytest.mark.filterwarnings("ignore:The 'float_precision' argument")
def test_pandas_reads_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas reads the file back")
    labels = [label for label in HARMLESS if "\0" not in label]
    run = labelled_run(tmp_path, labels, dim=6)
    export(run.folder, "csv", tmp_path / "out")
    table = pandas.read_csv(
        tmp_path / "out" / "entities.csv",
        dtype={"label": str},
        na_filter=False,
        float_precision="round_trip",
    )
    assert list(table.columns[:3]) == ["id", "label", "degree"]
    found = dict(zip(table["label"], table.iloc[:, 3:].to_numpy(np.float32), strict=True))
    assert same_rows(found, stored_rows(run)["entities"])


def test_polars_and_duckdb_read_it(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars reads the file back")
    duckdb = pytest.importorskip("duckdb", reason="DuckDB reads the file back")
    labels = [label for label in HARMLESS if "\0" not in label]
    run = labelled_run(tmp_path, labels, dim=6)
    export(run.folder, "csv", tmp_path / "out")
    path = tmp_path / "out" / "entities.csv"
    kinds = {f"v{i}": polars.Float32 for i in range(6)}
    table = polars.read_csv(path, schema_overrides={"label": polars.String, **kinds})
    found = dict(zip(table["label"].to_list(), table[:, 3:].to_numpy(), strict=True))
    assert same_rows(found, stored_rows(run)["entities"])
    types = ", ".join(["'label': 'VARCHAR'", *(f"'v{i}': 'FLOAT'" for i in range(6))])
    rows = duckdb.sql(
        f"select * exclude (id, degree) from read_csv('{path}', types = {{{types}}}, nullstr = '\\0none')"
    ).fetchall()
    assert same_rows({row[0]: np.array(row[1:], np.float32) for row in rows}, stored_rows(run)["entities"])
