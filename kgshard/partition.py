"""Which rank owns which rows of a table: contiguous, balanced ranges."""

from __future__ import annotations

from dataclasses import dataclass

from kgshard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RowPartition:
    """Rows 0..num_rows cut into contiguous blocks, one block for each rank.

    Block sizes differ by at most one row and the larger blocks come first, so
    10 rows over 4 ranks are 3, 3, 2 and 2 rows, and 2 rows over 3 ranks are
    1, 1 and 0: a rank may own nothing.

    Example:
        >>> [RowPartition(10, 4).rows_of(rank) for rank in range(4)]
        [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """

    num_rows: int
    world_size: int

    def __post_init__(self) -> None:
        if self.num_rows < 0:
            raise ConfigError(f"num_rows must be >= 0, got {self.num_rows}")
        if self.world_size < 1:
            raise ConfigError(f"world_size must be >= 1, got {self.world_size}")

    def rows_of(self, rank: int) -> range:
        """Return the global row ids that `rank` owns, as a half-open range."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a world of {self.world_size}")
        size, larger = divmod(self.num_rows, self.world_size)
        start = rank * size + min(rank, larger)
        return range(start, start + size + (rank < larger))

    def boundaries(self) -> list[int]:
        """Return world_size + 1 ascending row ids; rank r owns boundaries[r]..boundaries[r + 1]."""
        return [self.rows_of(rank).start for rank in range(self.world_size)] + [self.num_rows]
