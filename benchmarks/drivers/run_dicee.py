"""dicee: its CPU trainer with NegSample, its evaluators, and its sharded table on gloo.

The trainer of that table (torchFSDP) runs on CUDA only; both are driven here as it drives them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dicee.dataset_classes import TriplePredictionDataset
from dicee.evaluation.evaluator import Evaluator
from dicee.models.complex import ComplEx
from dicee.models.fsdp_models import RowWiseShardedEmbedding, _LocalSparseAdam
from dicee.trainer.torch_trainer import TorchTrainer
from measuring import Window, main, on_ranks, together, triples_of, zipf_batches


class _Enough(Exception):
    pass


def _model(given: dict[str, Any], num_entities: int, num_relations: int) -> ComplEx:
    rates = dict.fromkeys(("input_dropout_rate", "hidden_dropout_rate", "feature_map_dropout_rate"), 0.0)
    settings = {
        "model": "ComplEx",
        "embedding_dim": given["dim"],
        "num_entities": num_entities,
        "num_relations": num_relations,
        "num_tokens": None,
        "batch_size": given.get("batch_size"),
        "learning_rate": 0.01,
        "optim": "Adam",
        "kernel_size": 3,
        "num_of_output_channels": 3,
        "weight_decay": 0.0,
        "normalization": None,
        "init_param": None,
        "scoring_technique": given["technique"],
        "byte_pair_encoding": False,
    }
    return ComplEx(settings | rates)


def training(given: dict[str, Any]) -> dict[str, Any]:
    """Train ComplEx, each positive with negatives of its own, by dicee's trainer on one process."""
    triples, num_entities, num_relations = triples_of(given)
    dataset = TriplePredictionDataset(triples, num_entities, num_relations, given["negatives"])
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=given["batch_size"], shuffle=True, collate_fn=dataset.collate_fn
    )
    settings = SimpleNamespace(random_seed=0, gpus=None, max_epochs=1000, gradient_accumulation_steps=1)
    trainer, window = TorchTrainer(settings, callbacks=[]), Window(given)
    step = trainer.forward_backward_update

    def counted(*batch: Any) -> Any:
        loss = step(*batch)
        if window.step():
            raise _Enough
        return loss

    trainer.forward_backward_update = counted
    with suppress(_Enough):
        trainer.fit(_model(given, num_entities, num_relations), train_dataloaders=loader)
    return window.figures(items_a_step=given["batch_size"])


def evaluation(given: dict[str, Any]) -> dict[str, Any]:
    """Rank some test triples, filtered by all splits, as models of a technique are; a call is a step.

    NegSample asks for heads too; KvsAll asks for heads as tails of inverse relations, triples of their own.
    """
    with np.load(given["graph"]) as graph:
        num_entities, num_relations = int(graph["num_entities"]), int(graph["num_relations"])
        splits = [graph[name].astype(np.int64) for name in ("train", "valid", "test")]
    inverse = given["technique"] == "KvsAll"
    if inverse:
        splits = [np.concatenate([part, part[:, ::-1] + [0, num_relations, 0]]) for part in splits]
        num_relations *= 2
    tails, heads = defaultdict(list), defaultdict(list)
    for head, relation, tail in np.concatenate(splits).tolist():
        tails[head, relation].append(tail)
        heads[relation, tail].append(head)
    evaluator = Evaluator(
        SimpleNamespace(eval_model="test", batch_size=256, scoring_technique=given["technique"])
    )
    evaluator.er_vocab, evaluator.re_vocab = tails, heads
    evaluator.num_entities, evaluator.num_relations = num_entities, num_relations
    model = _model(given, num_entities, num_relations).eval()
    drawn = np.random.default_rng(0).permutation(splits[2])[: given["triples"]]
    window = Window(given)
    window.begin()
    while True:
        if inverse:
            evaluator.evaluate_lp_k_vs_all(model, drawn, form_of_labelling="EntityPrediction")
        else:
            evaluator.evaluate_lp(model, drawn, "")
        if window.step():
            return window.figures(items_a_step=len(drawn) * (1 if inverse else 2))


def lookup(given: dict[str, Any]) -> dict[str, Any]:
    """Look rows up on two ranks, square their distance from a target, and update them; see run_torch."""
    return together(on_ranks(_lookup, given))


def _lookup(given: dict[str, Any]) -> dict[str, Any]:
    table = _table(given, torch.float32)
    optimizer = _LocalSparseAdam(table.local_rows, given["dim"], lr=0.01, device=table.device)
    target, window = torch.randn(given["ids"], given["dim"]), Window(given)
    for ids in zipf_batches(given, dist.get_rank()):
        (table(torch.from_numpy(ids)) - target).square().mean().backward()
        optimizer.step(table.weight, table.weight.grad)
        table.weight.grad = None
        if window.step():
            break
    return window.figures(items_a_step=given["ids"])


def traffic(given: dict[str, Any]) -> dict[str, Any]:
    """Count the bytes that leave a rank for another in the lookups of one batch, there and back.

    Its trainer looks up heads, then tails. NegSample makes whole triples of negatives; FSDP1vsSample asks
    about each positive once, with as many tails. Negatives are drawn evenly.
    """
    ranks = on_ranks(_traffic, given)
    sent = {kind: sum(rank[kind] for rank in ranks) / given["batch_size"] for kind in ranks[0]}
    return {"bytes": sent, "steps": 1}


def _traffic(given: dict[str, Any]) -> dict[str, float]:
    table = _table(given, getattr(torch, given["dtype"]))
    sent = _counted(table.rank)
    source = np.random.default_rng(dist.get_rank())
    num_positives, candidates = given["batch_size"] // dist.get_world_size(), 1 + given["negatives"]
    num_heads = num_positives * (candidates if given["technique"] == "NegSample" else 1)
    total = torch.zeros(())
    for count in (num_heads, num_positives * candidates):
        ids = torch.from_numpy(source.integers(given["entities"], size=count))
        total = total + table(ids).sum()
    total.backward()
    return dict(sent)


def _table(given: dict[str, Any], dtype: torch.dtype) -> RowWiseShardedEmbedding:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    return RowWiseShardedEmbedding(given["entities"], given["dim"], rank, ranks, device, weight_dtype=dtype)


def _counted(rank: int) -> Counter[str]:
    """Return what will count the bytes that all_to_all_single sends to others, by what they are."""
    sent: Counter[str] = Counter()
    original = dist.all_to_all_single

    def counted(output: torch.Tensor, rows: torch.Tensor, **splits: Any) -> None:
        if counts := splits.get("input_split_sizes"):  # Without them, it tells others these counts.
            kind = ("gradients" if _backward() else "rows") if rows.dim() == 2 else "ids"
            elsewhere = sum(count for peer, count in enumerate(counts) if peer != rank)
            sent[kind] += elsewhere * rows[0].numel() * rows.element_size()
        original(output, rows, **splits)

    dist.all_to_all_single = counted
    return sent


def _backward() -> bool:
    return torch._C._current_autograd_node() is not None


if __name__ == "__main__":
    tasks = {"training": training, "evaluation": evaluation, "lookup": lookup, "traffic": traffic}
    main(tasks, "dicee", "torch", "numpy")
