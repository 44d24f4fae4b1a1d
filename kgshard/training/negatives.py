"""Negatives: candidates sampled for each step, shared by the questions of a batch or of a chunk of it.

    uniform   every entity equally likely
    degree    as likely as 3/4 powers of degrees in train (Mikolov et al., 2013)
    typed     for each question only entities that train has at that end of its relation (its domain or
              range; Krompass et al., 2015)

A sample stands for all candidates: each negative carries how many of them it stands for, 1 / (K p), so that
losses can estimate sums over all of them whatever it was drawn from (Bengio and Senecal, 2008). Draws are
keyed by (seed, step, chunk), never by rank.

Shape letters: q questions of this rank, K negatives, M pairs, N entities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.data.dataset import Triples
from kgshard.known import KnownLinks, anchors_of, targets_of
from kgshard.models.link import SIDES, LinkModel, Side
from kgshard.seeds import generator

Ids = npt.NDArray[np.int64]
Source = Literal["uniform", "degree", "typed"]
SOURCES: tuple[Source, ...] = ("uniform", "degree", "typed")
_DEGREE_POWER = 0.75


@dataclass(frozen=True, slots=True)
class Negatives:
    """Candidates for some of this rank's questions."""

    questions: Tensor | None
    """int64[q]: positions among the rank's questions; None for all of them."""
    num_heads: int
    """How many of the questions ask for heads; these come first."""
    ids: Tensor
    """int64[K] entities, drawn with replacement."""
    log_weights: Tensor | float
    """float32[K], or one number for all: log of how many candidates each stands for."""
    excluded: tuple[Tensor, Tensor]
    """Pairs (int64[M] question, int64[M] negative), positions in `questions` and `ids`, that are no
    negatives: the question's own answer, and known ones where these are filtered."""
    allowed: Tensor | None = None
    """bool[q, K]: which negatives are of the right type; None where all are."""


