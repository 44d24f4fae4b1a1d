"""Link-prediction indexes: recall, queries a second, memory and build time, beside bare FAISS on one table.

    python benchmarks/index.py [--run RUN | --graph NAME | --synthetic] [--recall 0.99] [--types flat ivf ...]

The table is that of RUN, or of ComplEx (128 floats) trained on one of the graphs for --epochs, or 1 million
x 128 random directions whose norms are as skewed as a trained table's. One JSON line for each type of index
and side. `overhead` is the seconds of our batched answers by row ids over those of FAISS's own search of the
same index file, with the same parameters, for the same queries and as many candidates; `flat_ratio` and
`scan_ratio` are our queries a second over those of a bare IndexFlat, and of our exact scan. Queries are those
of test triples, distinct.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
from common import emit, median, real_graph, run_command
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.index import link_contents
from kgshard_tools.search import Found
from kgshard_tools.stored import open_stored

from kgshard.known import anchors_of
from kgshard.models.link import SIDES, Side

K = 10
METRICS = {"dot": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2, "l1": faiss.METRIC_L1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--graph", default="FB15k-237")
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--recall", default="0.99")
    parser.add_argument("--types", nargs="*", default=["flat", "norm", "norm-top", "ivf", "ivfsq", "hnsw"])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as name:
        run = options.run or _made_run(Path(name), options)
        flat = _bare_flat(run, options)
        for type in options.types:
            _compare(run, type, flat, options)


def _made_run(folder: Path, options: argparse.Namespace) -> Path:
    if options.synthetic:
        return _synthetic_run(folder)
    graph = str(real_graph(options.graph))
    settings = f"--model complex --dim 128 --epochs {options.epochs} --batch-size 1000 --n3 0.01"
    run_command(
        [sys.executable, "-m", "kgshard", "train", graph, "-o", f"{folder}/run", "-q", *settings.split()]
    )
    return folder / "run"


def _synthetic_run(folder: Path, num_rows: int = 1_000_000, dim: int = 128) -> Path:
    """Import random rows as DistMult, whose relation is all ones: a query is an entity's row."""
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((num_rows, dim), np.float32)
    norms = np.exp(draw.normal(np.log(2.7), 0.3, num_rows)).clip(
        1.5, 8.8
    )  # min, median, max of a trained one
    rows *= (norms / np.linalg.norm(rows, axis=1)).astype(np.float32)[:, None]
    source = folder / "arrays"
    source.mkdir()
    np.save(source / "entities.npy", rows)
    np.save(source / "relations.npy", np.ones((1, dim), np.float32))
    (source / "entities.txt").write_text("".join(f"e{i}\n" for i in range(num_rows)))
    (source / "relations.txt").write_text("r\n")
    ends = draw.integers(0, num_rows, (20_000, 2)).tolist()
    (folder / "graph").mkdir()
    for split, part in (("train", ends[:10_000]), ("valid", ends[10_000:10_100]), ("test", ends[10_100:])):
        (folder / "graph" / f"{split}.tsv").write_text("".join(f"e{h}\tr\te{t}\n" for h, t in part))
    command = [
        "import",
        str(source),
        "-o",
        f"{folder}/run",
        "--model",
        "distmult",
        "--data",
        f"{folder}/graph",
        "-q",
    ]
    run_command([sys.executable, "-m", "kgshard", *command])
    return folder / "run"


@dataclass(frozen=True)
class Questions:
    """Distinct questions that test triples ask about one side."""

    model: TrainedModel
    side: Side
    anchors: npt.NDArray[np.int64]
    relations: npt.NDArray[np.int64]

    @staticmethod
    def of(run: Path, side: Side, count: int) -> Questions:
        """Draw questions; the run is opened anew."""
        test = open_stored(run).dataset.triples("test")
        pairs = np.unique(np.stack([anchors_of(side, test), test[:, 1]], axis=1), axis=0).astype(np.int64)
        pairs = np.random.default_rng(0).permutation(pairs)[:count]
        return Questions(load(run), side, pairs[:, 0], pairs[:, 1])

    def best(self, some: slice = slice(None), *, exact: bool = False) -> Found:
        links = self.model.links
        source = links.source(self.side, exact=exact)
        return links.best(self.side, self.anchors[some], self.relations[some], K, source=source)

    def vectors(self, width: int) -> npt.NDArray[np.float32]:
        """Return the queries as FAISS takes them: float32, padded with zeros."""
        queries = self.model.links.queries(self.side, self.anchors, self.relations).astype(np.float32)
        return np.ascontiguousarray(np.pad(queries, ((0, 0), (0, width - queries.shape[1]))))

    def seconds(self, repeats: int, *, exact: bool = False) -> float:
        """Return the seconds of all at once."""
        return median([_seconds(partial(self.best, exact=exact)) for _ in range(repeats)])

    def seconds_one_by_one(self) -> float:
        """Return the seconds of one."""
        some = range(min(100, len(self.anchors)))
        return median([_seconds(partial(self.best, slice(i, i + 1))) for i in some])


