"""What a process that read a foreign index sends back: believed no further than it can be checked. No faiss.

Shape letters: B queries, d floats of a vector, k answers.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.shards import Floats
from kgshard_tools.index.foreign_child import ANSWER, ENDED, FAULT, KILLED, MEMORY, OK, TOO_LONG, UNREADABLE
from kgshard_tools.search import Ids
from kgshard_tools.terminal import shown

Mask = npt.NDArray[np.bool_]

_METRICS = {0: "inner product", 1: "L2", 2: "L1", 3: "Linf"}
_LARGER_IS_NEARER = {0, 23}
"""FAISS's inner product and Jaccard; of all others smaller values are."""
_TRIALS = 2


class ForeignError(Exception):
    """What happened to the process, in words; the file is still to be named."""


@dataclass(frozen=True, slots=True)
class ForeignIndex:
    """What FAISS made of a file."""

    type: str
    """FAISS's class."""
    rows: int
    dim: int
    metric: str
    larger_is_nearer: bool


@dataclass(frozen=True, slots=True)
class ForeignFound:
    """What a foreign index came back with; its ids need not mean anything here."""

    index: ForeignIndex
    values: Floats
    """float32[B, k], higher is nearer (distances are negated), best first; -inf where there are fewer."""
    ids: Ids
    """int64[B, k]; each id once for a query, -1 where there are fewer."""
    counts: Ids
    """int64[B]: how many there are."""
    num_dropped: int
    """Answers that could not be any: an id out of range or repeated, a value that is not finite."""


def _content(answer: bytes, seconds: float) -> bytes:
    """Return what a child sent that came to its end."""
    if len(answer) < ENDED.size:
        raise ForeignError(f"FAISS sent {len(answer)} bytes, which are no answer")
    ended, number, memory = ENDED.unpack_from(answer)
    content = answer[ENDED.size :]
    if ended == TOO_LONG:
        raise ForeignError(f"FAISS did not read and search it within {seconds:g} s")
    if ended == KILLED:
        raise ForeignError(f"FAISS was ended by {_signal_name(number)} while it read or searched it")
    if number or not content:
        raise ForeignError(f"FAISS ended with exit code {number} and no answer")
    if content[:1] != OK and len(content) == FAULT.size:
        kind, text = FAULT.unpack(content)
        if kind == MEMORY:
            raise ForeignError(f"FAISS needs more memory for it than {memory >> 20:,} MiB")
        reason = shown(text.rstrip(b"\0").decode("ascii", "replace"))
        raise ForeignError(f"FAISS cannot {'read' if kind == UNREADABLE else 'search'} it: {reason}")
    return content


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_answer(
    answer: bytes, queries: Floats, k: int, *, seconds: float
) -> tuple[ForeignIndex, Floats, Ids]:
    """Return what the file is, values float32[B, k] as FAISS reports them, and ids int64[B, k].

    Args:
        answer: What `foreign_child` sent.
        queries: What it was asked, float32[B, d]; where B is 0, it tried two of its own.
        k: How many answers.
        seconds: How long it had.

    Raises:
        ForeignError: It came to no good end, or this is no answer to the question.
    """
    content = _content(answer, seconds)
    nonsense = ForeignError(f"FAISS sent {len(content)} bytes, which are no answer")
    if len(content) < ANSWER.size or content[:1] != OK:
        raise nonsense
    _, name, rows, dim, metric, num_queries, found_k = ANSWER.unpack_from(content)
    if rows < 0 or dim < 1 or not 0 <= metric < 100:
        raise ForeignError(f"FAISS takes it for {rows} vectors of {dim} floats and metric {metric}")
    type = shown(name.rstrip(b"\0").decode("ascii", "replace"))
    index = ForeignIndex(
        type, rows, dim, _METRICS.get(metric, f"metric {metric}"), metric in _LARGER_IS_NEARER
    )
    if len(queries) and dim != queries.shape[1]:
        raise ForeignError(f"its vectors are of {dim} floats, the queries of {queries.shape[1]}")
    shape = (len(queries) or _TRIALS, k)
    size = shape[0] * k
    if (num_queries, found_k) != shape or len(content) != ANSWER.size + 12 * size:
        raise nonsense
    values = np.frombuffer(content, "<f4", size, ANSWER.size).reshape(shape)
    ids = np.frombuffer(content, "<i8", size, ANSWER.size + 4 * size).reshape(shape)
    return index, values, ids


def checked(index: ForeignIndex, raw: Floats, ids: Ids, num_rows: int) -> ForeignFound:
    """Keep what can be an answer, best first: ids in [0, num_rows), each once, with finite values."""
    values = raw if index.larger_is_nearer else -raw
    is_good = (ids >= 0) & (ids < num_rows) & np.isfinite(values)
    order = np.argsort(np.where(is_good, -values, np.inf), axis=1, kind="stable")
    values, ids, is_good = _reordered(order, values, ids, is_good)
    is_good &= ~_repeats(ids)
    num_dropped = int(((ids != -1) & ~is_good).sum())
    values, ids = np.where(is_good, values, np.float32(-np.inf)), np.where(is_good, ids, -1)
    values, ids, is_good = _reordered(np.argsort(~is_good, axis=1, kind="stable"), values, ids, is_good)
    return ForeignFound(index, values, ids, is_good.sum(axis=1), num_dropped)


def _reordered(order: Ids, values: Floats, ids: Ids, is_good: Mask) -> tuple[Floats, Ids, Mask]:
    return (
        np.take_along_axis(values, order, axis=1),
        np.take_along_axis(ids, order, axis=1),
        np.take_along_axis(is_good, order, axis=1),
    )


def _repeats(ids: Ids) -> Mask:
    """Return bool[B, k]: whether the same id stands further left."""
    order = np.argsort(ids, axis=1, kind="stable")
    ascending = np.take_along_axis(ids, order, axis=1)
    again = np.zeros(ids.shape, bool)
    again[:, 1:] = ascending[:, 1:] == ascending[:, :-1]
    repeats = np.empty_like(again)
    np.put_along_axis(repeats, order, again, axis=1)
    return repeats
