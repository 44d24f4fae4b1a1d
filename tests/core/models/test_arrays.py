"""The array functions do the same to numpy arrays and torch tensors, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kgshard.models import arrays

FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "concat": (lambda *parts: arrays.concat(parts), [(5, 2), (3,), (4, 1, 1)]),
    "blocks": (lambda x: arrays.concat(arrays.blocks(x, 3)[::-1]), [(2, 12)]),
    "halves": (lambda x: arrays.concat(arrays.halves(x)[::-1]), [(2, 12)]),
    "outer": (arrays.outer, [(5, 2), (3,)]),
    "ones_like": (arrays.ones_like, [(2, 3)]),
    "cos": (arrays.cos, [(2, 3)]),
    "sin": (arrays.sin, [(2, 3)]),
    "relu": (arrays.relu, [(2, 3)]),
    "moduli": (arrays.moduli, [(4, 6)]),
    "moduli of quaternions": (lambda x: arrays.moduli(x, 4), [(4, 8)]),
    "norm": (arrays.norm, [(4, 6)]),
    "unit": (arrays.unit, [(4, 6)]),
    "layer_norm": (arrays.layer_norm, [(4, 6)]),
    "convolve": (arrays.convolve, [(2, 4, 6, 5), (7, 3, 2)]),
    "convolve one": (arrays.convolve, [(6, 5), (7, 3, 3)]),
    "add_product": (lambda b, q, e: arrays.add_product(b, q, e, factor=3), [(4,), (2, 5), (4, 5)]),
    "moduli_distances": (arrays.moduli_distances, [(3, 6), (4, 6)]),
}


def drawn(name: str) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    random = np.random.default_rng(1)
    return [random.standard_normal(shape) for shape in FUNCTIONS[name][1]]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_and_torch_agree(name: str, dtype: type[np.floating[Any]]) -> None:
    inputs = [value.astype(dtype) for value in drawn(name)]
    ours = FUNCTIONS[name][0](*inputs)
    theirs = FUNCTIONS[name][0](*map(torch.from_numpy, inputs)).numpy()
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert ours.dtype == dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-5 if dtype == np.float32 else 1e-12, atol=1e-6)


def test_joined_rows_are_broadcast() -> None:
    one, other, wide = drawn("concat")
    joined = FUNCTIONS["concat"][0](one, other, wide)
    assert joined.shape == (4, 5, 6)
    np.testing.assert_array_equal(joined[2, 3], [*one[3], *other, *wide[2, 0]])


def test_outer_products_run_over_the_second_factor_first() -> None:
    x, y = drawn("outer")
    np.testing.assert_array_equal(arrays.outer(x, y)[4], [a * b for a in x[4] for b in y])


def test_blocks_are_equal_parts_in_order() -> None:
    (x,) = drawn("blocks")
    np.testing.assert_array_equal(np.stack(arrays.blocks(x, 3)), x.reshape(2, 3, 4).swapaxes(0, 1))


def test_a_filter_sees_every_window_unflipped() -> None:
    images, filters = drawn("convolve")
    maps = arrays.convolve(images, filters)
    assert maps.shape == (2, 4, 7, 4, 4)
    for y in range(4):
        for x in range(4):
            expected = (images[1, 2, y : y + 3, x : x + 2] * filters[5]).sum()
            assert maps[1, 2, 5, y, x] == pytest.approx(expected)


def test_layer_norm_is_torchs() -> None:
    (x,) = drawn("layer_norm")
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x), (6,))
    np.testing.assert_allclose(arrays.layer_norm(x), expected.numpy(), rtol=1e-12)
    assert arrays.layer_norm(np.zeros((2, 3))).tolist() == [[0] * 3] * 2


def test_moduli_and_norms_have_gradients_at_nothing() -> None:
    for function in (arrays.moduli, arrays.norm, arrays.unit, lambda x: arrays.moduli(x, 4)):
        x = torch.zeros(2, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert bool(torch.isfinite(gradient).all())


def test_a_row_of_nothing_has_no_direction() -> None:
    assert arrays.unit(np.zeros(3)).tolist() == [0, 0, 0]
    np.testing.assert_allclose(arrays.unit(np.array([3.0, 4.0])), [0.6, 0.8])
