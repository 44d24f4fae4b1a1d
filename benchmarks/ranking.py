"""Exact filtered ranking of FB15k-237's test split against the matrix products alone.

    python benchmarks/ranking.py [--dim 200] [--repeats 3]

One JSON line. `product_ratio` is the time to rank all queries (both sides, filtered, one process) over the
time of the same queries x entities x dim products in the same blocks, in the same run. Below 1 where many
triples ask the same, since those share one query.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from common import cpu_seconds, emit, median, real_graph, run_command, time_function

from kgshard.exchange import SingleExchange
from kgshard.ranking.evaluation import evaluate_on_ranks
from kgshard.ranking.ranker import QUERY_BLOCK, ROW_BLOCK
from kgshard.runs import open_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=200)
    parser.add_argument("--model", default="complex")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    graph = real_graph("FB15k-237")
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
        command = [sys.executable, "-m", "kgshard", "train", str(graph), "-o", f"{folder}/run", "-q"]
        settings = f"--model {options.model} --dim {options.dim} --epochs 1 --n3 0.05 --nproc-per-node 2"
        run_command([*command, *settings.split()])
        run = open_run(f"{folder}/run")
        used, taken = [], []
        for _ in range(options.repeats):
            began = cpu_seconds()
            taken.append(time_function(lambda: evaluate_on_ranks(SingleExchange(), run), repeats=1))
            used.append((cpu_seconds() - began) / 2)
        result = evaluate_on_ranks(SingleExchange(), run)
        num_queries, num_entities = result["protocol"]["queries"], result["protocol"]["candidates"]
    queries, rows = torch.randn(QUERY_BLOCK, options.dim), torch.randn(ROW_BLOCK, options.dim)
    block = time_function(lambda: queries @ rows.T, repeats=20)
    products = block * (num_queries / QUERY_BLOCK) * (num_entities / ROW_BLOCK)
    emit(
        "exact filtered ranking against its matrix products",
        model=options.model,
        dim=options.dim,
        queries=num_queries,
        candidates=num_entities,
        seconds=median(taken),
        queries_per_second=num_queries / median(taken),
        queries_per_cpu_second=num_queries / median(used),
        product_seconds=products,
        product_ratio=median(taken) / products,
    )


if __name__ == "__main__":
    main()
