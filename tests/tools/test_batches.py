"""Batches of questions: every format of questions and answers, blocks, places of errors, memory."""

from __future__ import annotations

import gzip
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from graphs import make_run, ring, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.batches import (
    AnswersWritten,
    Batch,
    Entry,
    LinkAsker,
    OnError,
    SimilarityAsker,
    answer_to_file,
    block_size,
    one_question,
    read_candidates,
    read_entries,
)
from kgshard_tools.questions import Question, Wanted

from kgshard.errors import ConfigError, DataError, UsageError

LINKS = ("head", "relation", "tail")
HOSTILE = [
    "?",
    "-",
    " a ",
    '"quoted"',
    "#3",
    "null",
    "NA",
    "日本",
    "a\u2028b",
    "x\ufeff",
    "\\t",
    "'",
    "\x00",
    "e,f",
]
UNSPOKEN = ["tab\tin", "line\nfeed", "carriage\rreturn"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A run whose labels are all that a text format might trip over."""
    labels = HOSTILE + [f"e{i}" for i in range(40)]
    train = [
        (a, f"r{i % 3}", b) for i, (a, b) in enumerate(zip(labels, labels[1:] + labels[:1], strict=True))
    ]
    train += [("e0", "r0", f"e{i}") for i in range(5, 20)]
    folder = tmp_path_factory.mktemp("batches")
    return load(make_run(folder, train, model="complex", dim=8, world_size=2).folder)


def questions_of(model: TrainedModel) -> list[dict[str, str]]:
    """Return questions of all three kinds, in turns."""
    names = list(model.entities)
    return [
        (
            {"head": name, "relation": f"r{i % 3}"},
            {"relation": f"r{i % 3}", "tail": name},
            {"head": name, "tail": "e1"},
        )[i % 3]
        for i, name in enumerate(names)
    ]


def to_tsv(questions: Iterable[dict[str, str]]) -> bytes:
    return b"".join("\t".join(q.get(c, "") for c in LINKS).encode() + b"\n" for q in questions)


def to_ndjson(questions: Iterable[dict[str, str]]) -> bytes:
    return "".join(json.dumps(question) + "\n" for question in questions).encode()


def to_parquet(questions: Iterable[dict[str, str]], path: Path) -> None:
    pq.write_table(pa.table({c: pa.array([q.get(c) for q in questions], pa.string()) for c in LINKS}), path)


def write_questions(questions: Sequence[dict[str, str]], path: Path) -> Path:
    """Write a question file in the format of its name, without any code of kgshard."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        to_parquet(questions, path)
        return path
    if name.endswith(".json"):
        text = json.dumps(questions).encode()
    else:
        text = to_tsv(questions) if name.endswith((".tsv", ".txt")) else to_ndjson(questions)
    if path.suffix == ".gz":
        text = gzip.compress(text)
    elif path.suffix == ".zst":
        text = pa.Codec("zstd").compress(text, asbytes=True)
    path.write_bytes(text)
    return path


def given_in(path: Path, size: int = 1024, columns: Sequence[str] = LINKS) -> list[dict[str, str]]:
    entries = [entry for block in read_entries(str(path), columns, size) for entry in block]
    assert not [entry.error for entry in entries if entry.error]
    return [entry.given for entry in entries]


def answered(
    model: TrainedModel,
    questions: Sequence[dict[str, str]],
    out: Path,
    *,
    wanted: Wanted | None = None,
    on_error: OnError = "stop",
    size: int = 7,
) -> AnswersWritten:
    """Answer questions by way of an NDJSON file beside `out`."""
    source = write_questions(questions, out.with_name("questions.ndjson"))
    asker = LinkAsker(model, wanted or Wanted(3))
    return answer_to_file(Batch(asker, read_entries(str(source), LINKS, size), on_error=on_error), out)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


SUFFIXES = ["tsv", "txt", "ndjson", "jsonl", "json", "parquet", "tsv.gz", "ndjson.gz", "tsv.zst", "jsonl.zst"]
labels = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
names_without_separators = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"), min_size=1, max_size=8
)


