"""Looking for labels: the store, the scan that stands in for it, `kgshard search`, completion."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from graphs import make_run, ring
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.cli import run as kgshard
from kgshard_tools.labels import LabelMatch, LabelSource, LabelStore, labels_path
from kgshard_tools.labels.build import build_labels
from kgshard_tools.labels.found import open_labels
from kgshard_tools.labels.grams import MOST_CANDIDATES, Candidates
from kgshard_tools.labels.rules import EditDistance
from kgshard_tools.labels.scan import LabelScan

from kgshard.data.dataset import Dataset
from kgshard.errors import ConfigError, DataError, KgshardError, RunError
from kgshard.files import TEMPORARY_PREFIX
from kgshard.records import DatasetInfo
from kgshard.runs import Run
from kgshard.vocabulary import Vocabulary, hash_order

Degrees = dict[str, int]


def vocabulary(degrees: Degrees, kind: str) -> Vocabulary:
    labels = pa.array(list(degrees), pa.large_string())
    order = hash_order(labels)
    counts = np.array(list(degrees.values()), np.int64)
    return Vocabulary(labels.take(pa.array(order)), counts[order], kind=kind)


def dataset(folder: Path, entities: Degrees, relations: Degrees | None = None) -> Dataset:
    """Write the vocabularies of a dataset; there are no triples."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary(entities, "entity").save(folder / "entities.parquet")
    vocabulary(relations or {}, "relation").save(folder / "relations.parquet")
    info = DatasetInfo("kgshard.data/1", "labels", len(entities), len(relations or {}), {}, {}, "a hash")
    return Dataset(folder, info)


def built(folder: Path, entities: Degrees, relations: Degrees | None = None) -> LabelStore:
    data = dataset(folder, entities, relations)
    build_labels(data, folder / "labels.sqlite")
    return LabelStore(folder / "labels.sqlite", vocabulary_sha256="a hash")


# The rules once more, as plainly as they can be written: every label against every stage.


def plain_fold(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())
    bare = [char for char in decomposed if not 0x300 <= ord(char) <= 0x36F]
    return "".join(bare or decomposed)


def plain_words(text: str) -> list[str]:
    def separates(char: str) -> bool:
        blocks = [(0x80, 0xBF), (0x2000, 0x206F), (0x3000, 0x303F), (0xFF00, 0xFF0F), (0xFF1A, 0xFF20)]
        punctuation = any(first <= ord(char) <= last for first, last in [*blocks, (0xFEFF, 0xFEFF)])
        return not char.isalnum() if char.isascii() else punctuation or char.isspace()

    return "".join(" " if separates(char) else char for char in text).split(" ")


def plain_distance(left: str, right: str) -> int:
    @cache
    def edits(i: int, j: int) -> int:
        if min(i, j) == 0:
            return i + j
        options = [
            edits(i - 1, j) + 1,
            edits(i, j - 1) + 1,
            edits(i - 1, j - 1) + (left[i - 1] != right[j - 1]),
        ]
        if min(i, j) > 1 and left[i - 1] == right[j - 2] and left[i - 2] == right[j - 1]:
            options.append(edits(i - 2, j - 2) + 1)
        return min(options)

    return edits(len(left), len(right))


def plain_search(labels: Vocabulary, text: str, limit: int) -> list[tuple[str, str]]:
    """Return the best labels and how each was found."""
    wanted, found = plain_fold(text), []
    words = [word for word in plain_words(wanted) if word]
    edits = 0 if len(wanted) < 3 else 1 if len(wanted) < 7 else 2
    for number, label in enumerate(labels):
        folded = plain_fold(label)
        has = plain_words(folded)
        if folded == wanted:
            order = (0 if label == text else 1, 0)
        elif folded.startswith(wanted):
            order = (2, 0)
        elif words and all(any(word.startswith(begin) for word in has) for begin in words):
            order = (3, 0)
        elif edits and abs(len(folded) - len(wanted)) <= edits >= plain_distance(folded, wanted):
            order = (4, plain_distance(folded, wanted))
        else:
            continue
        found.append((*order, -labels.degrees[number], number, label))
    names = ["exact", "exact", "prefix", "words", "fuzzy"]
    return [(label, names[stage]) for stage, _, _, _, label in sorted(found)[:limit]]


def pairs(matches: Iterable[LabelMatch]) -> list[tuple[str, str]]:
    return [(match.label, match.how) for match in matches]


