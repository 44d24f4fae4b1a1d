"""What happens once, before ranks start: data are prepared and a run folder begins. No torch here."""

from __future__ import annotations

import uuid
from importlib import metadata
from pathlib import Path

from kgshard.config import TrainConfig
from kgshard.data.dataset import Dataset, clone_dataset, is_dataset, open_dataset
from kgshard.data.prepare import prepare
from kgshard.data.sources import Source, find_source
from kgshard.errors import RunError
from kgshard.files import replacing_directory, write_json
from kgshard.models.link import LinkModel
from kgshard.records import RunInfo
from kgshard.runs import RUN_FILE, Run, is_run, open_run


def ingest(data: str | Path, out: str | Path) -> Dataset:
    """Prepare `data` at the folder `out`, which must not exist or be a prepared dataset's.

    Raises:
        DataError: A line is malformed, or there is no such data.
        RunError: `out` is something else.
    """
    source = find_source(data)
    out = Path(out)
    if out.exists() and not is_dataset(out):
        raise RunError(f"{out}: exists and is not a prepared dataset; choose another folder")
    return _place_dataset(source, out)


def _place_dataset(source: Source | Path, folder: Path) -> Dataset:
    return (
        clone_dataset(open_dataset(source), folder) if isinstance(source, Path) else prepare(source, folder)
    )


def start_run(data: str | Path, out: str | Path, config: TrainConfig, *, overwrite: bool = False) -> Run:
    """Prepare the data and write run.json: everything that happens before ranks do.

    Raises:
        DataError: The data cannot be read; nothing was written.
        RunError: `out` exists, and is no run or `overwrite` is False; nothing was changed.
    """
    out = Path(out)
    source = find_source(data)
    _check_free(out, overwrite)
    with replacing_directory(out) as temporary:
        dataset = _place_dataset(source, temporary / "data")
        write_json(temporary / RUN_FILE, _run_info(config, dataset))
    return open_run(out)


def _check_free(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_run(out):
        raise RunError(f"{out}: exists and is not a kgshard run; choose another folder")
    if not overwrite:
        raise RunError(f"{out}: holds a run already; choose another folder or pass --overwrite")


def _run_info(config: TrainConfig, dataset: Dataset) -> RunInfo:
    model = LinkModel(
        name=config.model,
        dim=config.dim,
        num_entities=dataset.num_entities,
        num_relations=dataset.num_relations,
        reciprocal=config.corruption == "reciprocal",
    )
    packages = ("torch", "numpy", "kgshard")
    return RunInfo(
        format="kgshard.run/1",
        id=uuid.uuid4().hex,
        data=dataset.info.name,
        vocabulary_sha256=dataset.vocabulary_sha256,
        model=model.to_dict(),
        config=config.to_dict(),
        versions={package: metadata.version(package) for package in packages},
    )
