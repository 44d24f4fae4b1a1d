"""Safetensors files are read by byte range, refused when they lie, and equal what the package reads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from kgshard.errors import RunError, ShardError
from kgshard.files import file_sha256
from kgshard.shards import (
    ENTITIES,
    ITEM_BYTES,
    Piece,
    StoredTable,
    TensorInfo,
    find_non_finite,
    header_bytes,
    read_header,
    sharding_metadata,
    widen,
    write_blocks,
)

Header = dict[str, Any]


def file_of(header: str | bytes | Header, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file of this header, whatever it says."""
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(*shape: int, start: int = 0, stop: int | None = None, dtype: str = "F32") -> Header:
    size = 4
    for number in shape:
        size *= number
    return {
        "dtype": dtype,
        "shape": list(shape),
        "data_offsets": [start, start + size if stop is None else stop],
    }


def tensor(shape: object, offsets: list[int]) -> Header:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


GOOD = file_of({"__metadata__": {"a": "b"}, "w": entry(2, 3)}, bytes(range(24)))
DATA = bytes(24)
W = '"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}'

HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": GOOD[:7],
    "length only": GOOD[:8],
    "header length 0": file_of(b"", DATA),
    "header length 1": file_of(b"{", DATA),
    "header cut": GOOD[:40],
    "data cut": GOOD[:-1],
    "trailing byte": GOOD + b"\0",
    "trailing archive": GOOD + b"PK\x03\x04",
    "header 100,000,001": file_of({"w": entry(2, 3)}, DATA, length=100_000_001),
    "header 2^63": file_of({"w": entry(2, 3)}, DATA, length=2**63),
    "header 2^64 - 1": file_of({"w": entry(2, 3)}, DATA, length=2**64 - 1),
    "header beyond the file": file_of({"w": entry(2, 3)}, b"", length=10_000),
    "leading space": file_of(" {" + W + "}", DATA),
    "leading newline": file_of("\n{" + W + "}", DATA),
    "byte order mark": file_of("\ufeff{" + W + "}", DATA),
    "utf-16": file_of(("{" + W + "}").encode("utf-16-le"), DATA),
    "utf-32": file_of(("{" + W + "}").encode("utf-32-le"), DATA),
    "a list": file_of("[" + "1" * 20 + "]", b""),
    "text after the header": file_of("{" + W + "}x", DATA),
    "two headers": file_of("{" + W + "}{}", DATA),
    "not utf-8": file_of(b'{"\xff":1,' + W.encode() + b"}", DATA),
    "duplicate tensor": file_of("{" + W + "," + W + "}", DATA),
    "duplicate metadata": file_of('{"__metadata__":{},"__metadata__":{},' + W + "}", DATA),
    "duplicate key inside metadata": file_of('{"__metadata__":{"a":"b","a":"c"},' + W + "}", DATA),
    "duplicate key inside a tensor": file_of('{' + W[:-1] + ',"dtype":"F32"}}', DATA),
    "overlap": file_of({"a": entry(2, 3), "b": entry(1, 3, start=12)}, DATA),
    "same bytes twice": file_of({"a": entry(2, 3), "b": entry(2, 3)}, DATA),
    "hole": file_of({"a": entry(1, 2), "b": entry(1, 2, start=16)}, DATA),
    "hole at the start": file_of({"a": entry(2, 2, start=8)}, DATA),
    "tensor beyond the file": file_of({"w": entry(2, 4)}, DATA),
    "shape smaller than its bytes": file_of({"w": entry(2, 2, stop=24)}, DATA),
    "shape overflows 64 bits": file_of({"w": tensor([2**62, 4], [0, 0])}, b""),
    "shape overflows to the right size": file_of({"w": tensor([2**62 + 6], [0, 24])}, DATA),
    "no rows of 2^64 columns": file_of({"w": tensor([0, 2**64], [0, 0])}, b""),
    "negative shape": file_of({"w": tensor([-2, -3], [0, 24])}, DATA),
    "negative offset": file_of({"w": tensor([2, 3], [-24, 0])}, DATA),
    "offsets backwards": file_of({"w": tensor([2, 3], [24, 0])}, DATA),
    "three offsets": file_of({"w": tensor([2, 3], [0, 12, 24])}, DATA),
    "fractional shape": file_of({"w": tensor([2.0, 3.0], [0, 24])}, DATA),
    "text shape": file_of({"w": tensor("23", [0, 24])}, DATA),
    "boolean shape": file_of({"w": tensor([True, 6], [0, 24])}, DATA),
    "infinite shape": file_of('{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,24]}}', DATA),
    "integer of 5,000 digits": file_of('{"w":{"shape":[' + "9" * 5000 + "]}}", DATA),
    "unknown dtype": file_of({"w": entry(2, 3, dtype="F31")}, DATA),
    "dtype of another kind": file_of({"w": tensor([2, 3], [0, 24]) | {"dtype": ["F32"]}}, DATA),
    "no dtype": file_of({"w": {"shape": [2, 3], "data_offsets": [0, 24]}}, DATA),
    "no shape": file_of({"w": {"dtype": "F32", "data_offsets": [0, 24]}}, DATA),
    "no offsets": file_of({"w": {"dtype": "F32", "shape": [2, 3]}}, DATA),
    "null tensor": file_of({"w": None}, b""),
    "number for a tensor": file_of({"w": 7}, b""),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "w": entry(2, 3)}, DATA),
    "metadata nested": file_of({"__metadata__": {"a": {}}, "w": entry(2, 3)}, DATA),
    "metadata a list": file_of({"__metadata__": [], "w": entry(2, 3)}, DATA),
    "nested 100,000 deep": file_of('{"w":' + "[" * 100_000 + "]" * 100_000 + "}", DATA),
    "nested objects 100,000 deep": file_of('{"w":' * 100_000 + "1" + "}" * 100_000, DATA),
}  # fmt: skip
HOSTILE_NAMES = ["../w", "../../etc/passwd", "/w", "a\0b", "\0", "a/../b", "\ud800"]


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_a_hostile_file_is_refused_in_one_line_that_names_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(HOSTILE[kind])
    assert_refused(path)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_tensor_name_that_is_a_path_or_no_text_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(file_of({name: entry(2, 3)}, DATA))
    assert_refused(path)