HOSTILE = [
    *("a", "A", "b", "c", "ab", "1", " ", '"', "'", "*", ":", "\0", "\n", "\r", "\u2028", "-", "_", "(", ")"),
    *("%", "?", "#", "\\", "+", "^", "{", ".", ",", ";", " AND ", " NEAR(", " NOT ", "OR", "--", "\x1b"),
    *(
        "\u00e9",
        "e\u0301",
        "e",
        "\u0301",
        "\u00df",
        "ss",
        "\u0130",
        "i",
        "\u01c6",
        "\ufb01",
        "fi",
        "\u03a3",
        "\u03c2",
    ),
    *(
        "\u4e2d",
        "\ud55c",
        "\u1112\u1161",
        "\u0939\u093f",
        "\U0001f600",
        "\U0010ffff",
        "\u00a0",
        "\u200d",
        "\ufeff",
    ),
]
hostile_texts = st.lists(st.sampled_from(HOSTILE), max_size=9).map("".join)
plain_texts = st.text("ab", max_size=12)
texts = hostile_texts | plain_texts | st.text(max_size=6)


@dataclass(frozen=True)
class Question:
    """A text to look for: of its own, or made of one of the labels that there are."""

    own: str
    place: int | None
    """Which label; None: none of them."""
    first: int
    """How many of its characters are left out."""
    swapped: int
    """Where two of its characters change places."""

    def about(self, labels: list[str]) -> str:
        if self.place is None or not labels:
            return self.own
        label = labels[self.place % len(labels)][self.first :] + self.own[:1]
        at = self.swapped
        return label[:at] + label[at : at + 2][::-1] + label[at + 2 :]


questions = st.builds(
    Question,
    texts,
    st.none() | st.integers(0, 24),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([99, 0, 1, 2, 5]),
)


