"""The label store: build time, memory and size, and what questions take, against the targets of issue 5.

    python benchmarks/labels.py [--labels 1000000] [--of names|ids]

Labels are NCBITaxon2013's, its names or its identifiers (`taxon:9606`, which begin alike and lie a few edits
apart: the worst case). One JSON line for the build, one for questions to the store, one for the scan that
answers where none was built. Degrees are drawn from a power law. The build runs in a process of its own,
whose peak memory is given.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from common import emit, real_graph, run_command
from kgshard_tools.labels import LABELS_FILE, LabelStore
from kgshard_tools.labels.build import build_labels
from kgshard_tools.labels.rules import fold, wanted_words
from kgshard_tools.labels.scan import LabelScan

from kgshard.data.dataset import MANIFEST, Dataset, open_dataset
from kgshard.files import write_json
from kgshard.records import DatasetInfo
from kgshard.vocabulary import Vocabulary, hash_order

RELATIONS = ["rdf:type", "rdfs:subClassOf"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=int, default=1_000_000)
    parser.add_argument("--of", choices=["names", "ids"], default="names")
    parser.add_argument("--build-here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build_here:
        build_labels(open_dataset(options.build_here), options.build_here / LABELS_FILE)
        return
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as name:
        data = write_dataset(Path(name), labels_of(options.of)[: options.labels])
        cost, _ = run_command([sys.executable, __file__, "--build-here", name])
        size = (data.folder / LABELS_FILE).stat().st_size
        emit(
            "building a label store",
            labels=data.num_entities,
            of=options.of,
            seconds=cost.seconds,
            cpu_seconds=cost.cpu_seconds,
            peak_mib=cost.peak_mib,
            mib=size / 2**20,
            bytes_per_label=size / data.num_entities,
        )
        asked = drawn_labels(data, 200)
        measure_store(data, asked, options.of)
        measure_scan(data, asked[:20], options.of)


def labels_of(column: str) -> list[str]:
    """Return the distinct names or identifiers of NCBITaxon2013's entities."""
    path = real_graph("NCBITaxon2013") / "entity_labels.tsv.zst"
    lines = subprocess.run(
        ["zstd", "-dc", path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return list(dict.fromkeys(line.split("\t")[column == "names"] for line in lines))


def write_dataset(folder: Path, entities: list[str]) -> Dataset:
    """Write a dataset without triples."""
    degrees = np.random.default_rng(0).zipf(1.8, len(entities)).clip(1, 10**6)
    for kind, name, texts in (("entity", "entities", entities), ("relation", "relations", RELATIONS)):
        labels = pa.array(texts, pa.large_string())
        ordered = labels.take(pa.array(hash_order(labels)))
        Vocabulary(ordered, degrees[: len(texts)], kind=kind).save(folder / f"{name}.parquet")
    info = DatasetInfo("kgshard.data/1", "labels", len(entities), len(RELATIONS), {}, {}, "")
    write_json(folder / MANIFEST, info)
    return open_dataset(folder)


def drawn_labels(data: Dataset, count: int) -> list[str]:
    drawn = random.Random(0).sample(range(data.num_entities), 3 * count)
    labels = [data.entities[number] for number in drawn]
    return [label for label in labels if 4 <= len(fold(label)) <= 60][:count]


def misspelt(label: str) -> str:
    """Return a label with two neighbours swapped, as somebody in a hurry types it."""
    at = len(label) // 2
    return label[: at - 1] + label[at] + label[at - 1] + label[at + 1 :]


def measure_store(data: Dataset, asked: list[str], of: str) -> None:
    with LabelStore(data.folder / LABELS_FILE) as store:
        names = store.names("entity")
        hits = [any(m.label == text for m in store.search(misspelt(text))) for text in asked]
        emit(
            "questions to a label store, milliseconds (median, 95 %), CPU",
            labels=data.num_entities,
            of=of,
            exact=milliseconds(store.find, asked),
            prefix_1=milliseconds(lambda text: store.complete(text[:1], 10), asked),
            prefix_4=milliseconds(lambda text: store.complete(text[:4], 10), asked),
            words=milliseconds(lambda text: names.with_words(wanted_words(fold(text)), 10), asked),
            fuzzy=milliseconds(lambda text: store.search(misspelt(text)), asked),
            fuzzy_found=sum(hits) / len(hits),
        )


def measure_scan(data: Dataset, asked: list[str], of: str) -> None:
    scan = LabelScan(data)
    began = time.process_time()
    scan.find(asked[0])
    emit(
        "questions to a scan of the labels, milliseconds (median, 95 %), CPU",
        labels=data.num_entities,
        of=of,
        first=1e3 * (time.process_time() - began),
        prefix_4=milliseconds(lambda text: scan.complete(text[:4], 10), asked),
        fuzzy=milliseconds(lambda text: scan.search(misspelt(text)), asked),
    )


def milliseconds(ask: Callable[[str], object], asked: Iterable[str]) -> list[float]:
    """Return the median and the 95th percentile of the CPU time of single questions."""
    taken = []
    for text in asked:
        began = time.process_time()
        ask(text)
        taken.append(1e3 * (time.process_time() - began))
    return [round(float(np.quantile(taken, part)), 3) for part in (0.5, 0.95)]


if __name__ == "__main__":
    main()