class NegativeSampler:
    """Draws the negatives of any step."""

    def __init__(
        self,
        model: LinkModel,
        triples: Triples,
        *,
        count: int,
        source: Source = "uniform",
        chunk_size: int = 0,
        filtered: bool = False,
        seed: int = 0,
    ) -> None:
        """Prepare what draws need.

        Args:
            model: How many entities and relations there are.
            triples: int[n, 3] train triples.
            count: K, for each chunk.
            source: What they are drawn from.
            chunk_size: Triples that share negatives; 0 for all of a batch.
            filtered: Known answers of a question are no negatives.
            seed: Fixes the draws.
        """
        self._model = model
        self._count = count
        self._source = source
        self._chunk_size = chunk_size
        self._seed = seed
        relations = model.num_relations
        self._known = {
            side: KnownLinks(triples, side, num_relations=relations) for side in (SIDES if filtered else ())
        }
        self._cumulated = self._pools = None
        if source == "degree":
            degrees = np.bincount(triples[:, [0, 2]].reshape(-1), minlength=model.num_entities)
            weights = degrees.astype(np.float64) ** _DEGREE_POWER
            cumulated = np.cumsum(weights)
            self._cumulated = cumulated / cumulated[-1]  # Ends at 1, whatever the rounding.
        elif source == "typed":
            self._pools = {side: _Pools(triples, side, relations) for side in SIDES}

    def draw(self, step: int, triples: Ids, mine: range, device: torch.device | str) -> list[Negatives]:
        """Return the negatives of one step for one rank.

        Args:
            step: Counted from 0 over the whole training.
            triples: int64[B, 3], the global batch.
            mine: Which of them are this rank's.
            device: Where the tensors are put.
        """
        size = self._chunk_size or max(1, len(triples))
        groups = []
        for chunk, start in enumerate(range(0, len(triples), size)):
            part = range(max(mine.start, start), min(mine.stop, start + size))
            if len(part) or size >= len(triples):
                whole = triples[start : start + size]
                groups += self._draw_chunk((step, chunk), whole, triples, part, mine, device)
        return groups

    def _draw_chunk(
        self,
        key: tuple[int, int],
        chunk: Ids,
        triples: Ids,
        part: range,
        mine: range,
        device: torch.device | str,
    ) -> list[Negatives]:
        """Return the negatives of the triples `part` of the batch, which are of one chunk and all `mine`."""
        positions = {
            side: np.arange(part.start, part.stop) - mine.start + len(mine) * index
            for index, side in enumerate(SIDES)
        }
        asked = triples[part.start : part.stop]
        if self._pools is not None:
            return [self._typed(key, chunk, side, asked, positions[side], device) for side in SIDES]
        ids, log_weights = self._untyped(key)
        everything = len(part) == len(mine)
        questions = None if everything else as_tensor(np.concatenate(list(positions.values())), device)
        weights = log_weights if isinstance(log_weights, float) else as_tensor(log_weights, device)
        excluded = self._excluded(SIDES, asked, ids, device)
        return [Negatives(questions, len(part), as_tensor(ids, device), weights, excluded)]

    def _untyped(self, key: tuple[int, int]) -> tuple[Ids, npt.NDArray[np.float32] | float]:
        source, num_entities = generator(self._seed, "negatives", *key), self._model.num_entities
        if self._cumulated is None:
            return source.integers(num_entities, size=self._count), math.log(num_entities / self._count)
        drawn = np.searchsorted(self._cumulated, source.random(self._count), side="right")
        ids = np.minimum(drawn, num_entities - 1)
        chances = np.diff(self._cumulated, prepend=0.0)[ids]
        return ids, -np.log(self._count * chances).astype(np.float32)

    def _typed(
        self,
        key: tuple[int, int],
        chunk: Ids,
        side: Side,
        asked: Ids,
        positions: Ids,
        device: torch.device | str,
    ) -> Negatives:
        assert self._pools is not None
        pools = self._pools[side]
        source = generator(self._seed, f"negatives/{side}", *key)
        ids = pools.draw(source, chunk[:, 1], self._count)
        relations, counts = np.unique(chunk[:, 1], return_counts=True)
        holds = pools.holds(relations, ids)
        chances = (counts / len(chunk) / pools.sizes(relations)) @ holds
        allowed = holds[np.searchsorted(relations, asked[:, 1])]
        return Negatives(
            as_tensor(positions, device),
            len(asked) if side == "head" else 0,
            as_tensor(ids, device),
            as_tensor(-np.log(self._count * chances).astype(np.float32), device),
            self._excluded((side,), asked, ids, device),
            as_tensor(allowed, device),
        )

    def _excluded(
        self, sides: tuple[Side, ...], asked: Ids, ids: Ids, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        questions, answers = [], []
        for index, side in enumerate(sides):
            first = index * len(asked)
            if self._known:
                which, known = self._known[side].answers(anchors_of(side, asked), asked[:, 1])
            else:
                which, known = np.arange(len(asked)), targets_of(side, asked).astype(np.int64)
            questions.append(which + first)
            answers.append(known)
        pairs, negatives = find_hits(*(as_tensor(part, device) for part in (np.concatenate(answers), ids)))
        return as_tensor(np.concatenate(questions), device)[pairs], negatives


class _Pools:
    """The distinct entities that train has at one end of each relation."""

    def __init__(self, triples: Triples, side: Side, num_relations: int) -> None:
        pairs = np.stack([triples[:, 1], targets_of(side, triples)], axis=1).astype(np.int64)
        self._pairs = np.unique(pairs, axis=0)
        self._edges = np.searchsorted(self._pairs[:, 0], np.arange(num_relations + 1))

    def sizes(self, relations: Ids) -> Ids:
        return self._edges[relations + 1] - self._edges[relations]

    def draw(self, source: np.random.Generator, relations: Ids, count: int) -> Ids:
        """Return int64[count]: members of the pools of relations picked at random from int64[B]."""
        picked = relations[source.integers(len(relations), size=count)]
        within = (source.random(count) * self.sizes(picked)).astype(np.int64)
        members: Ids = self._pairs[self._edges[picked] + within, 1]
        return members

    def holds(self, relations: Ids, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return bool[R, K]: whether the pool of each relation holds each entity."""
        result = np.empty((len(relations), len(ids)), np.bool_)
        for index, relation in enumerate(relations):
            pool = self._pairs[self._edges[relation] : self._edges[relation + 1], 1]
            found = np.minimum(np.searchsorted(pool, ids), len(pool) - 1)
            result[index] = pool[found] == ids
        return result


def find_hits(wanted_ids: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return all pairs (int64[M] in wanted_ids, int64[M] in ids) of equal ids, comparing no two lists whole.

    Args:
        wanted_ids: int64[q].
        ids: int64[K], repeats allowed.

    Example:
        >>> [part.tolist() for part in find_hits(torch.tensor([5, 9, 7]), torch.tensor([7, 5, 7]))]
        [[0, 2, 2], [1, 0, 2]]
    """
    ordered, order = ids.sort(stable=True)
    starts = torch.searchsorted(ordered, wanted_ids)
    counts = torch.searchsorted(ordered, wanted_ids, right=True) - starts
    wanted = torch.repeat_interleave(counts)
    first = torch.cumsum(counts, 0) - counts
    within = torch.arange(len(wanted), device=counts.device) - first[wanted]
    return wanted, order[starts[wanted] + within]


def as_tensor(array: npt.NDArray[np.generic], device: torch.device | str) -> Tensor:
    """Return a tensor of an array's values; ids become int64."""
    kind = array.dtype if array.dtype in (np.bool_, np.float32) else np.int64
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind)).to(device)
