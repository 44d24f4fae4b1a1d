"""What rounding rows and gradients on their way between two ranks costs in MRR, and saves in bytes.

    python benchmarks/exchange_dtype.py [--graph FB15k-237] [--epochs 10] [--seeds 0 1 2]

One JSON line: the filtered MRR of test for each `--exchange-dtype` (the median over seeds, and all of them),
and the bytes of rows and gradients that one rank sends and receives in a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from typing import Any

from common import emit, median, real_graph, run_command


def kgshard(*arguments: str) -> Any:
    _, stdout = run_command([sys.executable, "-m", "kgshard", *arguments, "--json", "-q"])
    return json.loads(stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="FB15k-237")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dim", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    dtypes = ("float32", "bfloat16", "float16")
    mrr: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    step_bytes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
        kgshard("ingest", str(real_graph(options.graph)), "-o", f"{folder}/data")
        for seed in options.seeds:
            for dtype in dtypes:
                trained = kgshard(
                    *("train", f"{folder}/data", "-o", f"{folder}/run", "--overwrite", "--profile"),
                    *("--epochs", str(options.epochs), "--dim", str(options.dim), "--n3", "0.05"),
                    *("--batch-size", "500", "--negatives", "1000", "--seed", str(seed)),
                    *("--exchange-dtype", dtype, "--nproc-per-node", "2"),
                )
                stages = trained["profile"]["stages"]
                step_bytes[dtype] = sum(
                    stages[f"{kind} exchanged"]["bytes"] for kind in ("rows", "gradients")
                )
                figures = kgshard("evaluate", f"{folder}/run", "--nproc-per-node", "2")
                mrr[dtype].append(figures["metrics"]["mrr"])
    emit(
        "what the dtype of exchanges costs in MRR",
        graph=options.graph,
        epochs=options.epochs,
        dim=options.dim,
        mrr={dtype: round(median(found), 4) for dtype, found in mrr.items()},
        mrr_by_seed={dtype: [round(value, 4) for value in found] for dtype, found in mrr.items()},
        step_bytes=step_bytes,
    )


if __name__ == "__main__":
    main()
