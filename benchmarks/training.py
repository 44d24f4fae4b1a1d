"""Training throughput on FB15k-237 against the matrix products it cannot do without.

    python benchmarks/training.py [--dim 200] [--batch-size 500] [--negatives 1000] [--repeats 3]

One JSON line. The floor of a step is three products of queries x negatives x dim (scores, and two
gradients) at the rate this machine reaches on just that product, measured in the same run; `floor_ratio`
is time over floor, for the whole epoch as `kgshard train` reports it. `step_ratio` is the time of a step over
the sum of its stages' floors, as `kgshard train --profile` measures both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

import torch
from common import emit, median, real_graph, run_command, time_function


def product_rate(num_queries: int, num_negatives: int, dim: int) -> float:
    """Return multiply-adds a second of queries @ negatives.T on all cores."""
    queries, negatives = torch.randn(num_queries, dim), torch.randn(num_negatives, dim)
    seconds = time_function(lambda: queries @ negatives.T, repeats=50)
    return num_queries * num_negatives * dim / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--negatives", type=int, default=1000)
    parser.add_argument("--n3", type=float, default=0.05)
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    graph = real_graph("FB15k-237")
    seconds: dict[int, list[float]] = {1: [], 2: []}
    ratios: dict[int, list[float]] = {1: [], 2: []}
    rates = []
    triples = 0
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
        run_command([sys.executable, "-m", "kgshard", "ingest", str(graph), "-o", f"{folder}/data"])
        for _ in range(options.repeats):
            rates.append(product_rate(2 * options.batch_size, options.negatives, options.dim))
            for ranks, taken in seconds.items():
                _, stdout = run_command(
                    [
                        *(sys.executable, "-m", "kgshard", "train", f"{folder}/data", "-o", f"{folder}/run"),
                        *("--overwrite", "--json", "-q", "--profile", "--epochs", "1"),
                        *("--n3", str(options.n3), "--optimizer", options.optimizer),
                        *("--dim", str(options.dim), "--batch-size", str(options.batch_size)),
                        *("--negatives", str(options.negatives), "--nproc-per-node", str(ranks)),
                    ]
                )
                result = json.loads(stdout)
                taken.append(result["seconds"])
                ratios[ranks].append(result["profile"]["ratio"])
                triples = round(result["metrics"]["triples_per_second"] * result["seconds"])
    floor = 3 * 2 * triples * options.negatives * options.dim / median(rates)
    emit(
        "a training epoch against its matrix products",
        triples=triples,
        dim=options.dim,
        batch_size=options.batch_size,
        negatives=options.negatives,
        n3=options.n3,
        optimizer=options.optimizer,
        floor_seconds=floor,
        seconds={ranks: round(median(taken), 2) for ranks, taken in seconds.items()},
        triples_per_second={ranks: round(triples / median(taken)) for ranks, taken in seconds.items()},
        step_ratio={ranks: round(median(found), 2) for ranks, found in ratios.items()},
        floor_ratio={ranks: round(median(taken) / floor, 2) for ranks, taken in seconds.items()},
    )


if __name__ == "__main__":
    main()
