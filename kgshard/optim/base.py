"""What all optimizers of touched rows share: where state lies, its dtypes, and one update in blocks of rows.

State lives beside the table or on another device (`device="cpu"` keeps it in host memory while the
table is on a GPU); gradients then travel to the state and updates travel back. Tables and state may be
bfloat16; arithmetic is float32, and what is written back to bfloat16 is rounded once.

Shape letters: U touched rows, C values for each row, N rows of the table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from kgshard.errors import ConfigError
from kgshard.optim.rounding import random_bits, round_stochastically, stream_key
from kgshard.routing import RowGradient
from kgshard.stages import stage

Rows = Tensor | slice
"""Some rows of a table: int64[U], ascending and distinct, or a range, so that nothing need be copied."""
MakeZeros = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
Rounding = Literal["stochastic", "nearest"]


def zeros_in_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class Storage(TypedDict, total=False):
    """Keywords that every optimizer takes besides its own; `RowOptimizer` says what they mean."""

    device: torch.device | None
    state_dtype: torch.dtype
    rounding: Rounding
    seed: int
    table: str
    first_row: int
    make_zeros: MakeZeros


class RowOptimizer(ABC):
    """Updates the rows of one table in place.

    Attributes:
        weight: The table.
        lr: Learning rate; may be changed between steps, and be 0 then.
        num_steps: Steps made, those included in which no row was touched.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float,
        device: torch.device | None = None,
        state_dtype: torch.dtype = torch.float32,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        table: str = "",
        first_row: int = 0,
        make_zeros: MakeZeros = zeros_in_memory,
    ) -> None:
        """Make zero state for a table.

        Args:
            weight: float[N, ...], any shape where only `step_dense` is used; updated in place.
            lr: Learning rate, > 0.
            device: Where the state lives; by default where the table is.
            state_dtype: float32 or bfloat16.
            rounding: How float32 becomes bfloat16, in the table and in the state. Nearest loses small
                updates for good: a second moment with beta2 = 0.999 never decays.
            seed: Of stochastic rounding: a value's random bits depend on (seed, table, what is rounded,
                step, global row, column), so that they are the same at any world size.
            table: A name that tells tables of one seed apart.
            first_row: The global row of weight[0].
            make_zeros: Makes the state, by shape, dtype and device.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        if not 0 < lr < math.inf:
            raise ConfigError(f"lr must be > 0, got {lr}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"state_dtype must be float32 or bfloat16, got {state_dtype}")
        if rounding not in ("stochastic", "nearest"):
            raise ConfigError(f"rounding must be stochastic or nearest, got {rounding!r}")
        self.weight = weight
        self.lr = lr
        self.device = device or weight.device
        self.state_dtype = state_dtype
        self.rounding = rounding
        self.seed = seed
        self.table = table
        self.first_row = first_row
        self.num_steps = 0
        self._make_zeros = make_zeros

    def state(self) -> dict[str, Tensor]:
        """Return the state by name, not copied: with num_steps, all that the next step needs to know."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "weight"
        }

    @torch.no_grad()
    def step(self, gradient: RowGradient) -> None:
        """Apply one update. A row is touched if it is listed, even where its gradient is zero."""
        self.num_steps += 1
        # Rows are distinct: as many as the table has are all of them, in order.
        whole = len(gradient.rows) == _num_rows(self.weight)
        with stage("optimizer") as work:
            in_one_pass = self._update_in_one_pass(gradient)
            for block in () if in_one_pass else self._blocks(len(gradient.rows)):
                rows = block if whole else gradient.rows[block]
                values = gradient.values[block].to(self.device, torch.float32)
                update = self._update(_on(self.device, rows), values)
                self._add_to_weight(rows, update.to(self.weight.device))
            changed = [self.weight, *self.state().values()]
            row_bytes = sum(_num_columns(tensor) * tensor.element_size() for tensor in changed)
            work.moves(gradient.values.nbytes + 2 * len(gradient.rows) * row_bytes)

    def step_dense(self, gradient: Tensor) -> None:
        """Apply one update to the whole weight, such as a parameter that all rows share.

        Args:
            gradient: float, of the weight's shape, which may be any.

        Raises:
            ValueError: It is of another shape.
        """
        if gradient.shape != self.weight.shape:
            raise ValueError(
                f"gradient: expected shape {tuple(self.weight.shape)}, got {tuple(gradient.shape)}"
            )
        rows = torch.arange(_num_rows(self.weight), device=self.weight.device)
        self.step(RowGradient(rows, _as_matrix(gradient.contiguous())))

    @abstractmethod
    def _update(self, rows: Rows, gradients: Tensor) -> Tensor:
        """Advance the state of some rows; return float32[U, C] to add to them.

        Called once for each block of rows. `gradients` float32[U, C] may be the caller's own: read only.
        """

    def _update_in_one_pass(self, gradient: RowGradient) -> bool:
        """Do all of a step with a kernel where that can be; return whether it was done."""
        return False

    def _zeros(self, shape: torch.Size) -> Tensor:
        return self._make_zeros(shape, self.state_dtype, self.device)

    def _blocks(self, num_rows: int) -> Iterator[slice]:
        """Cut rows into blocks whose temporaries stay in a CPU's cache, and small beside the table."""
        num_values = 2**20 if self.device.type == "cpu" else 2**24
        size = max(1, num_values // max(1, _num_columns(self.weight)))
        return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))

    def _read(self, name: str, rows: Rows) -> Tensor:
        """Return [U, C] to be changed in place, then written: bfloat16 as float32.

        A range of another dtype is the table's own memory; everything else is a copy.
        """
        table = _as_matrix(getattr(self, name))
        part = table[rows] if isinstance(rows, slice) else table.index_select(0, rows)
        return part.float() if part.dtype == torch.bfloat16 else part

    def _write(self, name: str, rows: Rows, values: Tensor) -> None:
        """Store what became of the values that `_read` returned, rounded where need be; change no value."""
        table = _as_matrix(getattr(self, name))
        if table.dtype == torch.bfloat16:
            values = self._to_bfloat16(name, rows, values)
        if not isinstance(rows, slice):
            _copy_rows(table, rows, values)
        elif table[rows].data_ptr() != values.data_ptr():
            table[rows] = values

    def _to_bfloat16(self, name: str, rows: Rows, values: Tensor) -> Tensor:
        if self.rounding == "nearest":
            return values.bfloat16()
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=values.device)
        key = stream_key(self.seed, f"{self.table}/{name}", self.num_steps)
        return round_stochastically(values, random_bits(key, rows + self.first_row, values.shape[1]))

    def _add_to_weight(self, rows: Rows, update: Tensor) -> None:
        if self.weight.dtype == torch.bfloat16:
            self._write("weight", rows, self._read("weight", rows).add_(update))
        elif isinstance(rows, slice):
            _as_matrix(self.weight)[rows].add_(update)
        else:
            _as_matrix(self.weight).index_add_(0, rows, update.to(self.weight.dtype))


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _num_columns(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return the same memory as [N, C]: a vector has one value for each row, a number is one row."""
    return tensor.view(_num_rows(tensor), _num_columns(tensor))


def _on(device: torch.device, rows: Rows) -> Rows:
    return rows if isinstance(rows, slice) else rows.to(device)


def _copy_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Do table[rows] = values, on a CPU in words of 16 bytes where rows consist of such: twice as fast."""
    wide = torch.complex128
    if table.device.type == "cpu" and all(_has_wide_rows(tensor) for tensor in (table, values)):
        table, values = table.view(wide), values.view(wide)
    table.index_copy_(0, rows, values)


def _has_wide_rows(tensor: Tensor) -> bool:
    row_bytes = _num_columns(tensor) * tensor.element_size()
    return tensor.is_contiguous() and row_bytes % 16 == 0 and tensor.data_ptr() % 16 == 0
