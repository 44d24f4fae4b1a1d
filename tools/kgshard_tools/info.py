"""What a run, a checkpoint, a dataset, an index, an overlay, a model or a file is, as it says itself.

Only records and headers are read; `kgshard_tools.verify` checks them. No model of a run is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kgshard.data.dataset import DATASET_NAMES
from kgshard.data.dataset import MANIFEST as DATA_FILE
from kgshard.errors import RunError
from kgshard.files import AnyPath
from kgshard.records import FileInfo, IndexInfo, ListedFile, Manifest
from kgshard.runs import (
    BEST_FILE,
    CHECKPOINT_NAME,
    LATEST_FILE,
    RUN_FILE,
    open_run,
    read_manifest,
)
from kgshard.shards import read_header, saved_row_start
from kgshard_tools.artefacts import (
    WEIGHT_MAP_FILE,
    Artefact,
    Kind,
    WeightMap,
    check_names,
    read_config,
    read_data_info,
    read_indexes,
    read_listing,
    read_record,
    recognise,
)
from kgshard_tools.described import FileLine, Info
from kgshard_tools.headers import read_array_header, read_index_header, read_parquet_header
from kgshard_tools.index import SIDECAR
from kgshard_tools.labels import LABELS_FILE
from kgshard_tools.overlay import OVERLAY_FILE, read_overlay_info
from kgshard_tools.stored import CONFIG_FILE

_IMPORT = "kgshard import, which runs nothing in it, for models it knows"
_SAFETENSORS = "safetensors"
_READABLE_BY: dict[Kind, list[str]] = {
    "run": ["kgshard"],
    "checkpoint": ["kgshard", "torch.distributed.checkpoint (HuggingFaceStorageReader)", _SAFETENSORS],
    "data": ["kgshard", "numpy (*.npy)", "any Parquet reader (*.parquet)"],
    "index": ["kgshard", "faiss.read_index (*.faiss)"],
    "overlay": ["kgshard", f"{_SAFETENSORS} (load_file)", "any Parquet reader (*.parquet)", "numpy (*.npy)"],
    "model": [f"{_SAFETENSORS} (load_file)", "huggingface_hub", "any Parquet reader (*.parquet)"],
    "weight map": [_SAFETENSORS, "transformers", "huggingface_hub"],
    "safetensors": [_SAFETENSORS],
    "npy": ['numpy.load(..., mmap_mode="r")'],
    "parquet": ["any Parquet reader"],
    "faiss": ["faiss.read_index"],
    "torch": ["torch.load", _IMPORT],
    "pickle": ["the program that wrote it", _IMPORT],
}


def info(path: AnyPath) -> Info:
    """Say what lies at `path`: a folder that kgshard wrote, or a file of a format that it knows.

    Raises:
        RunError: Nothing that kgshard knows, or its record or header is damaged.
    """
    found = recognise(path)
    return _TELLERS[found.kind](found)


def _told(found: Artefact, format: str, details: dict[str, Any], files: Iterable[FileLine] = ()) -> Info:
    readable_by = list(_READABLE_BY.get(found.kind, []))
    return Info(str(found.path), found.kind, format, details, list(files), readable_by)


def _tell_run(found: Artefact) -> Info:
    run = open_run(found.path)
    folders = sorted((found.path / "checkpoints").glob("step-*"))
    manifests = {
        folder: read_manifest(folder) for folder in folders if CHECKPOINT_NAME.fullmatch(folder.name)
    }
    named = {name: _pointer(found.path / name) for name in (BEST_FILE, LATEST_FILE)}
    details: dict[str, Any] = {
        "id": run.info.id,
        **_model(run.info.model),
        "data": run.info.data,
        "vocabulary_sha256": run.info.vocabulary_sha256,
        "checkpoints": [_checkpoint(folder, manifest, named) for folder, manifest in manifests.items()],
    }
    index = found.path / "index"
    if (index / SIDECAR).exists():
        details["indexes"] = [_index(each) for each in read_indexes(index).indexes.values()]
    if run.info.imported is not None:
        details["imported_from"] = run.info.imported.program
    details["versions"] = run.info.versions
    files = [_there(found.path / RUN_FILE), *_listed(found.path / "data", _data_files(found.path / "data"))]
    for folder, manifest in manifests.items():
        files += _listed(folder, manifest.files)
    return _told(found, run.info.format, details, files)


def _pointer(path: Path) -> str | None:
    return path.read_bytes()[:64].decode(errors="replace").strip() if path.is_file() else None


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of the model, whatever it says: nothing of it is imported."""
    names = {
        "model": "score_function",
        "dim": "embedding_dim",
        "relation_dim": "relation_dim",
        "metric": "metric",
        "entities": "num_entities",
        "relations": "num_relations",
        "reciprocal": "reciprocal",
    }
    return {name: model[key] for name, key in names.items() if key in model}


