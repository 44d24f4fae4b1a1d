"""How many of the true best an approximate index finds, and how to search it for enough of them.

Measured on this table, with queries that this model asks: of train triples drawn at random, half of them from
relations drawn at random, so that rare relations count. The true best come from an exact scan. One half of
the queries chooses how to search, the other tells the recall, and must reach the target too. Each question is
asked with known answers left out, as `predict` does, and with them shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError
from kgshard.known import anchors_of
from kgshard.models.link import Side
from kgshard.records import GroupRecall, RecallInfo, RecallPoint
from kgshard_tools.index.contents import Contents
from kgshard_tools.index.kinds import Search
from kgshard_tools.index.tuned import TunedIndex
from kgshard_tools.known import KnownTriples
from kgshard_tools.lifts import squares, unit_rows
from kgshard_tools.search import CandidateSource, Exclusions, Found, Ids, Scan, Scores, search
from kgshard_tools.stored import Stored

AT = 10
_LEAST_QUERIES = 5
_NUM_LOWEST = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """Queries of one group, and their true best."""

    group: str
    """"tail", "head", either with "known shown", or "neighbors"."""
    queries: Scores
    """float64[B, Q]."""
    excluded: Exclusions
    """Of neighbours: the entity itself."""
    relations: Ids
    """int64[B]; of neighbours nothing."""
    worst: Scores
    """float64[B]: the score of the last of the true best."""
    counts: Ids
    """int64[B]: how many true best there are."""


def tune(
    stored: Stored,
    contents: Contents,
    source: TunedIndex,
    *,
    target: float,
    num_queries: int,
    seed: int,
    worthwhile: float = 0.0,
) -> RecallInfo | None:
    """Choose how `source` is searched, so that it reaches `target` on every side; leave it set so.

    Returns:
        What was measured; None as soon as it is clear that the search will not be `worthwhile` times as fast
        as an exact scan.

    Raises:
        ConfigError: It does not, however it is searched.
    """
    scan, draw = Scan(stored.checkpoint.entities, contents.metric, contents.lift), np.random.default_rng(seed)
    asked = _asked(stored, contents, 2 * num_queries, draw)
    began = time.perf_counter()
    samples = [_sample(scan, *each) for each in asked]
    flat_speed = sum(len(sample.queries) for sample in samples) / (time.perf_counter() - began)
    tuning, holdout = ([_part(sample, half) for sample in samples] for half in (0, 1))
    curve: list[RecallPoint] = []
    for point in _tried(source, tuning, target, curve):
        if point.queries_per_second < worthwhile * flat_speed:
            return None
        if min(point.recall.values()) < target:
            continue
        recalls = [_recall(source, sample)[0] for sample in holdout]
        measured = {
            sample.group: float(recall.mean()) for sample, recall in zip(holdout, recalls, strict=True)
        }
        if min(measured.values()) >= target:
            break
    else:
        best = max(curve, key=lambda point: min(point.recall.values()))
        raise ConfigError(
            f"--recall {target}: {contents.name} as {source.kind.name} reach {min(best.recall.values()):.3f} "
            f"with {best.search}; choose another --type, or ask for less"
        )
    return RecallInfo(
        at=AT,
        target=target,
        measured=measured,
        queries=len(holdout[0].queries),
        seed=seed,
        flat_queries_per_second=flat_speed,
        queries_per_second=point.queries_per_second,
        curve=curve,
        lowest=_lowest(stored, holdout, recalls),
    )


def share_of_longest(
    stored: Stored, contents: Contents, *, target: float, num_queries: int, seed: int
) -> float:
    """Return the share of the rows, from the longest on, that hold enough of the true best for `target`."""
    scan, draw = Scan(stored.checkpoint.entities, contents.metric, contents.lift), np.random.default_rng(seed)
    blocks = stored.checkpoint.entities.blocks()
    lengths = np.concatenate([squares(contents.lift.rounded(rows)) for _, rows in blocks])
    ascending, shares = np.sort(lengths), []
    for _, queries, excluded, _ in _asked(stored, contents, num_queries, draw):
        ids = search(scan, queries, AT, excluded).ids
        needed = np.quantile(lengths[ids[ids >= 0]], 1 - target) if (ids >= 0).any() else np.inf
        shares.append(1 - np.searchsorted(ascending, needed) / len(ascending))
    return float(max(shares))


def _tried(
    source: TunedIndex, samples: Sequence[Sample], target: float, curve: list[RecallPoint]
) -> Iterator[RecallPoint]:
    """Try ways to search, from the fastest on; yield what each gives while `source` is set so.

    For each setting the greatest depth tells whether it reaches the target at all; then the least that does
    is looked for.
    """
    depths = source.kind.depths(source.metric)
    for setting in source.kind.settings(source.num_lists, len(source)):
        source.search = Search(setting, depths[-1])
        point = _point(source, samples)
        curve.append(point)
        if min(point.recall.values()) >= target:
            for depth in depths[:-1]:
                source.search = Search(setting, depth)
                shallow = _point(source, samples)
                curve.append(shallow)
                if min(shallow.recall.values()) >= target:
                    point = shallow
                    break
            else:
                source.search = Search(setting, depths[-1])
        yield point


def _asked(
    stored: Stored, contents: Contents, count: int, draw: np.random.Generator
) -> list[tuple[str, Scores, Exclusions, Ids]]:
    """Return name, queries, exclusions and relations of each group: `count` queries, or all there are."""
    num_rows, nothing = stored.model.num_entities, np.empty(0, np.int64)
    if not contents.sides:
        entities = np.sort(draw.choice(num_rows, min(count, num_rows), replace=False))
        draw.shuffle(entities)
        queries = unit_rows(stored.checkpoint.entities.gather(entities).astype(np.float64))
        itself = Exclusions(np.arange(len(entities)), entities, num_queries=len(entities), num_rows=num_rows)
        return [("neighbors", queries, itself, nothing)]
    return [each for side in contents.sides for each in _asked_links(stored, side, count, draw)]


def _asked_links(
    stored: Stored, side: Side, count: int, draw: np.random.Generator
) -> list[tuple[str, Scores, Exclusions, Ids]]:
    """Return questions with known answers left out, which is what `predict` asks, and with them shown."""
    from kgshard_tools.links import LinkSearch, Sources

    train = stored.dataset.triples("train")
    if not len(train):
        raise ConfigError("train holds no triples, so nobody can tell what will be asked; use --type flat")
    chosen = np.concatenate(
        [draw.integers(0, len(train), count), _of_every_relation(train[:, 1], count, draw)]
    )
    triples = np.asarray(train[np.sort(chosen)])
    pairs = np.unique(np.stack([anchors_of(side, triples), triples[:, 1]], axis=1), axis=0).astype(np.int64)
    pairs = pairs[draw.permutation(len(pairs))[:count]]
    queries = LinkSearch(stored, Sources(stored)).queries(side, pairs[:, 0], pairs[:, 1])
    finite = np.isfinite(queries).all(axis=1)
    if not finite.any():
        raise ConfigError(f"no question for a {side} is finite; such a run cannot be indexed")
    queries, anchors, relations = queries[finite], pairs[finite, 0], pairs[finite, 1]
    known = KnownTriples(stored.dataset).answers(side, anchors, relations).everywhere()
    every = Exclusions.none(len(queries))
    return [(side, queries, known, relations), (f"{side}, known shown", queries, every, relations)]


def _of_every_relation(relations: npt.NDArray[np.integer], count: int, draw: np.random.Generator) -> Ids:
    """Return the places of `count` triples, each of a relation drawn at random."""
    order = np.argsort(relations, kind="stable")
    starts = np.flatnonzero(np.diff(relations[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    which = draw.integers(0, len(starts), count)
    return order[starts[which] + (draw.random(count) * sizes[which]).astype(np.int64)]


def _sample(
    scan: CandidateSource, group: str, queries: Scores, excluded: Exclusions, relations: Ids
) -> Sample:
    best = search(scan, queries, AT, excluded)
    worst = np.take_along_axis(best.scores, np.maximum(best.counts[:, None] - 1, 0), axis=1)[:, 0]
    return Sample(group, queries, excluded, relations, worst, best.counts)


def _part(sample: Sample, half: int) -> Sample:
    some = np.arange(half % len(sample.queries), len(sample.queries), 2)  # A single one is both halves.
    relations = sample.relations[some] if len(sample.relations) else sample.relations
    return Sample(
        sample.group,
        sample.queries[some],
        sample.excluded.take(some),
        relations,
        sample.worst[some],
        sample.counts[some],
    )


def _point(source: TunedIndex, samples: Sequence[Sample]) -> RecallPoint:
    recall, seconds, asked = {}, 0.0, 0
    for sample in samples:
        values, took = _recall(source, sample)
        recall[sample.group] = float(values.mean())
        seconds, asked = seconds + took, asked + len(values)
    way = {source.kind.parameter: source.search.setting, "depth": source.search.depth}
    return RecallPoint(way, recall, asked / max(seconds, 1e-9))


def _recall(source: CandidateSource, sample: Sample) -> tuple[Scores, float]:
    """Return float64[B], the share of the true best that was found for each query, and the seconds it took.

    What scores as well as the last of the true best is one of them: ties may fall otherwise.
    """
    began = time.perf_counter()
    found: Found = search(source, sample.queries, AT, sample.excluded)
    seconds = time.perf_counter() - began
    is_true = (found.ids >= 0) & (found.scores >= sample.worst[:, None])
    return is_true.sum(axis=1) / np.maximum(sample.counts, 1), seconds


def _lowest(stored: Stored, samples: Sequence[Sample], recalls: Sequence[Scores]) -> list[GroupRecall]:
    """Return the relations with the lowest recall."""
    groups = []
    for sample, recall in zip(samples, recalls, strict=True):
        for relation in np.unique(sample.relations).tolist():
            own = recall[sample.relations == relation]
            if len(own) >= _LEAST_QUERIES:
                name = stored.dataset.relations[relation]
                groups.append(GroupRecall(sample.group, name, len(own), float(own.mean())))
    return sorted(groups, key=lambda group: group.recall)[:_NUM_LOWEST]
