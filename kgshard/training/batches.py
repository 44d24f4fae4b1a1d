"""What one step trains on, keyed by (seed, epoch, step) and never by rank.

Every rank derives the same global batch and takes its contiguous part of it, so N ranks together do exactly
what one rank does alone. A batch is made of questions, (h, r, ?) and (?, r, t): two for each triple, or
(KvsAll) every distinct question of the graph with all its answers. On each rank those that ask for heads
come first; over all ranks they are counted rank by rank.

Shape letters: q questions of this rank, Q of the global batch, M labels, K negatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kgshard.data.dataset import Triples
from kgshard.known import anchors_of, targets_of
from kgshard.models.link import SIDES, LinkModel, Side
from kgshard.partition import RowPartition
from kgshard.seeds import generator
from kgshard.training.negatives import Negatives, NegativeSampler, as_tensor

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions of one rank; the first num_heads ask for heads, the others for tails."""

    num_heads: int
    places: Ids
    """int64[q], on the host: each one's number among the Q, the same at any world size."""
    anchors: Tensor
    """int64[q]: the given entities."""
    relation_rows: Tensor
    """int64[q]: rows of the relation table, as `LinkModel.relation_row` names them."""
    answers: Tensor
    """int64[q]: the one answer of each; int64[0] where labels tell instead."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The answers of all questions of the global batch, the same on every rank."""

    questions: Tensor
    """int64[M]: which question."""
    answers: Tensor
    """int64[M]: an entity."""
    counts: list[int]
    """Questions of each rank; they sum to Q."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, with this rank's part of it."""

    step: int
    """Counted from 0 over the whole training."""
    update: int
    """Which optimizer update it belongs to, counted from 0; several steps may share one."""
    is_last: bool
    """Whether it is the last step of its update."""
    num_triples: int
    """Train triples behind the global batch, for progress."""
    num_questions: int
    """Q."""
    num_update_questions: int
    """Questions of all steps of the update: what gradients are averaged over."""
    mine: Questions
    relation_rows: Tensor
    """int64: distinct relation rows of the global batch, ascending, the same on every rank."""
    negatives: list[Negatives] = field(default_factory=list)
    """Sampled candidates, where negatives are sampled."""
    labels: Labels | None = None
    """Set where all entities are candidates."""


