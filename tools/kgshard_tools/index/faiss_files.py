"""FAISS indexes: made, written, opened, searched. The one module that imports faiss; its ways end here.

FAISS reports squared L2 distances, smaller first, pads short results with id -1, and says nothing useful
about a query of the wrong width.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import faiss

from kgshard.errors import ShardError
from kgshard.shards import Floats
from kgshard_tools.index.kinds import FaissMetric, Kind
from kgshard_tools.search import Ids

_faiss: Any = faiss
"""Its stubs know half of it."""
_METRICS = {"dot": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2, "l1": faiss.METRIC_L1}
_LINKS = 32
"""Links of a node of a graph."""
_FLOATS_FOR_A_BYTE = 4
"""Floats that a byte of a product quantiser stands for."""


def padded_width(kind: Kind, width: int) -> int:
    """Return how wide vectors must be made with zeros, which change no inner product or distance."""
    return -(-width // _FLOATS_FOR_A_BYTE) * _FLOATS_FOR_A_BYTE if kind.name == "ivfpq" else width


def new_index(kind: Kind, metric: FaissMetric, width: int, num_lists: int = 0) -> Any:
    """Return an index without vectors, not yet trained.

    Args:
        kind: What to make.
        metric: How FAISS compares.
        width: Floats for each vector.
        num_lists: Of kinds with lists.
    """
    vectors = {"sq": "SQ8", "pq": f"PQ{width // _FLOATS_FOR_A_BYTE}"}.get(kind.name[-2:], "Flat")
    if kind.is_by_norm:
        return faiss.index_factory(width, "IDMap,Flat", _METRICS[metric])
    if kind.is_exact:
        return faiss.IndexFlat(width, _METRICS[metric])
    structure = f"IVF{num_lists}" if kind.parameter == "nprobe" else f"HNSW{_LINKS}"
    return faiss.index_factory(width, f"{structure},{vectors}", _METRICS[metric])


def built_with(kind: Kind, num_lists: int) -> dict[str, int]:
    """Return what index.json says of the structure."""
    return {"nprobe": {"lists": num_lists}, "ef": {"links": _LINKS}}.get(kind.parameter, {})


def is_trained(index: Any) -> bool:
    return bool(index.is_trained)


def train(index: Any, sample: Floats, *, seed: int) -> None:
    """Find what an index must know of its vectors before any is added, from a sample float32[n, E]."""
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.cp.seed = seed
        ivf.cp.max_points_per_centroid = max(1, -(-len(sample) // ivf.nlist))
        codes = getattr(_faiss.downcast_index(ivf), "pq", None)
        if codes is not None:  # It would warn for each part of a code.
            codes.cp.min_points_per_centroid = 1
    index.train(sample)


def copy_without_vectors(index: Any) -> Any:
    return faiss.clone_index(index)


def add(index: Any, vectors: Floats, ids: Ids | None = None) -> None:
    if ids is None:
        index.add(vectors)
    else:
        index.add_with_ids(vectors, ids)


def write_index(index: Any, path: Path) -> None:
    """Write an index to `path`.

    Raises:
        OSError: It cannot be written.
    """
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(errno.EIO, "FAISS could not write the index (disk full?)", str(path)) from error


def open_index(path: Path, kind: Kind) -> Any:
    """Open an index file; what can be mapped is not loaded.

    Raises:
        ShardError: FAISS cannot read it.
    """
    flags = faiss.IO_FLAG_MMAP if kind.parameter == "nprobe" else faiss.IO_FLAG_MMAP_IFC
    try:
        index = faiss.read_index(str(path), flags)
    except RuntimeError as error:
        raise ShardError(f"{path}: {error}", file=str(path)) from error
    if kind.parameter == "nprobe":
        # Threads that touch pages ahead of a search cost more than they save.
        lists: Any = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)  # type: ignore[arg-type]
        lists.prefetch_nthread = 0
    return index


def size_of(index: Any) -> tuple[int, int]:
    """Return the number of vectors and the floats of each."""
    return index.ntotal, index.d


def find(index: Any, kind: Kind, queries: Floats, count: int, setting: int) -> tuple[Floats, Ids]:
    """Return the best vectors for queries float32[B, E] as values float32[B, count], higher first, and ids.

    Ids are -1 where fewer were found.

    Args:
        index: An open index.
        kind: What it is.
        queries: As wide as the index.
        count: How many.
        setting: `nprobe` or `ef`.
    """
    if kind.parameter == "nprobe":
        parameters = _faiss.SearchParametersIVF(nprobe=setting)
    else:
        parameters = _faiss.SearchParametersHNSW(efSearch=max(setting, count))
    values, ids = index.search(queries, count, params=parameters)
    return values if index.metric_type == faiss.METRIC_INNER_PRODUCT else -values, ids


def lists_of(index: Any) -> int:
    """Return the number of lists, 0 where there are none."""
    ivf = faiss.try_extract_index_ivf(index)
    return ivf.nlist if ivf is not None else 0
