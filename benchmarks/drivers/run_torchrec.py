"""torchrec: an EmbeddingCollection sharded ROW_WISE on gloo, with fbgemm's fused row-wise Adagrad."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from measuring import Window, main, on_ranks, together, zipf_batches


def lookup(given: dict[str, Any]) -> dict[str, Any]:
    """Look rows up, square their distance from a target, and update them; see run_torch."""
    return together(on_ranks(_lookup, given))


def _lookup(given: dict[str, Any]) -> dict[str, Any]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    dist.init_process_group("gloo")
    table, window = _sharded(given["entities"], given["dim"]), Window(given)
    target, ones = torch.randn(given["ids"], given["dim"]), torch.ones(given["ids"], dtype=torch.int32)
    for ids in zipf_batches(given, dist.get_rank()):
        rows = table(KeyedJaggedTensor(keys=["entity"], values=torch.from_numpy(ids), lengths=ones))
        (rows.wait()["entity"].values() - target).square().mean().backward()
        if window.step():
            break
    return window.figures(items_a_step=given["ids"])


def _sharded(num_rows: int, dim: int) -> torch.nn.Module:
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv, ShardingType

    config = torchrec.EmbeddingConfig(
        name="table", embedding_dim=dim, num_embeddings=num_rows, feature_names=["entity"]
    )
    collection = torchrec.EmbeddingCollection(device=torch.device("meta"), tables=[config])
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    sharders = [EmbeddingCollectionSharder(fused_params=fused)]
    constraints = ParameterConstraints(
        sharding_types=[ShardingType.ROW_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
    )
    ranks = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device="cpu", local_world_size=ranks),
        constraints={"table": constraints},
    )
    return DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=planner.collective_plan(collection, sharders, dist.group.WORLD),
        sharders=sharders,
    )


if __name__ == "__main__":
    main({"lookup": lookup}, "torchrec", "fbgemm-gpu-cpu", "torch")
