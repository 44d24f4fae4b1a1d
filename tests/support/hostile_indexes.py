"""FAISS files of many types, and what becomes of them when bytes are changed."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

_faiss: Any = faiss
"""Its stubs know half of it."""
ROWS, DIM = 600, 8
TYPES = (
    *("Flat", "IVF8,Flat", "IVF8,SQ8", "IVF8,PQ4x4", "PQ4x4", "SQ8", "HNSW8", "HNSW8_SQ8", "IDMap,Flat"),
    *("IDMap2,IVF8,Flat", "PCA4,IVF8,Flat", "HNSW8_PQ4x4"),
)
"""As FAISS's index_factory names them; the nine of the promise, and three that hold others."""
_NUMBERS = (0, 1, -1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, -(2**63))

Vectors = npt.NDArray[np.float32]


def some_vectors(num_rows: int = ROWS, width: int = DIM) -> Vectors:
    return np.random.default_rng(3).standard_normal((num_rows, width), np.float32)


def make_index(type: str, metric: int = faiss.METRIC_L2, vectors: Vectors | None = None) -> Any:
    """Return an index of `some_vectors`, or others; its ids are their rows."""
    vectors = some_vectors() if vectors is None else vectors
    index = faiss.index_factory(vectors.shape[1], type, metric)
    index.train(vectors)
    if type.startswith("IDMap"):
        index.add_with_ids(vectors, np.arange(len(vectors)))
    else:
        index.add(vectors)
    return index


def lattice(path: Path, r2: int, width: int = 32) -> Path:
    """Write an empty index whose codebook takes a second to set up where r2 is 256, hours where it is 512.

    FAISS checks that the tables of a codebook fit memory, and not how long they take.
    """
    index: Any = _faiss.IndexLattice(width, 1, 4, 20)
    index.train(some_vectors(50, width))
    faiss.write_index(index, str(path))
    content = bytearray(path.read_bytes())
    assert struct.unpack_from("<i", content, 16) == (20,)
    content[16:20] = struct.pack("<i", r2)
    path.write_bytes(content)
    return path


def greedy(path: Path, width: int) -> Path:
    """Write a graph that says it is to be searched with so many nodes in sight, each some bytes."""
    index = make_index("HNSW8")
    index.hnsw.efSearch = width
    faiss.write_index(index, str(path))
    return path


def mutants(originals: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Yield files with one or two changes, often near their beginning, where sizes and types are."""
    source = random.Random(seed)
    for number in range(count):
        content = bytearray(originals[number % len(originals)])
        for _ in range(source.randint(1, 2)):
            near = source.random() < 0.4
            at = source.randrange(min(len(content), 160) if near else len(content))
            match source.randrange(6):
                case 0:
                    content[at] ^= 1 << source.randrange(8)
                case 1:
                    content[at] = source.randrange(256)
                case 2:
                    content[at : at + 4] = struct.pack("<I", source.choice(_NUMBERS) % 2**32)
                case 3:
                    content[at : at + 8] = struct.pack("<Q", source.choice(_NUMBERS) % 2**64)
                case 4:
                    del content[at : at + source.choice([1, 4, 8, 100])]
                case _:
                    content[at:at] = content[: source.choice([1, 4, 8, 40])]
            content = content or bytearray(1)
        yield bytes(content)