@given(
    degrees=st.dictionaries(texts, st.integers(0, 3), max_size=25),
    asked=st.lists(questions, min_size=4, max_size=12),
    limit=st.sampled_from([1, 3, 50]),
)
@settings(max_examples=40, deadline=None)
def test_store_and_scan_find_what_the_rules_say(
    tmp_path_factory: pytest.TempPathFactory, degrees: Degrees, asked: list[Question], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("labels")
    prepared = dataset(folder, degrees)
    build_labels(prepared, folder / "labels.sqlite")
    with LabelStore(folder / "labels.sqlite") as store, LabelScan(prepared) as scan:
        for question in asked:
            text = question.about(sorted(degrees))
            wanted = plain_search(prepared.entities, text, limit)
            for source in (store, scan):
                assert pairs(source.search(text, limit)) == wanted
                assert source.find(text) == prepared.entities.find(text)
    shutil.rmtree(folder)


@given(st.text("abc", max_size=9), st.text("abc", max_size=9), st.integers(0, 4))
def test_edits_are_counted_up_to_a_limit(left: str, right: str, limit: int) -> None:
    assert EditDistance(left, limit)(right) == min(plain_distance(left, right), limit + 1)


def test_of_too_many_candidates_those_that_share_most_are_kept_and_then_the_first() -> None:
    drawn = np.random.default_rng(2)
    blocks = [drawn.integers(0, 9, size) for size in (700, 0, 3000, 1, 4000)]
    candidates, first, everything = Candidates(least=2), 1, []
    for block in blocks:
        candidates.add(first, block)
        everything += [(-shared, n) for n, shared in enumerate(block.tolist(), start=first) if shared >= 2]
        first += len(block)
    assert candidates.rows() == sorted(n for _, n in sorted(everything)[:MOST_CANDIDATES])


CITIES: Degrees = {
    "Berlin": 50,
    "berlin": 2,
    "Berlin Wall": 9,
    "Berliner Mauer": 8,
    "East Berlin": 7,
    "Bern": 5,
    "Merlin": 1,
    "S\u00e3o Paulo": 6,
    "Sa\u0303o Paulo Museum": 1,
    "Douglas Adams": 4,
    "Adams, Douglas N\u00f6el": 3,
    "\u6771\u4eac": 1,
    "Q64": 1,
    "Q640": 2,
}


@pytest.fixture(scope="module", params=["store", "scan"])
def cities(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LabelSource:
    folder = tmp_path_factory.mktemp("cities")
    store = built(folder, CITIES, {"capital of": 9, "berlin to": 70})
    return (
        store
        if request.param == "store"
        else LabelScan(dataset(folder, CITIES, {"capital of": 9, "berlin to": 70}))
    )


def test_exact_comes_before_prefix_before_words_before_fuzzy(cities: LabelSource) -> None:
    assert pairs(cities.search("berlin")) == [
        ("berlin", "exact"),
        ("Berlin", "exact"),
        ("Berlin Wall", "prefix"),
        ("Berliner Mauer", "prefix"),
        ("East Berlin", "words"),
        ("Merlin", "fuzzy"),
    ]


@pytest.mark.parametrize(
    ("text", "label", "how"),
    [
        ("Brelin", "Berlin", "fuzzy"),
        ("Dougals Adms", "Douglas Adams", "fuzzy"),
        ("sao paulo", "S\u00e3o Paulo", "exact"),
        ("SA\u0303O PAULO", "S\u00e3o Paulo", "exact"),
        ("paulo s\u00e3o mus", "Sa\u0303o Paulo Museum", "words"),
        ("douglas ad", "Douglas Adams", "prefix"),
        ("noel dou", "Adams, Douglas N\u00f6el", "words"),
        ("\u6771", "\u6771\u4eac", "prefix"),
        ("q6", "Q640", "prefix"),
    ],
)
def test_what_people_type_finds_what_they_mean(cities: LabelSource, text: str, label: str, how: str) -> None:
    assert pairs(cities.search(text, 1)) == [(label, how)]


def test_matches_say_id_degree_and_kind(cities: LabelSource, tmp_path: Path) -> None:
    entities = vocabulary(CITIES, "entity")
    found = cities.search("berlin", 4, kind="both")
    assert [(m.label, m.kind, m.degree) for m in found] == [
        ("berlin", "entity", 2),
        ("Berlin", "entity", 50),
        ("berlin to", "relation", 70),
        ("Berlin Wall", "entity", 9),
    ]
    assert [entities[m.id] for m in found if m.kind == "entity"] == ["berlin", "Berlin", "Berlin Wall"]
    assert cities.find("capital of", "relation") == vocabulary({"capital of": 9, "berlin to": 70}, "r").find(
        "capital of"
    )
    assert cities.find("capital of") is None


def test_completion_is_by_beginning_and_the_frequent_first(cities: LabelSource) -> None:
    assert cities.complete("BER", 3) == ["Berlin", "Berlin Wall", "Berliner Mauer"]
    assert cities.complete("", 1) == ["Berlin"]


def test_a_mark_alone_is_not_the_beginning_of_every_label(cities: LabelSource) -> None:
    assert cities.search("\u0301") == []


def test_bytes_that_are_no_text_are_no_label(cities: LabelSource) -> None:
    broken = b"Berlin\xff".decode(errors="surrogateescape")
    assert cities.search(broken) == []
    assert cities.complete(broken) == []
    assert cities.find(broken) is None


@pytest.mark.parametrize(("limit", "kind"), [(0, "entity"), (-1, "entity"), (True, "entity"), (1, "city")])
def test_a_limit_or_kind_that_cannot_be_is_refused(
    cities: LabelSource, limit: int, kind: Literal["entity"]
) -> None:
    with pytest.raises(ConfigError, match="--limit" if kind == "entity" else "--kind"):
        cities.search("a", limit, kind)


@dataclass(frozen=True)
class Crowd:
    store: LabelStore
    scan: LabelScan
    labels: Vocabulary
    words: list[list[str]]
    """Of each label."""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Crowd:
    """More labels than are sorted or met at once, in two blocks; those of "rare" come last of all."""
    drawn = random.Random(3)
    degrees = {f"taxon:{number}": 10 + number % 90 for number in range(63_000)}
    degrees |= {f"rare Neoceratodus {number}": 1 for number in range(5_500)}
    degrees["rarer neoceratops"] = 0
    degrees |= {f"an uncultivated rare {number}": 5 for number in range(5_500)}
    degrees |= {"".join(drawn.choices("abcdefghij", k=9)): 0 for _ in range(2000)}
    folder = tmp_path_factory.mktemp("crowd")
    store = built(folder, degrees)
    scan = LabelScan(dataset(folder, degrees))
    labels = vocabulary(degrees, "entity")
    return Crowd(store, scan, labels, [plain_words(label.lower()) for label in labels])


@pytest.mark.parametrize(
    "text",
    [
        "t",
        "taxon:",
        "taxon:1",
        "rare",
        "rare neoc",
        "rare neoceratodus",
        "neoceratop",
        "uncultivated",
        "xon",
        "ra 77 neo",
    ],
)
def test_of_many_labels_the_first_are_found(crowd: Crowd, text: str) -> None:
    store, scan, labels = crowd.store, crowd.scan, crowd.labels
    begins = [word for word in plain_words(text) if word]
    wanted = []
    for number, (label, words) in enumerate(zip(labels, crowd.words, strict=True)):
        if label.startswith(text):
            wanted.append((int(label != text), -labels.degrees[number], number))
        elif all(any(word.startswith(begin) for word in words) for begin in begins):
            wanted.append((2, -labels.degrees[number], number))
    wanted = sorted(wanted)[:10]
    assert [m.id for m in store.search(text)][: len(wanted)] == [number for _, _, number in wanted]
    assert store.search(text) == scan.search(text)


@pytest.mark.parametrize("text", ["taxno:4711", "taxon:471111", "rare Neocertaodus 54"])
def test_of_many_nearly_right_labels_store_and_scan_show_the_same(crowd: Crowd, text: str) -> None:
    store, scan = crowd.store, crowd.scan
    found = store.search(text, 30)
    assert found == scan.search(text, 30)
    assert found[0].how == "fuzzy"


def test_labels_of_every_block_are_found_with_two_typing_errors(crowd: Crowd) -> None:
    store, labels = crowd.store, crowd.labels
    rarest = [
        label for label, degree in zip(labels, labels.degrees, strict=True) if degree == 0 and label.isalpha()
    ]
    for label in random.Random(5).sample(rarest, 15):
        swapped = label[:3] + label[4] + label[3] + label[5:-1] + "z"
        assert any(match.label == label for match in store.search(swapped, 50))


def test_labels_of_a_megabyte_and_of_many_words(tmp_path: Path) -> None:
    long, longer = "x" * 1_000_000, "x" * 1_000_000 + "y"
    many = " ".join(f"word{number}" for number in range(50_000))
    same = "w" * 64
    degrees = {long: 1, longer: 2, many: 1, same + "a": 1, "z " + same + "b": 1, "": 1}
    store, scan = built(tmp_path, degrees), LabelScan(dataset(tmp_path, degrees))
    questions = [
        long,
        long[:-1],
        "x" * 999,
        "x" * 1000,
        "x" * 1001,
        longer + "y",
        many,
        many[:-3],
        many + " w",
    ]
    for text in [*questions, "word3 word49 word20", same + "b", '"' * 5000, "\0" * 5000, ""]:
        found = store.search(text)
        assert found == scan.search(text)
        assert (found[0].label == text) == (text in degrees) if found else text not in degrees
    assert pairs(store.search("x" * 1001)) == [(longer, "prefix"), (long, "prefix")]
    assert pairs(store.search("word3 word49")) == [(many, "words")]


def test_an_empty_vocabulary_answers_nothing(tmp_path: Path) -> None:
    store = built(tmp_path, {})
    for source in (store, LabelScan(dataset(tmp_path, {}))):
        for text in ("", "a", "berlin", "neverending"):
            assert source.search(text, kind="both") == []


# The file


@pytest.mark.parametrize("name", ["a?b#c%20d e", "x;mode=rwc", "\u00e9\u2028\n", "'\""])
def test_any_path_will_do(tmp_path: Path, name: str) -> None:
    assert built(tmp_path / name, CITIES).find("Bern") is not None


@pytest.fixture
def store_file(tmp_path: Path) -> Path:
    degrees = {f"label number {number} {number * 7919}": number for number in range(3000)}
    built(tmp_path, degrees | CITIES).close()
    return tmp_path / "labels.sqlite"


def ask_everything(path: Path) -> None:
    with LabelStore(path, vocabulary_sha256="a hash") as store:
        for text in ("Berlin", "label number 12", "labl numbr 17", "number 79", "l", ""):
            store.search(text, kind="both")
            store.complete(text)


def refused(path: Path) -> str:
    with pytest.raises(RunError) as caught:
        ask_everything(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert "run kgshard index" in message
    return message


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + bytes(5000)])
def test_what_is_no_label_store_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels.sqlite"
    path.write_bytes(content)
    refused(path)


def test_a_missing_file_a_folder_and_another_database_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "labels.sqlite")
    assert not (tmp_path / "labels.sqlite").exists()
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder")
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE t (a)").connection.close()
    refused(tmp_path / "other")


