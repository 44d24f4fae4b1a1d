"""PyKEEN: its sLCWA training loop with Adam, and its rank-based evaluator."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from measuring import Window, main, triples_of
from pykeen.evaluation import RankBasedEvaluator
from pykeen.models import ComplEx
from pykeen.training import SLCWATrainingLoop
from pykeen.training.callbacks import TrainingCallback
from pykeen.triples import CoreTriplesFactory


class _Enough(Exception):
    pass


class _Steps(TrainingCallback):
    """Ends the training after the last measured step."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def post_batch(self, *_: Any, **__: Any) -> None:
        if self._window.step():
            raise _Enough


def _model(given: dict[str, Any]) -> tuple[CoreTriplesFactory, ComplEx]:
    triples, num_entities, num_relations = triples_of(given)
    factory = CoreTriplesFactory(torch.from_numpy(triples.astype(np.int64)), num_entities, num_relations)
    # Its dimension counts complex numbers.
    return factory, ComplEx(triples_factory=factory, embedding_dim=given["dim"] // 2, random_seed=0)


def training(given: dict[str, Any]) -> dict[str, Any]:
    """Train ComplEx, each positive with negatives of its own."""
    factory, model = _model(given)
    loop = SLCWATrainingLoop(
        model=model,
        triples_factory=factory,
        optimizer=torch.optim.Adam(model.get_grad_params(), lr=0.001),
        negative_sampler="basic",
        negative_sampler_kwargs={"num_negs_per_pos": given["negatives"]},
    )
    window = Window(given)
    with suppress(_Enough):
        loop.train(
            factory,
            num_epochs=1000,
            batch_size=given["batch_size"],
            callbacks=[_Steps(window)],
            use_tqdm=False,
            use_tqdm_batch=False,
        )
    return window.figures(items_a_step=given["batch_size"])


def evaluation(given: dict[str, Any]) -> dict[str, Any]:
    """Rank some test triples on both sides, filtered by all splits; a call is a step."""
    _, model = _model(given)
    with np.load(given["graph"]) as graph:
        splits = [torch.from_numpy(graph[name].astype(np.int64)) for name in ("train", "valid", "test")]
    drawn = torch.randperm(len(splits[2]), generator=torch.Generator().manual_seed(0))[: given["triples"]]
    evaluator, window = RankBasedEvaluator(filtered=True), Window(given)
    window.begin()
    while True:
        evaluator.evaluate(
            model, splits[2][drawn], additional_filter_triples=splits, batch_size=256, use_tqdm=False
        )
        if window.step():
            return window.figures(items_a_step=2 * len(drawn))


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.ERROR)
    main({"training": training, "evaluation": evaluation}, "pykeen", "torch")
