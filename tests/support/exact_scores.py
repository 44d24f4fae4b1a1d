"""Small graphs whose scores are whole numbers, and their ranks in whole-number arithmetic.

Ties are real there, and there is nothing to round. Formulas are those of the papers and share nothing with
kgshard but the layout of rows: numpy arrays of int64, or of Python's integers where numbers grow large.

Shape letters: N candidates, D floats for each entity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from kgshard.errors import ConfigError
from kgshard.models import find_scoring
from kgshard.models.link import LinkModel, Side

Whole = Any
"""A numpy array of whole numbers: int64, or objects that are Python's int."""
Shared = Mapping[str, Whole]
Triple = tuple[int, int, int]
Floats = npt.NDArray[np.float32]


def _series(first_term: int) -> int:
    """Return cos(1) or sin(1), scaled by UNIT, from its power series."""
    value, term, k = 0, UNIT // max(first_term, 1), first_term
    while term:
        value += term if (k // 2) % 2 == 0 else -term
        term //= (k + 1) * (k + 2)
        k += 2
    return value


UNIT = 10**60
COSINES = {0: UNIT, 1: _series(0), -1: _series(0)}
SINES = {0: 0, 1: _series(1), -1: -_series(1)}
"""Of the angles that rotations take here, in radians. cos 1 and sin 1 are algebraically independent of
whole numbers over whole numbers, so two scores are equal only if they are the same combination of them."""


def _blocks(rows: Whole, count: int) -> list[Whole]:
    return np.split(rows, count, axis=-1)


def _inner(xs: Sequence[Whole], ys: Sequence[Whole]) -> Whole:
    return np.sum([x * y for x, y in zip(xs, ys, strict=True)], axis=0).sum(-1)


def _conjugate(x: list[Whole]) -> list[Whole]:
    return [x[0], *(-part for part in x[1:])]


def _plus(xs: list[Whole], ys: list[Whole], sign: int = 1) -> list[Whole]:
    return [x + sign * y for x, y in zip(xs, ys, strict=True)]


def _times(x: list[Whole], y: list[Whole]) -> list[Whole]:
    """Multiply by Cayley and Dickson's doubling: (a, b)(c, d) = (a c - conj(d) b, d a + b conj(c))."""
    if len(x) == 1:
        return [x[0] * y[0]]
    middle = len(x) // 2
    (a, b), (c, d) = ((z[:middle], z[middle:]) for z in (x, y))
    first = _plus(_times(a, c), _times(_conjugate(d), b), -1)
    return first + _plus(_times(d, a), _times(b, _conjugate(c)))


def _distmult(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    return (h * r * t).sum(-1)


def _cp(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    return (_blocks(h, 2)[0] * r * _blocks(t, 2)[1]).sum(-1)


def _simple(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    forward, inverse = _blocks(r, 2)
    return _cp(h, forward, t, shared) + _cp(t, inverse, h, shared)


def _rescal(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    dim = h.shape[-1]
    return (h[..., :, None] * r.reshape(*r.shape[:-1], dim, dim) * t[..., None, :]).sum((-1, -2))


def _tucker(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    return np.einsum("aij,...a,...i,...j->...", shared["core"], r, h, t)


def _hypercomplex(size: int) -> Callable[[Whole, Whole, Whole, Shared], Whole]:
    def score(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
        return _inner(_times(_blocks(h, size), _blocks(r, size)), _blocks(t, size))

    return score


def _twice_units(r: list[Whole]) -> list[Whole]:
    """Return 2 r / |r| of quaternions whose norm is 1 or 2; see `_draw_units`."""
    norms_squared = np.sum([part * part for part in r], axis=0)
    return [part * np.where(norms_squared == 1, 2, 1) for part in r]


def _quate(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    return _inner(_times(_blocks(h, 4), _twice_units(_blocks(r, 4))), _blocks(t, 4))


def _duale(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    """Return four times the score: with c2 = 2 c', d' is d - <d, c2> c2 / 4."""
    (a, b), (c, d), (e, f) = ((_blocks(x, 8)[:4], _blocks(x, 8)[4:]) for x in (h, r, t))
    c2 = _twice_units(c)
    along = np.sum([x * y for x, y in zip(c2, d, strict=True)], axis=0)
    d4 = [4 * x - along * y for x, y in zip(d, c2, strict=True)]
    c4 = [2 * x for x in c2]
    return _inner(_times(a, c4), e) + _inner(_plus(_times(a, d4), _times(b, c4)), f)


def _keci(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    """In Cl(0, 1), whose one basis vector squares to -1 and has the learned coefficient c."""
    (h0, h1), (r0, r1), (t0, t1) = (_blocks(x, 2) for x in (h, r, t))
    c = shared["coefficients"][0] if "coefficients" in shared else 1
    return ((h0 * r0 - c * c * h1 * r1) * t0 + c * (h0 * r1 + r0 * h1) * t1).sum(-1)


def _transe(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    return -((h + r - t) ** 2).sum(-1)


def _transe_l1(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    return -abs(h + r - t).sum(-1)


def _transh(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    """Return -|P v|^2 |w|^2 = <v, w>^2 - |v|^2 |w|^2 for v = h + d - t; where w is 0, -|v|^2."""
    d, w = _blocks(r, 2)
    v = h + d - t
    squared = (w * w).sum(-1)
    return (v * w).sum(-1) ** 2 - (v * v).sum(-1) * np.where(squared == 0, 1, squared)


def _mure(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    stretch, shift = _blocks(r, 2)
    return -((stretch * h[..., :-2] + shift - t[..., :-2]) ** 2).sum(-1) + h[..., -2] + t[..., -1]


def _rotate(h: Whole, r: Whole, t: Whole, shared: Shared) -> Whole:
    """-|h e^(i r) - t|^2 = 2 Re(h e^(i r) conj(t)) - |h|^2 - |t|^2, scaled."""
    (a, b), (c, d) = _blocks(h.astype(object), 2), _blocks(t.astype(object), 2)
    cosine, sine = (np.vectorize(table.get, otypes=[object])(r) for table in (COSINES, SINES))
    turned = (a * cosine - b * sine) * c + (a * sine + b * cosine) * d
    return 2 * turned.sum(-1) - UNIT * ((a * a + b * b).sum(-1) + (c * c + d * d).sum(-1))


EXACT: dict[str, Callable[[Whole, Whole, Whole, Shared], Whole]] = {
    "distmult": _distmult,
    "cp": _cp,
    "simple": _simple,
    "rescal": _rescal,
    "tucker": _tucker,
    "complex": lambda h, r, t, _: _inner(_times(_blocks(h, 2), _blocks(r, 2)), _blocks(t, 2)),
    "qmult": _hypercomplex(4),
    "quate": _quate,
    "duale": _duale,
    "omult": _hypercomplex(8),
    "keci": _keci,
    "ckeci": _keci,
    "transe": _transe,
    "transe-l1": _transe_l1,
    "transh": _transh,
    "mure": _mure,
    "rotate": _rotate,
}
"""Whole numbers that order and equal each other as the scores of one question do; rows broadcast."""

NOT_WHOLE = {
    "rotate-moduli": "sums of square roots",
    "protate": "sums of sines",
    "conve": "layers are divided by standard deviations",
}
"""Models without such numbers, and why."""


def small_dim(name: str, at_least: int = 4) -> int:
    """Return the least dimension from `at_least` on that the model has a form of."""
    for dim in range(at_least, at_least + 64):
        try:
            find_scoring(name).check_dim(dim)
        except ConfigError:
            continue
        return dim
    raise AssertionError(f"{name} takes no dim from {at_least} on")


@dataclass(frozen=True)
class SmallGraph:
    """Tables, and triples that are partly known."""

    model: LinkModel
    entities: Floats
    relations: Floats
    triples: npt.NDArray[np.int32]
    """The ranked triples."""
    known: npt.NDArray[np.int32]
    """The ranked triples and others."""
    shared: dict[str, Floats] = field(default_factory=dict)

    @property
    def known_set(self) -> set[Triple]:
        return {(h, r, t) for h, r, t in self.known.tolist()}


def small_graph(name: str, seed: int) -> SmallGraph:
    """Draw whole-number tables of at most 30 entities."""
    random = np.random.default_rng(seed)
    num_entities, num_relations = int(random.integers(1, 31)), int(random.integers(1, 4))
    reciprocal = seed % 2 == 0 or not find_scoring(name).has_head_queries
    model = LinkModel(name, small_dim(name), num_entities, num_relations, reciprocal)
    largest = 1 if name == "rotate" else 2
    entities = random.integers(-2, 3, (num_entities, model.dim))
    relations = random.integers(-largest, largest + 1, (model.num_relation_rows, model.relation_dim))
    if name in ("quate", "duale"):
        _draw_units(random, relations, 4 if name == "quate" else 8)
    shared = {
        key: random.integers(-1, 2, how.shape).astype(np.float32)
        for key, how in model.scoring.shared_init(model.dim).items()
    }
    size = int(random.integers(1, 60))
    drawn = np.stack(
        [random.integers(0, n, size) for n in (num_entities, num_relations, num_entities)], axis=1
    ).astype(np.int32)
    known = np.unique(drawn, axis=0)
    ranked = known[random.permutation(len(known))[:8]]
    return SmallGraph(model, entities.astype(np.float32), relations.astype(np.float32), ranked, known, shared)


def _draw_units(random: np.random.Generator, relations: npt.NDArray[np.int64], size: int) -> None:
    """Make the first four blocks of relation rows quaternions of norm 1 or 2, in place."""
    width = relations.shape[1] // size
    for row in relations:
        for column in range(width):
            quaternion = random.choice([-1, 1], 4)
            if random.random() < 0.5:
                quaternion = quaternion * (np.arange(4) == random.integers(4))
            row[column : 4 * width : width] = quaternion


def scores_of(graph: SmallGraph, side: Side, triple: Triple) -> Whole:
    """Return N whole numbers: every entity's, in the place that is asked for."""
    h, r, t = triple
    entities, relations = graph.entities.astype(np.int64), graph.relations.astype(np.int64)
    shared = {name: values.astype(np.int64) for name, values in graph.shared.items()}
    score = EXACT[graph.model.name]
    if side == "tail":
        return score(entities[h], relations[r], entities, shared)
    if graph.model.reciprocal:
        return score(entities[t], relations[r + graph.model.num_relations], entities, shared)
    return score(entities, relations[r], entities[t], shared)


@dataclass(frozen=True)
class Place:
    """Where one true answer stands, counted candidate by candidate."""

    higher: int
    ties: int
    candidates: int

    def rank(self, ties: str = "realistic") -> Fraction:
        share = {"realistic": Fraction(1, 2), "optimistic": Fraction(0), "pessimistic": Fraction(1)}[ties]
        return 1 + self.higher + share * self.ties


def oracle(graph: SmallGraph, side: Side, known: set[Triple]) -> list[Place]:
    """Place every ranked triple's `side` among all entities but the known answers."""
    places = []
    for h, r, t in graph.triples.tolist():
        scores = scores_of(graph, side, (h, r, t))
        answer = h if side == "head" else t
        others = [
            e
            for e in range(len(scores))
            if e != answer and ((e, r, t) if side == "head" else (h, r, e)) not in known
        ]
        higher = sum(bool(scores[e] > scores[answer]) for e in others)
        ties = sum(bool(scores[e] == scores[answer]) for e in others)
        places.append(Place(higher, ties, len(others) + 1))
    return places