@pytest.mark.parametrize("key", ["format", "vocabulary_sha256"])
def test_another_format_and_other_labels_are_refused(store_file: Path, key: str) -> None:
    with sqlite3.connect(store_file) as database:
        database.execute("UPDATE meta SET value = 'kgshard.labels/2' WHERE key = ?", [key])
    database.close()
    assert ("kgshard.labels/2" if key == "format" else "other labels") in refused(store_file)


@pytest.mark.parametrize("part", [0.05, 0.3, 0.5, 0.9])
def test_a_truncated_file_is_refused(store_file: Path, part: float) -> None:
    with store_file.open("r+b") as file:
        file.truncate(int(store_file.stat().st_size * part))
    refused(store_file)


def test_changed_bytes_are_an_answer_or_one_line(store_file: Path) -> None:
    whole, drawn = store_file.read_bytes(), random.Random(1)
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(drawn.choice([1, 20, 2000])):
            broken[drawn.randrange(len(broken))] = drawn.randrange(256)
        store_file.write_bytes(broken)
        with suppress(RunError):
            ask_everything(store_file)


def test_a_list_of_rows_that_names_no_label_is_damage(store_file: Path) -> None:
    with sqlite3.connect(store_file) as database:
        database.execute("DELETE FROM entity_labels WHERE label LIKE 'label%'")
    database.close()
    assert "a label is missing" in refused(store_file)


