"""From text to ids: no line is lost, no label changed, and the same labels get the same ids."""

from __future__ import annotations

import errno
import functools
import gzip
import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard.data import prepare as module
from kgshard.data.dataset import Dataset, clone_dataset, open_dataset
from kgshard.data.prepare import first_occurrences, prepare
from kgshard.data.readers import read_triples
from kgshard.data.sources import Source, find_source
from kgshard.errors import DataError

Link = tuple[str, str, str]
SPLITS = ("train", "valid", "test")


def prepared(folder: Path, **texts: str | bytes) -> Dataset:
    """Write one file a split ("train_tsv_gz" is train.tsv.gz) and prepare them at folder/data."""
    graph = folder / "graph"
    graph.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = graph / (name.replace("_", ".") if "_" in name else f"{name}.tsv")
        raw = text if isinstance(text, bytes) else text.encode()
        if path.suffix == ".gz":
            raw = gzip.compress(raw)
        elif path.suffix == ".zst":
            raw = pa.compress(raw, codec="zstd", asbytes=True)
        path.write_bytes(raw)
    source = find_source(graph)
    assert isinstance(source, Source)
    return prepare(source, folder / "data")


def links_of(dataset: Dataset, split: str) -> list[Link]:
    """Return a split's triples as labels."""
    entities, relations = list(dataset.entities), list(dataset.relations)
    return [(entities[h], relations[r], entities[t]) for h, r, t in dataset.triples(split).tolist()]


def in_hash_order(labels: set[str]) -> list[str]:
    def key(label: str) -> tuple[bytes, bytes]:
        return hashlib.blake2b(label.encode(), digest_size=8).digest(), label.encode()

    return sorted(labels, key=key)


def stored_info(dataset: Dataset) -> dict[str, Any]:
    info: dict[str, Any] = json.loads((dataset.folder / "data.json").read_text())
    return info


labels = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"), min_size=1, max_size=3
)
lines = st.one_of(st.just(""), st.tuples(labels, st.sampled_from("rs"), labels).map("\t".join))
files = st.lists(lines, max_size=15)


def links_in(file: list[str]) -> list[Link]:
    """Return the distinct triples of some lines, in order."""
    split = [tuple(line.split("\t")) for line in file if line]
    return [(h, r, t) for h, r, t in dict.fromkeys(split)]