def num_batches(num_items: int, batch_size: int) -> int:
    """Return the steps of an epoch; the last batch may be smaller."""
    return -(-num_items // batch_size)


@dataclass(frozen=True, slots=True)
class Cut:
    """How epochs are cut into batches, and whose part of them is wanted."""

    batch_size: int
    """Items (triples, or questions) of a step over all ranks."""
    accumulate: int = 1
    """Steps for each optimizer update."""
    seed: int = 0
    """Fixes shuffles."""
    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    """Where tensors are put."""


class Sampler(ABC):
    """The batches of any epoch, for one rank: every item exactly once over all ranks."""

    def __init__(self, model: LinkModel, num_items: int, cut: Cut) -> None:
        self.model = model
        self.num_items = num_items
        self.cut = cut

    def __len__(self) -> int:
        """Steps of an epoch."""
        return num_batches(self.num_items, self.cut.batch_size)

    @property
    def num_updates(self) -> int:
        """Optimizer updates of an epoch; the last may be made of fewer steps."""
        return num_batches(len(self), self.cut.accumulate)

    def updates_in(self, num_steps: int) -> int:
        """Return how many updates the first steps of a training belong to."""
        epochs, rest = divmod(num_steps, len(self))
        return epochs * self.num_updates + num_batches(rest, self.cut.accumulate)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of one epoch, counted from 0."""
        order = generator(self.cut.seed, "shuffle", epoch).permutation(self.num_items)
        size = self.cut.batch_size
        for index in range(len(self)):
            yield self._batch(epoch, index, order[index * size : (index + 1) * size])

    @abstractmethod
    def _batch(self, epoch: int, index: int, chosen: Ids) -> Batch:
        """Make a batch of the chosen items, int64[B]; `index` counts from 0 in the epoch."""

    def _when(self, epoch: int, index: int) -> tuple[int, int, bool]:
        """Return the step, the update it belongs to, and whether it is that update's last."""
        together = self.cut.accumulate
        is_last = (index + 1) % together == 0 or index + 1 == len(self)
        return epoch * len(self) + index, epoch * self.num_updates + index // together, is_last

    def _items_of_update(self, index: int) -> int:
        """Return how many items the whole update has that step `index` of an epoch belongs to."""
        size = self.cut.accumulate * self.cut.batch_size
        first = index // self.cut.accumulate * size
        return min(self.num_items, first + size) - first

    def _parts(self, num_items: int) -> list[range]:
        """Return which items of a batch are each rank's."""
        partition = RowPartition(num_items, self.cut.world_size)
        return [partition.rows_of(rank) for rank in range(self.cut.world_size)]

    def _tensor(self, array: Ids) -> Tensor:
        return as_tensor(array, self.cut.device)


class TripleSampler(Sampler):
    """Batches of triples, each of which asks for its head and for its tail."""

    def __init__(
        self, model: LinkModel, triples: Triples, cut: Cut, negatives: NegativeSampler | None = None
    ) -> None:
        """Cut int[n, 3] triples; without `negatives` all entities are candidates."""
        super().__init__(model, len(triples), cut)
        self._triples = np.asarray(triples)  # A memmap's own indexing takes several times as long.
        self._negatives = negatives

    def _batch(self, epoch: int, index: int, chosen: Ids) -> Batch:
        step, update, is_last = self._when(epoch, index)
        triples = self._triples.take(chosen, axis=0).astype(np.int64)
        mine, device = self._parts(len(chosen))[self.cut.rank], self.cut.device
        return Batch(
            step=step,
            update=update,
            is_last=is_last,
            num_triples=len(chosen),
            num_questions=2 * len(chosen),
            num_update_questions=2 * self._items_of_update(index),
            mine=self._questions(triples, mine),
            relation_rows=self._tensor(np.unique([self._rows(side, triples[:, 1]) for side in SIDES])),
            negatives=self._negatives.draw(step, triples, mine, device) if self._negatives else [],
            labels=None if self._negatives else self._labels(triples),
        )

    def _questions(self, batch: Ids, mine: range) -> Questions:
        triples = batch[mine.start : mine.stop]
        both = [np.concatenate([part(side, triples) for side in SIDES]) for part in (anchors_of, targets_of)]
        rows = np.concatenate([self._rows(side, triples[:, 1]) for side in SIDES])
        numbers = np.arange(mine.start, mine.stop)
        places = np.concatenate([numbers + index * len(batch) for index in range(len(SIDES))])
        return Questions(len(triples), places, *(self._tensor(ids) for ids in (both[0], rows, both[1])))

    def _labels(self, triples: Ids) -> Labels:
        parts = [triples[rows.start : rows.stop] for rows in self._parts(len(triples))]
        answers = np.concatenate([targets_of(side, part) for part in parts for side in SIDES])
        questions = np.arange(len(answers))
        counts = [2 * len(part) for part in parts]
        return Labels(self._tensor(questions), self._tensor(answers), counts)

    def _rows(self, side: Side, relations: Ids) -> Ids:
        rows: Ids = self.model.relation_row(side, relations)
        return rows


class QuestionSampler(Sampler):
    """Batches of distinct questions, each with all its answers in train (KvsAll; Dettmers et al., 2018)."""

    def __init__(self, model: LinkModel, triples: Triples, cut: Cut) -> None:
        """Group int[n, 3] triples by question."""
        sides = [np.full(len(triples), index) for index in range(len(SIDES))]
        asked = np.stack(
            [
                np.concatenate(sides),
                np.concatenate([anchors_of(side, triples) for side in SIDES]),
                np.concatenate([model.relation_row(side, triples[:, 1].astype(np.int64)) for side in SIDES]),
            ],
            axis=1,
        ).astype(np.int64)
        answers = np.concatenate([targets_of(side, triples) for side in SIDES]).astype(np.int64)
        order = np.lexsort((answers, *asked.T[::-1]))
        self._asked, starts = np.unique(asked[order], axis=0, return_index=True)
        self._answers = answers[order]
        self._edges = np.append(starts, len(answers))
        super().__init__(model, len(self._asked), cut)

    def _batch(self, epoch: int, index: int, chosen: Ids) -> Batch:
        step, update, is_last = self._when(epoch, index)
        ranges = self._parts(len(chosen))
        # Within a rank's part, those that ask for heads come first: SIDES begins with them.
        sides = self._asked[chosen, 0]
        places = [np.argsort(sides[rows.start : rows.stop], kind="stable") + rows.start for rows in ranges]
        everyone = chosen[np.concatenate(places)]
        mine = self._asked[chosen[places[self.cut.rank]]]
        sizes = self._edges[everyone + 1] - self._edges[everyone]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        answers = self._answers[np.repeat(self._edges[everyone], sizes) + within]
        return Batch(
            step=step,
            update=update,
            is_last=is_last,
            num_triples=len(answers) // 2,
            num_questions=len(chosen),
            num_update_questions=self._items_of_update(index),
            mine=Questions(
                int((mine[:, 0] == 0).sum()),
                places[self.cut.rank],
                *(self._tensor(ids) for ids in (mine[:, 1], mine[:, 2], np.empty(0, np.int64))),
            ),
            relation_rows=self._tensor(np.unique(self._asked[chosen, 2])),
            labels=Labels(
                self._tensor(np.repeat(np.arange(len(everyone)), sizes)),
                self._tensor(answers),
                [len(rows) for rows in ranges],
            ),
        )
