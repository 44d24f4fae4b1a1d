"""How good FB15k-237 is after so many seconds, counted from the start of `kgshard train` on text files.

    python benchmarks/time_to_quality.py [--recipe FILE] [--ranks 1] [--epochs 2 6] [--repeats 3]

One JSON line for each number of epochs; every one is a training of its own, because the learning rate
falls until the last epoch. `mrr` is valid's, filtered by train and valid only, as training itself measures
it, and its time is within `seconds`; `mrr_filtered_by_all` filters by test as well, as most published
validation figures do. The floor is the matrix products of training alone, at the rate this machine reaches in
the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from pathlib import Path

import torch
from common import emit, median, real_graph, run_command
from training import product_rate

from kgshard.data.dataset import SPLITS
from kgshard.exchange import SingleExchange
from kgshard.known import KnownLinks
from kgshard.models.link import SIDES
from kgshard.partition import RowPartition
from kgshard.ranking.metrics import Ranks, ranking_metrics
from kgshard.ranking.ranker import Ranker
from kgshard.runs import Run, open_run
from kgshard.table import ShardedTable

TRAIN_TRIPLES = 272_115
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def mrr_filtered_by_all(run: Run) -> float:
    """Return the MRR of valid with test filtered too, which kgshard itself never does."""
    checkpoint, dataset = run.open_checkpoint(), run.dataset
    rows, relations = (
        torch.from_numpy(table.read(range(table.num_rows)))
        for table in (checkpoint.entities, checkpoint.relations)
    )
    table = ShardedTable(rows, RowPartition(len(rows), 1), SingleExchange())
    known, triples = dataset.known_triples(*SPLITS), dataset.triples("valid")
    links = {side: KnownLinks(known, side, num_relations=dataset.num_relations) for side in SIDES}
    ranks = [Ranker(run.model, table, relations).rank(side, triples, links[side]) for side in SIDES]
    return ranking_metrics(Ranks.join(ranks))["mrr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPES / "fb15k-237-quick.toml")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    graph = real_graph("FB15k-237")
    recipe = tomllib.loads(options.recipe.read_text())
    shape = (2 * recipe["batch_size"], recipe["negatives"], recipe["dim"])
    kgshard = [sys.executable, "-m", "kgshard"]
    for epochs in options.epochs:
        seconds, rates = [], []
        with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
            train = [
                *(*kgshard, "train", str(graph), "-o", f"{folder}/run", "--config", str(options.recipe)),
                *("--epochs", str(epochs), "--eval-every", str(epochs)),
                *("--nproc-per-node", str(options.ranks), "--overwrite", "--json", "-q"),
            ]
            for _ in range(options.repeats):
                rates.append(product_rate(*shape))
                cost, stdout = run_command(train)
                seconds.append(cost.seconds)
            result = json.loads(stdout)
            filtered_by_all = mrr_filtered_by_all(open_run(f"{folder}/run"))
        floor = 3 * 2 * epochs * TRAIN_TRIPLES * recipe["negatives"] * recipe["dim"] / median(rates)
        emit(
            "validation MRR of FB15k-237 after so many seconds",
            epochs=epochs,
            ranks=options.ranks,
            seconds=median(seconds),
            mrr=result["metrics"]["valid"]["mrr"],
            mrr_filtered_by_all=filtered_by_all,
            floor_seconds=floor,
            floor_ratio=median(seconds) / floor,
        )


if __name__ == "__main__":
    main()
