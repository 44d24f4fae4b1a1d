"""What one step trains on, keyed by (seed, epoch, step) and never by rank.

Every rank derives the same global batch and takes its contiguous part of it, so N ranks together do
exactly what one rank does alone.

Shape letters: B positive triples of the global batch, b of them on this rank, K negatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kgshard.data.dataset import Triples
from kgshard.partition import RowPartition
from kgshard.seeds import generator


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, with this rank's part of it."""

    step: int
    """Counted from 0 over the whole training."""
    relations: Tensor
    """int64[B]: relations of the global batch, the same on every rank."""
    triples: Tensor
    """int64[b, 3]: this rank's positives; b may be 0 in the last batch of an epoch."""
    negatives: Tensor
    """int64[K] entity ids, the same on every rank, drawn uniformly with replacement."""
    global_size: int
    """B."""


def num_batches(num_triples: int, batch_size: int) -> int:
    """Return the steps of an epoch; the last batch may be smaller."""
    return -(-num_triples // batch_size)


def epoch_batches(
    triples: Triples,
    *,
    num_entities: int,
    batch_size: int,
    num_negatives: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Yield the batches of one epoch: every triple exactly once over all ranks.

    Args:
        triples: int[n, 3] train triples.
        num_entities: Negatives are ids below it.
        batch_size: Positive triples of a step over all ranks.
        num_negatives: K, shared by the whole global batch.
        seed: Fixes shuffles and negatives.
        epoch: Counted from 0.
        rank: Whose part to yield.
        world_size: Into how many parts to cut each batch.
        device: Where the tensors are put.
    """
    order = generator(seed, "shuffle", epoch).permutation(len(triples))
    first_step = epoch * num_batches(len(triples), batch_size)
    for index, start in enumerate(range(0, len(triples), batch_size)):
        step = first_step + index
        chosen = order[start : start + batch_size]
        mine = RowPartition(len(chosen), world_size).rows_of(rank)
        batch = triples[chosen]
        negatives = generator(seed, "negatives", step).integers(num_entities, size=num_negatives)
        yield Batch(
            step=step,
            relations=_tensor(batch[:, 1], device),
            triples=_tensor(batch[mine.start : mine.stop], device),
            negatives=_tensor(negatives, device),
            global_size=len(chosen),
        )


def _tensor(array: Triples, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
