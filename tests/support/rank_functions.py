"""What runs on a rank in tests of exchanges, tables and embeddings. Every function takes an Exchange first.

All are module-level, so threads and gloo processes run the same ones; arguments and results can be pickled.

Shape letters: I requested ids, D floats for each row, N rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from worlds import ThreadExchange

from kgshard.distributed import current_exchange
from kgshard.embedding import RowWiseShardedEmbedding
from kgshard.errors import ExchangeMismatchError
from kgshard.exchange import Exchange, Kind
from kgshard.partition import RowPartition
from kgshard.routing import RowGradient
from kgshard.table import ShardedTable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


# --- exchange

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
WORDS = [b"", b"\x00\xffafter a NUL", "vocabulaire é".encode()]


def split_matrices(world_size: int, number: int, *, seed: int) -> list[Ints]:
    """Return random split matrices [sender, receiver]; many hold all-zero rows and columns."""
    source = np.random.default_rng([seed, world_size])
    matrices = []
    for _ in range(number):
        matrix = source.integers(0, 6, size=(world_size, world_size))
        matrix[source.random(world_size) < 0.3] = 0
        matrix[:, source.random(world_size) < 0.3] = 0
        matrices.append(matrix)
    return matrices


def payload(key: list[int], sender: int, receiver: int, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return what `sender` sends `receiver`: anyone can draw it alone, every dtype holds it exactly."""
    numbers = np.random.default_rng([*key, sender, receiver]).integers(0, 100, size=(count, width))
    values = torch.from_numpy(numbers).to(dtype)
    return values if width > 1 else values[:, 0]


def exchange_matrices(exchange: Exchange, matrices: list[Ints], width: int, dtype: torch.dtype) -> list[bool]:
    """Do one all_to_all for each split matrix [sender, receiver]; say whether each brought the right rows."""
    me, outcomes = exchange.rank, []
    for key, matrix in enumerate(matrices):
        send = [payload([key], me, to, int(n), width, dtype) for to, n in enumerate(matrix[me])]
        want = [payload([key], of, me, int(n), width, dtype) for of, n in enumerate(matrix[:, me])]
        expected = matrix[:, me].tolist() if key % 2 else None
        got = exchange.all_to_all(send, expected)
        same = [g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want, strict=True)]
        outcomes.append(len(got) == exchange.world_size and all(same))
    return outcomes


@dataclass(frozen=True)
class Fault:
    """How one rank departs from an all_to_all in which everyone sends everyone one float32 pair."""

    rank: int
    """Who departs."""
    sends: tuple[int, int] | None = None
    """(receiver, rows it sends there instead of 1)."""
    expects: tuple[int, int] | None = None
    """(sender, rows it expects from there instead of 1)."""
    dtype: torch.dtype = torch.float32
    width: int = 2
    calls_before: int = 0
    """All_to_all calls that only this rank believes it has made."""


FLOAT, DOUBLE, INT = torch.float32, torch.float64, torch.int64
FAULTS = {
    "sends nothing": (Fault(1, sends=(0, 0)), "rank 1→0: announced 0, expected 1"),
    "sends too much": (Fault(1, sends=(0, 3)), "rank 1→0: announced 3, expected 1"),
    "sends itself too much": (Fault(2, sends=(2, 2)), "rank 2→2: announced 2, expected 1"),
    "sends the last rank too much": (Fault(0, sends=(2, 2)), "rank 0→2: announced 2, expected 1"),
    "expects more": (Fault(2, expects=(1, 5)), "rank 1→2: announced 1, expected 5"),
    "expects nothing": (Fault(0, expects=(2, 0)), "rank 2→0: announced 1, expected 0"),
    "float64": (Fault(1, dtype=DOUBLE), f"rank 1→0: announced dtype {DOUBLE}, expected {FLOAT}"),
    "bfloat16": (
        Fault(2, dtype=torch.bfloat16),
        f"rank 2→0: announced dtype {torch.bfloat16}, expected {FLOAT}",
    ),
    "rank 0 alone has int64": (Fault(0, dtype=INT), f"rank 1→0: announced dtype {FLOAT}, expected {INT}"),
    "wider rows": (Fault(1, width=3), "rank 1→0: announced width 3, expected 2"),
    "flat rows": (Fault(2, width=1), "rank 2→0: announced width 1, expected 2"),
    "a call ahead": (Fault(1, calls_before=1), "rank 1→0: announced call 1, expected 0"),
    "two calls ahead": (Fault(2, calls_before=2), "rank 2→0: announced call 2, expected 0"),
}