@st.composite
def question(draw: Callable[[st.SearchStrategy[Any]], Any], names: st.SearchStrategy[str]) -> dict[str, str]:
    asked = draw(st.sampled_from(LINKS))
    return {part: draw(names) for part in LINKS if part != asked}


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.integers(1, 5))
def test_every_format_gives_back_any_question(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject, size: int
) -> None:
    is_tsv = suffix.startswith(("tsv", "txt"))
    asked = data.draw(st.lists(question(names_without_separators if is_tsv else labels), max_size=12))
    path = write_questions(asked, tmp_path_factory.mktemp("formats") / f"questions.{suffix}")
    assert given_in(path, size) == asked
    blocks = [len(block) for block in read_entries(str(path), LINKS, size)]
    assert blocks == [size] * (len(asked) // size) + ([len(asked) % size] if len(asked) % size else [])


@pytest.mark.parametrize("suffix", ["tsv", "ndjson", "json", "parquet"])
def test_entities_alone_are_questions_too(tmp_path: Path, suffix: str) -> None:
    path, names = tmp_path / f"names.{suffix}", [*HOSTILE, "e1"]
    if suffix == "tsv":
        path.write_bytes("".join(f"{name}\n" for name in names).encode())
    elif suffix == "ndjson":
        path.write_text(
            "".join(json.dumps({"entity": n} if i % 2 else n) + "\n" for i, n in enumerate(names))
        )
    elif suffix == "json":
        path.write_text(json.dumps([{"entity": n} if i % 2 else n for i, n in enumerate(names)]))
    else:
        pq.write_table(pa.table({"entity": names, "note": [1] * len(names)}), path)
    assert given_in(path, 4, ["entity"]) == [{"entity": name} for name in names]


@pytest.mark.parametrize("text", [b"a\tr\t\r\n\r\n\n\tr\tb", b"\xef\xbb\xbfa\tr\t\n\tr\tb\n"])
def test_line_ends_blank_lines_and_a_byte_order_mark_are_no_part_of_labels(
    tmp_path: Path, text: bytes
) -> None:
    (tmp_path / "q.tsv").write_bytes(text)
    assert given_in(tmp_path / "q.tsv") == [{"head": "a", "relation": "r"}, {"relation": "r", "tail": "b"}]


def test_lines_longer_than_what_is_read_at_once_stay_whole(tmp_path: Path) -> None:
    asked = [{"head": letter * 200_000, "relation": "r"} for letter in "abc"]
    assert given_in(write_questions(asked, tmp_path / "q.tsv")) == asked


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "q.tsv.gz").write_bytes(gzip.compress(b"a\tr\t\n") + gzip.compress(b"b\tr\t\n"))
    assert [each["head"] for each in given_in(tmp_path / "q.tsv.gz")] == ["a", "b"]


def test_parquet_may_hold_categories_large_text_columns_of_nulls_and_more_columns(tmp_path: Path) -> None:
    heads = pa.array(["a", "b", "a"]).dictionary_encode()
    relations, tails = pa.array(["r"] * 3, pa.large_string()), pa.nulls(3)
    path = tmp_path / "q.parquet"
    pq.write_table(pa.table({"weight": [1, 2, 3], "tail": tails, "relation": relations, "head": heads}), path)
    assert given_in(path, 2) == [{"head": head, "relation": "r"} for head in "aba"]


@pytest.mark.parametrize("suffix", ["ndjson", "parquet", "json", "tsv"])
def test_answers_of_a_batch_are_those_to_each_question_alone(
    model: TrainedModel, tmp_path: Path, suffix: str
) -> None:
    asked = questions_of(model)
    out = tmp_path / f"answers.{suffix}"
    written = answered(model, asked, out)
    alone = [model.predict([Question(**each)], Wanted(3))[0] for each in asked]
    assert written.questions == len(asked)
    assert written.rows == sum(map(len, alone))
    assert (written.files, written.bytes) == ([str(out)], out.stat().st_size)
    expected = [json.loads(json.dumps(answers.to_dict())) for answers in alone]
    if suffix == "ndjson":
        assert lines_of(out) == expected
    elif suffix == "json":
        assert json.loads(out.read_text()) == expected
    else:
        assert flat_rows(out) == list(expected_rows(expected))


def flat_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    header, *lines = [line.split("\t") for line in path.read_bytes().decode().split("\n")[:-1]]
    types: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(["query", "rank", "id"], int),
        **dict.fromkeys(["known", "folded"], {"true": True, "false": False}.__getitem__),
        "score": float,
    }
    return [
        {name: types.get(name, str)(text) if text else None for name, text in zip(header, line, strict=True)}
        for line in lines
    ]