def assert_refused(path: Path) -> None:
    with pytest.raises(ShardError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    assert caught.value.file == str(path)
    assert isinstance(caught.value, RunError)


def test_the_good_file_behind_the_hostile_ones_is_read(tmp_path: Path) -> None:
    """A control: they are refused for their fault."""
    path = tmp_path / "good.safetensors"
    path.write_bytes(GOOD)
    tensors, metadata = read_header(path)
    assert tensors == {"w": TensorInfo("F32", (2, 3), len(GOOD) - 24)}
    assert tensors["w"].num_bytes == 24
    assert metadata == {"a": "b"}


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none.safetensors", tmp_path / "folder"):
        assert_refused(path)


def mutate(source: random.Random, content: bytes) -> bytes:
    """Change, drop, repeat or insert a few bytes of a file's first part."""
    changed = bytearray(content)
    for _ in range(source.randint(1, 3)):
        position = source.randrange(min(len(changed), 300))
        match source.randrange(5):
            case 0:
                changed[position] = source.randrange(256)
            case 1:
                changed[position] ^= 1 << source.randrange(8)
            case 2:
                del changed[position : position + source.randint(1, 8)]
            case 3:
                changed[position:position] = changed[position : position + source.randint(1, 20)]
            case _:
                changed[position:position] = source.choice(
                    [b'"', b"{", b"}", b"[", b",", b"0", b"-", b"9" * 20, b"null", b"1e9", b"\\u0000", b" "]
                )
    return bytes(changed)


def test_mutated_files_are_refused_or_read_as_the_package_reads_them(tmp_path: Path) -> None:
    """3,000 mutants: a ShardError or the right content, never another exception."""
    source = random.Random(1)
    path = tmp_path / "original.safetensors"
    write_tables(
        path, {"first": np.arange(6, dtype=np.float32).reshape(2, 3), "second": np.ones((1, 4), np.float32)}
    )
    original, mutant = path.read_bytes(), tmp_path / "mutant.safetensors"
    num_read = 0
    for _ in range(3000):
        content = mutate(source, original)
        mutant.write_bytes(content)
        try:
            tensors, _ = read_header(mutant)
        except ShardError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017
            assert str(mutant) in str(error)  # noqa: PT017
            continue
        num_read += 1
        theirs = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
        assert tensors.keys() == theirs.keys()
        for name, info in tensors.items():
            assert list(info.shape) == theirs[name]["shape"]
            assert info.dtype == theirs[name]["dtype"]
            assert content[info.offset : info.offset + info.num_bytes] == theirs[name]["data"]
    assert 10 < num_read < 1500


def write_tables(path: Path, tables: dict[str, npt.NDArray[np.float32]]) -> None:
    """Write float32 arrays through this module."""
    shapes: dict[str, tuple[str, Any]] = {name: ("F32", table.shape) for name, table in tables.items()}
    with path.open("wb") as file:
        write_blocks(
            file, [header_bytes(shapes, {"format": "pt"}), *(table.tobytes() for table in tables.values())]
        )


@settings(max_examples=30, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4))
def test_the_package_reads_what_this_module_writes(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "ours.safetensors"
    source = np.random.default_rng(2)
    tables = {f"t{i}": source.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    write_tables(path, tables)
    loaded = load_file(path)
    assert loaded.keys() == tables.keys()
    for name, table in tables.items():
        np.testing.assert_array_equal(loaded[name], table)
    assert read_header(path)[1] == {"format": "pt"}


def test_this_module_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    tables: dict[str, npt.NDArray[Any]] = {
        "half": np.arange(6, dtype=np.float16).reshape(3, 2),
        "single": np.arange(4, dtype=np.float32).reshape(2, 2),
    }
    save_file(tables, path, {"who": "package"})
    tensors, metadata = read_header(path)
    assert metadata == {"who": "package"}
    for name, table in tables.items():
        read = StoredTable(name, [Piece(path, range(len(table)), tensors[name])]).read(range(len(table)))
        np.testing.assert_array_equal(read, table.astype(np.float32))


def test_a_table_of_another_kind_of_number_is_refused(tmp_path: Path) -> None:
    """float64 would lose digits as float32, silently."""
    path = tmp_path / "theirs.safetensors"
    save_file({"wide": np.ones((2, 2))}, path)
    tensors, _ = read_header(path)
    with pytest.raises(ShardError, match="wide is F64"):
        StoredTable("wide", [Piece(path, range(2), tensors["wide"])])


def test_a_file_is_laid_out_as_documented(tmp_path: Path) -> None:
    header = header_bytes({ENTITIES: ("F32", (2, 3))}, sharding_metadata({ENTITIES: 5}))
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length
    assert len(header) % 8 == 0
    value = json.loads(header[8:])
    assert value[ENTITIES] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert value["__metadata__"]["format"] == "pt"
    assert value["__metadata__"]["DCP_VERSION"] == "1.0"
    assert json.loads(value["__metadata__"]["DCP_SHARDING_INFO"]) == {ENTITIES: {"saved_offsets": [5, 0]}}


def test_written_blocks_are_counted_and_hashed(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    with path.open("wb") as file:
        size, digest = write_blocks(file, [b"abc", memoryview(b"defg"), b""])
    assert path.read_bytes() == b"abcdefg"
    assert (size, digest) == (7, file_sha256(path))


def raw_bytes(rows: torch.Tensor) -> bytes:
    array = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
    return bytes(array.numpy().tobytes())


def stored_table(
    folder: Path, table: npt.NDArray[np.float32], cuts: list[int], dtype: str = "F32"
) -> StoredTable:
    """Write a table in pieces that end at `cuts` and at its end."""
    pieces, start = [], 0
    for number, stop in enumerate([*sorted(cuts), len(table)]):
        path = folder / f"piece-{number}.safetensors"
        rows = torch.tensor(table[start:stop]).to(torch.bfloat16 if dtype == "BF16" else torch.float32)
        with path.open("wb") as file:
            write_blocks(
                file,
                [
                    header_bytes({"w": (dtype, tuple(rows.shape))}, sharding_metadata({"w": start})),
                    raw_bytes(rows),
                ],
            )
        pieces.append(Piece(path, range(start, stop), read_header(path)[0]["w"]))
        start = stop
    return StoredTable("w", pieces)


@st.composite
def cut_tables(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], list[int]]:
    num_rows, dim = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    table = np.random.default_rng(draw(st.integers(0, 99))).standard_normal((num_rows, dim))
    return table.astype(np.float32), draw(st.lists(st.integers(0, num_rows), max_size=5))


@settings(max_examples=60, deadline=None)
@given(cut=cut_tables(), dtype=st.sampled_from(["F32", "BF16"]), data=st.data())
def test_pieces_read_like_one_array(
    tmp_path_factory: pytest.TempPathFactory,
    cut: tuple[npt.NDArray[np.float32], list[int]],
    dtype: str,
    data: st.DataObject,
) -> None:
    """However a table is cut, empty pieces included."""
    table, cuts = cut
    stored = stored_table(tmp_path_factory.mktemp("pieces"), table, cuts, dtype)
    if dtype == "BF16":
        table = torch.tensor(table).bfloat16().float().numpy()
    assert stored.shape == table.shape
    start = data.draw(st.integers(0, len(table)))
    stop = data.draw(st.integers(start, len(table)))
    part = stored.read(range(start, stop))
    assert part.dtype == np.float32
    np.testing.assert_array_equal(part, table[start:stop])

    ids = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=9)) if len(table) else []
    np.testing.assert_array_equal(stored.gather(ids), table[np.array(ids, np.int64)])

    size = data.draw(st.integers(1, 5))
    blocks = list(stored.blocks(range(start, stop), size=size))
    assert [row for rows, _ in blocks for row in rows] == list(range(start, stop))
    assert all(0 < len(rows) == len(values) <= size for rows, values in blocks)
    if blocks:
        np.testing.assert_array_equal(np.concatenate([values for _, values in blocks]), table[start:stop])
    assert sum(len(rows) for rows, _ in stored.blocks()) == len(table)

    raw = b"".join(
        path.read_bytes()[offset : offset + length]
        for path, offset, length in stored.byte_ranges(range(start, stop))
    )
    expected = torch.tensor(table[start:stop]).to(torch.bfloat16 if dtype == "BF16" else torch.float32)
    assert raw == raw_bytes(expected)
    assert sum(length for _, _, length in stored.byte_ranges()) == table.size * ITEM_BYTES[dtype]