@settings(max_examples=30, deadline=None)
@given(
    train=files, valid=files, test=files, ends=st.sampled_from(["\n", "\r\n"]), block_bytes=st.integers(1, 60)
)
def test_every_line_is_accounted_for_and_every_label_kept(
    tmp_path_factory: pytest.TempPathFactory,
    train: list[str],
    valid: list[str],
    test: list[str],
    ends: str,
    block_bytes: int,
) -> None:
    texts = {"train": ["\ufeffa\tr\tb", *train], "valid": valid, "test": test}
    # Only the first line of a file may lose a byte order mark.
    written = {name: "".join(line + ends for line in file) for name, file in texts.items()}
    texts["train"][0] = "a\tr\tb"
    for name in ("valid", "test"):
        if written[name].startswith("\ufeff"):
            written[name] = "\ufeff" + written[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_triples", functools.partial(read_triples, block_bytes=block_bytes))
        patch.setattr(os, "fsync", lambda _: None)  # Many small files; none has to survive a crash.
        dataset = prepared(tmp_path_factory.mktemp("data"), **written)
    expected = {name: links_in(file) for name, file in texts.items()}
    assert {split: links_of(dataset, split) for split in SPLITS} == expected
    entities = {label for links in expected.values() for h, _, t in links for label in (h, t)}
    assert list(dataset.entities) == in_hash_order(entities)
    assert list(dataset.relations) == in_hash_order({r for links in expected.values() for _, r, _ in links})
    info = stored_info(dataset)
    for split in SPLITS:
        counts = info["splits"][split]
        num_lines, blank, duplicates = (counts.get(key, 0) for key in ("lines", "blank", "duplicates"))
        assert num_lines == len(texts[split])
        assert counts["triples"] == len(expected[split])
        assert blank == sum(not line for line in texts[split])
        assert num_lines == counts["triples"] + duplicates + blank
    degrees = Counter(label for h, _, t in expected["train"] for label in (h, t))
    assert dataset.entities.degrees.tolist() == [degrees[label] for label in dataset.entities]


TEXT = "".join(f"e{i % 17}\tr{i % 3}\té{i % 23}\n" for i in range(200))


def test_ids_do_not_depend_on_blocks_compression_or_line_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prepared(tmp_path / "plain", train=TEXT, test="e1\tr0\tnew\n")
    gz = prepared(tmp_path / "gz", train_txt_gz=TEXT, test_tsv_zst="e1\tr0\tnew\n")
    backwards = prepared(
        tmp_path / "backwards", train="".join(reversed(TEXT.splitlines(True))), test="e1\tr0\tnew\n"
    )
    for block_bytes in (1, 7, 100, 10**6):
        monkeypatch.setattr(module, "read_triples", functools.partial(read_triples, block_bytes=block_bytes))
        cut = prepared(tmp_path / f"cut{block_bytes}", train=TEXT, test="e1\tr0\tnew\n")
        for split in SPLITS:
            np.testing.assert_array_equal(cut.triples(split), plain.triples(split))
        assert cut.vocabulary_sha256 == plain.vocabulary_sha256
    for split in SPLITS:
        np.testing.assert_array_equal(gz.triples(split), plain.triples(split))
    assert gz.vocabulary_sha256 == backwards.vocabulary_sha256 == plain.vocabulary_sha256
    assert sorted(backwards.triples("train").tolist()) == sorted(plain.triples("train").tolist())


def test_a_different_label_gives_another_vocabulary_hash(tmp_path: Path) -> None:
    one = prepared(tmp_path / "one", train="a\tr\tb\n")
    as_relation = prepared(tmp_path / "two", train="a\tb\tr\n")
    other = prepared(tmp_path / "three", train="a\tr\tB\n")
    assert len({one.vocabulary_sha256, as_relation.vocabulary_sha256, other.vocabulary_sha256}) == 3


def test_duplicates_are_dropped_within_a_split_and_the_first_stays_in_place(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, train="c\tr\td\na\tr\tb\nc\tr\td\nb\tr\ta\na\tr\tb\n", valid="a\tr\tb\n")
    assert links_of(dataset, "train") == [("c", "r", "d"), ("a", "r", "b"), ("b", "r", "a")]
    assert links_of(dataset, "valid") == [("a", "r", "b")]
    assert stored_info(dataset)["splits"]["train"]["duplicates"] == 2


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=30))
def test_first_occurrences_are_those_a_person_would_mark(rows: list[tuple[int, int, int]]) -> None:
    expected = [i for i, row in enumerate(rows) if row not in rows[:i]]
    assert first_occurrences(np.array(rows, np.int32).reshape(-1, 3)).tolist() == expected


def test_labels_of_valid_and_test_alone_get_rows_too(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, train="a\tr\tb\n", valid="a\tr\tnew\n", test="newer\tonly-here\tb\n")
    assert set(dataset.entities) == {"a", "b", "new", "newer"}
    assert set(dataset.relations) == {"r", "only-here"}
    assert dataset.num_entities == 4
    assert dataset.num_relations == 2
    assert stored_info(dataset)["unseen_in_train"] == {"valid": 1, "test": 1}
    degree = dict(zip(dataset.entities, dataset.entities.degrees.tolist(), strict=True))
    assert degree == {"a": 1, "b": 1, "new": 0, "newer": 0}


def test_a_label_may_be_an_entity_and_a_relation(tmp_path: Path) -> None:
    """Relations must not end up among entities, nor clash with names made for inverses (B47)."""
    dataset = prepared(tmp_path, train="likes\ttype\tProperty\na\tlikes\tb\na\tlikes_inverse\tb\n")
    assert set(dataset.entities) == {"likes", "Property", "a", "b"}
    assert set(dataset.relations) == {"type", "likes", "likes_inverse"}
    assert links_of(dataset, "train")[:2] == [("likes", "type", "Property"), ("a", "likes", "b")]


