"""Reading triples from text: no byte lost, no line misread, no fault passed over."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard.data.readers import TripleBlock, read_triples
from kgshard.errors import DataError

MARK = b"\xef\xbb\xbf"
Triple = tuple[bytes, bytes, bytes]


def zstd_frame(data: bytes) -> bytes:
    compressed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return compressed


COMPRESS = {".gz": gzip.compress, ".zst": zstd_frame}
# `printf 'a\tr\tb\n' | zstd -c`: the last four bytes are the checksum, which Arrow's encoder leaves out.
CHECKED_FRAME = bytes.fromhex("28b52ffd0458310000 61097209620a 344c791a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readers")


def write(folder: Path, data: bytes, name: str = "train.tsv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def labels(column: pa.LargeStringArray) -> list[bytes]:
    column.validate(full=True)
    assert column.type == pa.large_string()
    assert column.null_count == 0
    raw: list[bytes] = column.cast(pa.large_binary()).to_pylist()
    return raw


def triples(block: TripleBlock) -> list[Triple]:
    return list(zip(labels(block.heads), labels(block.relations), labels(block.tails), strict=True))


@dataclass(frozen=True)
class Reading:
    """What a file holds, or what is wrong with it."""

    triples: list[Triple]
    num_lines: int = 0
    num_blank: int = 0
    error: str | None = None


def read(path: Path, block_bytes: int = 1 << 24) -> Reading:
    blocks = list(read_triples(path, block_bytes=block_bytes))
    return Reading(
        [triple for block in blocks for triple in triples(block)],
        sum(block.num_lines for block in blocks),
        sum(block.num_blank for block in blocks),
    )


def read_or_error(path: Path, block_bytes: int) -> Reading:
    try:
        return read(path, block_bytes)
    except DataError as error:
        return Reading([], error=str(error))


# The same rules, one line at a time and in plain Python.


def expected_reading(path: Path, data: bytes) -> Reading:
    *ended, rest = data.removeprefix(MARK).split(b"\n")
    lines = [line[:-1] if line.endswith(b"\r") else line for line in ended]
    if rest:
        lines.append(b"" if rest == b"\r" else rest)
    for number, line in enumerate(lines, 1):
        if line and (fault := expected_fault(line)):
            return Reading([], error=f"{path}:{number}: {fault}")
    found = [line.split(b"\t") for line in lines if line]
    return Reading([(h, r, t) for h, r, t in found], len(lines), lines.count(b""))


def expected_fault(line: bytes) -> str | None:
    columns = line.split(b"\t")
    if len(columns) != 3:
        return f"{len(columns)} columns, expected 3"
    for name, label in zip(("head", "relation", "tail"), columns, strict=True):
        if not label:
            return f"empty {name} label"
    good = line.decode("utf-8", errors="ignore").encode()
    if good != line:
        first = next(i for i, byte in enumerate(line) if good[i : i + 1] != bytes([byte]))
        return f"expected UTF-8, found byte 0x{line[first]:02x}"
    return None


HOSTILE = [
    *('"', "'", "\r", " ", "\xa0", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x00", "\ufeff"),
    *(
        "e\u0301",
        "é",
        "\u200d",
        "日本",
        "😀",
        "\ue000",
        "nan",
        "NA",
        "NULL",
        "None",
        "007",
        "1e5",
        "-",
        "#",
        "\\",
    ),
    *("\\t", "\\n", ",", ";", "<a:b>", "true"),
]
hostile_labels = st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=5).map("".join)
triple_lines = st.tuples(hostile_labels, hostile_labels, hostile_labels).map("\t".join)
line_ends = st.sampled_from(["\n", "\r\n"])
good_lines = st.tuples(triple_lines | st.just(""), line_ends).map("".join)
# Nearly always well-formed: a label may also be just the CR or U+FEFF that belongs to the line or file.
good_files = st.tuples(
    st.sampled_from([b"", MARK]),
    st.lists(good_lines, max_size=12).map("".join).map(str.encode),
    st.sampled_from(["", "last\tr\tline", "last\tr\tline\r", "\r"]).map(str.encode),
).map(b"".join)
scraps = [
    b"\t",
    b"\t",
    b"\n",
    b"\n",
    b"\r",
    b"a",
    b"b",
    MARK,
    b"\xff",
    b"\xc3",
    b"\xa9",
    b"\xed\xa0\x80",
    b"\x00",
]
scrap_files = st.lists(st.sampled_from([*scraps, b"a\tr\tb", b"a\tr\tb\n"]), max_size=30).map(b"".join)
block_sizes = st.integers(1, 40)


def assert_agrees(folder: Path, data: bytes, block_bytes: int) -> None:
    path = write(folder, data)
    reading = read_or_error(path, block_bytes)
    assert reading == expected_reading(path, data)
    assert reading.num_lines == len(reading.triples) + reading.num_blank


@settings(max_examples=400, deadline=None)
@given(data=good_files, block_bytes=block_sizes)
def test_bytes_in_are_bytes_out(folder: Path, data: bytes, block_bytes: int) -> None:
    assert_agrees(folder, data, block_bytes)


@settings(max_examples=400, deadline=None)
@given(data=scrap_files, block_bytes=block_sizes)
def test_any_bytes_are_read_or_refused_as_the_rules_say(folder: Path, data: bytes, block_bytes: int) -> None:
    assert_agrees(folder, data, block_bytes)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None)
@given(data=good_files | scrap_files, block_bytes=block_sizes)
def test_ten_thousand_files(folder: Path, data: bytes, block_bytes: int) -> None:
    assert_agrees(folder, data, block_bytes)


# Kinds of fault seen in other tools; the numbers are those of the collection.


def test_words_for_missing_values_are_labels(tmp_path: Path) -> None:  # B01
    path = write(tmp_path, b"nan\tlikes\tNA\nNULL\tlikes\tNone\nnull\tis\tN/A\n")
    assert read(path).triples == [
        (b"nan", b"likes", b"NA"),
        (b"NULL", b"likes", b"None"),
        (b"null", b"is", b"N/A"),
    ]


def test_quotes_are_data(tmp_path: Path) -> None:  # B04
    path = write(tmp_path, b'"Kostas" Theatre\tin\tGreece\nx\tr\t"open\ny\tr\tz"')
    assert read(path).triples == [
        (b'"Kostas" Theatre', b"in", b"Greece"),
        (b"x", b"r", b'"open'),
        (b"y", b"r", b'z"'),
    ]


@pytest.mark.parametrize(
    "inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\x00"]
)
def test_only_a_line_feed_ends_a_line(tmp_path: Path, inside: str) -> None:  # B06, X4
    label = f"a{inside}b".encode()
    path = write(tmp_path, b"%b\t%b\t%b\n" % (label, label, label))
    assert read(path).triples == [(label, label, label)]


def test_one_carriage_return_belongs_to_the_line_end(tmp_path: Path) -> None:
    path = write(tmp_path, b"a\tr\tb\r\nc\tr\td\r\r\n\re\tr\tf\r")
    assert [tail for _, _, tail in read(path).triples] == [b"b", b"d\r", b"f\r"]


def test_a_byte_order_mark_is_dropped_only_at_the_start_of_the_file(tmp_path: Path) -> None:  # B08
    path = write(tmp_path, MARK + b"alice\tr\t" + MARK + b"bob\n" + MARK + b"alice\tr\tcarol\n")
    assert read(path).triples == [(b"alice", b"r", MARK + b"bob"), (MARK + b"alice", b"r", b"carol")]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 1 << 24])
@pytest.mark.parametrize("data", [b"", MARK])
def test_an_empty_file_yields_nothing(tmp_path: Path, data: bytes, block_bytes: int) -> None:
    assert list(read_triples(write(tmp_path, data), block_bytes=block_bytes)) == []


@pytest.mark.parametrize("data", [b"\n\r\n\n", MARK + b"\n\n\r"])
def test_blank_lines_are_counted(tmp_path: Path, data: bytes) -> None:
    assert read(write(tmp_path, data)) == Reading([], num_lines=3, num_blank=3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"a\tr\tb\nc\tr\n\nd\tr\te\textra\n", "2: 2 columns, expected 3"),  # B11
        (b"a\tr\tb\nc\tr\td\n\nd\tr\te\textra\n", "4: 4 columns, expected 3"),
        (b"a\tr\tb\nnothing", "2: 1 columns, expected 3"),
        (b"a\tr\nb\n", "1: 2 columns, expected 3"),
        (b"a\tr\nb\tc\td\te\n", "1: 2 columns, expected 3"),  # six labels in all
        (b" \n", "1: 1 columns, expected 3"),
        (b"# a comment\n", "1: 1 columns, expected 3"),
        (b"a\tr\tb\n\tr\tb\n", "2: empty head label"),
        (b"a\t\tb\n", "1: empty relation label"),
        (b"a\tr\t\n", "1: empty tail label"),
        (b"a\tr\t\r\n", "1: empty tail label"),
        (b"a\tr\t", "1: empty tail label"),
        (b"\t\t\n", "1: empty head label"),
        (b"a\tr\tb\nc\tr\t\xe9t\xe9\n", "2: expected UTF-8, found byte 0xe9"),
        (b"a\tr\xc3\tb\n", "1: expected UTF-8, found byte 0xc3"),
        (b"a\tr\xc3\t\xa9b\n", "1: expected UTF-8, found byte 0xc3"),  # é with a TAB inside
        (b"a\tr\tb\xc3\n\xa9\tr\tb\n", "1: expected UTF-8, found byte 0xc3"),  # é with a line end inside
        (b"a\tr\t\xed\xa0\x80\n", "1: expected UTF-8, found byte 0xed"),  # a surrogate
        (b"a\tr\t\xc0\x80\n", "1: expected UTF-8, found byte 0xc0"),  # an overlong NUL
        (b"a\tr\t\xf4\x90\x80\x80\n", "1: expected UTF-8, found byte 0xf4"),  # beyond U+10FFFF
        (b"\xff\tr\tb\nc\tr\n", "1: expected UTF-8, found byte 0xff"),
        (b"c\tr\n\xff\tr\tb\n", "1: 2 columns, expected 3"),
        (b"a\t\tb\nc\n\xff\n", "1: empty relation label"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 5, 1 << 24])
def test_the_first_faulty_line_is_named(tmp_path: Path, lines: bytes, message: str, block_bytes: int) -> None:
    path = write(tmp_path, lines)
    with pytest.raises(DataError) as raised:
        list(read_triples(path, block_bytes=block_bytes))
    assert str(raised.value) == f"{path}:{message}"


def lines_before_fault(path: Path, block_bytes: int) -> tuple[int, str]:
    num_lines = 0
    try:
        for block in read_triples(path, block_bytes=block_bytes):
            num_lines += block.num_lines
    except DataError as error:
        return num_lines, str(error)
    raise AssertionError("no fault was found")


@pytest.mark.parametrize("bad_line", [b"c\tr", b"c\tr\t", b"c\tr\t\xff"])
@pytest.mark.parametrize("block_bytes", [7, 100, 4096])
def test_lines_are_counted_across_blocks(tmp_path: Path, bad_line: bytes, block_bytes: int) -> None:
    path = write(tmp_path, b"a\tr\tb\n\r\n" * 1000 + bad_line + b"\n" + b"a\tr\tb\n" * 1000)
    num_lines, message = lines_before_fault(path, block_bytes)
    assert message.startswith(f"{path}:2001: ")
    assert 2000 - block_bytes < num_lines <= 2000


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("block_bytes", [1000, 1 << 20, 1 << 24])
def test_labels_of_a_megabyte(tmp_path: Path, suffix: str, block_bytes: int) -> None:
    head, relation, tail = b"h" * (1 << 20), b"r" * 1_000_003, "é".encode() * (1 << 19)
    lines = b"a\tr\tb\n" + b"\t".join([head, relation, tail]) + b"\nc\tr\td"
    path = write(tmp_path, COMPRESS.get(suffix, bytes)(lines), "train.tsv" + suffix)
    assert read(path, block_bytes).triples == [(b"a", b"r", b"b"), (head, relation, tail), (b"c", b"r", b"d")]


def test_a_block_is_about_as_long_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path, b"a\tr\tb\n" * 1000)
    assert [block.num_lines for block in read_triples(path, block_bytes=600)] == [100] * 10


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    lines = b"entity/1234567\tP31\tentity/7654321\n" * 1_000_000  # 34 MB
    path = write(tmp_path, COMPRESS.get(suffix, bytes)(lines), "train.tsv" + suffix)
    del lines
    tracemalloc.start()
    for block in read_triples(path, block_bytes=1 << 20):
        assert pa.total_allocated_bytes() < 8 << 20
        del block
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


# Compressed files


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".GZ"])
@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 24])
def test_every_member_and_frame_is_read(tmp_path: Path, suffix: str, block_bytes: int) -> None:  # B18
    compress = COMPRESS[suffix.lower()]
    parts = [b"a\tr\tb\nc\tr", b"", b"\td\n" + MARK, b"e\tr\tf\n"]
    path = write(tmp_path, b"".join(map(compress, parts)), "t" + suffix)
    assert read(path, block_bytes).triples == [
        (b"a", b"r", b"b"),
        (b"c", b"r", b"d"),
        (MARK + b"e", b"r", b"f"),
    ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_empty_text_may_be_compressed(tmp_path: Path, suffix: str) -> None:
    assert list(read_triples(write(tmp_path, COMPRESS[suffix](b""), "t" + suffix))) == []


def damaged(suffix: str) -> Iterator[bytes]:
    """Yield every cut, inside the second of two streams too, and some other bytes."""
    first, second = (COMPRESS[suffix](line * 20) for line in (b"a\tr\tb\n", b"c\tr\td\n"))
    yield from (first[:length] for length in range(len(first)))
    yield from (first + second[:length] for length in range(1, len(second)))
    yield first + b"neither padding nor a stream"
    yield first[:10] + bytes(byte ^ 0xFF for byte in first[10:])
    yield b"a\tr\tb\n"
    yield b"\0" * 100


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("block_bytes", [1, 1 << 24])
def test_damage_is_never_a_short_file(tmp_path: Path, suffix: str, block_bytes: int) -> None:
    path = tmp_path / f"train.tsv{suffix}"
    for data in damaged(suffix):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"train\.tsv{suffix}: truncated or corrupt: ."):
            list(read_triples(path, block_bytes=block_bytes))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("place", [-1, -2, -3, -4])
def test_checksums_are_checked(tmp_path: Path, suffix: str, place: int) -> None:
    # A gzip member ends with its checksum and then four bytes of its length.
    data = bytearray(CHECKED_FRAME if suffix == ".zst" else gzip.compress(b"a\tr\tb\n")[:-4])
    ending = b"" if suffix == ".zst" else (6).to_bytes(4, "little")
    path = write(tmp_path, bytes(data) + ending, "t" + suffix)
    assert read(path).triples == [(b"a", b"r", b"b")]
    data[place] ^= 1
    with pytest.raises(DataError, match=rf"t{suffix}: truncated or corrupt"):
        list(read_triples(write(tmp_path, bytes(data) + ending, "t" + suffix)))


@pytest.mark.parametrize("name", ["absent.tsv", "absent.tsv.gz", "absent.tsv.zst"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as raised:
        list(read_triples(tmp_path / name))
    assert str(raised.value) == f"{tmp_path / name}: No such file or directory"


@pytest.mark.parametrize("name", ["folder", "folder.gz", "folder.zst"])
def test_a_folder_is_not_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"{name}: Is a directory"):
        list(read_triples(tmp_path / name))


def test_the_path_in_a_message_is_the_path_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, b"a\tr\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^train\.tsv:1: 2 columns, expected 3$"):
        list(read_triples(Path("train.tsv")))


def test_a_block_of_no_bytes_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_bytes must be >= 1, got 0"):
        read_triples(tmp_path / "train.tsv", block_bytes=0)