def expected_rows(answers: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(answers, start=1):
        for result in each["results"]:
            query = {part: each["query"].get(part) for part in (*LINKS, "asked")}
            yield {"query": number, **query, **result, "error": None}


def test_neighbours_of_a_batch_are_those_of_each_entity_alone(model: TrainedModel, tmp_path: Path) -> None:
    names = [*HOSTILE, "e1", "e2"]
    source, out = tmp_path / "names.json", tmp_path / "near.parquet"
    source.write_text(json.dumps(names))
    asker = SimilarityAsker(model, 4, metric="l2", exact=False)
    answer_to_file(Batch(asker, read_entries(str(source), asker.columns, 5)), out)
    rows = pq.read_table(out).to_pylist()
    assert [(row["entity"], row["label"], row["score"]) for row in rows] == [
        (name, answer.label, answer.score)
        for name in names
        for answer in model.most_similar(name, 4, metric="l2")
    ]


def test_a_k_beyond_the_table_gives_every_entity_once(model: TrainedModel, tmp_path: Path) -> None:
    answered(model, questions_of(model)[:2], tmp_path / "a.ndjson", wanted=Wanted(10_000, known=True))
    for each in lines_of(tmp_path / "a.ndjson"):
        assert sorted(result["id"] for result in each["results"]) == list(range(len(model)))


def test_blocks_are_small_where_answers_are_many() -> None:
    assert block_size(10) == 1024
    assert [block_size(k) * k <= 1 << 20 for k in (1000, 10_000, 1_000_000)] == [True] * 3
    assert block_size(1_000_000) == 1
    assert block_size(0) == 1024  # Who checks k comes later.


def test_candidates_may_be_rows_names_or_those_seen(model: TrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_text("e7\n\n?\n#3\n日本\n")
    rows = read_candidates(file, model)
    assert rows.tolist() == sorted(model.entities.ids_of(["e7", "?", "#3", "日本"]).tolist())
    question, names = Question(head="e30", relation="r0"), ["日本", "e7", "#3", "?"]
    by_row, by_name = (model.predict([question], Wanted(9, candidates=which)) for which in (rows, names))
    assert by_row == by_name
    assert {answer.label for answer in by_row[0]} <= {"e7", "?", "#3", "日本"}


def test_where_train_has_nobody_at_an_end_nobody_answers(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9, 1), [("e0", "only valid has it", "e1")], dim=4)
    question = Question(head="e0", relation="only valid has it")
    [answers] = load(run.folder).predict([question], Wanted(candidates="seen", known=True))
    assert (len(answers), answers.query["exact"]) == (0, True)


def test_a_batch_of_seen_candidates_takes_those_of_each_relation(model: TrainedModel) -> None:
    asked = [Question(head=f"e{i}", relation=f"r{i % 3}") for i in range(9)]
    wanted = Wanted(60, known=True, candidates="seen")
    alone = [model.predict([each], wanted)[0] for each in asked]
    assert model.predict(asked, wanted) == alone
    train = model._known.splits["train"]
    for each, answers in zip(asked, alone, strict=True):
        relation = model.relations.id_of(str(each.relation))
        seen = {tail for _, r, tail in train.tolist() if r == relation}
        assert {answer.id for answer in answers} == seen


@pytest.mark.parametrize("candidates", ["seen", ["e1"], np.array([1])])
def test_entities_cannot_answer_where_a_relation_is_asked_for(model: TrainedModel, candidates: Any) -> None:
    with pytest.raises(ConfigError, match="candidates are entities"):
        model.predict([Question(head="e1", tail="e2")], Wanted(candidates=candidates))


FAULTS = {
    "q.tsv": (b"e1\tr0\t\ne1\tr0\n", r"q.tsv:2: 2 columns, expected 3"),
    "all.tsv": (b"e1\tr0\te2\n", r"all.tsv:1: a question gives two .* gives head, relation, tail"),
    "none.tsv": (b"\n\t\t\n", r"none.tsv:2: a question gives two .* gives nothing"),
    "utf8.tsv": (b"e1\tr0\t\n\xff\tr0\t\n", r"utf8.tsv:2: expected UTF-8, found byte 0xff"),
    "name.tsv": (b"e1\tr0\t\n\n\r\ne77\tr0\t\n", r"name.tsv:4: no entity 'e77'. Did you mean: e7"),
    "relation.tsv": (b"e1\tr0\t\ne1\tr9\t\n", r"relation.tsv:2: no relation 'r9'"),
    "q.ndjson": (
        b'{"head": "e1", "relation": "r0"}\n{"head": "e1",\n',
        r"q.ndjson:2: not a question in JSON",
    ),
    "number.ndjson": (
        b'{"head": 1, "relation": "r0"}\n',
        r"number.ndjson:1: not a question in JSON: Expected",
    ),
    "field.ndjson": (
        b'{"haed": "e1"}\n',
        r"field.ndjson:1: unknown field 'haed' \(known: head, relation, tail\)",
    ),
    "word.ndjson": (b'"e1"\n', r"word.ndjson:1: not a question in JSON"),
    "half.ndjson": (b'{"head": "\\ud800", "relation": "r0"}\n', r"half.ndjson:1: "),
    "deep.ndjson": (b"[" * 100_000 + b"\n", r"deep.ndjson:1: not a question in JSON"),
    "q.json": (
        b'[{"head": "e1", "relation": "r0"}, {"head": "e77", "relation": "r0"}]',
        r"question 2: no entity",
    ),
    "object.json": (b'{"head": "e1"}', r"object.json: not a list of questions"),
    "q.parquet": (b"PAR1", r"q.parquet: "),
    "q.tsv.gz": (gzip.compress(b"e1\tr0\t\n" * 9)[:-9], r"q.tsv.gz: truncated or corrupt"),
    "q.tsv.zst": (b"e1\tr0\t\n", r"q.tsv.zst: truncated or corrupt"),
    "q.csv": (b"e1,r0,", r"q.csv: the name does not tell"),
    "q.json.gz": (b"", r"q.json.gz: the name does not tell"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_says_where_it_is_and_leaves_no_file(model: TrainedModel, tmp_path: Path, name: str) -> None:
    content, words = FAULTS[name]
    (tmp_path / name).write_bytes(content)
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=words):
        answer_to_file(
            Batch(LinkAsker(model, Wanted(3)), read_entries(str(tmp_path / name), LINKS, 64)),
            tmp_path / "new" / "a.ndjson",
        )
    assert tree(tmp_path) == before


def test_a_parquet_row_in_error_is_numbered(model: TrainedModel, tmp_path: Path) -> None:
    asked = [{"head": "e1", "relation": "r0"}] * 5 + [{"head": "e1", "relation": "r1", "tail": "e2"}]
    path = write_questions(asked, tmp_path / "q.parquet")
    batch = Batch(LinkAsker(model, Wanted(3)), read_entries(str(path), LINKS, 2))
    with pytest.raises(DataError, match=r"q.parquet: row 6: a question gives two"):
        answer_to_file(batch, tmp_path / "a.json")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": ["a"], "y": ["b"]}, "none of the columns head, relation, tail"),
        ({"head": [3]}, "column head is int64"),
    ],
)
def test_parquet_without_questions_is_refused(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "q.parquet")
    with pytest.raises(DataError, match=words):
        given_in(tmp_path / "q.parquet")