def meet_fault(exchange: Exchange, fault: Fault | None) -> str:
    """Make one all_to_all, perhaps departing from it; return the words of the refusal, or "agreed"."""
    departs = fault if fault is not None and fault.rank == exchange.rank else Fault(-1)
    sends, expects = [1] * exchange.world_size, [1] * exchange.world_size
    if departs.sends is not None:
        sends[departs.sends[0]] = departs.sends[1]
    if departs.expects is not None:
        expects[departs.expects[0]] = departs.expects[1]
    if departs.calls_before:
        exchange._num_calls += departs.calls_before
    shape = () if departs.width == 1 else (departs.width,)
    try:
        exchange.all_to_all([torch.ones(n, *shape, dtype=departs.dtype) for n in sends], expects)
    except ExchangeMismatchError as error:
        return str(error)
    return "agreed"


def calls_in_another_order(exchange: Exchange, confused: int) -> str:
    """Send ids, then rows; rank `confused` the other way round. Return the words of the refusal."""
    calls = [torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4)]
    try:
        for chunk in calls[::-1] if exchange.rank == confused else calls:
            exchange.all_to_all([chunk] * exchange.world_size)
    except ExchangeMismatchError as error:
        return str(error)
    return "agreed"


def exchanges_in_another_order(exchange: Exchange, confused: int) -> str:
    """Use one exchange twice; rank `confused` takes another of the same ranks for its second call."""
    other = second_exchange(exchange)
    chunks = [torch.zeros(1, 4)] * exchange.world_size
    try:
        exchange.all_to_all(chunks)
        (other if exchange.rank == confused else exchange).all_to_all(chunks)
    except ExchangeMismatchError as error:
        return str(error)
    return "agreed"


def second_exchange(exchange: Exchange) -> Exchange:
    """Return another exchange among the same ranks."""
    if isinstance(exchange, ThreadExchange):
        return ThreadExchange(exchange._world, exchange.rank)
    return current_exchange(exchange.device)


def gather_words(exchange: Exchange, words: list[bytes]) -> list[bytes]:
    """Say words[rank]; return what everyone said."""
    return exchange.gather_bytes(words[exchange.rank])


def stumble(exchange: Exchange, who: int | None, error: Exception) -> tuple[str, str]:
    """Share a failure of rank `who`; return the kind and the words of what came of it here."""
    try:
        exchange.share_failure(error if exchange.rank == who else None)
    except Exception as raised:
        return type(raised).__name__, str(raised)
    return "nothing", ""


def push_with_a_row_missing(exchange: Exchange, forgetful: int) -> tuple[str, bool]:
    """Fetch, then push and update, rank `forgetful` one gradient short.

    Returns:
        The words of the refusal, and whether this rank's rows are as before.
    """
    table = sharded(exchange, torch.arange(12.0).view(6, 2))
    before = table.weight.clone()
    lookup = table.fetch(torch.arange(6))
    gradients = torch.ones_like(lookup.rows)
    words = "agreed"
    if exchange.rank == forgetful:
        lookup.route.counts[0] -= 1
        gradients = gradients[1:]
    try:
        owned = table.push(lookup, gradients)
        table.weight.index_add_(0, owned.rows, owned.values)
    except ExchangeMismatchError as error:
        words = str(error)
    return words, torch.equal(table.weight, before)


