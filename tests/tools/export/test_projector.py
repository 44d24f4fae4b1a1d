"""TensorBoard's own code serves what was written for its projector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import Floats, floats, labelled_run, run_lines, same_rows, stored_rows
from kgshard_tools.export import export, projector

from kgshard.runs import Run

LABELS = [
    "a",
    "NA",
    '"quoted',
    "007",
    "=1",
    " spaces ",
    "line\u2028separator",
    "next\u0085line",
    "日本",
    "\\",
]
ESCAPED = {"a\tb": "a\\tb", "a\nb": "a\\nb", "\r": "\\r"}


def read(folder: Path) -> tuple[dict[str, Floats], list[int]]:
    """Read as the files are described; return rows by label, and degrees."""
    header, *lines = (folder / "metadata.tsv").read_bytes().decode().split("\n")
    assert header == "label\tdegree"
    tensors = (folder / "tensors.tsv").read_bytes().decode().split("\n")
    assert lines.pop() == tensors.pop() == ""
    labels, degrees = zip(*(line.split("\t") for line in lines), strict=True)
    rows = [floats(line.split("\t")) for line in tensors]
    return dict(zip(labels, rows, strict=True)), [int(degree) for degree in degrees]


def shown_rows(run: Run) -> dict[str, Floats]:
    return {ESCAPED.get(label, label): row for label, row in stored_rows(run)["entities"].items()}


def test_rows_labels_and_degrees_stand_side_by_side(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, [*LABELS, *ESCAPED], dim=6, world_size=3)
    written = export(run.folder, "projector", tmp_path / "out")
    rows, degrees = read(tmp_path / "out")
    assert same_rows(rows, shown_rows(run))
    assert degrees == run.dataset.entities.degrees.tolist()
    assert any(note.startswith("3 labels with a tab or a line end") for note in written.notes)
    assert not any("sampled" in note for note in written.notes)


def test_the_loading_lines_it_prints_run(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, LABELS, dim=6)
    names = run_lines(export(run.folder, "projector", tmp_path / "out").python, tmp_path / "out")
    assert names["entities"].dtype == np.float32
    assert same_rows(dict(zip(names["labels"], names["entities"], strict=True)), stored_rows(run)["entities"])


@pytest.mark.parametrize("top_degree", [None, 29])
def test_of_too_many_entities_some_are_drawn_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_degree: int | None
) -> None:
    assert projector.MAX_POINTS == 100_000
    monkeypatch.setattr(projector, "MAX_POINTS", 10)
    run = labelled_run(tmp_path, [f"e{i}" for i in range(37)], dim=6)
    total = top_degree or 37
    written = export(run.folder, "projector", tmp_path / "out", top_degree=top_degree)
    rows, degrees = read(tmp_path / "out")
    wanted = stored_rows(run)["entities"]
    assert same_rows(rows, {label: wanted[label] for label in rows})
    assert len(rows) == 10
    vocabulary = run.dataset.entities
    ids = [vocabulary.id_of(label) for label in rows]
    assert degrees == vocabulary.degrees[ids].tolist()
    order = np.argsort(-vocabulary.degrees, kind="stable")[:total].tolist() if top_degree else range(37)
    places = [list(order).index(found) for found in ids]
    assert set(np.diff(places)) <= {total // 10, total // 10 + 1}
    assert places[0] == 0
    assert any(f"sampled 10 of {total} entities" in note for note in written.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["rows"] == 10
    again = export(run.folder, "projector", tmp_path / "again", top_degree=top_degree)
    assert read(tmp_path / "again")[1] == degrees
    assert again.notes == written.notes


@pytest.fixture
def served(tmp_path: Path) -> tuple[Run, Any]:
    """A run that was exported, and a client of TensorBoard's own server on the folder."""
    reason = "TensorBoard serves the folder"
    projector_plugin = pytest.importorskip("tensorboard.plugins.projector.projector_plugin", reason=reason)
    application = pytest.importorskip("tensorboard.backend.application", reason=reason)
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext
    from werkzeug.test import Client

    run = labelled_run(tmp_path, [*LABELS, *ESCAPED], dim=6)
    export(run.folder, "projector", tmp_path / "out")
    folder = str(tmp_path / "out")
    provider = MultiplexerDataProvider(EventMultiplexer(), folder)
    plugin = projector_plugin.ProjectorPlugin(TBContext(logdir=folder, data_provider=provider))
    return run, Client(application.TensorBoardWSGI([plugin], data_provider=provider))


def test_tensorboard_serves_rows_and_labels(served: tuple[Run, Any]) -> None:
    run, client = served
    address = "/data/plugin/projector"
    assert client.get(f"{address}/runs").json == ["."]
    (config,) = client.get(f"{address}/info?run=.").json["embeddings"]
    wanted = shown_rows(run)
    assert config["tensorName"] == "entities"
    assert config["tensorShape"] == [len(wanted), 6]
    asked = f"run=.&name=entities&num_rows={len(wanted)}"
    values = np.frombuffer(client.get(f"{address}/tensor?{asked}").data, np.float32).reshape(-1, 6)
    header, *lines = client.get(f"{address}/metadata?{asked}").data.decode().split("\n")
    assert header == "label\tdegree"
    assert lines.pop() == ""
    assert same_rows({line.split("\t")[0]: row for line, row in zip(lines, values, strict=True)}, wanted)