@pytest.mark.parametrize("name", ["nothing.tsv", "nothing.json", "nothing.parquet", "folder.tsv"])
def test_questions_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.tsv").mkdir()
    with pytest.raises(DataError, match=name):
        given_in(tmp_path / name)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_what_comes_before_an_error_is_answered_whatever_the_blocks(model: TrainedModel, size: int) -> None:
    texts = ["e1", "e2", "e3", "e77", "e4", "e99"]
    entries = [Entry(n, f"q:{n}", {"head": name, "relation": "r0"}) for n, name in enumerate(texts, 1)]
    blocks = [entries[start : start + size] for start in range(0, len(entries), size)]
    batch, seen = Batch(LinkAsker(model, Wanted(2)), blocks), []

    def look() -> None:
        for block in batch.outcomes():
            seen.extend(outcome.entry.number for outcome in block)

    with pytest.raises(DataError, match="q:4: no entity 'e77'"):
        look()
    assert seen == [1, 2, 3]
    assert batch.tally.questions == 3


def bad_questions() -> list[dict[str, str]]:
    return [
        {"head": "e1", "relation": "r0"},
        {"head": "e77", "relation": "r0"},
        {"head": "e1"},
        {"relation": "r7", "tail": "e1"},
        {"head": "e2", "tail": "e3"},
    ]