def _bare_flat(run: Path, options: argparse.Namespace) -> dict[Side, dict[str, Any]]:
    """Return FAISS's exact search of the same vectors, and our scan: queries a second, and the true best."""
    found: dict[Side, dict[str, Any]] = {}
    for side in SIDES:
        asked, stored = Questions.of(run, side, options.queries), open_stored(run)
        contents = link_contents(stored, side)
        rows = stored.checkpoint.entities.read(range(stored.model.num_entities))
        index = faiss.IndexFlat(contents.lift.width(rows.shape[1]), METRICS[contents.metric.name])
        index.add(np.ascontiguousarray(contents.lift.rounded(rows)))
        queries = asked.vectors(index.d)[:256]
        batched = [_seconds(partial(index.search, queries, K)) for _ in range(options.repeats)]
        single = [_seconds(partial(index.search, queries[i : i + 1], K)) for i in range(20)]
        found[side] = {
            "faiss_flat_queries_per_second": len(queries) / median(batched),
            "faiss_flat_milliseconds_one_by_one": 1e3 * median(single),
            "scan_queries_per_second": len(asked.anchors) / asked.seconds(options.repeats, exact=True),
            "ids": asked.best(exact=True).ids,
        }
    return found


def _compare(run: Path, type: str, flat: dict[Side, dict[str, Any]], options: argparse.Namespace) -> None:
    """Build an index, ask it, and print what it gave."""
    command = [sys.executable, "-m", "kgshard", "index", str(run), "--for", "links", "--type", type, "--json"]
    cost, text = run_command([*command, "--recall", options.recall])
    entries = json.loads((run / "index" / "index.json").read_text())["indexes"]
    for side in SIDES:
        asked, before = Questions.of(run, side, options.queries), dict(flat[side])
        info, truth = entries[link_contents(open_stored(run), side).name], before.pop("ids")
        found = asked.best()
        recall = [len(set(a) & set(b)) / len(b) for a, b in zip(found.ids, truth, strict=True)]
        ours, bare = asked.seconds(options.repeats), _bare_seconds(run, asked, info, options.repeats)
        speed = len(asked.anchors) / ours
        emit(
            f"{type}, {side} queries",
            rows=info["rows"],
            dim=info["dim"],
            queries=len(asked.anchors),
            search=info["search"],
            recall_at_10=float(np.mean(recall)),
            certified=float(found.exact.mean()),
            queries_per_second=speed,
            milliseconds_one_by_one=1e3 * asked.seconds_one_by_one(),
            **before,
            flat_ratio=speed / before["faiss_flat_queries_per_second"],
            scan_ratio=speed / before["scan_queries_per_second"],
            **({"overhead": ours / bare} if bare else {}),
            build_seconds=json.loads(text)["seconds"],
            build_peak_mib=cost.peak_mib,
            bytes=sum(part["bytes"] for part in info["parts"]),
        )


def _bare_seconds(run: Path, asked: Questions, info: dict[str, Any], repeats: int) -> float | None:
    """Return the seconds of FAISS's own search of an index with lists or a graph, as kgshard searches it."""
    if not {"nprobe", "ef"} & info["search"].keys():
        return None
    index = faiss.read_index(str(run / "index" / info["parts"][0]["file"]))
    queries, count = asked.vectors(index.d), K * info["search"]["depth"]
    if "nprobe" in info["search"]:
        parameters = faiss.SearchParametersIVF(nprobe=info["search"]["nprobe"])  # type: ignore[call-arg]
    else:
        parameters = faiss.SearchParametersHNSW(efSearch=info["search"]["ef"])  # type: ignore[attr-defined]
    search = partial(index.search, queries, count, params=parameters)
    search()
    return median([_seconds(search) for _ in range(repeats)])


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
