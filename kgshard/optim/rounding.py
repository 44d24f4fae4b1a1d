"""float32 to bfloat16 by stochastic rounding, with random bits that know nothing of ranks.

bfloat16 keeps the upper 16 bits of a float32. Rounding to nearest loses every update smaller than half
the distance of two neighbours, always; stochastic rounding goes up with a probability that equals the
part cut off, so that the mean of what is stored is the value itself (Gupta et al., 2015).

Shape letters: U rows, C values for each row.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.bfloat16).max


def stream_key(seed: int, purpose: str, step: int) -> int:
    """Return an int64 that stands for the draws of one purpose in one step."""
    name = f"{seed}/rounding/{purpose}/{step}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def random_bits(key: int, rows: Tensor, num_columns: int) -> Tensor:
    """Draw 16 bits for each value of some rows. A value's bits depend on (key, row, column) only.

    Rows and columns are hashed to two numbers each, and these make up the bits of a value:
    r + r' c + c' mod 2**16. Over all r they are uniform, whatever the others are.

    Args:
        key: From `stream_key`.
        rows: int64[U] global rows.
        num_columns: C.

    Returns:
        int32[U, C] in [0, 65536).
    """
    # Columns are hashed along with the rows, as the ids below zero.
    columns = torch.arange(-1, -1 - num_columns, -1, device=rows.device)
    mixed = _mix(torch.cat([rows, columns]) + key)
    # 16 and 15 bits, so that no int32 below overflows.
    adds, factors = (mixed & 0xFFFF).to(torch.int32), ((mixed >> 32) & 0x7FFF).to(torch.int32)
    of_rows, of_columns = slice(len(rows)), slice(len(rows), None)
    bits = torch.addcmul(adds[of_columns], factors[of_rows, None], factors[of_columns])
    return bits.add_(adds[of_rows, None]).bitwise_and_(0xFFFF)


def _mix(ids: Tensor) -> Tensor:
    """Hash int64 values, overwriting them: the finalizer of MurmurHash3, on which every bit depends."""
    for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
        ids ^= (ids >> 33) & 0x7FFFFFFF  # the mask makes the shift a logical one
        ids *= factor
    ids ^= (ids >> 33) & 0x7FFFFFFF
    return ids


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Return bfloat16 values: toward zero where the part cut off is small against `bits`, else away from it.

    What bfloat16 can hold stays as it is, infinity and NaN too. Finite values stay finite: beyond
    bfloat16's largest number they become that number.

    Args:
        values: float32[U, C].
        bits: int32[U, C], uniform in [0, 65536); overwritten.
    """
    # A carry out of the lower half moves to the next bfloat16 away from zero, whatever the sign is.
    bits += values.view(torch.int32)
    rounded = bits.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    if values.device.type == "cpu" and _all_small(values):
        return rounded
    edge = torch.where(values.isinf(), values, values.clamp(-_LARGEST, _LARGEST)).bfloat16()
    return torch.where(values.abs() < _LARGEST, rounded, edge)


def _all_small(values: Tensor) -> bool:
    """Whether no value is so large, or NaN, that a carry could change its kind."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(low > -_LARGEST) and bool(high < _LARGEST)
