"""CSV for neo4j-admin: its reader's rules give back the graph, the labels and every bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from exports import Floats, bits, by_float, floats, labelled_run, run_lines, same_rows, stored_rows
from graphs import make_run, ring, save_tables, tree
from kgshard_tools.export import export, neo4j

import kgshard
from kgshard.data.dataset import Dataset
from kgshard.errors import ConfigError

LABELS = [
    "a",
    'say "hi"',
    '"',
    "a,b",
    "a;b",
    "back\\slash",
    '\\"',
    "NA",
    "=1",
    " spaces ",
    "日本",
    "\u2028",
]
MULTILINE = ["a\nb", "c\rd"]
TYPES = ["is a", 'r"s', "t,u"]


def read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Read as neo4j-admin does without --legacy-style-quoting; return the header and the records.

    A field that begins with a quotation mark goes on to the next one that is not doubled, after which only
    a comma or a line end may come. Anywhere else a line ends at LF or CR, and a backslash is data.
    """
    text, records, record, at = path.read_bytes().decode(), list[list[str]](), list[str](), 0
    while at < len(text):
        if text[at] == '"':
            field, at = "", at + 1
            while text[at] != '"' or text[at + 1] == '"':
                field += text[at]
                at += 2 if text[at] == '"' else 1
            at += 1
        else:
            end = min(place for mark in ",\n\r" if (place := text.find(mark, at)) >= 0)
            field, at = text[at:end], end
        record.append(field)
        assert text[at] in ",\n"
        if text[at] == "\n":
            records.append(record)
            record = []
        at += 1
    assert not record
    assert all(len(one) == len(records[0]) for one in records)
    return records[0], records[1:]


def embedding(text: str) -> Floats:
    """Read a float[] as Java does: every number straight to a float."""
    return floats(text.split(";"), by_float)


def named_triples(dataset: Dataset) -> set[tuple[str, str, str, str]]:
    return {
        (dataset.entities[head], dataset.relations[relation], dataset.entities[tail], split)
        for split in ("train", "valid", "test")
        for head, relation, tail in dataset.triples(split).tolist()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_graph_the_labels_and_every_bit_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(neo4j, "_BLOCK_TRIPLES", 2)
    run = labelled_run(tmp_path, [*LABELS, *MULTILINE], TYPES, dim=6, dtype=dtype, world_size=2)
    export(run.folder, "neo4j", tmp_path / "out")
    wanted = stored_rows(run)
    header, nodes = read(tmp_path / "out" / "nodes.csv")
    assert header == ["id:ID", "label", "degree:int", "embedding:float[]"]
    assert [int(node[0]) for node in nodes] == list(range(len(nodes)))
    assert [int(node[2]) for node in nodes] == run.dataset.entities.degrees.tolist()
    assert same_rows({node[1]: embedding(node[3]) for node in nodes}, wanted["entities"])
    for name in ("relations", "inverse_relations"):
        header, types = read(tmp_path / "out" / f"{name}.csv")
        assert header == ["label", "degree:int", "embedding:float[]"]
        assert same_rows({row[0]: embedding(row[2]) for row in types}, wanted[name])
    header, links = read(tmp_path / "out" / "relationships.csv")
    assert header == [":START_ID", ":END_ID", ":TYPE", "split"]
    names = {node[0]: node[1] for node in nodes}
    found = {(names[start], kind, names[end], split) for start, end, kind, split in links}
    assert found == named_triples(run.dataset)
    assert len(links) == sum(len(run.dataset.triples(split)) for split in ("train", "valid", "test"))
    assert {split for *_, split in links} == {"train", "valid", "test"}


def test_no_inverses_without_reciprocal_relations(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, LABELS, dim=6, model="transe", corruption="both-sides")
    export(run.folder, "neo4j", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("nodes.csv", "relationships.csv", "relations.csv", "config.json")
    }


@pytest.mark.parametrize("where", ["entity", "relation", "nowhere"])
def test_the_import_says_where_lines_end_in_labels(tmp_path: Path, where: str) -> None:
    entities = ["a", "b\nc" if where == "entity" else "b c"]
    run = labelled_run(tmp_path, entities, ["r\rs" if where == "relation" else "r s"], dim=2)
    (note,) = (note for note in export(run.folder, "neo4j", tmp_path / "out").notes if "import" in note)
    assert "neo4j-admin database import full neo4j --id-type=integer" in note
    assert "--nodes=Entity=nodes.csv --relationships=relationships.csv" in note
    assert ("--multiline-fields=true" in note) == (where != "nowhere")


def test_types_without_a_name_are_refused_or_escaped(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, ["a\0b", "c"], ["r\0s", "t"], dim=2)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"neo4j cannot say 1 of the labels \(relation 'r\\x00s'\)"):
        export(run.folder, "neo4j", tmp_path / "out")
    assert tree(tmp_path) == before
    export(run.folder, "neo4j", tmp_path / "out", label_escape="percent")
    _, links = read(tmp_path / "out" / "relationships.csv")
    _, types = read(tmp_path / "out" / "relations.csv")
    assert {link[2] for link in links} <= {row[0] for row in types} == {"r%00s", "t"}


@pytest.mark.parametrize("model", ["transe", "distmult", "complex", "transe-l1"])
def test_gds_scores_by_what_the_loading_lines_give(tmp_path: Path, model: str) -> None:
    """Graph Data Science has -|h + r - t| and the sum of h r t; only models with one of them are said to."""
    run = labelled_run(tmp_path, LABELS, ["r", "s"], dim=8, model=model)
    source = np.random.default_rng(3)
    save_tables(run, source.standard_normal((len(LABELS), 8)), source.standard_normal((4, 8)), step=2)
    written = export(run.folder, "neo4j", tmp_path / "out")
    said = any(f"gds.model.{model}.create" in note for note in written.notes)
    assert said == (model in ("transe", "distmult"))
    assert said == any("gds" in note for note in written.notes)
    names = run_lines(written.python, tmp_path / "out")
    wanted = stored_rows(run)["entities"]
    assert list(names["entities"]) == list(wanted)
    assert bits(names["entities"].values()) == bits(wanted.values())
    if said:
        head, relation = (
            np.array(names[kind][name]) for kind, name in (("entities", "a"), ("relations", "s"))
        )
        formula = {
            "transe": lambda t: -np.linalg.norm(head + relation - t),
            "distmult": lambda t: head * relation @ t,
        }
        gds = [float(formula[model](np.array(tail))) for tail in names["entities"].values()]
        ours = kgshard.load(run.folder).score([("a", "s", tail) for tail in names["entities"]])
        np.testing.assert_allclose(ours, gds, rtol=1e-5, atol=1e-6)


def test_it_is_a_whole_graph(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=4)
    with pytest.raises(ConfigError, match="whole model"):
        export(run.folder, "neo4j", tmp_path / "out", top_degree=2)
    with pytest.raises(ConfigError, match="--normalize"):
        export(run.folder, "neo4j", tmp_path / "out", normalize=True)
