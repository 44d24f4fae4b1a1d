"""Every model's score of one triple as its paper has it: numpy, float64, complex numbers and plain loops.

Nothing here comes from kgshard. Rows are laid out as the models' modules say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]
Shared = Mapping[str, Row]
Paper = Callable[[Row, Row, Row, Shared], float]


def as_complex(row: Row) -> npt.NDArray[np.complex128]:
    real, imaginary = row.reshape(2, -1)
    return real + 1j * imaginary


def distmult(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return float(np.sum(h * r * t))


def cp(h: Row, r: Row, t: Row, shared: Shared) -> float:
    (h_as_head, _), (_, t_as_tail) = h.reshape(2, -1), t.reshape(2, -1)
    return float(np.sum(h_as_head * r * t_as_tail))


def simple(h: Row, r: Row, t: Row, shared: Shared) -> float:
    relation, inverse = r.reshape(2, -1)
    forwards = cp(h, relation, t, shared)
    backwards = cp(t, inverse, h, shared)
    return (forwards + backwards) / 2


def rescal(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return float(h @ r.reshape(len(h), len(t)) @ t)


def tucker(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return float(np.einsum("aij,a,i,j->", shared["core"], r, h, t))


def complex_(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return float(np.real(np.sum(as_complex(h) * as_complex(r) * np.conj(as_complex(t)))))


def quaternion_product(x: Row, y: Row) -> Row:
    """Multiply two quaternions [4] as complex 2 x 2 matrices."""
    left, right = (
        np.array([[a + b * 1j, c + d * 1j], [-c + d * 1j, a - b * 1j]], np.complex128)
        for a, b, c, d in (x, y)
    )
    scalar, rest = (left @ right)[0]
    return np.array([scalar.real, scalar.imag, rest.real, rest.imag])


FANO = ((1, 2, 3), (1, 4, 5), (1, 7, 6), (2, 4, 6), (2, 5, 7), (3, 4, 7), (3, 6, 5))
"""Lines (i, j, k) of the Fano plane: e_i e_j = e_k, and so on in a circle; backwards with a minus."""


def octonion_product(x: Row, y: Row) -> Row:
    """Multiply two octonions [8] by the Fano plane."""
    result = x[0] * y
    result[0] -= x[1:] @ y[1:]
    result[1:] += y[0] * x[1:]
    for line in FANO:
        for i, j, k in (line, line[1:] + line[:1], line[2:] + line[:2]):
            result[k] += x[i] * y[j] - x[j] * y[i]
    return result


def hypercomplex(h: Row, r: Row, t: Row, shared: Shared, *, size: int) -> float:
    times = quaternion_product if size == 4 else octonion_product
    coordinates = zip(*(row.reshape(size, -1).T for row in (h, r, t)), strict=True)
    return float(sum(times(x, y) @ z for x, y, z in coordinates))


def quate(h: Row, r: Row, t: Row, shared: Shared) -> float:
    norms = np.sqrt((r.reshape(4, -1) ** 2).sum(0))
    return hypercomplex(h, r / np.tile(norms, 4), t, shared, size=4)


def duale(h: Row, r: Row, t: Row, shared: Shared) -> float:
    total = 0.0
    for x, y, z in zip(*(row.reshape(8, -1).T for row in (h, r, t)), strict=True):
        a, b, c, d = x[:4], x[4:], y[:4], y[4:]
        d = d - (d @ c) / (c @ c) * c
        c = c / np.sqrt(c @ c)
        total += quaternion_product(a, c) @ z[:4]
        total += (quaternion_product(a, d) + quaternion_product(b, c)) @ z[4:]
    return float(total)


def blade_product(a: int, b: int, p: int) -> tuple[int, int]:
    """Multiply two products of basis vectors, each a set of bits; return sign and product.

    e_i e_j = -e_j e_i, and e_i e_i is 1 for i < p, else -1.
    """
    sign = 1
    for i in range(b.bit_length()):
        if b >> i & 1:
            passed = bin(a >> (i + 1)).count("1")  # e_i moves left past these.
            sign *= -1 if passed % 2 else 1
            sign *= -1 if a >> i & 1 and i >= p else 1
            a ^= 1 << i
    return sign, a


def clifford_product(x: Mapping[int, float], y: Mapping[int, float], p: int) -> dict[int, float]:
    """Multiply two elements of Cl(p, q), given by their coefficients for each blade."""
    result: dict[int, float] = {}
    for (a, left), (b, right) in product(x.items(), y.items()):
        sign, blade = blade_product(a, b, p)
        result[blade] = result.get(blade, 0.0) + sign * left * right
    return result


def keci(h: Row, r: Row, t: Row, shared: Shared, *, p: int, q: int) -> float:
    blades = [0, *(1 << i for i in range(p + q))]
    weights = np.array([1.0, *shared.get("coefficients", np.ones(p + q))])
    total = 0.0
    for x, y, z in zip(*(row.reshape(1 + p + q, -1).T for row in (h, r, t)), strict=True):
        left, right = (dict(zip(blades, weights * part, strict=True)) for part in (x, y))
        found = clifford_product(left, right, p)
        total += sum(found[blade] * value for blade, value in zip(blades, z, strict=True))
    return float(total)


def transe(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return -float(np.sqrt(np.sum((h + r - t) ** 2)))


def transe_l1(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return -float(np.sum(np.abs(h + r - t)))


def transh(h: Row, r: Row, t: Row, shared: Shared) -> float:
    shift, normal = r.reshape(2, -1)
    normal = normal / np.sqrt(normal @ normal)
    onto = np.eye(len(h)) - np.outer(normal, normal)
    difference = onto @ h + onto @ shift - onto @ t
    return -float(np.sqrt(difference @ difference))


def mure(h: Row, r: Row, t: Row, shared: Shared) -> float:
    stretch, shift = r.reshape(2, -1)
    difference = np.diag(stretch) @ h[:-2] + shift - t[:-2]
    return float(-(difference @ difference) + h[-2] + t[-1])


def rotate(h: Row, r: Row, t: Row, shared: Shared) -> float:
    difference = as_complex(h) * np.exp(1j * r) - as_complex(t)
    return -float(np.sqrt(np.sum(np.abs(difference) ** 2)))


def rotate_moduli(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return -float(np.sum(np.abs(as_complex(h) * np.exp(1j * r) - as_complex(t))))


def protate(h: Row, r: Row, t: Row, shared: Shared) -> float:
    return -2 * float(np.sum(np.abs(np.sin((h + r - t) / 2))))


def normalised(values: Row) -> Row:
    return (values - np.mean(values)) / np.sqrt(np.var(values) + 1e-5)


def conve(h: Row, r: Row, t: Row, shared: Shared, *, height: int | None) -> float:
    if height is None:
        height = max(n for n in range(1, len(h)) if n * n <= len(h) and len(h) % n == 0)
    image = normalised(np.concatenate([h.reshape(height, -1), r.reshape(height, -1)]))
    filters, bias = shared["filters"], shared["filter_bias"]
    rows, columns = image.shape[0] - 2, image.shape[1] - 2
    maps = np.empty((len(filters), rows, columns))
    for y in range(rows):
        for x in range(columns):
            maps[:, y, x] = (filters * image[y : y + 3, x : x + 3]).sum(axis=(1, 2)) + bias
    hidden = np.maximum(normalised(maps), 0).ravel() @ shared["projection"]
    return float(np.maximum(normalised(hidden) * shared["gain"] + shared["bias"], 0) @ t)


PAPER: dict[str, Paper] = {
    "distmult": distmult,
    "cp": cp,
    "simple": simple,
    "rescal": rescal,
    "tucker": tucker,
    "tucker:5": tucker,
    "complex": complex_,
    "qmult": partial(hypercomplex, size=4),
    "quate": quate,
    "duale": duale,
    "omult": partial(hypercomplex, size=8),
    "keci": partial(keci, p=0, q=1),
    "keci:0,0": partial(keci, p=0, q=0),
    "keci:1,0": partial(keci, p=1, q=0),
    "keci:2,3": partial(keci, p=2, q=3),
    "ckeci": partial(keci, p=0, q=1),
    "ckeci:3,0": partial(keci, p=3, q=0),
    "transe": transe,
    "transe-l1": transe_l1,
    "transh": transh,
    "mure": mure,
    "rotate": rotate,
    "rotate-moduli": rotate_moduli,
    "protate": protate,
    "conve": partial(conve, height=None),
    "conve:4": partial(conve, height=4),
}
"""By the name that `--model` takes; some with arguments."""
