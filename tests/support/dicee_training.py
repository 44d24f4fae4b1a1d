"""Train a model with dicee and ask it for scores; run by an interpreter that has dicee, without kgshard.

    python dicee_training.py DATA OUT SETTINGS

SETTINGS is JSON for dicee's Namespace. Beside what dicee writes, OUT gets probe_triples.npy, int64[1000, 3],
and probe_scores.npy, float32[1000]: forward_triples, one triple at a time (for Keci with p > 0 it sums over
its batch).
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch


class _NoTokens:
    """In place of a vocabulary that dicee asks a network service for, and uses for byte pairs alone."""

    n_vocab, eot_token = 50257, 50256

    def encode(self, *_: object, **__: object) -> list[int]:
        return [0]


def main(data: str, out: str, settings: dict[str, object]) -> None:
    import_module("tiktoken").get_encoding = lambda *_, **__: _NoTokens()
    torch.set_num_threads(1)
    namespace = import_module("dicee.config").Namespace()
    given = {
        "dataset_dir": data,
        "path_to_store_single_run": out,
        "separator": "\t",
        "trainer": "torchCPUTrainer",
        "eval_model": "test",
        **settings,
    }
    for name, value in given.items():
        setattr(namespace, name, value)
    execute = import_module("dicee.executer").Execute(namespace)
    execute.start()
    model, source = execute.trained_model.eval(), np.random.default_rng(0)
    num_entities, num_relations = (
        len(table.weight) for table in (model.entity_embeddings, model.relation_embeddings)
    )
    limits = (num_entities, num_relations, num_entities)
    triples = np.stack([source.integers(0, limit, 1000) for limit in limits], axis=1)
    with torch.no_grad():
        scores = [model.forward_triples(torch.from_numpy(triples[i : i + 1])).item() for i in range(1000)]
    np.save(Path(out, "probe_triples.npy"), triples)
    np.save(Path(out, "probe_scores.npy"), np.array(scores, np.float32))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
