"""numpy arrays become runs: our own exports bit for bit, others' with a model and labels given."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign import ENTITIES, RELATIONS, draw, draw_triples, run_scores, toy, write_dict, write_splits
from graphs import make_run, ring, tree
from kgshard_tools.export import export
from kgshard_tools.importers import import_run
from kgshard_tools.importers.writer import write_run
from papers import PAPER

from kgshard.errors import ConfigError, DataError
from kgshard.files import file_sha256
from kgshard.models import SCORING, find_scoring
from kgshard.runs import Run

DIMS = {"conve": 12, "mure": 6}


def change_config(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def decisions(run: Run) -> list[str]:
    assert run.info.imported is not None
    return run.info.imported.decisions


def shard_hashes(run: Run) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in run.checkpoint.folder.glob("*.safetensors")}


@pytest.mark.parametrize("name", sorted(SCORING))
def test_an_export_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    reciprocal = not find_scoring(name).has_head_queries or name in ("complex", "tucker")
    corruption = "reciprocal" if reciprocal else "both-sides"
    run = make_run(tmp_path, ring(9, 2), model=name, dim=DIMS.get(name, 8), corruption=corruption)
    export(run, "numpy", tmp_path / "arrays")
    back = import_run(tmp_path / "arrays", tmp_path / "back", data=tmp_path / "source")
    assert shard_hashes(back) == shard_hashes(run)
    assert back.model == run.model
    assert back.dataset.vocabulary_sha256 == run.dataset.vocabulary_sha256
    for split in ("train", "valid", "test"):
        np.testing.assert_array_equal(back.dataset.triples(split), run.dataset.triples(split))


def test_labels_come_back_byte_for_byte(tmp_path: Path) -> None:
    labels = ["NA", "null", " ", "a\\nb", "a\nb", "\\", "\r", "x\r", "\u2028", '"q', "#3", "é", "007"]
    run = make_run(tmp_path / "made", ring(13), dim=4, model="distmult")
    export(run, "numpy", tmp_path / "arrays")
    escaped = [label.replace("\\", "\\\\").replace("\n", "\\n") for label in labels]
    (tmp_path / "arrays" / "entities.parquet").unlink()
    change_config(tmp_path / "arrays", vocab_sha256=None)  # These labels are others.
    (tmp_path / "arrays" / "entities.txt").write_bytes("".join(f"{line}\n" for line in escaped).encode())
    back = import_run(tmp_path / "arrays", tmp_path / "back")
    assert sorted(back.dataset.entities) == sorted(labels)
    table = np.load(tmp_path / "arrays" / "entities.npy")
    for row, label in enumerate(labels):
        np.testing.assert_array_equal(
            back.checkpoint.entities.gather([back.dataset.entities.id_of(label)])[0], table[row]
        )


def test_the_offset_of_an_exported_import_comes_back(tmp_path: Path) -> None:
    export(write_run(toy(offset=7.5), tmp_path / "run"), "numpy", tmp_path / "arrays")
    back = import_run(tmp_path / "arrays", tmp_path / "back")
    assert back.model.offset == 7.5
    assert any("scores have 7.5 added" in line for line in decisions(back))


def test_rows_that_were_scaled_on_export_are_told(tmp_path: Path) -> None:
    export(make_run(tmp_path, ring(9), dim=4, model="distmult"), "numpy", tmp_path / "arrays")
    change_config(tmp_path / "arrays", normalized=True)
    imported = import_run(tmp_path / "arrays", tmp_path / "back").info.imported
    assert imported is not None
    assert any("scaled to length 1" in line for line in imported.decisions)


def write_arrays(folder: Path, *, dtype: Any = np.float32, order: Any = "C") -> dict[str, Any]:
    """Write what another program might keep; return the arrays."""
    folder.mkdir()
    arrays = {"entities": draw(13, 6, 1).astype(dtype), "relations": draw(3, 6, 2).astype(dtype)}
    for kind, labels in (("entities", ENTITIES), ("relations", RELATIONS)):
        np.save(folder / f"{kind}.npy", np.asarray(arrays[kind], order=order))
        write_dict(folder / f"{kind}.tsv", labels)
    return arrays


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_anybodys_arrays_become_a_run(tmp_path: Path, dtype: Any, order: str) -> None:
    arrays = write_arrays(tmp_path / "arrays", dtype=dtype, order=order)
    splits = {"train": draw_triples(20, 1), "test": draw_triples(5, 2)}
    write_splits(tmp_path / "data", splits)
    run = import_run(tmp_path / "arrays", tmp_path / "run", data=tmp_path / "data", model="distmult")
    ids = draw_triples(30, 3)
    expected = [
        PAPER["distmult"](arrays["entities"][h], arrays["relations"][r], arrays["entities"][t], {})
        for h, r, t in ids.tolist()
    ]
    tolerance = 2e-2 if dtype == np.float16 else 1e-5  # numpy sums half precision in half precision
    np.testing.assert_allclose(run_scores(run, ids), expected, atol=tolerance)
    assert len(run.dataset.triples("train")) == len(np.unique(splits["train"], axis=0))


def test_without_a_config_the_model_must_be_given(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    with pytest.raises(ConfigError, match="give --model"):
        import_run(tmp_path / "arrays", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pickled_array_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    np.save(tmp_path / "arrays" / "entities.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"entities.npy: .*it holds objects or records"):
        import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "no tab": ("entities.tsv", b"0 e0\n", r"entities.tsv:1: expected a number, TAB and a label, got '0 e0'"),
    "no number": ("entities.tsv", b"e0\t0\n", r"entities.tsv:1: expected a number"),
    "twice": ("entities.tsv", b"0\ta\n0\tb\n", r"entities.tsv:2: number 0 occurs twice"),
    "a gap": ("entities.tsv", b"0\ta\n2\tb\n", r"entities.tsv: 2 labels, but none has number 1"),
    "not UTF-8": ("entities.tsv", b"0\t\xff\n", r"entities.tsv: expected UTF-8"),
    "empty": ("entities.tsv", b"", r"the entity table is \[13, 6\], with 0 labels"),
    "no escape": ("relations.txt", b"a\\tb\nc\nd\n", r"relations.txt:1: '\\\\t' is no escape"),
    "no array": ("entities.npy", b"\x93NUMPY", r"entities.npy: "),
    "integers": ("relations.npy", b"", r"relations.npy: "),
    "config": ("config.json", b'{"model_type": "kgshard"}', r"config.json: 'score_function'"),
    "damaged config": ("config.json", b"{", r"config.json: "),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path: Path, case: str) -> None:
    name, content, words = BROKEN[case]
    write_arrays(tmp_path / "arrays")
    (tmp_path / "arrays" / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_train_that_names_what_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("e1\tlikes\te2\ne1\tlikes\tBerln\n")
    with pytest.raises(DataError, match=r"train.txt: triple 2 of train names the tail 'Berln'"):
        import_run(tmp_path / "arrays", tmp_path / "run", data=tmp_path / "data", model="distmult")


def test_test_triples_of_unknown_entities_are_left_out_and_counted(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("e1\tlikes\te2\n")
    (tmp_path / "data" / "test.txt").write_text("e1\tlikes\tnew\ne1\tknows\te2\nold\tlikes\te2\n")
    run = import_run(tmp_path / "arrays", tmp_path / "run", data=tmp_path / "data", model="distmult")
    assert len(run.dataset.triples("test")) == 1
    assert run.info.imported is not None
    assert any("test: 2 of 3 triples" in line for line in run.info.imported.decisions)
    (tmp_path / "data" / "test.txt").write_text("a\tb\tc\n")
    with pytest.raises(DataError, match="triple 1 of test names the head 'a'"):
        import_run(tmp_path / "arrays", tmp_path / "run2", data=tmp_path / "data", model="distmult")


def test_a_prepared_dataset_gives_the_triples_too(tmp_path: Path) -> None:
    run = make_run(tmp_path, ring(9, 2), test=ring(3), model="distmult", dim=4, corruption="both-sides")
    export(run, "numpy", tmp_path / "arrays")
    back = import_run(tmp_path / "arrays", tmp_path / "back", data=run.folder / "data")
    np.testing.assert_array_equal(back.dataset.triples("test"), run.dataset.triples("test"))
    other = make_run(tmp_path / "other", ring(10), model="distmult", dim=4)
    with pytest.raises(DataError, match=r"of train names the .* 'e9'"):
        import_run(tmp_path / "arrays", tmp_path / "b2", data=other.folder / "data")


def test_the_inverses_must_fit_the_relations(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    np.save(tmp_path / "arrays" / "inverse_relations.npy", draw(2, 6))
    with pytest.raises(DataError, match=r"inverse_relations.npy: shape \[2, 6\]"):
        import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")


def test_an_import_changes_nothing_at_its_source(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    before = tree(tmp_path / "arrays")
    import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")
    assert tree(tmp_path / "arrays") == before
    assert json.loads((tmp_path / "run" / "run.json").read_text())["imported"]["program"] == "numpy arrays"


def export_numpy(folder: Path, **choices: Any) -> Run:
    """Write an export to `folder`/arrays; return its run."""
    run = make_run(folder, ring(9, 2), model="complex", dim=6, corruption="reciprocal")
    export(run, "numpy", folder / "arrays", **choices)
    return run


def test_code_that_a_file_names_is_run_only_by_name(tmp_path: Path) -> None:
    """`this` says something when it is imported."""
    export_numpy(tmp_path)
    change_config(tmp_path / "arrays", score_function="this:x")
    sys.modules.pop("this", None)
    with pytest.raises(ConfigError, match=r"config.json: names code to run, 'this:x'.*--model this:x"):
        import_run(tmp_path / "arrays", tmp_path / "back")
    assert "this" not in sys.modules
    change_config(tmp_path / "arrays", score_function="whole_models:NotInSCORING")
    with pytest.raises(ConfigError, match="unknown scoring function 'whole_models:NotInSCORING'"):
        import_run(tmp_path / "arrays", tmp_path / "back", model="whole_models:NotInSCORING")


def test_a_model_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    run = export_numpy(tmp_path)
    with pytest.raises(ConfigError, match="--model distmult, but the arrays are of complex"):
        import_run(tmp_path / "arrays", tmp_path / "back", model="distmult")
    assert import_run(tmp_path / "arrays", tmp_path / "back", model="complex").model == run.model


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "reciprocal": ({"reciprocal": False}, "reciprocal is False, but inverse_relations.npy is there"),
    "rows": ({"rows": 5}, "rows is 5, but found 9"),
    "no number": ({"rows": "9"}, "rows is '9', expected a number"),
    "dim": ({"embedding_dim": 8}, "embedding_dim is 8, but found 6"),
    "relations": ({"num_relations": 3}, "num_relations is 3, but found 2"),
    "truth": ({"reciprocal": "false"}, "reciprocal is 'false', expected true or false"),
    "name": ({"score_function": ["complex"]}, r"score_function is \['complex'\], expected a name"),
    "vocabulary": ({"vocab_sha256": "0" * 64}, "labels are not those of the export"),
}


@pytest.mark.parametrize("case", sorted(CONTRADICTIONS))
def test_a_config_that_contradicts_the_arrays_is_refused(tmp_path: Path, case: str) -> None:
    changed, words = CONTRADICTIONS[case]
    export_numpy(tmp_path)
    change_config(tmp_path / "arrays", **changed)
    with pytest.raises(DataError, match=f"config.json: {words}"):
        import_run(tmp_path / "arrays", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("offset", ["1" + "0" * 400, '"nan"', "null"])
def test_an_offset_that_no_score_can_have_is_refused(tmp_path: Path, offset: str) -> None:
    export_numpy(tmp_path)
    change_config(tmp_path / "arrays", offset="HERE")
    path = tmp_path / "arrays" / "config.json"
    path.write_text(path.read_text().replace('"HERE"', offset))
    with pytest.raises((DataError, ConfigError), match=r"config.json: "):
        import_run(tmp_path / "arrays", tmp_path / "back")


def test_missing_inverses_are_missed(tmp_path: Path) -> None:
    """Without them every question about heads would be asked by other rows, silently."""
    export_numpy(tmp_path)
    (tmp_path / "arrays" / "inverse_relations.npy").unlink()
    with pytest.raises(DataError, match=r"reciprocal is True, but inverse_relations.npy is missing"):
        import_run(tmp_path / "arrays", tmp_path / "back")


def test_labels_in_another_order_are_refused(tmp_path: Path) -> None:
    export_numpy(tmp_path)
    path = tmp_path / "arrays" / "entities.parquet"
    table = pq.read_table(path)
    backwards = pa.array(table["label"].to_pylist()[::-1])
    pq.write_table(table.set_column(table.column_names.index("label"), "label", backwards), path)
    with pytest.raises(DataError, match="labels are not those of the export, or in another order"):
        import_run(tmp_path / "arrays", tmp_path / "back")


def test_a_part_of_a_run_is_said_to_be_one(tmp_path: Path) -> None:
    run = export_numpy(tmp_path, top_degree=4)
    back = import_run(tmp_path / "arrays", tmp_path / "back", data=tmp_path / "source")
    assert any("only 4 of 9 entities were exported" in line for line in decisions(back))
    kept = set(back.dataset.entities)
    of_run = [
        triple
        for triple in run.dataset.triples("train").tolist()
        if {run.dataset.entities[triple[0]], run.dataset.entities[triple[2]]} <= kept
    ]
    info = back.dataset.info.splits["train"]
    assert (info.triples, info.unknown) == (len(of_run), len(run.dataset.triples("train")) - len(of_run))
    assert info.unknown > 0


@pytest.mark.parametrize("column", ["ids out of order", "no label"])
def test_a_parquet_table_must_say_every_row(tmp_path: Path, column: str) -> None:
    write_arrays(tmp_path / "arrays")
    ids, labels = list(range(13)), [*ENTITIES[:12], None]
    if column == "ids out of order":
        ids, labels = [1, 0, *range(2, 13)], list(ENTITIES)
    pq.write_table(pa.table({"id": ids, "label": labels}), tmp_path / "arrays" / "entities.parquet")
    words = "row 12 has no label" if column == "no label" else "ids must be 0..12, in order"
    with pytest.raises(DataError, match=f"entities.parquet: {words}"):
        import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_what_editors_add_to_lines_is_no_part_of_labels(tmp_path: Path, mark: bytes, end: bytes) -> None:
    write_arrays(tmp_path / "arrays")
    for kind, labels in (("entities", ENTITIES), ("relations", RELATIONS)):
        (tmp_path / "arrays" / f"{kind}.tsv").unlink()
        lines = b"".join(label.encode() + end for label in labels)
        (tmp_path / "arrays" / f"{kind}.txt").write_bytes(mark + lines)
    run = import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")
    assert sorted(run.dataset.entities) == sorted(ENTITIES)
    write_dict(tmp_path / "arrays" / "entities.tsv", ENTITIES)
    (tmp_path / "arrays" / "entities.txt").unlink()
    numbered = (tmp_path / "arrays" / "entities.tsv").read_bytes()
    (tmp_path / "arrays" / "entities.tsv").write_bytes(mark + numbered.replace(b"\n", end))
    again = import_run(tmp_path / "arrays", tmp_path / "again", model="distmult")
    assert again.dataset.vocabulary_sha256 == run.dataset.vocabulary_sha256


def test_a_cr_in_some_labels_stays(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    (tmp_path / "arrays" / "relations.tsv").unlink()
    (tmp_path / "arrays" / "relations.txt").write_bytes(b"a\r\nb\nc\r\n")
    run = import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")
    assert sorted(run.dataset.relations) == ["a\r", "b", "c\r"]


def test_lines_of_splits_add_up(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("e1\tlikes\te2\n\ne1\tlikes\te2\ne2\tknows\te1\n")
    (tmp_path / "data" / "test.txt").write_text("e1\tlikes\tnew\n\n\ne1\tknows\te2\n")
    run = import_run(tmp_path / "arrays", tmp_path / "run", data=tmp_path / "data", model="distmult")
    info = run.dataset.info
    assert info.lines()[1:3] == [
        "train: 4 lines = 2 triples + 1 duplicates + 1 blank",
        "test: 4 lines = 1 triples + 0 duplicates + 2 blank + 1 left out",
    ]
    for split in ("train", "test"):
        assert info.splits[split].source == f"{split}.txt"
        assert info.splits[split].sha256 == file_sha256(tmp_path / "data" / f"{split}.txt")


def npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    size = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + header + data


def described(shape: str, dtype: str = "'<f4'") -> bytes:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()


HOSTILE: dict[str, bytes] = {
    "zip": b"PK\x03\x04garbage",
    "nothing": b"",
    "open bracket": npy(b"{'descr': '<f4', (\n"),
    "brackets": npy(b"(" * 9000),
    "minuses": npy(b"-" * 9000 + b"1"),
    "long": npy(b" " * 60000 + b"\n", version=b"\x02\x00"),
    "huge": npy(described("(9999999999999999999999, 6)")),
    "2^62": npy(described("(4611686018427387904, 6)")),
    "2^62 empty": npy(described("(4611686018427387904, 0)")),
    "negative": npy(described("(-13, 6)")),
    "negative twice": npy(described("(-13, -6)"), bytes(1000)),
    "truth": npy(described("(True, 6)"), bytes(1000)),
    "records": npy(described("(13, 6)", "('<f4', 'x')"), bytes(1000)),
    "no such float": npy(described("(13, 6)", "'<f3'"), bytes(13 * 6 * 3)),
    "nul": npy(b"\0\0\0\n"),
    "short": npy(described("(13, 6)"), bytes(13 * 6 * 4 - 1)),
    "no rows": npy(described("(0, 6)")),
    "no axes": npy(described("()"), bytes(4)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_array_is_refused_by_name(tmp_path: Path, case: str) -> None:
    write_arrays(tmp_path / "arrays")
    (tmp_path / "arrays" / "entities.npy").write_bytes(HOSTILE[case])
    with pytest.raises(DataError, match=r"entities.npy: |entity table is \[") as caught:
        import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    write_arrays(tmp_path / "arrays")
    os.mkfifo(tmp_path / "arrays" / "inverse_relations.npy")
    with pytest.raises(DataError, match=r"inverse_relations.npy: no ordinary file"):
        import_run(tmp_path / "arrays", tmp_path / "run", model="distmult")
