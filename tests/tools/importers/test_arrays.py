"""numpy arrays become runs: our own exports bit for bit, others' with a model and labels given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
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
    assert import_run(tmp_path / "arrays", tmp_path / "back").model.offset == 7.5


def test_rows_that_were_scaled_on_export_are_told(tmp_path: Path) -> None:
    export(make_run(tmp_path, ring(9), dim=4, model="distmult"), "numpy", tmp_path / "arrays")
    config = json.loads((tmp_path / "arrays" / "config.json").read_text())
    (tmp_path / "arrays" / "config.json").write_text(json.dumps({**config, "normalized": True}))
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
    with pytest.raises(DataError, match=r"entities.npy: .*Python objects"):
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