def fetch_with_a_row_missing(exchange: Exchange, short: int, monkey: pytest.MonkeyPatch) -> str:
    """Fetch, rank `short` answering rank 0 a row too few; return the words of the refusal."""
    table = sharded(exchange, torch.zeros(6, 2))
    swap = exchange.swap

    def send_less(
        rows: Tensor, sends: Sequence[int], expected: Sequence[int] | None = None, *, kind: Kind, table: int
    ) -> tuple[Tensor, list[int]]:
        if kind == "rows":
            rows, sends = rows[1:], [sends[0] - 1, *sends[1:]]
        return swap(rows, sends, expected, kind=kind, table=table)

    if exchange.rank == short:
        monkey.setattr(exchange, "swap", send_less)
    try:
        table.fetch(torch.arange(6))
    except ExchangeMismatchError as error:
        return str(error)
    return "agreed"


def sum_with_a_fault(exchange: Exchange, who: int | None, fault: str) -> str:
    """Sum three floats over ranks, rank `who` departing from it; return the refusal, or "agreed"."""
    departs = who == exchange.rank
    tensor = torch.ones(3, dtype=torch.float64 if departs and fault == "dtype" else torch.float32)
    try:
        if departs and fault == "call":
            exchange.all_to_all([tensor] * exchange.world_size)
        else:
            exchange.all_reduce(tensor[: 2 if departs and fault == "size" else 3])
    except ExchangeMismatchError as error:
        return str(error)
    return "agreed"


def sum_of_any_size(exchange: Exchange, values: list[Floats], small_bytes: int) -> tuple[Floats, bool]:
    """Sum values[rank] over ranks, tensors above `small_bytes` by torch's own all_reduce.

    Returns:
        The sum, and whether torch's all_reduce made it.
    """
    with (
        patch("kgshard.distributed._SMALL_BYTES", small_bytes),
        patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as theirs,
    ):
        total: Floats = exchange.all_reduce(torch.from_numpy(values[exchange.rank].copy())).numpy()
    return total, theirs.called


# --- table


def sharded(exchange: Exchange, whole: Tensor) -> ShardedTable:
    """Return this rank's part of a table."""
    partition = RowPartition(len(whole), exchange.world_size)
    rows = partition.rows_of(exchange.rank)
    return ShardedTable(whole[rows.start : rows.stop].clone(), partition, exchange)


@dataclass(frozen=True)
class TableUse:
    """What a rank saw of a sharded table."""

    fetched: Floats
    """[I, D] rows of the ids it asked for."""
    summed: Floats
    """[N, D] gradient that came to this rank, at its global rows; zeros elsewhere."""
    touched: Ints
    """Global rows that got a gradient here."""


def use_table(exchange: Exchange, whole: Floats, ids: list[Ints], gradients: list[Floats]) -> TableUse:
    """Fetch ids[rank] and push gradients[rank] [I, D] back."""
    table = sharded(exchange, torch.from_numpy(whole))
    lookup = table.fetch(torch.from_numpy(ids[exchange.rank]))
    per_id = torch.from_numpy(gradients[exchange.rank])
    per_row = torch.zeros_like(lookup.rows).index_add_(0, lookup.inverse, per_id)
    owned = table.push(lookup, per_row)
    assert owned.rows.tolist() == sorted(set(owned.rows.tolist()))
    summed = torch.zeros(len(whole), whole.shape[1], dtype=torch.float64)
    touched = owned.rows + table.rows.start
    summed[touched] = owned.values
    return TableUse(lookup.rows[lookup.inverse].numpy(), summed.numpy(), touched.numpy())


def replicate_rows(exchange: Exchange, whole: Floats, ids: Ints) -> Floats:
    """Bring the rows of the same ids to every rank."""
    rows: Floats = sharded(exchange, torch.from_numpy(whole)).replicate(torch.from_numpy(ids)).numpy()
    return rows


def fetch_two_tables(exchange: Exchange, confused: int) -> str:
    """Fetch from one table and then from another of equal shape; rank `confused` the other way round."""
    tables = [sharded(exchange, torch.zeros(6, 2)), sharded(exchange, torch.ones(6, 2))]
    try:
        for table in tables[::-1] if exchange.rank == confused else tables:
            table.fetch(torch.arange(6))
    except ExchangeMismatchError as error:
        return str(error)
    return "agreed"


def gathered(table: ShardedTable) -> Floats:
    """Return float64[N, D]: all rows, on every rank."""
    rows: Floats = table.replicate(torch.arange(table.partition.num_rows)).double().numpy()
    return rows


