"""Promise 19: exports round-trip, whatever dtype a table has and however its memory lies."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from graphs import begin_run, ring
from kgshard_tools.export import export
from numpy.typing import NDArray
from worlds import ThreadWorld

from kgshard.checkpoint import save_checkpoint
from kgshard.errors import ConfigError
from kgshard.exchange import Exchange
from kgshard.partition import RowPartition
from kgshard.runs import Run
from kgshard.table import ShardedTable

ROWS, DIM = 11, 5
Floats = NDArray[np.floating]
Table = tuple[list[str], Floats]


def contiguous(values: torch.Tensor, folder: Path) -> torch.Tensor:
    return values.clone()


def fortran(values: torch.Tensor, folder: Path) -> torch.Tensor:
    return values.T.contiguous().T


def strided(values: torch.Tensor, folder: Path) -> torch.Tensor:
    wide = torch.zeros(2 * ROWS, 3 * DIM, dtype=values.dtype)
    wide[::2, 1::3] = values
    return wide[::2, 1::3]


def mapped(values: torch.Tensor, folder: Path) -> torch.Tensor:
    path = folder / "mapped"
    path.write_bytes(values.contiguous().view(torch.uint8).numpy().tobytes())
    raw = np.memmap(path, np.uint8, "c")
    return torch.from_numpy(raw).view(values.dtype).view(ROWS, DIM)


LAYOUTS = {"C": contiguous, "F": fortran, "strided": strided, "mmap": mapped}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def save(exchange: Exchange, run: Run, entities: torch.Tensor) -> None:
    table = ShardedTable(entities, RowPartition(ROWS, 1), exchange)
    save_checkpoint(run, table, torch.ones(run.model.num_relation_rows, DIM), step=1, epoch=1)


def run_with(folder: Path, entities: torch.Tensor) -> Run:
    run = begin_run(folder, ring(ROWS), dim=DIM, model="distmult")
    ThreadWorld(1).run(save, run, entities)
    return run


def read_npy(folder: Path) -> Table:
    labels = (folder / "entities.txt").read_text().splitlines()
    return labels, np.load(folder / "entities.npy", mmap_mode="r")


def read_parquet(folder: Path) -> Table:
    table = pq.read_table(folder / "entities.parquet")
    return table["label"].to_pylist(), np.array(table["vector"].to_pylist())


def read_word2vec(folder: Path) -> Table:
    header, *lines = (folder / "entities.vec").read_text().splitlines()
    assert header == f"{ROWS} {DIM}"
    cells = [line.split(" ") for line in lines]
    return [row[0] for row in cells], np.array([[float(cell) for cell in row[1:]] for row in cells])


def read_word2vec_bin(folder: Path) -> Table:
    raw = (folder / "entities.bin").read_bytes()
    header, rest = raw.split(b"\n", 1)
    assert header == f"{ROWS} {DIM}".encode()
    labels, rows = [], []
    for _ in range(ROWS):
        label, rest = rest.lstrip(b"\n").split(b" ", 1)
        labels.append(label.decode())
        rows.append(np.frombuffer(rest[: 4 * DIM], "<f4"))
        rest = rest[4 * DIM :]
    assert rest in (b"", b"\n")
    return labels, np.stack(rows)


def read_csv(folder: Path) -> Table:
    with (folder / "entities.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [row[1] for row in rows], np.array([[float(cell) for cell in row[3:]] for row in rows])


READERS: dict[str, Callable[[Path], Table]] = {
    "numpy": read_npy,
    "parquet": read_parquet,
    "word2vec": read_word2vec,
    "word2vec-bin": read_word2vec_bin,
    "csv": read_csv,
}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Values of every kind that the dtype has: large, small, denormal, both zeros."""
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32))
    limits = torch.finfo(dtype)
    values[0] = torch.tensor([limits.max, limits.min, limits.tiny, limits.smallest_normal / 4, -0.0])
    return values.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_keeps_its_label_and_every_bit(tmp_path: Path, dtype: str, layout: str) -> None:
    expected = numbers(DTYPES[dtype])
    laid_out = LAYOUTS[layout](expected, tmp_path)
    assert torch.equal(laid_out, expected)
    assert laid_out.is_contiguous() == (layout in ("C", "mmap"))
    run = run_with(tmp_path, laid_out)
    for format, read in READERS.items():
        notes = export(run.folder, format, tmp_path / format).notes
        labels, rows = read(tmp_path / format)
        assert labels == list(run.dataset.entities)
        assert rows.astype(np.float32).tobytes() == expected.float().numpy().tobytes(), format
        widened = dtype == "bf16" and format in ("numpy", "parquet", "word2vec-bin")
        widened |= dtype == "fp16" and format == "word2vec-bin"
        assert any("widened to float32, exactly" in note for note in notes) == widened, format


@pytest.mark.parametrize("layout", ["F", "strided"])
def test_a_writer_of_memory_as_it_lies_would_be_caught(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: shards whose bytes come in the order of memory."""
    expected = numbers(torch.float32)

    def as_it_lies(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[bytes]:
        yield header
        for tensor in tensors:
            start = tensor.storage_offset() * 4
            yield bytes(tensor.untyped_storage())[start:][: tensor.numel() * 4]

    monkeypatch.setattr("kgshard.checkpoint._blocks", as_it_lies)
    run = run_with(tmp_path, LAYOUTS[layout](expected, tmp_path))
    export(run.folder, "numpy", tmp_path / "numpy")
    _, rows = read_npy(tmp_path / "numpy")
    assert rows.tobytes() != expected.numpy().tobytes()


@pytest.mark.parametrize("format", ["numpy", "parquet", "word2vec", "csv"])
def test_what_float16_cannot_hold_is_refused_and_nothing_is_there(tmp_path: Path, format: str) -> None:
    values = numbers(torch.float32)
    values[0] = 0.0
    values[7, 2] = 70000.0
    run = run_with(tmp_path, values)
    with pytest.raises(ConfigError, match=r"entity 7 \('.*'\) holds 70000, which float16 cannot"):
        export(run.folder, format, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".kgshard-tmp*"))
