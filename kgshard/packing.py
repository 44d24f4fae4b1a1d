"""How rows and gradients travel: as they are, or in half the bytes.

float16 has the finer mantissa but a short range, so each row brings the exponent of its largest value along,
in a column more: nothing overflows, and nothing vanishes but what is 2**-24 of that.

Shape letters: U rows, D floats for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENTS = (-126, 127)
"""Of float32's normal numbers: powers of two by which one can multiply and divide."""


def pack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float[U, D] rows as they travel.

    Args:
        rows: float32 or bfloat16.
        dtype: float32 leaves them as they are; bfloat16 rounds to the nearest; float16 does too, and makes
            [U, D + 1] of them.
    """
    if dtype == torch.float32:
        return rows
    if dtype == torch.bfloat16:
        return rows.bfloat16()
    values = rows.float()
    largest = values.abs().amax(dim=1, keepdim=True)
    exponents = torch.frexp(largest).exponent.clamp_(*_EXPONENTS)
    return torch.cat([torch.ldexp(values, -exponents), exponents], dim=1).half()


def unpack(packed: Tensor, sent_as: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return what `pack` made of rows for `sent_as`, in the dtype that the receiver wants."""
    if sent_as != torch.float16:
        return packed.to(dtype)
    values = packed.float()
    return torch.ldexp(values[:, :-1], values[:, -1:]).to(dtype)