def swapped_rows(gradient: RowGradient) -> RowGradient:
    """Return the same rows with the gradients of the first two exchanged."""
    order = torch.arange(len(gradient.rows))
    if len(order) > 1:
        order[[0, 1]] = order[[1, 0]]
    return RowGradient(gradient.rows, gradient.values[order])


# --- embedding


def embed(
    exchange: Exchange, whole: Floats, ids: list[Ints], gradients: list[Floats], dtype: torch.dtype
) -> dict[str, Any]:
    """Look up ids[rank] (of any shape) in a module, and send gradients[rank] back through autograd."""
    module = module_with(exchange, whole, dtype)
    rows = module(torch.from_numpy(ids[exchange.rank]))
    rows.backward(torch.from_numpy(gradients[exchange.rank]).to(dtype))
    gradient = module.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    return {
        "rows": rows.detach().double().numpy(),
        "row_dtype": rows.dtype,
        "gradient": gradient.to_dense().double().numpy(),
        "touched": sorted(gradient._indices()[0].tolist()),
        "owns": range(module.start_row, module.end_row),
    }


def module_with(exchange: Exchange, whole: Floats, dtype: torch.dtype) -> RowWiseShardedEmbedding:
    """Return a module that holds this rank's rows of `whole`, in `dtype`."""
    module = RowWiseShardedEmbedding(
        len(whole),
        whole.shape[1],
        exchange.rank,
        exchange.world_size,
        "cpu",
        torch.float32,
        exchange=exchange,
    )
    module = module.to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(whole[module.start_row : module.end_row]))
    return module


def train_embedding(exchange: Exchange, whole: Floats, ids: list[list[Ints]], lr: float) -> Floats:
    """Train rows towards 1 with torch.optim.SparseAdam, ids[step][rank] at a time; return all rows.

    Heads and tails are looked up apart, as scoring functions do.
    """
    module = module_with(exchange, whole, torch.float64)
    optimizer = torch.optim.SparseAdam([module.weight], lr=lr)
    for step in ids:
        heads, tails = torch.from_numpy(step[exchange.rank]).chunk(2)
        optimizer.zero_grad()
        loss = (module(heads) - 1).square().sum() + (module(tails) - 1).square().sum()
        loss.backward()
        optimizer.step()  # type: ignore[no-untyped-call]
    return gathered(module.table)


def embed_on_ranks_that_drift(exchange: Exchange) -> str:
    """Make a module for the wrong rank; return the words of the refusal."""
    try:
        RowWiseShardedEmbedding(4, 2, exchange.rank + 1, exchange.world_size, "cpu", exchange=exchange)
    except ValueError as error:
        return str(error)
    return "accepted"


def initial_rows(exchange: Exchange, num_rows: int, dim: int, seed: int) -> Tensor:
    """Return the whole table of a fresh module with the default dtype."""
    module = RowWiseShardedEmbedding(
        num_rows, dim, exchange.rank, exchange.world_size, "cpu", seed=seed, exchange=exchange
    )
    assert module.weight.dtype == torch.bfloat16
    return module.table.replicate(torch.arange(num_rows))


def default_group_embedding(exchange: Exchange) -> dict[str, Any]:
    """Use the module as a reference user does: no exchange given, ids of any shape, nn.Module inside out."""
    module = RowWiseShardedEmbedding(
        7, 3, exchange.rank, exchange.world_size, torch.device("cpu"), torch.float32
    )
    dense = nn.Embedding(7, 3, _weight=module.table.replicate(torch.arange(7)))
    ids = torch.tensor([[6, 0], [3, exchange.rank]])
    rows, truth = module(ids), dense(ids)
    (rows.square().sum()).backward()
    (truth.square().sum()).backward()
    assert dense.weight.grad is not None
    total = exchange.all_reduce(dense.weight.grad.clone())[module.start_row : module.end_row]
    assert module.weight.grad is not None
    return {
        "rows": torch.equal(rows, truth),
        "gradient": torch.allclose(module.weight.grad.to_dense(), total),
    }