def _checkpoint(folder: Path, manifest: Manifest, named: Mapping[str, str | None]) -> dict[str, Any]:
    dtypes = sorted({table.dtype for table in manifest.tables.values()})
    return {
        "name": folder.name,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "world_size": manifest.world_size,
        "dtype": " and ".join(dtypes),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "best": named[BEST_FILE] == folder.name,
        "latest": named[LATEST_FILE] == folder.name,
    }


def _index(index: IndexInfo) -> dict[str, Any]:
    names = ("type", "metric", "rows", "dim", "step", "bytes", "search")
    recall = index.recall.measured if index.recall else None
    files = [part.file for part in index.parts]
    return {"file": ", ".join(files), **{name: getattr(index, name) for name in names}, "recall": recall}


def _tell_checkpoint(found: Artefact) -> Info:
    manifest = read_manifest(found.path)
    tables = [
        {"name": name, "dtype": table.dtype, "shape": list(table.shape), "pieces": len(table.pieces)}
        for name, table in manifest.tables.items()
    ]
    details = {
        "run_id": manifest.run_id,
        **_model(manifest.model),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "world_size": manifest.world_size,
        "tables": tables,
        "shared_parameters": [{"name": name, "shape": shape} for name, shape in manifest.shared.items()],
        "optimizer": manifest.optimizer.name if manifest.optimizer else None,
        "vocabulary_sha256": manifest.vocabulary_sha256,
    }
    return _told(found, manifest.format, details, _listed(found.path, manifest.files))


def _tell_data(found: Artefact) -> Info:
    data = read_data_info(found.path)
    details = {
        "name": data.name,
        "entities": data.num_entities,
        "relations": data.num_relations,
        **{split: counts.triples for split, counts in data.splits.items()},
        "unseen_in_train": data.unseen_in_train,
        "sources": [
            {"file": counts.source, "split": split, "lines": counts.lines, "sha256": counts.sha256}
            for split, counts in data.splits.items()
            if counts.source is not None
        ],
        "vocabulary_sha256": data.vocabulary_sha256,
    }
    return _told(found, data.format, details, _listed(found.path, _data_files(found.path)))


def _data_files(folder: Path) -> dict[str, ListedFile | None]:
    """Return a dataset's files by name, with what data.json says of them."""
    listed = read_listing(folder / DATA_FILE)
    return {name: listed.get(name) for name in DATASET_NAMES if (folder / name).is_file()}


def _tell_index(found: Artefact) -> Info:
    indexes = read_indexes(found.path)
    entries = list(indexes.indexes.values())
    details: dict[str, Any] = {"indexes": [_index(each) for each in entries]}
    for name in ("model", "run_id", "vocabulary_sha256"):
        details[name] = sorted({getattr(each, name) for each in entries})
    files = [
        FileLine(str(found.path / part.file), part.bytes, part.sha256)
        for each in entries
        for part in each.parts
    ]
    if indexes.labels is not None:
        files.append(FileLine(str(found.path / LABELS_FILE), indexes.labels.bytes, indexes.labels.sha256))
    return _told(found, indexes.format, details, files)


def _tell_overlay(found: Artefact) -> Info:
    overlay = read_overlay_info(found.path)
    check_names(found.path / OVERLAY_FILE, overlay.files)
    details = {
        "run_id": overlay.run_id,
        "step": overlay.step,
        "model": overlay.model,
        "dim": overlay.dim,
        "entities": overlay.num_entities,
        "first_id": overlay.first_id,
        "approximate": overlay.approximate,
        "triples": overlay.counts,
        "settings": overlay.settings,
        "vocabulary_sha256": overlay.vocabulary_sha256,
    }
    return _told(found, overlay.format, details, _listed(found.path, overlay.files))


