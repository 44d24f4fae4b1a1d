"""Data are found where a person says, one file a split, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgshard.data.prepare import prepare
from kgshard.data.sources import Source, bundled_graphs, find_source
from kgshard.errors import DataError

LINE = b"a\tr\tb\n"


def folder_of(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "graph"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(LINE)
    return folder


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".tsv", ".txt"])
def test_every_spelling_of_a_split_file_is_found(tmp_path: Path, kind: str, compression: str) -> None:
    name = f"train{kind}{compression}"
    folder = folder_of(tmp_path, name)
    assert find_source(folder) == Source("graph", {"train": folder / name})


def test_splits_may_be_spelt_differently(tmp_path: Path) -> None:
    names = {"train": "train.tsv.gz", "valid": "valid.txt", "test": "test.tsv.zst"}
    folder = folder_of(tmp_path, *names.values())
    source = find_source(str(folder))
    assert isinstance(source, Source)
    assert source.files == {split: folder / name for split, name in names.items()}


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, "train.tsv", "train.csv", "Train.tsv", "train", "valid.tsv.bak", "labels.tsv"
    )
    source = find_source(folder)
    assert isinstance(source, Source)
    assert set(source.files) == {"train"}


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_several_files_for_one_split_are_refused_by_name(tmp_path: Path, split: str) -> None:
    folder = folder_of(tmp_path, *{"train.tsv", f"{split}.tsv", f"{split}.txt.gz"})
    with pytest.raises(
        DataError, match=rf"several {split} files \({split}\.tsv, {split}\.txt\.gz\); keep one"
    ):
        find_source(folder)


def test_a_folder_without_train_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "valid.tsv", "test.tsv")
    (folder / "train.tsv").mkdir()
    with pytest.raises(DataError, match=r"graph: no train file \(looked for train\.tsv, .*train\.txt\.zst\)"):
        find_source(folder)


def test_a_misspelt_folder_is_refused_and_stands_for_nothing_else(tmp_path: Path) -> None:
    """No default data: a forgotten or wrong name must not train on something (B86)."""
    graphs = bundled_graphs()
    assert graphs
    with pytest.raises(DataError, match="no such folder, and no bundled graph of that name") as caught:
        find_source(tmp_path / "FB15k-238")
    assert all(name in str(caught.value) for name in graphs)
    with pytest.raises(DataError, match="no such folder"):
        find_source(graphs[0].upper() + "x")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train.tsv")
    with pytest.raises(DataError, match=r"train\.tsv: is a file; expected a folder"):
        find_source(folder / "train.tsv")


@pytest.mark.parametrize("name", bundled_graphs())
def test_a_bundled_graph_is_found_by_its_name(name: str) -> None:
    source = find_source(name)
    assert isinstance(source, Source)
    assert source.name == name
    assert set(source.files) == {"train", "valid", "test"}


def test_a_folder_of_that_name_comes_before_a_bundled_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bundled_graphs()[0]
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.tsv").write_bytes(LINE)
    monkeypatch.chdir(tmp_path)
    source = find_source(name)
    assert isinstance(source, Source)
    assert source.files == {"train": Path(name, "train.tsv")}


def test_a_prepared_dataset_is_handed_back_as_it_is(tmp_path: Path) -> None:
    prepare(Source("graph", {"train": folder_of(tmp_path, "train.tsv") / "train.tsv"}), tmp_path / "data")
    assert find_source(tmp_path / "data") == tmp_path / "data"


def test_a_folder_with_somebody_elses_data_json_is_a_source(tmp_path: Path) -> None:
    source = find_source(folder_of(tmp_path, "train.tsv", "data.json"))
    assert isinstance(source, Source)
    assert source.not_read == ["data.json"]


def test_files_that_nobody_reads_are_named(tmp_path: Path) -> None:
    """A misspelt vaild.tsv is not lost in silence."""
    folder = folder_of(tmp_path, "train.tsv", "vaild.tsv", "test.txt", "README.md")
    (folder / "more").mkdir()
    source = find_source(folder)
    assert isinstance(source, Source)
    assert source.not_read == ["README.md", "vaild.tsv"]
    info = prepare(source, tmp_path / "data").info
    assert info.not_read == ["README.md", "vaild.tsv"]
    assert info.lines()[-1] == "not read: README.md, vaild.tsv"


def test_nothing_is_said_where_every_file_is_read(tmp_path: Path) -> None:
    source = find_source(folder_of(tmp_path, "train.tsv", "valid.tsv", "test.tsv"))
    assert isinstance(source, Source)
    info = prepare(source, tmp_path / "data").info
    assert info.not_read == []
    assert "not read" not in "".join(info.lines())


def test_a_run_says_where_its_dataset_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run.json")
    with pytest.raises(DataError) as caught:
        find_source(folder)
    assert str(caught.value) == f"{folder}: is a run; the dataset it was trained on is {folder / 'data'}"


def test_a_folder_that_hides_a_bundled_graph_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = bundled_graphs()[0]
    for other in (name, "nameless"):
        (tmp_path / other).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"{name}: no train file .*; it hides the bundled graph {name}$"):
        find_source(name)
    with pytest.raises(DataError, match=r"no train file \(looked for [^;]*\)$"):
        find_source("nameless")
