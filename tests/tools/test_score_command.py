"""`kgshard score`: ranks are those of evaluate, scores those of the model; every format says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from brute_force import random_graph
from cases import fitting_dim
from graphs import Triple, make_run, ring, save_tables, tree
from kgshard_tools import cli
from kgshard_tools.answers import load
from kgshard_tools.batches import one_question, read_entries
from kgshard_tools.calibration import calibration, pooled
from kgshard_tools.known import KnownTriples
from kgshard_tools.links import LinkSearch, Sources
from kgshard_tools.stored import open_stored
from kgshard_tools.triple_scores import PARTS, TripleBatch, TripleScorer, place, ranks
from ranking_functions import evaluated

from kgshard.errors import DataError, NonFiniteError
from kgshard.exchange import SingleExchange
from kgshard.known import KnownLinks
from kgshard.models import SCORING, find_scoring
from kgshard.models.link import SIDES
from kgshard.partition import RowPartition
from kgshard.ranking.ranker import Ranker
from kgshard.runs import Run
from kgshard.table import ShardedTable

GRAPH = random_graph(7, 80, 3)
CASES = [
    (name, corruption)
    for name in sorted(SCORING)
    for corruption in ("reciprocal", "both-sides")
    if corruption == "reciprocal" or find_scoring(name).has_head_queries
]


def run_of(
    folder: Path, model: str = "distmult", corruption: str = "reciprocal", *, whole: bool = False
) -> Run:
    """Make a run whose first ten entities are copied to the last ten; `whole` numbers make more ties."""
    random = np.random.default_rng(11)
    dim = fitting_dim(model, 8)
    shape = (80, dim)
    entities = random.integers(-1, 2, shape) if whole else random.standard_normal(shape)
    entities[-10:] = entities[:10]
    settings: dict[str, Any] = {"model": model, "dim": dim, "corruption": corruption}
    return make_run(folder, *GRAPH.values(), entities=entities, world_size=2, seed=4, **settings)


@pytest.mark.parametrize(("model", "corruption"), CASES)
def test_ranks_are_those_of_the_ranker(tmp_path: Path, model: str, corruption: str) -> None:
    """Candidates that score higher, ties and candidates, of every test triple and of triples nobody knows."""
    stored = open_stored(run_of(tmp_path, model, corruption, whole=corruption == "both-sides").folder)
    known, checkpoint = stored.dataset.known_triples(), stored.checkpoint
    random = np.random.default_rng(3)
    new = random.integers(0, [80, 3, 80], (40, 3))
    triples = np.concatenate([stored.dataset.triples("test"), new, new[:5]])
    entities = torch.tensor(checkpoint.entities.read(range(80)))
    relations = torch.tensor(checkpoint.relations.read(range(checkpoint.relations.num_rows)))
    shared = {name: torch.tensor(values) for name, values in checkpoint.shared.items()}
    table = ShardedTable(entities, RowPartition(80, 1), SingleExchange())
    ranker = Ranker(stored.model, table, relations, shared)
    links, num_tied = LinkSearch(stored, Sources(stored)), 0
    for side in SIDES:
        wanted = ranker.rank(side, triples, KnownLinks(known, side, num_relations=3))
        found = place(stored, links, KnownTriples(stored.dataset), side, triples).ranks
        for column in ("higher", "ties", "candidates"):
            np.testing.assert_array_equal(getattr(found, column), getattr(wanted, column), column)
        num_tied += int((wanted.ties > 0).sum())
    assert num_tied > 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("run"), "complex")


@pytest.fixture(scope="module")
def triples(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test triples, and some of train, valid and of nobody, as TSV."""
    path = tmp_path_factory.mktemp("triples") / "triples.tsv"
    new = [("e70", "r0", "e3"), ("e71", "r1", "e71")]
    rows = [*GRAPH["test"], *GRAPH["train"][:3], *GRAPH["valid"][:3], *new]
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def objects(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    code, out, err = said(capsys, "score", *arguments, "--json")
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_mean_reciprocal_ranks_are_those_of_evaluate(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = sorted(set(GRAPH["test"]))
    path = tmp_path / "test.ndjson"
    path.write_text("".join(json.dumps(dict(zip(PARTS, row, strict=True))) + "\n" for row in test))
    found, expected = objects(capsys, run.folder, path), evaluated(run, split="test")
    assert len(found) == expected["protocol"]["triples"]
    for side in SIDES:
        places = np.array([each["rank"][side] for each in found])
        assert (1 / places).mean() == pytest.approx(expected[side]["mrr"], rel=1e-12)
        assert places.mean() == pytest.approx(expected[side]["mr"], rel=1e-12)


def test_scores_are_those_of_the_model(run: Run, triples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: list[Triple] = [(h, r, t) for h, r, t in map(str.split, triples.read_text().splitlines())]
    model = load(run)
    wanted = {side: model.score(names, side=side).tolist() for side in SIDES}
    found = objects(capsys, run.folder, triples)
    assert [each["score"] for each in found] == pytest.approx(wanted["tail"], rel=1e-12)
    for side in SIDES:
        assert [each["scores"][side] for each in found] == pytest.approx(wanted[side], rel=1e-12)
    assert wanted["head"] != pytest.approx(wanted["tail"])


def test_known_triples_are_told_by_the_first_split_that_holds_them(
    run: Run, triples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits: dict[Triple, str] = {}
    for split, rows in GRAPH.items():
        for row in rows:
            splits.setdefault(row, split)
    found = objects(capsys, run.folder, triples)
    told = [each["split"] for each in found]
    assert told == [splits.get(tuple(each["triple"].values())) for each in found]
    assert [each["known"] for each in found] == [split is not None for split in told]
    assert {*told} == {"train", "valid", "test", None}


def test_one_triple_is_one_object(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    [found] = objects(capsys, run.folder, "--head", "e3", "--relation", "r0", "--tail", "e4")
    assert found["triple"] == {"head": "e3", "relation": "r0", "tail": "e4"}
    assert list(found) == ["triple", "score", "scores", "rank", "candidates", "known", "split"]
    code, out, err = said(capsys, "score", run.folder, "--head", "e3", "--relation", "r0", "--tail", "e4")
    assert (code, err) == (0, "")
    head, line = out.splitlines()
    assert head.split() == ["score", "head", "rank", "tail", "rank", "known", "triple"]
    assert line.split()[:3] == [
        f"{found['score']:.4f}",
        f"{found['rank']['head']:.1f}",
        f"{found['rank']['tail']:.1f}",
    ]


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_blocks_change_nothing(run: Run, triples: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    scorer = TripleScorer(open_stored(run.folder))
    names = [dict(zip(PARTS, line.split("\t"), strict=True)) for line in triples.read_text().splitlines()]
    whole = scorer.score(names)
    monkeypatch.setattr(ranks, "_BLOCK_FLOATS", 8 * 13)
    monkeypatch.setattr(ranks, "_SETTLED_FLOATS", 1)
    for start in range(0, len(names), block):
        for one, other in zip(
            scorer.score(names[start : start + block]), whole[start : start + block], strict=True
        ):
            assert (one.rank, one.candidates, one.split) == (other.rank, other.candidates, other.split)
            assert one.score == pytest.approx(other.score, rel=1e-12)


def read_back(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    if path.suffix == ".tsv":
        head, *lines = path.read_text().splitlines()
        return [
            {name: cell or None for name, cell in zip(head.split("\t"), line.split("\t"), strict=True)}
            for line in lines
        ]
    text = path.read_text()
    found: list[dict[str, Any]] = (
        json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    )
    return found


def test_every_format_says_the_same(
    run: Run, triples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = objects(capsys, run.folder, triples)
    for suffix in (".ndjson", ".jsonl", ".json", ".parquet", ".tsv"):
        out = tmp_path / f"scores{suffix}"
        code, text, err = said(capsys, "score", run.folder, triples, "-o", out, "--json")
        assert (code, err) == (0, "")
        written = json.loads(text)
        assert written["files"] == [str(out)]
        assert (written["rows"], written["failed"]) == (len(wanted), 0)
        assert written["bytes"] == out.stat().st_size
        found = read_back(out)
        if suffix in (".parquet", ".tsv"):
            for number, (row, each) in enumerate(zip(found, wanted, strict=True), start=1):
                assert int(row["line"]) == number
                assert {part: row[part] for part in PARTS} == each["triple"]
                assert float(row["score"]) == each["score"]
                assert {side: float(row[f"rank_{side}"]) for side in SIDES} == each["rank"]
                assert {side: int(row[f"candidates_{side}"]) for side in SIDES} == each["candidates"]
                assert (row["split"], row["error"], row["probability"]) == (each["split"], None, None)
                assert str(row["known"]).lower() == str(each["known"]).lower()
        else:
            assert found == wanted


def test_triples_are_read_from_parquet_json_and_stdin(
    run: Run,
    triples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = objects(capsys, run.folder, triples)
    names = [each["triple"] for each in wanted]
    pq.write_table(pa.Table.from_pylist(names), tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(json.dumps(names))
    for name in ("t.parquet", "t.json"):
        assert objects(capsys, run.folder, tmp_path / name) == wanted
    lines = "".join(json.dumps(each) + "\n" for each in names[:4])
    done = subprocess.run(
        [sys.executable, "-m", "kgshard", "score", str(run.folder), "-", "--json"],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted[:4]


BAD = "e0\tr0\te1\ne0\tr9\te1\n\ne0\tr0\nEntity\tr0\te1\ne2\tr0\te3\n\tr0\te1\n"


def test_a_faulty_triple_is_named_by_its_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "bad.tsv", tmp_path / "out.tsv"
    for text, words in (
        (BAD, "bad.tsv:2: no relation 'r9'"),
        ("e0\tr0\te1\n\ne0\tr0\n", "bad.tsv:3: 2 columns, expected 3"),
        ("e0\tr0\te1\ne77x\tr0\te1\n", "bad.tsv:2: no entity 'e77x'. Did you mean: e77"),
        ("e0\tr0\t\n", "bad.tsv:1: a triple gives head, relation and tail; this one lacks tail"),
    ):
        path.write_text(text)
        before = tree(tmp_path)
        code, said_out, err = said(capsys, "score", run.folder, path, "-o", out)
        assert (code, said_out, err.count("\n")) == (2, "", 1)
        assert words in err
        assert tree(tmp_path) == before
    path.write_text(BAD)
    code, shown, err = said(capsys, "score", run.folder, path)
    assert code == 2
    assert len(shown.splitlines()) == 2  # The head of the table, and the triple before the fault.


def test_faulty_triples_can_be_passed_over(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "bad.tsv", tmp_path / "out.ndjson"
    path.write_text(BAD)
    code, text, err = said(capsys, "score", run.folder, path, "-o", out, "--on-error", "skip")
    assert (code, err) == (0, "")
    assert "4 of 6 triples failed; the first: " in text
    found = read_back(out)
    assert [each.get("line") for each in found] == [None, 2, 4, 5, None, 7]
    assert "no relation 'r9'" in found[1]["error"]
    assert found[1]["triple"] == {"head": "e0", "relation": "r9", "tail": "e1"}
    assert found[0] == objects(capsys, run.folder, "--head", "e0", "--relation", "r0", "--tail", "e1")[0]
    code, text, err = said(capsys, "score", run.folder, path, "--on-error", "skip")
    assert code == 0
    assert len(text.splitlines()) == 7
    assert "4 of 6 triples failed" in err
    path.write_text("x\tr0\te1\ne0\tx\te1\n")
    code, text, err = said(capsys, "score", run.folder, path, "-o", out, "--on-error", "skip")
    assert code == 2
    assert "no triple could be scored; the first: " in err
    assert len(read_back(out)) == 6  # What was there stays.


def test_suggestions_are_given_for_the_first_faults_only(run: Run) -> None:
    lines = "".join(json.dumps({"head": f"E{i}", "relation": "r0", "tail": "e1"}) + "\n" for i in range(40))
    path = run.folder.parent / "many.ndjson"
    path.write_text(lines + '{"head": "e0", "relation": "r0", "tail": "e1"}\n')
    batch = TripleBatch(
        TripleScorer(open_stored(run.folder)), read_entries(str(path), PARTS, 1024), on_error="skip"
    )
    errors = [outcome.error for block in batch.outcomes() for outcome in block]
    assert ["Did you mean" in error for error in errors] == [True] * 20 + [False] * 21
    assert errors[39] == "no entity 'E39'"
    assert errors[40] == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --head, --relation and --tail, or a file"),
        (["--head", "e0", "--tail", "e1"], "give --head, --relation and --tail, or a file"),
        (["t.tsv", "--head", "e0"], "give --head, --relation and --tail, or a file"),
        (["--head", "e0", "--relation", "r0", "--tail", "e77x"], "no entity 'e77x'. Did you mean: e77"),
        (["nowhere.tsv"], "nowhere.tsv"),
        (["t.tsv", "-o", "out.xlsx"], "--out out.xlsx: the name does not tell the format"),
        (["t.tsv", "--base-rate", "0.5"], "--base-rate has no effect without --calibrate"),
        (["t.tsv", "--calibrate", "--base-rate", "2"], "--base-rate must be a number between 0 and 1"),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = said(capsys, "score", run.folder, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_label_that_tsv_cannot_say_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, [*ring(4), ("e0", "r0", "a\rb")], model="distmult", dim=4)
    (tmp_path / "t.json").write_text(json.dumps([{"head": "e0", "relation": "r0", "tail": "a\rb"}]))
    code, _, err = said(capsys, "score", run.folder, tmp_path / "t.json", "-o", tmp_path / "out.tsv")
    assert code == 2
    assert ".tsv cannot say 'a\\rb'" in err
    assert not (tmp_path / "out.tsv").exists()
    assert said(capsys, "score", run.folder, tmp_path / "t.json", "-o", tmp_path / "out.parquet")[0] == 0
    assert read_back(tmp_path / "out.parquet")[0]["tail"] == "a\rb"


def test_a_row_that_is_not_finite_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    stored = open_stored(run.folder)
    rows = stored.checkpoint.entities.read(range(80)).copy()
    rows[41, 0] = np.inf
    save_tables(run, rows, stored.checkpoint.relations.read(range(6)), step=2)
    scorer = TripleScorer(open_stored(run.folder))
    with pytest.raises(NonFiniteError, match=r"entity 41 \('e\d+'\) is not finite"):
        scorer.score([{"head": "e3", "relation": "r0", "tail": "e4"}])


def test_calibrated_triples_have_a_probability(
    tmp_path: Path, triples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is that of both sides, pooled; the file says so, and the table says what it means."""
    valid = [(f"e{i % 12}", f"r{i % 3}", f"e{(7 * i + 3) % 80}") for i in range(160)]
    run = make_run(tmp_path, GRAPH["train"], valid, GRAPH["test"], model="complex", dim=8)
    stored = open_stored(run.folder)
    for arguments, rate in ((["--calibrate"], None), (["--calibrate", "--base-rate", "0.5"], 0.5)):
        found = objects(capsys, run.folder, triples, *arguments)
        fitted = calibration(stored, base_rate=rate)
        relations = stored.dataset.relations.ids_of(each["triple"]["relation"] for each in found)
        wanted = pooled(
            [
                fitted.probabilities(np.array([each["scores"][side] for each in found]), relations, side)
                for side in SIDES
            ]
        )
        assert [each["probability"] for each in found] == pytest.approx(wanted.tolist(), rel=1e-9)
        assert all(0 < each["probability"] < 1 for each in found)
        one = ["--head", "e0", "--relation", "r0", "--tail", "e1"]
        code, out, err = said(capsys, "score", run.folder, *one, *arguments)
        assert (code, err) == (0, "")
        assert "probability" in out.splitlines()[0]
        assert out.splitlines()[-1] == fitted.line()
    out_file = tmp_path / "out.parquet"
    said(capsys, "score", run.folder, triples, "--calibrate", "-o", out_file)
    assert all(row["probability"] > 0 for row in read_back(out_file))


def test_a_run_with_too_small_a_valid_has_no_probabilities(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(
        capsys, "score", run.folder, "--head", "e0", "--relation", "r0", "--tail", "e1", "--calibrate"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "at least 100 are needed" in err


def test_nothing_is_scored_where_nothing_is_asked(run: Run) -> None:
    scorer = TripleScorer(open_stored(run.folder))
    assert scorer.score([]) == []
    with pytest.raises(DataError, match="this one lacks relation, tail"):
        scorer.score([{"head": "e0"}])
    [block] = TripleBatch(scorer, one_question({"head": "e0", "relation": "r0", "tail": "e1"})).outcomes()
    assert block[0].score == scorer.score([{"head": "e0", "relation": "r0", "tail": "e1"}])[0]


def test_scoring_imports_no_torch(run: Run) -> None:
    code = (
        "import sys; from kgshard_tools.cli import run; "
        f"run(['score', {str(run.folder)!r}, '--head', 'e0', '--relation', 'r0', '--tail', 'e1']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