def test_every_bfloat16_is_widened_exactly() -> None:
    """All 65,536 of them, subnormals, infinities and NaN included (B51)."""
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    widened = widen(bits, "BF16")
    np.testing.assert_array_equal(widened.view(np.uint32), expected.view(np.uint32))


@pytest.fixture
def five_rows(tmp_path: Path) -> StoredTable:
    return stored_table(tmp_path, np.arange(10, dtype=np.float32).reshape(5, 2), [2, 2, 4])


@pytest.mark.parametrize("ids", [[5], [-1], [0, 99], [-3, 2]])
def test_rows_outside_are_refused(five_rows: StoredTable, ids: list[int]) -> None:
    wrong = next(row for row in ids if not 0 <= row < 5)
    with pytest.raises(IndexError, match=f"row {wrong} is outside a table of 5 rows"):
        five_rows.gather(ids)


@pytest.mark.parametrize("rows", [range(3, 6), range(5, 6), range(-1, 2), range(7, 9)])
def test_ranges_that_leave_the_table_are_refused(five_rows: StoredTable, rows: range) -> None:
    """`read` promises len(rows) rows: fewer would be a silent loss."""
    with pytest.raises(IndexError):
        five_rows.read(rows)


Damage = Callable[[list[Piece]], list[Piece]]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "gap": (lambda p: [p[0], p[2]], r"piece-2\.safetensors: begins at row 4, expected 2"),
    "repeat": (lambda p: [p[0], p[0], p[1], p[2]], r"piece-0\.safetensors: begins at row 0, expected 2"),
    "order": (lambda p: [p[1], p[0], p[2]], r"piece-1\.safetensors: begins at row 2, expected 0"),
    "late start": (lambda p: p[1:], r"piece-1\.safetensors: begins at row 2, expected 0"),
    "too many rows": (
        lambda p: [Piece(p[0].path, range(3), p[0].info), *p[1:]],
        r"piece-0\.safetensors: w is F32 \[2, 2\], expected F32 \[3, 2\]",
    ),
    "other width": (
        lambda p: [p[0], Piece(p[1].path, p[1].rows, TensorInfo("F32", (2, 3), 0)), p[2]],
        r"piece-1\.safetensors: w is F32 \[2, 3\], expected F32 \[2, 2\]",
    ),
    "other dtype": (
        lambda p: [*p[:2], Piece(p[2].path, p[2].rows, TensorInfo("F16", (1, 2), 0))],
        r"piece-2\.safetensors: w is F16 \[1, 2\], expected F32 \[1, 2\]",
    ),
    "one axis": (
        lambda p: [p[0], Piece(p[1].path, p[1].rows, TensorInfo("F32", (4,), 0)), p[2]],
        r"piece-1\.safetensors: w is F32 \[4\], expected F32 \[2, 2\]",
    ),
}


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_pieces_that_do_not_make_a_table_are_refused_by_file(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGES[kind]
    pieces = stored_table(tmp_path, np.ones((5, 2), np.float32), [2, 4]).pieces
    with pytest.raises(ShardError, match=message):
        StoredTable("w", damage(pieces))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_found(tmp_path: Path, value: float) -> None:
    table = np.ones((9, 2), np.float32)
    assert find_non_finite(stored_table(tmp_path, table, [4])) is None
    table[8, 0] = table[6, 1] = value
    stored = stored_table(tmp_path, table, [4])
    assert find_non_finite(stored) == 6
    assert find_non_finite(stored, range(7, 9)) == 8
    assert find_non_finite(stored, range(6)) is None
