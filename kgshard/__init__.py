"""kgshard: train knowledge-graph embeddings on row-sharded tables; merge, export, index and query them.

Everything here is loaded when first used, so that importing kgshard costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kgshard_tools.answers import load as load
    from kgshard_tools.export import export as export
    from kgshard_tools.index.build import build_index as build_index
    from kgshard_tools.info import info as info
    from kgshard_tools.merge import merge_shards as merge_shards
    from kgshard_tools.overlay import fold_in as fold_in
    from kgshard_tools.questions import Question as Question
    from kgshard_tools.questions import Wanted as Wanted
    from kgshard_tools.reshard import reshard as reshard
    from kgshard_tools.verify import verify as verify

    from kgshard.api import evaluate as evaluate
    from kgshard.api import plan as plan
    from kgshard.api import train as train
    from kgshard.config import TrainConfig as TrainConfig
    from kgshard.embedding import RowWiseShardedEmbedding as RowWiseShardedEmbedding
    from kgshard.errors import KgshardError as KgshardError
    from kgshard.errors import ShardError as ShardError
    from kgshard.errors import UnknownEntityError as UnknownEntityError
    from kgshard.errors import UnknownRelationError as UnknownRelationError
    from kgshard.runs import open_run as open_run
    from kgshard.sharded_model.lifecycle import FSDPShardedEntityModel as FSDPShardedEntityModel
    from kgshard.sharded_model.lifecycle import (
        create_fsdp_sharded_model_class as create_fsdp_sharded_model_class,
    )
    from kgshard.start import ingest as ingest

_WHERE = {
    "evaluate": "kgshard.api",
    "plan": "kgshard.api",
    "train": "kgshard.api",
    "TrainConfig": "kgshard.config",
    "RowWiseShardedEmbedding": "kgshard.embedding",
    "KgshardError": "kgshard.errors",
    "ShardError": "kgshard.errors",
    "UnknownEntityError": "kgshard.errors",
    "UnknownRelationError": "kgshard.errors",
    "open_run": "kgshard.runs",
    "FSDPShardedEntityModel": "kgshard.sharded_model.lifecycle",
    "create_fsdp_sharded_model_class": "kgshard.sharded_model.lifecycle",
    "ingest": "kgshard.start",
    "load": "kgshard_tools.answers",
    "export": "kgshard_tools.export",
    "build_index": "kgshard_tools.index.build",
    "info": "kgshard_tools.info",
    "merge_shards": "kgshard_tools.merge",
    "fold_in": "kgshard_tools.overlay",
    "Question": "kgshard_tools.questions",
    "Wanted": "kgshard_tools.questions",
    "verify": "kgshard_tools.verify",
    "reshard": "kgshard_tools.reshard",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kgshard' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_WHERE]
