"""Whether all ranks ask for the same table and optimizer: compared before any of them makes its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kgshard.errors import ConfigError
from kgshard.exchange import Exchange
from kgshard.sharded_model.deferred import DeferredEmbedding
from kgshard.sharded_model.entity_optimizer import MakeRowOptimizer

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""What the repr of an object says that differs in every process."""


def refusing_together(exchange: Exchange) -> AbstractContextManager[None]:
    """Let every rank stop where one raises in a `with` block without collective calls.

    Raises:
        Exception: The rank's own, on the rank that failed.
        RankFailureError: Elsewhere, naming that rank and its error.
    """
    return nullcontext() if exchange.world_size == 1 else exchange.sharing_failure(Exception)


def request_of(table: DeferredEmbedding, make: MakeRowOptimizer, seed: int | None) -> dict[str, Any]:
    """Return what all ranks must ask for alike, by name. Devices may differ."""
    settings = {name: value for name, value in make.keywords.items() if name != "device"}
    return {
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": table.dtype,
        "optimizer_cls": make.func,
        "seed": seed,
        **settings,
    }


def check_same_request(exchange: Exchange, request: Mapping[str, Any]) -> None:
    """Compare what each rank asks for, by the words of its `repr`. A collective call.

    Args:
        exchange: The other ranks.
        request: What must be the same everywhere, by name.

    Raises:
        ConfigError: Ranks differ. On every rank, naming rank 0, the first other rank and both their values.
    """
    if exchange.world_size == 1:
        return
    mine = {name: _ADDRESS.sub("", repr(request[name])) for name in sorted(request)}
    first, *others = [json.loads(words) for words in exchange.gather_bytes(json.dumps(mine).encode())]
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            wanted, found = first.get(name, "not set"), other.get(name, "not set")
            if wanted != found:
                raise ConfigError(
                    f"setup_fsdp_training: {name} is {wanted} on rank 0 and {found} on rank {rank};"
                    " all ranks must ask for the same table and optimizer"
                )
