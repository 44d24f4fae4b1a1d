"""Which part of a step is which, and the least work that each part is.

Code marks its parts, and says what they cannot do without:

    with stage("lookup") as work:
        rows = weight.index_select(0, wanted)
        work.moves(2 * rows.nbytes)

That costs a fraction of a microsecond until somebody measures, in a `with measured() as stages` block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass


@dataclass(slots=True)
class Stage:
    """One part of a step, all its visits together."""

    seconds: float = 0.0
    """Wall time, without that of stages inside it."""
    num_bytes: int = 0
    """Read and written, where each value is once."""
    num_flops: int = 0
    """Of matrix products; a multiplication and an addition are two."""

    def moves(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def multiplies(self, num_flops: int) -> None:
        self.num_flops += num_flops


class _Clock:
    """Gives the time since it last looked to the innermost stage."""

    def __init__(self, settle: Callable[[], object]) -> None:
        self.stages: dict[str, Stage] = {}
        self._open: list[Stage] = []
        self._settle = settle
        self._looked = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        self._look()
        self._open.append(self.stages.setdefault(name, Stage()))
        try:
            yield self._open[-1]
        finally:
            self._look()
            self._open.pop()

    def _look(self) -> None:
        self._settle()
        now = time.perf_counter()
        if self._open:
            self._open[-1].seconds += now - self._looked
        self._looked = now


class _Here(threading.local):
    clock: _Clock | None = None


_here = _Here()
_UNMEASURED = nullcontext(Stage())


def stage(name: str) -> AbstractContextManager[Stage]:
    """Return a `with` block that is the named stage, or a part of it; stages may lie inside others."""
    return _here.clock.stage(name) if _here.clock else _UNMEASURED


@contextmanager
def measured(settle: Callable[[], object] = lambda: None) -> Iterator[dict[str, Stage]]:
    """Measure the stages that this thread passes in a `with` block.

    Args:
        settle: Called before each look at the clock: waits for work that was only begun, as on a GPU.

    Yields:
        What was measured so far, by name, in the order of first visits.
    """
    before, clock = _here.clock, _Clock(settle)
    _here.clock = clock
    try:
        yield clock.stages
    finally:
        _here.clock = before
