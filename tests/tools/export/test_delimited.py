"""Numbers as text are read back to the same bits, by way of a double too."""

from __future__ import annotations

import io

import numpy as np
import pytest
from exports import AWKWARD, WAYS, bits, by_double, by_float, floats, labelled_run
from graphs import stored_table
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.export import delimited
from kgshard_tools.export.delimited import quoted, row_texts, write_lines
from kgshard_tools.export.tables import Rows

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


@settings(deadline=None)
@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=1, max_size=20))
def test_every_float32_reads_back_to_the_bit(rows: list[tuple[float, float, float]]) -> None:
    values = np.array(rows, np.float32)
    texts = [bytes(text).decode().split(";") for text in row_texts(values, ";")]
    for way in WAYS:
        assert bits(floats(text, way) for text in texts) == bits(values)


def test_awkward_numbers_read_back_to_the_bit() -> None:
    around = np.array(AWKWARD, np.float32).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    values = around.view(np.float32)
    values = np.where(np.isfinite(values), values, 0)
    texts = [bytes(text).decode().split(" ") for text in row_texts(values, " ")]
    for way in WAYS:
        assert bits(floats(text, way) for text in texts) == bits(values)


def test_any_bits_read_back() -> None:
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    values = drawn[np.isfinite(drawn)].reshape(-1, 1)
    read = np.array([float(text) for text in row_texts(values, " ")]).astype(np.float32)
    assert bits([read]) == bits([values.ravel()])


def test_a_text_that_a_double_leads_astray_has_nine_digits() -> None:
    trap = np.nextafter(np.float32(7.038531e-26), np.float32(0))
    assert by_float("7.038531e-26") == trap != by_double("7.038531e-26"), "the trap is real"
    assert bytes(row_texts(np.array([[0.1, trap]], np.float32), " ")[0]) == b"0.1 7.03853069e-26"


@pytest.mark.parametrize("block_values", [1, 7, 10_000])
def test_lines_are_the_same_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, block_values: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    run = labelled_run(folder, [f"e{i}" for i in range(23)], dim=4)
    values = run.checkpoint.entities.read(range(23))
    monkeypatch.setattr(delimited, "_BLOCK_VALUES", block_values)
    rows = Rows(
        table=stored_table(folder, values, num_pieces=3),
        ids=range(23),
        vocabulary=run.dataset.folder / "entities.parquet",
        label_ids=range(23),
        dtype="F32",
    )
    file = io.BytesIO()
    write_lines(file, rows, lambda *told: "|".join(map(str, told)) + "=", ",", "!\r\n")
    lines = file.getvalue().decode().split("!\r\n")
    assert lines.pop() == ""
    heads, texts = zip(*(line.split("=") for line in lines), strict=True)
    degrees = run.dataset.entities.degrees
    assert list(heads) == [f"{i}|{label}|{degrees[i]}" for i, label in enumerate(run.dataset.entities)]
    assert bits(floats(text.split(",")) for text in texts) == bits(values)


def test_quotation_marks_are_doubled() -> None:
    assert quoted('say "a, b"\n') == '"say ""a, b""\n"'
