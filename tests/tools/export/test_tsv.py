"""Tab-separated text changes no label and no bit, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import WAYS, Floats, by_double, floats, labelled_run, run_lines, same_rows, stored_rows
from graphs import tree
from kgshard_tools.export import export

from kgshard.errors import ConfigError

MISSING = ["nan", "NA", "NULL", "None", "null", "N/A", "-inf", "1e5", "007", "true", "1,5"]
QUOTES = [
    '"Kostas" Theatre',
    '"open',
    'end"',
    "it's",
    "a,b;c|d",
    "#3",
    "# comment",
    "back\\slash",
    "\\t",
    "\\",
]
LINES = ["line\u2028separator", "next\u0085line", "form\x0cfeed", "file\x1cseparator", "zero\u200bwidth"]
FORMULAS = ["=1+1", "+x", "-y", "@z", "-7", "＝1"]
OTHERS = [" spaces ", "no\ufeffbreak", "100%", "%09", "</s>", "3 2", "日本", "e\u0301", "é", "x" * 3000]
LABELS = [*MISSING, *QUOTES, *LINES, *FORMULAS, *OTHERS]
REFUSED = ["a\tb", "a\nb", "a\rb", "\t=1", "\ufeffmark"]


def read(path: Path, way: Callable[[str], float] = by_double) -> dict[str, Floats]:
    """Read as the format is described."""
    lines = path.read_bytes().decode().split("\n")
    assert lines.pop() == ""
    rows = {label: floats(texts, way) for label, *texts in (line.split("\t") for line in lines)}
    assert len(rows) == len(lines)
    return rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_and_every_label_comes_back(
    tmp_path: Path, dtype: torch.dtype, way: Callable[[str], float]
) -> None:
    run = labelled_run(tmp_path, LABELS, ["=r", "s s"], dim=6, dtype=dtype, world_size=3)
    written = export(run.folder, "tsv", tmp_path / "out")
    for name, rows in stored_rows(run).items():
        assert same_rows(read(tmp_path / "out" / f"{name}.tsv", way), rows)
    assert written.notes == []


def test_the_loading_lines_it_prints_run(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, LABELS, dim=6)
    names = run_lines(export(run.folder, "tsv", tmp_path / "out").python, tmp_path / "out")
    assert names["entities"].dtype == np.float32
    assert same_rows(dict(zip(names["labels"], names["entities"], strict=True)), stored_rows(run)["entities"])


def test_labels_with_a_tab_or_a_line_end_are_refused_or_escaped(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, [*LABELS, *REFUSED], dim=6)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="tsv cannot say 5 of the labels") as caught:
        export(run.folder, "tsv", tmp_path / "out")
    assert all(repr(label) in str(caught.value) for label in REFUSED)
    assert tree(tmp_path) == before
    lines = export(run.folder, "tsv", tmp_path / "out", label_escape="percent").python
    names = run_lines(lines, tmp_path / "out")
    assert same_rows(dict(zip(names["labels"], names["entities"], strict=True)), stored_rows(run)["entities"])


@pytest.mark.filterwarnings("ignore:The 'float_precision' argument")
def test_pandas_reads_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas reads the file back")
    run = labelled_run(tmp_path, LABELS, dim=6)
    export(run.folder, "tsv", tmp_path / "out")
    table = pandas.read_csv(
        tmp_path / "out" / "entities.tsv",
        sep="\t",
        header=None,
        quoting=3,
        dtype={0: str},
        keep_default_na=False,
        na_filter=False,
        float_precision="round_trip",
        lineterminator="\n",
    )
    found = dict(zip(table[0], table.iloc[:, 1:].to_numpy(np.float32), strict=True))
    assert same_rows(found, stored_rows(run)["entities"])


def test_polars_reads_it(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars reads the file back")
    run = labelled_run(tmp_path, LABELS, dim=6)
    export(run.folder, "tsv", tmp_path / "out")
    schema = {"label": polars.String, **{f"v{i}": polars.Float32 for i in range(6)}}
    table = polars.read_csv(
        tmp_path / "out" / "entities.tsv", separator="\t", has_header=False, quote_char=None, schema=schema
    )
    found = dict(zip(table["label"].to_list(), table.drop("label").to_numpy(), strict=True))
    assert same_rows(found, stored_rows(run)["entities"])


def test_duckdb_reads_it(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB reads the file back")
    run = labelled_run(tmp_path, LABELS, dim=6)
    export(run.folder, "tsv", tmp_path / "out")
    columns = ", ".join(["'label': 'VARCHAR'", *(f"'v{i}': 'FLOAT'" for i in range(6))])
    rows = duckdb.sql(
        f"select * from read_csv('{tmp_path / 'out' / 'entities.tsv'}', auto_detect = false, delim = '\\t',"
        f" header = false, quote = '', escape = '', nullstr = '\\0none', columns = {{{columns}}})"
    ).fetchall()
    assert same_rows({row[0]: np.array(row[1:], np.float32) for row in rows}, stored_rows(run)["entities"])
