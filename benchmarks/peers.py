"""kgshard beside its peers: the same work on the same data, in turns, in one run.

    python benchmarks/peers.py training growth lookup evaluation traffic
        [--data FOLDER] [--rounds 3] [--venvs FOLDER] [--without PEER ...] [--timeout 900] [--markdown]

FOLDER holds the train, valid and test files of FB15k-237. Peers are installed into environments of their own,
once. Programs take turns, round by round; each run is a process of its own (benchmarks/drivers) in which
only steady steps are measured: seconds, CPU seconds of all its processes, and their memory (PSS) meanwhile.
One JSON line for each program and work: medians over rounds, and `times`, its costs an item over those of the
cheapest kgshard at the same work. A peer that cannot be installed or run has a line with the reason. With
--markdown the same figures follow as a table for docs/benchmarks.md.

    training    ComplEx of 200 floats on FB15k-237, about 1,024 positives a step: CPU and seconds a positive
    growth      the same steps at 100,000 and a million entities, drawn evenly
    lookup      8,192 Zipf ids a rank, of a million rows of 128 floats: lookup, loss, backward, update
    evaluation  filtered ranks of test on both sides: all of it, or the part that a slow peer is given
    traffic     bytes between two ranks for each positive, a million entities drawn evenly
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import emit, real_graph
from contenders import CLAIMS, Claim, Contender
from environments import VENVS
from turns import take_turns

from kgshard.data.dataset import SPLITS
from kgshard.start import ingest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("claims", nargs="+", choices=CLAIMS, metavar="CLAIM")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venvs", type=Path, default=VENVS)
    parser.add_argument("--without", nargs="*", default=[], metavar="PEER")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    tables = []
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
        graph = Path(folder) / "ids.npz"
        if {"training", "evaluation"} & set(options.claims):
            _write_ids(options.data or real_graph("FB15k-237"), graph)
        for name in options.claims:
            contenders = [each for each in CLAIMS[name].contenders(graph) if each.peer not in options.without]
            found = take_turns(
                contenders, rounds=options.rounds, venvs=options.venvs, timeout=options.timeout
            )
            _report(name, contenders, found)
            tables.append(_table(CLAIMS[name], contenders, found))
    if options.markdown:
        print("\n\n".join(tables))


def _write_ids(data: Path, path: Path) -> None:
    """Give every program the same ids."""
    dataset = ingest(data, path.with_suffix(""))
    sizes = {"num_entities": dataset.num_entities, "num_relations": dataset.num_relations}
    arrays: dict[str, Any] = sizes | {split: dataset.triples(split) for split in SPLITS}
    np.savez(path, **arrays)


def _report(claim: str, contenders: Sequence[Contender], found: list[dict[str, Any]]) -> None:
    for contender, figures in zip(contenders, found, strict=True):
        asked = {name: value for name, value in contender.given.items() if name not in ("task", "graph")}
        emit(
            f"{claim} beside peers",
            work=contender.work,
            program=contender.name,
            settings=asked,
            threads=contender.threads,
            **figures,
        )


def _table(claim: Claim, contenders: Sequence[Contender], found: list[dict[str, Any]]) -> str:
    """Return Markdown."""
    told = {"cpu_us": "times kgshard's CPU", "wall_us": "times its seconds", "bytes": "times kgshard's"}
    headings = ["steps", *claim.columns, *(told[cost] for cost in claim.costs)]
    lines = [f"| work | program | {' | '.join(headings)} |", f"|---|---|{'---:|' * len(headings)}"]
    for contender, figures in zip(contenders, found, strict=True):
        if "failed" in figures:
            cells = [f"not measured: {figures['failed']}", *[""] * (len(headings) - 1)]
        else:
            names = ["steps", *claim.columns.values()]
            cells = [_shown(figures.get(name, 0)) for name in names]
            cells += [_shown(figures["times"][cost]) if "times" in figures else "" for cost in claim.costs]
        lines.append(f"| {contender.work} | {contender.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


if __name__ == "__main__":
    main()