def test_labels_that_other_tools_take_for_missing_or_numbers_stay_labels(tmp_path: Path) -> None:
    """B01, and labels that numbers would merge."""
    text = "nan\tlikes\tNA\nNULL\tlikes\tNone\nnull\tis\tN/A\n007\tis\t7\n7.0\tis\t1e1\n"
    dataset = prepared(tmp_path, train=text)
    assert links_of(dataset, "train") == [tuple(x.split("\t")) for x in text.splitlines()]
    assert len(dataset.entities) == 10


def test_a_byte_order_mark_makes_no_second_alice(tmp_path: Path) -> None:
    """B08: in train and again in test; inside a label it stays."""
    mark = b"\xef\xbb\xbf"
    dataset = prepared(
        tmp_path,
        train=mark + b"alice\tr\tbob\nalice\tr\tcarol\nx\tr\t" + mark + b"y\n",
        test=mark + b"alice\tr\tbob\n",
    )
    assert set(dataset.entities) == {"alice", "bob", "carol", "x", "\ufeffy"}


def test_splits_that_are_absent_are_empty(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, train="a\tr\tb\n")
    assert dataset.triples("valid").shape == dataset.triples("test").shape == (0, 3)
    assert dataset.known_triples().shape == (1, 3)


def test_known_triples_are_those_of_the_splits_asked_for(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, train="a\tr\tb\n", valid="a\tr\tc\n", test="a\tr\td\n")
    assert len(dataset.known_triples()) == 3
    tails = [dataset.entities[t] for t in dataset.known_triples("train", "valid")[:, 2]]
    assert tails == ["b", "c"]


def test_arrays_are_small_memory_mapped_and_plain(tmp_path: Path) -> None:
    triples = prepared(tmp_path, train="a\tr\tb\n").triples("train")
    assert isinstance(triples, np.memmap)
    assert triples.dtype == np.int32
    assert not triples.flags.writeable


BAD_TEXTS = {
    "two columns": ("a\tr\tb\nc\tr\n\nd\tr\te\n", "train.tsv:2: 2 columns, expected 3"),
    "four columns": ("a\tr\tb\n\n\nd\tr\te\textra\n", "train.tsv:4: 4 columns, expected 3"),
    "empty label": ("a\tr\tb\n\tr\tb\n", "train.tsv:2: empty head label"),
    "nothing": ("", "train.tsv: no triples"),
    "blank lines": ("\n\n", "train.tsv: no triples"),
}


@pytest.mark.parametrize("kind", sorted(BAD_TEXTS))
def test_a_bad_train_file_is_refused_and_nothing_is_written(tmp_path: Path, kind: str) -> None:
    """Not even the folder above: B11."""
    text, message = BAD_TEXTS[kind]
    path = tmp_path / "train.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        prepare(Source("graph", {"train": path}), tmp_path / "new" / "parent" / "data")
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.tsv"]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_bad_line_in_another_split_stops_everything_too(tmp_path: Path, split: str) -> None:
    files = {name: tmp_path / f"{name}.tsv" for name in ("train", split)}
    files["train"].write_text("a\tr\tb\n")
    files[split].write_text("a\tr\tb\na r b\n")
    with pytest.raises(DataError, match=rf"{split}\.tsv:2: 1 columns, expected 3"):
        prepare(Source("graph", files), tmp_path / "new" / "data")
    assert not (tmp_path / "new").exists()


def test_a_dataset_that_is_there_survives_a_bad_one(tmp_path: Path) -> None:
    before = prepared(tmp_path, train="a\tr\tb\n")
    bad = tmp_path / "bad.tsv"
    bad.write_text("a\tb\n")
    with pytest.raises(DataError):
        prepare(Source("graph", {"train": bad}), before.folder)
    assert links_of(open_dataset(before.folder), "train") == [("a", "r", "b")]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("a\tr\tb\n")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "save_array", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(Source("graph", {"train": path}), tmp_path / "new" / "parent" / "data")
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.tsv"]


