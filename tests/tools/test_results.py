"""Answers as Python objects, JSON, tables and HTML."""

from __future__ import annotations

import json

import pytest
from kgshard_tools.results import Answer, Answers, Evaluation
from kgshard_tools.written import Written

ANSWERS = Answers(
    {"head": "Österreich", "k": 2},
    [
        Answer(1, "Euro", 7, 1.25, known=True, split="test"),
        Answer(2, "<script>alert(1)</script>", 3, -0.5, known=False),
    ],
)
METRICS = {"mrr": 0.5, "mr": 12.0, "hits@1": 0.25, "hits@3": 0.5, "hits@10": 1.0}
EVALUATION = Evaluation(
    {
        "protocol": {
            "split": "test",
            "triples": 1264,
            "queries": 2528,
            "candidates": 1818,
            "filtered": True,
            "filter": ["train", "valid", "test"],
            "ties": "realistic",
            "sides": ["head", "tail"],
            "head_queries": "inverse relations",
            "step": 20,
        },
        "metrics": METRICS,
        "head": METRICS | {"mrr": 0.4},
        "tail": METRICS | {"mrr": 0.6},
    }
)


def test_answers_are_a_sequence_best_first() -> None:
    assert len(ANSWERS) == 2
    assert ANSWERS[0].label == "Euro"
    assert [answer.rank for answer in ANSWERS] == [1, 2]
    assert ANSWERS.labels == ["Euro", "<script>alert(1)</script>"]


def test_the_dictionary_is_what_cli_and_scripts_read() -> None:
    assert json.loads(json.dumps(ANSWERS.to_dict())) == {
        "query": {"head": "Österreich", "k": 2},
        "results": [
            {
                "rank": 1,
                "label": "Euro",
                "id": 7,
                "score": 1.25,
                "known": True,
                "split": "test",
                "folded": False,
                "probability": None,
            },
            {
                "rank": 2,
                "label": "<script>alert(1)</script>",
                "id": 3,
                "score": -0.5,
                "known": False,
                "split": None,
                "folded": False,
                "probability": None,
            },
        ],
    }


def test_a_table_line_says_rank_label_score_and_where_it_is_known() -> None:
    first, second = ANSWERS.lines()
    assert first.split() == ["1", "Euro", "1.2500", "known", "(test)"]
    assert second.split() == ["2", "<script>alert(1)</script>", "-0.5000"]
    assert first.index("1.2500") + 6 == second.index("-0.5000") + 7


def test_no_answers_make_no_lines() -> None:
    assert Answers({"k": 1}, []).lines() == []
    assert repr(Answers({"k": 1}, [])) == '{"k": 1}'


def test_repr_shows_the_question_and_the_table() -> None:
    lines = repr(ANSWERS).split("\n")
    assert json.loads(lines[0]) == ANSWERS.query
    assert "Österreich" in lines[0]
    assert lines[1:] == ANSWERS.lines()


@pytest.mark.parametrize("label", ["<script>alert(1)</script>", "<img src=x onerror=y>", "a & b", '"><b>'])
def test_labels_are_inert_in_html(label: str) -> None:
    shown = Answers({"head": label}, [Answer(1, label, 0, 0.0, known=False)])._repr_html_()
    assert label not in shown
    assert shown.count("<tr>") == 2
    assert "<script" not in shown
    assert "<img" not in shown


def test_an_evaluation_shows_protocol_and_both_sides() -> None:
    assert EVALUATION.metrics["mrr"] == 0.5
    protocol, header, *rows = EVALUATION.lines()
    for words in ("test", "1,264 triples", "all 1,818 entities", "train+valid+test", "realistic", "inverse"):
        assert words in protocol
    assert header.split() == list(METRICS)
    assert [row.split() for row in rows] == [
        ["both", "0.5000", "12.0", "0.2500", "0.5000", "1.0000"],
        ["head", "0.4000", "12.0", "0.2500", "0.5000", "1.0000"],
        ["tail", "0.6000", "12.0", "0.2500", "0.5000", "1.0000"],
    ]
    assert repr(EVALUATION) == "\n".join(EVALUATION.lines())


def test_a_raw_evaluation_says_that_nothing_was_filtered() -> None:
    protocol = EVALUATION.result["protocol"] | {"filtered": False, "filter": []}
    assert "filtered by nothing" in Evaluation(EVALUATION.result | {"protocol": protocol}).lines()[0]


def test_what_was_written_is_said_in_words_and_as_json() -> None:
    counts = {"rows": 1200, "bytes": 3_000_000, "seconds": 2.0, "peak_memory": 5_000_000}
    written = Written(["out/a.npy", "out/b.npy"], **counts, notes=["be told"], python=["import a"])
    assert written.lines() == [
        "out/a.npy",
        "out/b.npy",
        "1,200 entities, 3,000,000 bytes in 2.00 s (2 MB/s, 5 MB of memory at most)",
        "be told",
        "to load it, in out:",
        "  >>> import a",
    ]
    shape = {"files": ["out/a.npy", "out/b.npy"], "notes": ["be told"], "python": ["import a"], **counts}
    assert written.to_dict() == shape
    assert Written([], 0, 0, 0.0).megabytes_per_second == 0.0
