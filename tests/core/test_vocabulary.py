"""Labels keep their bytes and their ids, whatever is in them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard import vocabulary as module
from kgshard.errors import DataError, UnknownEntityError, UnknownRelationError
from kgshard.vocabulary import Vocabulary, hash_order, label_hash

HOSTILE = [
    "nan", "NULL", "None", "N/A", "NA", "007", "7", "1e5", "-1", "true", "", " ", "  x  ", "\t", "\n",
    "a\nb", "a\rb", "\r", "\0", "a\0", "a\0b", "\ufeffalice", "alice", "a\u2028b", "a\u0085b", "a\x0cb",
    "a\x1cb", "\u00e9", "e\u0301", '"open', '"quoted"', "'", "=1+1", "../../etc/passwd", "#3", "#99999",
    "#", "##", "\U0001f9ea", "\u202eevil", "</s>", "<script>", "x" * 100_000, "K", "\u212a",
]  # fmt: skip
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def vocabulary_of(labels: list[str], kind: str = "entity") -> Vocabulary:
    """Return the vocabulary of distinct labels in any order; degree = length of the label."""
    array = pa.array(labels, pa.large_string())
    ordered = array.take(pa.array(hash_order(array)))
    degrees = np.array([len(label) for label in ordered.to_pylist()], np.int64)
    return Vocabulary(ordered, degrees, kind=kind)


def reference_order(labels: list[str]) -> list[str]:
    """Order labels by (BLAKE2b-64, label), straight from the definition."""

    def key(label: str) -> tuple[bytes, bytes]:
        return hashlib.blake2b(label.encode(), digest_size=8).digest(), label.encode()

    return sorted(labels, key=key)


@settings(deadline=None)
@given(st.lists(texts, unique=True, max_size=30), st.randoms(use_true_random=False))
def test_order_depends_on_the_labels_alone(labels: list[str], random: object) -> None:
    shuffled = list(labels)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert list(vocabulary_of(shuffled)) == reference_order(labels)


def test_order_is_the_same_in_every_version() -> None:
    """Ids are on disks: these three must never change places."""
    assert label_hash("France") == int(hashlib.blake2b(b"France", digest_size=8).hexdigest(), 16)
    assert list(vocabulary_of(["Euro", "France", "Paris"])) == reference_order(["Euro", "France", "Paris"])
    assert label_hash("") == 0xE4A6A0577479B2B4


def test_labels_whose_hashes_collide_are_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "label_hash", lambda label: len(label) % 2)
    labels = [f"{i}" * (1 + i % 3) for i in range(10)] + ["zz", "\u00e9", "a"]
    found = vocabulary_of(labels)
    assert list(found) == sorted(labels, key=lambda label: (len(label) % 2, label))
    assert [found.find(label) for label in found] == list(range(len(labels)))
    assert found.find("nope") is None


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, unique=True, max_size=30), texts)
def test_every_label_finds_its_own_id_and_no_other_does(labels: list[str], other: str) -> None:
    found = vocabulary_of(labels)
    assert [found.find(label) for label in found] == list(range(len(labels)))
    assert [found.id_of(label) for label in found] == list(range(len(labels)))
    assert (found.find(other) is not None) is (other in labels)
    assert (other in found) is (other in labels)


@settings(deadline=None)
@given(st.lists(texts, unique=True, max_size=30), st.lists(texts, unique=True, max_size=30))
def test_many_names_at_once_are_found_as_one_by_one(labels: list[str], others: list[str]) -> None:
    vocabulary = vocabulary_of(labels)
    names = [*labels, *others, "\udc80", *HOSTILE]
    alone = {name: vocabulary.find(name) for name in dict.fromkeys(names)}
    assert vocabulary.find_all(list(alone)) == alone
    del alone["\udc80"]  # What is no text is looked for in another way, with all names beside it.
    assert vocabulary.find_all(list(alone)) == alone
    assert vocabulary.ids_of(label for label in labels * 2).tolist() == [alone[label] for label in labels * 2]


def test_hostile_labels_are_found_and_told_apart() -> None:
    found = vocabulary_of(HOSTILE)
    assert sorted(found) == sorted(HOSTILE)
    assert {found[found.id_of(label)] for label in HOSTILE} == set(HOSTILE)
    assert found.ids_of(HOSTILE).tolist() == [list(found).index(label) for label in HOSTILE]


def test_a_number_sign_names_a_row_unless_a_label_reads_so() -> None:
    found = vocabulary_of(["a", "b", "c", "#1"])
    assert found.id_of("#0") == 0
    assert found.id_of("#3") == 3
    assert found[found.id_of("#1")] == "#1"
    for name in ("#4", "#-1", "#", "# 1", "#1.0", "#\u0661", "#x", "1"):
        with pytest.raises(UnknownEntityError):
            found.id_of(name)


def test_a_row_number_of_any_length_is_an_unknown_name() -> None:
    """Python refuses to read integers of more than 4,300 digits with a ValueError."""
    with pytest.raises(UnknownEntityError):
        vocabulary_of(["a"]).id_of("#" + "9" * 5000)


def test_a_name_that_is_not_text_on_disk_is_an_unknown_name() -> None:
    """An argument with bytes that are not UTF-8 reaches Python as lone surrogates."""
    found = vocabulary_of(["a", "b"])
    assert "\udcff" not in found
    with pytest.raises(UnknownEntityError):
        found.id_of("caf\udce9")


def test_an_unknown_name_suggests_near_ones() -> None:
    found = vocabulary_of(["France", "Francs", "Germany", "French Guiana", "Euro"])
    with pytest.raises(UnknownEntityError) as caught:
        found.id_of("Frnce")
    assert caught.value.suggestions[0] == "France"
    assert str(caught.value).startswith("no entity 'Frnce'. Did you mean: France")
    assert found.suggest("guiana") == ["French Guiana"]
    assert found.suggest("xyzzy") == []
    assert len(vocabulary_of([f"label{i}" for i in range(50)]).suggest("label")) == 5


def test_an_unknown_relation_says_so() -> None:
    with pytest.raises(UnknownRelationError, match=r"no relation 'borders'. Did you mean: border\?"):
        vocabulary_of(["border"], kind="relation").id_of("borders")


def test_suggestions_cope_with_strange_names() -> None:
    found = vocabulary_of([*HOSTILE, *(f"e{i}" for i in range(100))])
    for name in ("", " ", "*", "(", "\\", "%", "a\nb ", "x" * 1000, "\U0001f9ea\U0001f9ea"):
        assert len(found.suggest(name)) <= 5


def test_ids_outside_are_refused() -> None:
    found = vocabulary_of(["a", "b"])
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"entity id {index} is outside 0..1"):
            found[index]


def test_an_empty_vocabulary_works(tmp_path: Path) -> None:
    empty = vocabulary_of([])
    empty.save(tmp_path / "v.parquet")
    for found in (empty, Vocabulary.load(tmp_path / "v.parquet", kind="entity")):
        assert len(found) == 0
        assert list(found) == []
        assert found.find("a") is None
        with pytest.raises(UnknownEntityError, match=r"no entity '#0'$"):
            found.id_of("#0")
    assert empty.sha256 == hashlib.sha256().hexdigest()


@settings(max_examples=25, deadline=None)
@given(st.lists(texts, unique=True, max_size=30))
def test_saved_labels_come_back_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, labels: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "vocabulary.parquet"
    check_round_trip(path, labels)


def test_hostile_labels_come_back_byte_for_byte(tmp_path: Path) -> None:
    check_round_trip(tmp_path / "v.parquet", HOSTILE)


def check_round_trip(path: Path, labels: list[str]) -> None:
    saved = vocabulary_of(labels)
    saved.save(path)
    loaded = Vocabulary.load(path, kind="entity")
    assert [label.encode() for label in loaded] == [label.encode() for label in reference_order(labels)]
    assert loaded.degrees.tolist() == [len(label) for label in loaded]
    assert loaded.sha256 == saved.sha256
    table = pq.read_table(path)  # As any other reader sees it.
    assert table.column_names == ["id", "label", "kind", "degree"]
    assert table["id"].to_pylist() == list(range(len(labels)))
    assert set(table["kind"].to_pylist()) <= {"entity"}


def test_the_hash_is_over_lengths_and_bytes_so_that_borders_count() -> None:
    labels = reference_order(["ab", "c"])
    expected = hashlib.sha256()
    for label in labels:
        expected.update(len(label.encode()).to_bytes(8, "little") + label.encode())
    assert vocabulary_of(labels).sha256 == expected.hexdigest()
    plain = [
        Vocabulary(pa.array(x, pa.large_string()), np.zeros(2, np.int64), kind="entity")
        for x in (["ab", "c"], ["a", "bc"])
    ]
    assert plain[0].sha256 != plain[1].sha256


def test_what_is_no_vocabulary_is_refused_naming_the_file(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    with pytest.raises(DataError, match=r"v\.parquet: not a vocabulary"):
        Vocabulary.load(path, kind="entity")
    vocabulary_of(["a", "b"]).save(path)
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-20], b"\x80\x04pickle", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"v\.parquet: not a vocabulary"):
            Vocabulary.load(path, kind="entity")
    pq.write_table(pa.table({"id": [0], "name": ["a"]}), path)
    with pytest.raises(DataError, match=r"v\.parquet: not a vocabulary"):
        Vocabulary.load(path, kind="entity")


@pytest.fixture(scope="module")
def large() -> Vocabulary:
    return vocabulary_of([f"e{i}" for i in range(50_000)])


@pytest.mark.parametrize(
    ("asked", "meant"), [("e12345x", "e12345"), ("E12345", "e12345"), ("e4999", "e4999"), ("xe777", "e777")]
)
def test_the_nearest_of_many_alike_labels_is_suggested_first(
    large: Vocabulary, asked: str, meant: str
) -> None:
    """All 50,000 look alike; only some are compared slowly, and the right one must be among them."""
    assert large.suggest(asked)[0] == meant


@pytest.mark.parametrize("name", [5, None, b"e5", 1.0, ["e5"]])
def test_a_name_is_text(name: Any) -> None:
    for call in (vocabulary_of(["e5"]).find, vocabulary_of(["e5"]).id_of):
        with pytest.raises(TypeError, match=f"entity names are str, got {type(name).__name__}"):
            call(name)