def test_the_report_says_what_became_of_every_line(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, train="a\tr\tb\n\na\tr\tb\nb\tr\ta\n", test="a\tr\ta\n")
    assert dataset.info.lines() == [
        "2 entities, 1 relations",
        "train: 4 lines = 2 triples + 1 duplicates + 1 blank",
        "test: 1 lines = 1 triples + 0 duplicates + 0 blank",
    ]


def test_sources_are_recorded_with_their_hashes(tmp_path: Path) -> None:
    info = stored_info(prepared(tmp_path, train="a\tr\tb\n"))
    assert info["format"] == "kgshard.data/1"
    assert info["name"] == "graph"
    assert info["splits"]["train"]["source"] == "train.tsv"
    assert info["splits"]["train"]["sha256"] == hashlib.sha256(b"a\tr\tb\n").hexdigest()


def test_a_clone_is_the_same_dataset(tmp_path: Path) -> None:
    original = prepared(tmp_path, train=TEXT, valid="e1\tr0\tnew\n")
    clone = clone_dataset(original, tmp_path / "clone")
    assert clone.folder == tmp_path / "clone"
    assert stored_info(clone) == stored_info(original)
    assert list(clone.entities) == list(original.entities)
    for split in SPLITS:
        np.testing.assert_array_equal(clone.triples(split), original.triples(split))


def test_damaged_datasets_are_refused_by_file(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, train="a\tr\tb\nb\tr\ta\n")
    with pytest.raises(DataError, match="no split 'dev'"):
        dataset.triples("dev")
    np.save(dataset.folder / "train.npy", np.zeros((1, 3), np.int32))
    with pytest.raises(DataError, match=r"train\.npy: shape \(1, 3\), but data.json says 2 triples"):
        dataset.triples("train")
    for content in (b"", b"\x93NUMPY", b"\x80\x04K\x01."):
        (dataset.folder / "train.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"train\.npy"):
            dataset.triples("train")
    for content in (b"", b"{", b"[]", b"{}", b'{"format": "kgshard.data/2"}', b"\xff"):
        (dataset.folder / "data.json").write_bytes(content)
        with pytest.raises(DataError):
            open_dataset(dataset.folder)


REAL = {
    "FB15k-237": (14_541, 237, (272_115, 17_535, 20_466), (9, 28)),
    "WN18RR": (40_943, 11, (86_835, 3_034, 3_134), (210, 210)),
}
"""As shared/data/README.md counts them: entities, relations, triples, and triples with unseen entities."""


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_graphs_have_their_published_counts(tmp_path: Path, shared_data: Path, name: str) -> None:
    source = find_source(shared_data / name)
    assert isinstance(source, Source)
    dataset = prepare(source, tmp_path / "data")
    num_entities, num_relations, num_triples, unseen = REAL[name]
    assert (dataset.num_entities, dataset.num_relations) == (num_entities, num_relations)
    assert (len(dataset.entities), len(dataset.relations)) == (num_entities, num_relations)
    assert tuple(len(dataset.triples(split)) for split in SPLITS) == num_triples
    assert tuple(stored_info(dataset)["unseen_in_train"].values()) == unseen
    # The first and last line, and the zeros that numbers would lose.
    text = source.files["train"].read_bytes().decode().split("\n")
    for row, line in ((0, text[0]), (-1, text[-2])):
        h, r, t = dataset.triples("train")[row].tolist()
        assert "\t".join([dataset.entities[h], dataset.relations[r], dataset.entities[t]]) == line


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("triple", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (3, 0, 0), (0, 1, 0), (0, 0, 3)])
def test_ids_out_of_range_are_refused_by_file(tmp_path: Path, split: str, triple: tuple[int, ...]) -> None:
    """An id of -1 would silently be the last entity."""
    line = "a\tr\tb\nb\tr\tc\n"
    dataset = prepared(tmp_path, train=line, valid=line, test=line)
    for row in (0, 1):
        triples = np.zeros((2, 3), np.int32)
        np.save(dataset.folder / f"{split}.npy", triples)
        assert dataset.triples(split).tolist() == triples.tolist()
        triples[row] = triple
        np.save(dataset.folder / f"{split}.npy", triples)
        with pytest.raises(DataError, match=rf"{split}\.npy: column \d holds ids outside 0\.\.[02]"):
            dataset.triples(split)
