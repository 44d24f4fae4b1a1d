"""Which new entities triples connect: those are fitted together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def components(triples: Ids, num_new: int) -> Ids:
    """Return int64[num_new]: the smallest number of the new entities that each is connected with.

    Args:
        triples: int64[n, 3], entities counted from the first new one: trained ones are negative, and
            connect nothing.
        num_new: How many there are.

    Example:
        >>> components(np.array([[0, 5, 2], [1, 5, -3], [2, 6, 3]]), 4).tolist()
        [0, 1, 0, 0]
    """
    among = triples[(triples[:, 0] >= 0) & (triples[:, 2] >= 0)]
    group = np.arange(num_new)
    while True:
        least = np.minimum(group[among[:, 0]], group[among[:, 2]])
        lower = group.copy()
        np.minimum.at(lower, among[:, 0], least)
        np.minimum.at(lower, among[:, 2], least)
        lower = lower[lower]  # Twice as far with each round.
        if np.array_equal(lower, group):
            return group
        group = lower


def groups(triples: Ids, connected: Ids, num_triples: int) -> Iterator[tuple[Ids, Ids]]:
    """Yield new entities that are fitted together: their numbers, ascending, and which triples are theirs.

    Args:
        triples: int64[n, 3], entities counted from the first new one: trained ones are negative.
        connected: As `components` returns.
        num_triples: Of a group at most, unless it is of one component.
    """
    of_triple = connected[np.maximum(triples[:, 0], triples[:, 2])]
    names, sizes = np.unique(of_triple, return_counts=True)
    cuts, size = [0], 0
    for position, more in enumerate(sizes.tolist()):
        if size and size + more > num_triples:
            cuts.append(position)
            size = 0
        size += more
    for start, stop in zip(cuts, [*cuts[1:], len(names)], strict=True):
        low, high = names[start], names[stop - 1]
        yield (
            np.flatnonzero((connected >= low) & (connected <= high)),
            np.flatnonzero((of_triple >= low) & (of_triple <= high)),
        )


def from_first(triples: Ids, first: int) -> Ids:
    """Return triples with entities counted from the first new one."""
    return np.stack([triples[:, 0] - first, triples[:, 1], triples[:, 2] - first], axis=1)