def test_opening_reads_a_few_pages(store_file: Path) -> None:
    def num_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    assert store_file.stat().st_size > 500_000
    before = num_read()
    with LabelStore(store_file) as store:
        assert store.find("Bern") is not None
    assert num_read() - before < 100_000


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    built(tmp_path, CITIES).close()
    before = (tmp_path / "labels.sqlite").read_bytes()
    (tmp_path / "relations.parquet").write_bytes(b"damaged")
    data = dataset(tmp_path / "other", CITIES)
    shutil.copy(tmp_path / "relations.parquet", data.folder)
    with pytest.raises(DataError, match=r"relations\.parquet"):
        build_labels(data, tmp_path / "labels.sqlite")
    assert (tmp_path / "labels.sqlite").read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    degrees = {f"label number {number}": number for number in range(5000)}
    data = dataset(tmp_path / "data", degrees)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(KgshardError, match=r"labels\.sqlite: labels cannot be written: .*(full|disk)"):
            build_labels(data, tmp_path / "out" / "labels.sqlite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()


def test_the_same_labels_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        built(tmp_path / name, CITIES, {"r": 1}).close()
    assert (tmp_path / "one/labels.sqlite").read_bytes() == (tmp_path / "two/labels.sqlite").read_bytes()


def test_threads_share_a_store(store_file: Path) -> None:
    with LabelStore(store_file) as store:
        wanted = store.search("labl number 17", 50)
        found: list[list[LabelMatch]] = []

        def ask() -> None:
            for _ in range(5):
                found.append(store.search("labl number 17", 50))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [wanted] * 30
    with pytest.raises(ValueError, match="is closed"):
        store.search("Berlin")


# The commands


@pytest.fixture
def finished(tmp_path: Path) -> Run:
    """A run of a ring of entities e0..e13, and a few with names that need care."""
    odd = [
        "Douglas Adams",
        "Douglas, Adam; $HOME",
        "Douglas\u2028Adams",
        "Douglas \\ 'n\" *",
        "dougal:x",
        "dougal,",
        "dougal*?~",
        "red \x1b[31m",
    ]
    names = {f"e{number}": name for number, name in enumerate(odd)}
    triples = [(names.get(h, h), r, names.get(t, t)) for h, r, t in ring(14, 2)]
    return make_run(tmp_path / "my run", triples)


@pytest.fixture
def indexed(finished: Run) -> Run:
    build_labels(finished.dataset, labels_path(finished.folder))
    return finished


def answer(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert kgshard(["search", *arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_a_run_answers_alike_with_and_without_a_store(
    finished: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(finished.folder)
    without = [answer([folder, text, "--json"], capsys) for text in ("Doug", "e1", "Duoglas Adam", "zzz")]
    build_labels(finished.dataset, labels_path(finished.folder))
    assert isinstance(open_labels(finished), LabelStore)
    assert [
        answer([folder, text, "--json"], capsys) for text in ("Doug", "e1", "Duoglas Adam", "zzz")
    ] == without
    found = json.loads(without[2])
    assert found["query"] == {"text": "Duoglas Adam", "kind": "entity", "limit": 10}
    wanted = finished.dataset.entities.find("Douglas Adams")
    assert found["results"] == [
        {"id": wanted, "label": "Douglas Adams", "kind": "entity", "degree": 2, "how": "fuzzy"}
    ]


def test_a_table_for_people_cannot_steer_a_terminal(indexed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    lines = answer([str(indexed.folder), "doug", "--limit", "2"], capsys).splitlines()
    assert lines[0].split() == ["id", "label", "kind", "degree", "how"]
    assert len(lines) == 3
    table = answer([str(indexed.folder), "Douglas", "--kind", "both"], capsys)
    assert "Douglas\\u2028Adams" in table
    assert len(table.splitlines()) == 6


def test_nothing_found_is_said_and_is_no_failure(indexed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer([str(indexed.folder), "no such thing"], capsys) == "no label fits\n"
    assert json.loads(answer([str(indexed.folder), "no such thing", "--json"], capsys))["results"] == []


def test_mistakes_are_one_line(indexed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--limit must be" in answer([str(indexed.folder), "e", "--limit", "0"], capsys, 2)
    labels_path(indexed.folder).write_bytes(b"damaged")
    assert "run kgshard index again" in answer([str(indexed.folder), "e"], capsys, 2)


def test_search_imports_neither_torch_nor_faiss(indexed: Run) -> None:
    program = (
        "import sys; from kgshard_tools.cli import run; code = run(sys.argv[1:]); "
        "print(code, {'torch', 'faiss'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, "search", str(indexed.folder), "Duoglas Adams"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("0 set()\n")


def complete(shell: str, words: str, number: int) -> tuple[list[str], float]:
    """Ask as click's script does; return the lines of stdout and the seconds it took."""
    environment = {"_KGSHARD_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from kgshard_tools.cli import main; main()"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines(), time.monotonic() - began


def test_names_are_completed_from_the_store(indexed: Run) -> None:
    run = str(indexed.folder).replace(" ", "\\ ")
    lines, seconds = complete("zsh", f"kgshard search {run} douglas\\ a", 3)
    assert lines[:3] == ["plain", "Douglas Adams", "_"]
    assert len(lines) == 3
    assert seconds < 2  # 0.1 s on an idle machine
    checkpoint = str(indexed.checkpoint.folder).replace(" ", "\\ ")
    assert complete("zsh", f"kgshard search {checkpoint} douglas\\ a", 3)[0] == lines
    assert complete("zsh", f"kgshard predict {run} --head douglas\\ a", 4)[0] == lines
    assert "Douglas Adams" in complete("zsh", f"kgshard predict {run} --head ", 4)[0]


def test_what_cannot_be_completed_completes_to_nothing(finished: Run, tmp_path: Path) -> None:
    run = str(finished.folder).replace(" ", "\\ ")
    assert complete("zsh", f"kgshard search {run} e", 3)[0] == [""]
    path = labels_path(finished.folder)
    path.parent.mkdir()
    for content in (b"", b"damaged", b"SQLite format 3\0" + bytes(9000)):
        path.write_bytes(content)
        assert complete("zsh", f"kgshard search {run} e", 3)[0] == [""]
    assert complete("zsh", f"kgshard search {tmp_path}/nothing e", 3)[0] == [""]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_puts_a_name_on_its_line_as_one_word(indexed: Run, tmp_path: Path) -> None:
    """What bash would insert is read by bash again: it must come out as the label."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kgshard"
    program.write_text(f"#!{sys.executable}\nfrom kgshard_tools.cli import main\nmain()\n")
    program.chmod(0o755)
    script = f"""
        {kgshard_script("bash")}
        COMP_WORDS=(kgshard search {str(indexed.folder).replace(" ", chr(92) * 3 + " ")} Doug); COMP_CWORD=3
        _kgshard_completion kgshard
        for reply in "${{COMPREPLY[@]}}"; do eval "set -- $reply"; printf '%s %s\\n' $# "$1"; done
    """
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": "/nowhere"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    wanted = [
        "Douglas Adams",
        "Douglas, Adam; $HOME",
        "Douglas \\ 'n\" *",
        "dougal:x",
        "dougal,",
        "dougal*?~",
    ]
    assert sorted(done.stdout.splitlines()) == sorted(f"1 {label}" for label in wanted)


def kgshard_script(shell: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kgshard", "completion", shell], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "COMPREPLY"), ("zsh", "#compdef kgshard"), ("fish", "--command kgshard")]
)
def test_completion_prints_the_script_of_a_shell(shell: str, words: str) -> None:
    assert words in kgshard_script(shell)
