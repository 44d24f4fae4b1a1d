"""The whole way with a graph, from triples to an answer: seconds and peak memory of every command.

    python benchmarks/whole_way.py [--graph NCBITaxon2013] [--epochs 12] [--patience 1] [--sample 2000]

Trains at dimension 128 on two ranks until the MRR on valid falls, or all epochs are done. One JSON line;
`mib` is the largest sum, over a command's processes, of the memory they use (PSS, mapped files too).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from common import emit, real_graph
from drivers.measuring import memory_mib

_SHARE = 0.02
"""How much later than the last one each look comes: to add up the pages of large mappings takes long."""


def run(*arguments: str) -> tuple[Any, dict[str, float]]:
    """Run a command of kgshard; return its JSON, and what it took."""
    began, peak = time.monotonic(), 0.0
    command = [sys.executable, "-m", "kgshard", *arguments, "--json", "-q"]
    with tempfile.TemporaryFile("w+") as stdout:
        process = subprocess.Popen(command, stdout=stdout)
        while process.poll() is None:
            peak = max(peak, memory_mib(process.pid))
            time.sleep(max(0.05, _SHARE * (time.monotonic() - began)))
        seconds = time.monotonic() - began
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        stdout.seek(0)
        return json.load(stdout), {"seconds": round(seconds, 1), "mib": round(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="NCBITaxon2013")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--sample", type=int, default=2000, help="triples of valid, and of test, to rank")
    parser.add_argument("--question", nargs=2, metavar=("HEAD", "RELATION"), default=["#12", "#0"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    head, relation = options.question
    sample = str(options.sample)
    settings = [f"epochs={options.epochs}", "dim=128", "batch_size=1000", "negatives=1000", "n3=0.01"]
    settings += ["eval_every=1", "eval=sampled", f"eval_sample={sample}", f"patience={options.patience}"]
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
        data, trained = f"{folder}/data", f"{folder}/run"
        chosen = [part for setting in (*settings, *options.set) for part in ("--set", setting)]
        steps = {
            "ingest": ["ingest", str(real_graph(options.graph)), "-o", data],
            "train": ["train", data, "-o", trained, "--nproc-per-node", "2", *chosen],
            "evaluate": ["evaluate", trained, "--sample", sample, "--nproc-per-node", "2"],
            "merge": ["merge-shards", trained],
            "export": ["export", trained, "--format", "numpy"],
            "index": ["index", trained, "--for", "both"],
            "predict": ["predict", trained, "--head", head, "--relation", relation],
        }
        results, taken = {}, {}
        for name, arguments in steps.items():
            results[name], taken[name] = run(*arguments)
            print(f"{name}: {taken[name]}", file=sys.stderr, flush=True)
    emit(
        "the whole way from triples to an answer",
        graph=options.graph,
        commands=taken,
        trained=results["train"]["metrics"],
        epochs=results["train"]["epochs"],
        mrr=results["evaluate"]["metrics"]["mrr"],
        hits_at_10=results["evaluate"]["metrics"]["hits@10"],
        triples=options.sample,
    )


if __name__ == "__main__":
    main()