def _tell_folder(found: Artefact) -> Info:
    """Tell of a merged model or an export."""
    config = read_config(found.path)
    listed = read_listing(found.path / CONFIG_FILE)
    details: dict[str, Any] = {
        **_model(config),
        **{key: config[key] for key in ("export_format", "rows", "torch_dtype", "step") if key in config},
        "run_id": config.get("run_id"),
        "vocabulary_sha256": config.get("vocab_sha256"),
    }
    files = {
        str(path.relative_to(found.path)): listed.get(path.relative_to(found.path).as_posix())
        for path in sorted(found.path.rglob("*"))
        if path.is_file()
    }
    told = _told(found, f"kgshard {config.get('kgshard_format')}", details, _listed(found.path, files))
    if found.kind == "export":
        told.readable_by.append(_export_reader(str(config["export_format"])))
    return told


def _export_reader(format: str) -> str:
    from kgshard_tools.export import FORMATS

    return f"{format}: {FORMATS[format].summary}" if format in FORMATS else format


def _tell_weight_map(found: Artefact) -> Info:
    path = found.path / WEIGHT_MAP_FILE if found.path.is_dir() else found.path
    weights = read_record(path, WeightMap)
    names = sorted(set(weights.weight_map.values()))
    check_names(path, names)
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        raise RunError(f"{path}: names {absent[0]!r}, which is not there")
    details = {
        "tensors": len(weights.weight_map),
        "total_size": weights.metadata.get("total_size"),
    }
    return _told(found, "safetensors", details, (_there(path.parent / name) for name in names))


def _tell_safetensors(found: Artefact) -> Info:
    tensors, metadata = read_header(found.path)
    details: dict[str, Any] = {
        "tensors": [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for name, tensor in tensors.items()
        ]
    }
    shards = [
        f"{name}, {_rows(start, tensor.shape[0])}"
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and (start := saved_row_start(metadata, name)) is not None
    ]
    if shards:
        details["shard_of"] = shards
    details["metadata"] = metadata
    return _told(found, "safetensors", details, [_there(found.path)])


def _rows(start: int, count: int) -> str:
    return f"rows {start}..{start + count - 1}" if count else "no rows"


def _tell_npy(found: Artefact) -> Info:
    array = read_array_header(found.path)
    order = "Fortran" if array.fortran_order else "C"
    details = {"dtype": array.dtype, "shape": list(array.shape), "order": order}
    return _told(found, "npy", details, [_there(found.path)])


def _tell_parquet(found: Artefact) -> Info:
    header = read_parquet_header(found.path)
    details = {
        "rows": header.rows,
        "columns": [{"name": name, "type": kind} for name, kind in header.columns.items()],
    }
    return _told(found, "parquet", details, [_there(found.path)])


def _tell_faiss(found: Artefact) -> Info:
    header = read_index_header(found.path)
    details = {"type": header.type, "metric": header.metric, "vectors": header.rows, "dim": header.dim}
    return _told(found, "faiss", details, [_there(found.path)])


def _tell_closed(found: Artefact) -> Info:
    """Tell of a file that could run code where it is opened."""
    return _told(found, found.kind, {}, [_there(found.path)])


def _there(path: Path) -> FileLine:
    return FileLine(str(path), path.stat().st_size)


def _listed(folder: Path, files: Mapping[str, FileInfo | ListedFile | None]) -> list[FileLine]:
    return [
        FileLine(str(folder / name), entry.bytes, entry.sha256) if entry else _there(folder / name)
        for name, entry in files.items()
    ]


_TELLERS: dict[Kind, Callable[[Artefact], Info]] = {
    "run": _tell_run,
    "checkpoint": _tell_checkpoint,
    "data": _tell_data,
    "index": _tell_index,
    "overlay": _tell_overlay,
    "model": _tell_folder,
    "export": _tell_folder,
    "weight map": _tell_weight_map,
    "safetensors": _tell_safetensors,
    "npy": _tell_npy,
    "parquet": _tell_parquet,
    "faiss": _tell_faiss,
    "torch": _tell_closed,
    "pickle": _tell_closed,
}