@pytest.mark.parametrize("size", [1, 2, 64])
def test_skipped_questions_keep_their_place_with_an_error(
    model: TrainedModel, tmp_path: Path, size: int
) -> None:
    out = tmp_path / "a.ndjson"
    written = answered(model, bad_questions(), out, on_error="skip", size=size)
    found = lines_of(out)
    assert [sorted(each) for each in found] == [
        ["query", "results"],
        *[["error", "line", "query"]] * 3,
        ["query", "results"],
    ]
    assert found[1] == {
        "query": {"head": "e77", "relation": "r0"},
        "error": found[1]["error"],
        "line": 2,
    }
    assert "Did you mean" in found[1]["error"]
    assert found[3]["error"].startswith("no relation 'r7'")
    assert (
        found[4]["results"]
        == model.predict([Question(head="e2", tail="e3")], Wanted(3))[0].to_dict()["results"]
    )
    assert (written.questions, written.failed) == (5, 3)
    assert written.notes == [
        f"3 of 5 questions failed; the first: {out.with_name('questions.ndjson')}:2: {found[1]['error']}"
    ]


@pytest.mark.parametrize("suffix", ["tsv", "parquet"])
def test_skipped_questions_are_rows_without_a_rank(model: TrainedModel, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"a.{suffix}"
    answered(model, bad_questions(), out, on_error="skip")
    failed = [row for row in flat_rows(out) if row["error"]]
    assert [(row["query"], row["head"], row["relation"], row["rank"], row["label"]) for row in failed] == [
        (2, "e77", "r0", None, None),
        (3, "e1", None, None, None),
        (4, None, "r7", None, None),
    ]


def test_the_line_of_an_error_counts_blank_lines_far_into_a_file(model: TrainedModel, tmp_path: Path) -> None:
    lines = ["e1\tr0\t", ""] * 10_000 + ["e77\tr0\t"]
    (tmp_path / "q.tsv").write_text("\n".join(lines))
    entries = [entry for block in read_entries(str(tmp_path / "q.tsv"), LINKS, 64) for entry in block]
    assert [entry.number for entry in entries] == list(range(1, len(lines) + 1, 2))
    assert entries[-1].where == f"{tmp_path / 'q.tsv'}:{len(lines)}"


def test_rows_by_number_are_found_among_any_number_of_errors(model: TrainedModel, tmp_path: Path) -> None:
    asked = [{"head": "e77", "relation": "r0"}] * 30 + [{"head": "#5", "relation": "#1"}]
    written = answered(model, asked, tmp_path / "a.ndjson", on_error="skip", size=31)
    assert written.failed == 30
    assert lines_of(tmp_path / "a.ndjson")[-1]["query"]["head"] == model.entities[5]


def test_near_names_are_looked_for_only_for_the_first_errors(model: TrainedModel, tmp_path: Path) -> None:
    asked = [{"head": "e1", "relation": "r0"}] + [{"head": "e77", "relation": "r0"}] * 60
    answered(model, asked, tmp_path / "a.ndjson", on_error="skip", size=9)
    hints = ["Did you mean" in each.get("error", "") for each in lines_of(tmp_path / "a.ndjson")]
    assert hints == [False] + [True] * 20 + [False] * 40


def test_where_nothing_could_be_answered_skipping_is_no_success(model: TrainedModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no question could be answered; the first: .*:1: no entity 'e77'"):
        answered(model, [{"head": "e77", "relation": "r0"}] * 3, tmp_path / "a.ndjson", on_error="skip")
    assert not (tmp_path / "a.ndjson").exists()


@pytest.mark.parametrize("suffix", ["ndjson", "json", "tsv", "parquet"])
def test_no_questions_give_a_whole_file_without_answers(
    model: TrainedModel, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / f"a.{suffix}"
    assert answered(model, [], out).questions == 0
    if suffix == "json":
        assert json.loads(out.read_text()) == []
    else:
        assert (lines_of(out) if suffix == "ndjson" else flat_rows(out)) == []


def test_an_option_out_of_range_is_refused_even_without_questions(
    model: TrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="-k must be"):
        answered(model, [], tmp_path / "a.ndjson", wanted=Wanted(0))
    with pytest.raises(ConfigError, match="--metric"):
        list(Batch(SimilarityAsker(model, 3, metric="x", exact=False), []).outcomes())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a", "a.csv", "a.tsv.gz"])
def test_an_output_of_unknown_format_is_refused(model: TrainedModel, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--out .*known: .ndjson, .jsonl, .json, .tsv, .parquet"):
        answered(model, [], tmp_path / name)


def test_a_folder_is_no_output(model: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        answered(model, [], tmp_path / "a.json")


@pytest.mark.parametrize("label", UNSPOKEN)
def test_tsv_refuses_a_label_that_would_break_its_lines(
    model: TrainedModel, tmp_path: Path, label: str
) -> None:
    entry = Entry(1, "q:1", {"head": label, "relation": "r0"}, "no such entity")
    batch = Batch(
        LinkAsker(model, Wanted(3)),
        [[Entry(1, "", {"head": "e1", "relation": "r0"}), entry]],
        on_error="skip",
    )
    with pytest.raises(ConfigError, match=r"\.tsv cannot say .*(\\t|\\n|\\r)"):
        answer_to_file(batch, tmp_path / "a.tsv")
    assert not (tmp_path / "a.tsv").exists()


def test_scores_in_tsv_read_back_to_the_same_number(model: TrainedModel, tmp_path: Path) -> None:
    answered(model, questions_of(model), tmp_path / "a.tsv")
    answered(model, questions_of(model), tmp_path / "a.parquet")
    texts, numbers = ([row["score"] for row in flat_rows(tmp_path / name)] for name in ("a.tsv", "a.parquet"))
    assert texts == numbers
    assert all(map(math.isfinite, texts))


def test_a_question_without_a_file_is_a_batch_of_one(model: TrainedModel, tmp_path: Path) -> None:
    asked = {"head": "e1", "relation": "r0"}
    answer_to_file(Batch(LinkAsker(model, Wanted(3)), one_question(asked)), tmp_path / "a.json")
    [found] = json.loads((tmp_path / "a.json").read_text())
    assert found == model.predict([Question(**asked)], Wanted(3))[0].to_dict()


def test_progress_is_told_every_byte_but_what_a_format_writes_last(
    model: TrainedModel, tmp_path: Path
) -> None:
    told: list[int] = []
    source = write_questions(questions_of(model), tmp_path / "q.tsv")
    batch = Batch(LinkAsker(model, Wanted(3)), read_entries(str(source), LINKS, 5))
    answer_to_file(batch, tmp_path / "a.ndjson", advance=told.append)
    assert len(told) > 5
    assert sum(told) == (tmp_path / "a.ndjson").stat().st_size


@pytest.mark.parametrize("suffix", ["ndjson", "parquet"])
def test_questions_are_read_while_answers_are_written(
    model: TrainedModel, tmp_path: Path, suffix: str
) -> None:
    """Never more than a block of questions waits: what is read is answered before more is read."""
    waiting, most = 0, 0

    def blocks() -> Iterator[list[Entry]]:
        nonlocal waiting, most
        for start in range(0, 60, 6):
            waiting += 6
            most = max(most, waiting)
            yield [Entry(start + n, "", {"head": "e1", "relation": "r0"}) for n in range(6)]

    class Counting(LinkAsker):
        def answer(self, questions: Sequence[dict[str, str]]) -> Any:
            nonlocal waiting
            waiting -= len(questions)
            return super().answer(questions)

    answer_to_file(Batch(Counting(model, Wanted(2)), blocks()), tmp_path / f"a.{suffix}")
    assert most == 6


def test_a_named_pipe_is_read_line_by_line(tmp_path: Path) -> None:
    """The second line is written only once the first was handed on: who waits for more waits for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    asked = [{"head": "a", "relation": "r"}, {"head": "b", "relation": "r"}]
    handed_on = threading.Event()

    def feed() -> None:
        with pipe.open("wb", buffering=0) as file:
            file.write(to_ndjson(asked[:1]))
            assert handed_on.wait(20)
            file.write(to_ndjson(asked[1:]))

    feeder = threading.Thread(target=feed)
    feeder.start()
    found = []
    for block in read_entries(str(pipe), LINKS, 1024):
        found += [entry.given for entry in block]
        handed_on.set()
    feeder.join()
    assert found == asked
