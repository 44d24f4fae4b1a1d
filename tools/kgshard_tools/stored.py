"""What merge, export and index start from: a run's best or newest checkpoint, or one checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgshard.data.dataset import Dataset
from kgshard.errors import ConfigError, RunError
from kgshard.files import AnyPath, read_json
from kgshard.models.link import LinkModel
from kgshard.runs import MANIFEST_FILE, RUN_FILE, Checkpoint, Run, is_run, open_run
from kgshard.shards import ENTITIES, TABLE_DTYPES, StoredTable

CONFIG_FILE = "config.json"
CONFIG_FORMAT = 1
_RECORDS = (RUN_FILE, MANIFEST_FILE, "data.json", "index.json", "overlay.json")
"""What tells the folders that nobody else may write into."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint, and the run it belongs to."""

    run: Run
    checkpoint: Checkpoint

    @property
    def dataset(self) -> Dataset:
        return self.run.dataset

    @property
    def model(self) -> LinkModel:
        return self.run.model

    @property
    def num_trained(self) -> int:
        """Entities of the run; those from this id on were folded in."""
        return self.run.model.num_entities

    @property
    def has_indexes(self) -> bool:
        """Whether an index of the run, where one was built, holds every entity."""
        return True

    def row_namer(self, table: StoredTable) -> Callable[[int], str]:
        """Return what names rows of the entity or relation table; labels are loaded when one is asked for."""

        def name(row: int) -> str:
            dataset = self.dataset
            labels = dataset.entities if table.name == ENTITIES else dataset.relations
            return labels.row_name(row)

        return name

    def verify(self) -> None:
        """Compare every file that an output is made of with its hash: shards, labels, triples, records.

        Data prepared before there were hashes of them are read instead: labels by the hash of the
        vocabulary, triples by their range.

        Raises:
            ShardError: Naming the first file that is not what was written.
        """
        from kgshard_tools.verify.data import dataset_files  # it reads what this module describes
        from kgshard_tools.verify.hashes import check_record

        check_record(self.run.folder / RUN_FILE)
        self.checkpoint.check_hashes()
        for _ in dataset_files(self.dataset.folder, deep=not self.dataset.info.files):
            pass

    def config(self) -> dict[str, Any]:
        """Return what config.json says beside merged or exported tables."""
        return {
            "model_type": "kgshard",
            "architectures": [self.model.name],
            **self.model.to_dict(),
            "torch_dtype": TABLE_DTYPES[self.checkpoint.entities.dtype][1],
            "kgshard_format": CONFIG_FORMAT,
            "step": self.checkpoint.step,
            "run_id": self.run.info.id,
            "vocab_sha256": self.dataset.vocabulary_sha256,
        }


def open_stored(path: AnyPath) -> Stored:
    """Open the checkpoint that a run answers from, or the checkpoint folder of a run.

    Raises:
        RunError: It is neither.
        ShardError: A shard is missing or damaged.
    """
    path = Path(path)
    if is_run(path) or (path / RUN_FILE).exists():
        run = open_run(path)
        return Stored(run, run.checkpoint)
    if not (path / MANIFEST_FILE).is_file():
        raise RunError(f"{path}: neither a run (run.json) nor a checkpoint ({MANIFEST_FILE})")
    folder = path.resolve()
    run = open_run(folder.parent.parent)
    return Stored(run, run.open_checkpoint(folder.name))


def check_outside(out: Path, run: Run) -> None:
    """Raise RunError where a path is a run or lies in one, whose own it would be taken for."""
    place = Path(os.path.realpath(out))
    if place == run.folder.resolve():
        raise RunError(f"{out}: is the run itself; choose another folder")
    if any((folder / RUN_FILE).is_file() for folder in list(place.parents)[:3]):
        raise RunError(f"{out}: lies in a run; choose another folder")


def check_answers_outside(out: Path, *inputs: str | Path | None) -> None:
    """Raise ConfigError where answers would replace what they are made from, or lie in what kgshard wrote."""
    place = Path(os.path.realpath(out))
    if any(given is not None and Path(os.path.realpath(given)) == place for given in inputs):
        raise ConfigError(f"--out {out}: is what is read; choose another file")
    for folder in list(place.parents)[:3]:
        if any((folder / record).is_file() for record in _RECORDS):
            raise ConfigError(f"--out {out}: lies in {folder}, which kgshard wrote; choose another folder")


def is_ours(folder: Path, key: str, value: object) -> bool:
    """Whether a folder was written by kgshard, with `key` set to `value` in its config.json."""
    try:
        config = read_json(folder / CONFIG_FILE)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "kgshard" and config.get(key) == value
