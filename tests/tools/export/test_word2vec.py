"""word2vec text and binary: an independent reader and gensim get every label and every bit."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest
import torch
from exports import WAYS, Floats, by_double, exported, floats, labelled_run, run_lines, same_rows, stored_rows
from graphs import make_run, ring, save_tables, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.export import export
from kgshard_tools.export.escapes import Spelling
from kgshard_tools.export.word2vec import BINARY, TEXT

from kgshard.errors import ConfigError, NonFiniteError
from kgshard.vocabulary import Vocabulary

PLAIN = ["a", "</s>", "3", "=1+1", '"quoted', "#3", "nan", "e\u0301", "日本", "%20", "100%", "x" * 3000]
SPACES = [" ", "\t", "\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85"]
SPACES += ["\xa0", "\u1680", "\u2003", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\0"]
UNSAYABLE = ["my name", "a\nb", "3 2", "\nc", "d\te", "no\xa0break", "line\u2028separator"]
FORMATS = {"word2vec": "vec", "word2vec-bin": "bin"}


def read_text(path: Path, way: Callable[[str], float] = by_double) -> dict[str, Floats]:
    """Read as the format is described, and as scripts do: split at any white space."""
    lines = path.read_bytes().decode().splitlines()
    count, dim = map(int, lines[0].split())
    rows = {key: floats(texts, way) for key, *texts in (line.split() for line in lines[1:])}
    assert len(lines) == count + 1 == len(rows) + 1
    assert all(len(row) == dim for row in rows.values())
    return rows


def read_binary(path: Path, _: object = None) -> dict[str, Floats]:
    """Read as distance.c of word2vec does: a key up to a space, newlines in it skipped, then the floats."""
    header, _, data = path.read_bytes().partition(b"\n")
    count, dim = map(int, header.split())
    rows = {}
    for _ in range(count):
        key, _, data = data.partition(b" ")
        values = struct.unpack(f"<{dim}f", data[: 4 * dim])
        rows[key.replace(b"\n", b"").decode()] = np.array(values, np.float32)
        data = data[4 * dim :]
    assert data == b"\n"
    assert len(rows) == count
    return rows


READERS = {"word2vec": read_text, "word2vec-bin": read_binary}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_every_bit_and_every_label_comes_back(
    tmp_path: Path, format: str, dtype: torch.dtype, way: Callable[[str], float]
) -> None:
    run = labelled_run(tmp_path, PLAIN, ["r", "</s>", "%"], dim=6, dtype=dtype, world_size=3)
    export(run.folder, format, tmp_path / "out")
    wanted = stored_rows(run)
    assert set(wanted) == {"entities", "relations", "inverse_relations"}
    for name, rows in wanted.items():
        found = READERS[format](tmp_path / "out" / f"{name}.{FORMATS[format]}", way)
        assert same_rows(found, rows)


@pytest.mark.parametrize("format", FORMATS)
def test_gensim_reads_every_row(tmp_path: Path, format: str) -> None:
    pytest.importorskip("gensim", reason="gensim reads the files back")
    run = labelled_run(tmp_path, PLAIN, ["r", "s"], dim=6)
    written = export(run.folder, format, tmp_path / "out")
    names = run_lines(written.python, tmp_path / "out")
    for name in ("entities", "relations"):
        vectors = names[name]
        assert same_rows(
            dict(zip(vectors.index_to_key, vectors.vectors, strict=True)), stored_rows(run)[name]
        )


@pytest.mark.parametrize("format", FORMATS)
def test_gensim_reads_what_was_escaped(tmp_path: Path, format: str) -> None:
    pytest.importorskip("gensim", reason="gensim reads the files back")
    run = labelled_run(tmp_path, [*PLAIN, *UNSAYABLE, *SPACES], ["is a"], dim=6)
    written = export(run.folder, format, tmp_path / "out", label_escape="percent")
    names = run_lines(written.python, tmp_path / "out")
    found = dict(zip(names["labels"], names["entities"].vectors, strict=True))
    assert same_rows(found, stored_rows(run)["entities"])


def test_the_width_of_relations_may_differ(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, PLAIN, dim=6, model="rotate", corruption="both-sides")
    export(run.folder, "word2vec", tmp_path / "out")
    assert (tmp_path / "out" / "relations.vec").read_bytes().startswith(b"1 3\n")
    assert not (tmp_path / "out" / "inverse_relations.vec").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_labels_that_cannot_be_said_are_counted_and_named(tmp_path: Path, format: str) -> None:
    run = labelled_run(tmp_path, [*PLAIN, *UNSAYABLE], ["is a", "r"], dim=2)
    before = tree(tmp_path)
    with pytest.raises(ConfigError) as caught:
        export(run.folder, format, tmp_path / "out")
    assert tree(tmp_path) == before
    text = str(caught.value)
    assert f"--format {format} cannot say 8 of the labels" in text
    assert "and 3 more" in text
    assert sum(f"entity {label!r}" in text for label in UNSAYABLE) == 5
    assert "--label-escape percent" in text
    assert "\n" not in text


@pytest.mark.parametrize("space", SPACES)
def test_whatever_readers_split_at_is_refused(tmp_path: Path, space: str) -> None:
    run = labelled_run(tmp_path, ["a", "b", f"c{space}d"], dim=2)
    with pytest.raises(ConfigError, match="1 of the labels"):
        export(run.folder, "word2vec", tmp_path / "out")


def test_relations_are_looked_at_too(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, ["a", "b"], ["is a"], dim=2)
    with pytest.raises(ConfigError, match=r"relation 'is a'"):
        export(run.folder, "word2vec-bin", tmp_path / "out")


def test_labels_are_looked_at_before_rows(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, ["a b", "c"], dim=2)
    save_tables(run, [[np.nan] * 2] * 2, [[np.nan] * 2] * 2, step=2)
    with pytest.raises(ConfigError, match="cannot say"):
        export(run.folder, "word2vec", tmp_path / "out")


@pytest.mark.parametrize("format", FORMATS)
def test_percent_escapes_lead_back(tmp_path: Path, format: str) -> None:
    labels = [*PLAIN, *UNSAYABLE, *SPACES, "a b", "a%20b"]
    run = labelled_run(tmp_path, labels, ["is a"], dim=4)
    written = export(run.folder, format, tmp_path / "out", label_escape="percent")
    found = READERS[format](tmp_path / "out" / f"entities.{FORMATS[format]}")
    assert len(found) == len(labels)
    plain = {unquote(key): row for key, row in found.items()}
    assert same_rows(plain, stored_rows(run)["entities"])
    # Those with a white space, a NUL or a percent sign, and the relation.
    changed = len(UNSAYABLE) + len(SPACES) + 4 + 1
    assert any(f"{changed} labels written with percent escapes" in note for note in written.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config["label_escape"] == "percent"


@pytest.mark.parametrize("format", [TEXT, BINARY])
def test_the_empty_label_is_refused_or_written(tmp_path: Path, format: object) -> None:
    """No dataset has one today, so a vocabulary is made by hand."""
    assert format in (TEXT, BINARY)
    chosen = TEXT if format is TEXT else BINARY
    run = make_run(tmp_path, ring(3), dim=2)
    vocabulary = Vocabulary(pa.array(["", "%", "_"], pa.large_string()), np.zeros(3, np.int64), kind="entity")
    vocabulary.save(tmp_path / "labels.parquet")
    labels = tmp_path / "labels.parquet"
    with pytest.raises(ConfigError, match="entity ''"):
        chosen.fill(exported(run, labels=labels), tmp_path)
    with pytest.raises(ConfigError, match=r"equal: '' and '_'"):
        chosen.fill(exported(run, labels=labels, escape="underscore"), tmp_path)
    lines = chosen.fill(exported(run, labels=labels, escape="percent"), tmp_path)
    found = read_text(tmp_path / "entities.vec") if chosen is TEXT else read_binary(tmp_path / "entities.bin")
    assert list(found) == ["%", "%25", "_"]
    assert [unquote(key) if key != "%" else "" for key in found] == ["", "%", "_"]
    assert lines[-1].startswith('labels = [unquote(key) if key != "%" else "" for key')


@settings(deadline=None)
@given(st.lists(st.text(max_size=6) | st.sampled_from(["", "%", "%2", "%20", " "]), unique=True))
def test_escaped_keys_are_distinct_and_sayable(labels: list[str]) -> None:
    write = Spelling(r"[\s\x00]|\A\Z", "percent").writer()
    keys = [write(label) for label in labels]
    assert len(set(keys)) == len(labels)
    assert all(key.split() == [key] and "\0" not in key for key in keys)
    assert [unquote(key) if key != "%" else "" for key in keys] == labels


def test_underscores_are_written_where_they_are_distinct(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, ["my name", "a\nb", "c", "100%"], ["is a"], dim=2)
    written = export(run.folder, "word2vec", tmp_path / "out", label_escape="underscore")
    assert set(read_text(tmp_path / "out" / "entities.vec")) == {"my_name", "a_b", "c", "100%"}
    assert set(read_text(tmp_path / "out" / "relations.vec")) == {"is_a"}
    assert any("3 labels written with underscores" in note for note in written.notes)


@pytest.mark.parametrize("labels", [["a b", "a_b", "c"], ["a b", "a\tb", "c"]])
def test_underscores_that_make_labels_equal_are_refused_by_name(tmp_path: Path, labels: list[str]) -> None:
    run = labelled_run(tmp_path, labels, dim=2)
    before = tree(tmp_path)
    with pytest.raises(ConfigError) as caught:
        export(run.folder, "word2vec", tmp_path / "out", label_escape="underscore")
    assert repr(labels[0]) in str(caught.value)
    assert repr(labels[1]) in str(caught.value)
    assert "'c'" not in str(caught.value)
    assert tree(tmp_path) == before


def test_float16_is_rounded_first(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    run = make_run(tmp_path, ring(5), dim=4, entities=rows)
    written = export(run.folder, "word2vec", tmp_path / "out", dtype="float16")
    found = np.array(list(read_text(tmp_path / "out" / "entities.vec").values()))
    np.testing.assert_array_equal(found, rows.astype(np.float16).astype(np.float32))
    assert any("rounded to float16" in note for note in written.notes)


def test_binary_is_float32_only(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=4, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"'float16'.*float32"):
        export(run.folder, "word2vec-bin", tmp_path / "out", dtype="float16")
    written = export(run.folder, "word2vec-bin", tmp_path / "out")
    assert any("float16 was widened to float32" in note for note in written.notes)


@pytest.mark.parametrize("format", FORMATS)
def test_the_header_counts_what_was_chosen(tmp_path: Path, format: str) -> None:
    run = labelled_run(tmp_path, [*PLAIN, "not sayable"], dim=4)
    (tmp_path / "wanted.txt").write_text("nan\na\n")
    export(run.folder, format, tmp_path / "out", entities=tmp_path / "wanted.txt", normalize=True)
    found = READERS[format](tmp_path / "out" / f"entities.{FORMATS[format]}")
    assert list(found) == ["nan", "a"]
    stored = stored_rows(run)["entities"]
    for label, row in found.items():
        wanted = stored[label].astype(np.float64)
        np.testing.assert_allclose(row, wanted / np.linalg.norm(wanted), rtol=1e-6)


def test_a_row_that_is_not_finite_leaves_what_was_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(5), dim=4)
    export(run.folder, "word2vec", tmp_path / "out")
    before = tree(tmp_path / "out")
    rows = np.ones((5, 4), np.float32)
    rows[3, 2] = np.inf
    save_tables(run, rows, np.ones((2, 4)), step=2)
    with pytest.raises(NonFiniteError, match="entity 3"):
        export(run.folder, "word2vec", tmp_path / "out")
    assert tree(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run", "source"]


@pytest.mark.parametrize("format", [*FORMATS, "tsv", "csv", "neo4j"])
def test_parameters_that_all_rows_share_are_said_to_be_missing(tmp_path: Path, format: str) -> None:
    run = make_run(tmp_path, ring(9), dim=16, model="tucker")
    written = export(run.folder, format, tmp_path / "out")
    assert any("(core) are not in this format" in note for note in written.notes)
