"""merge-shards against `cp`, torch's consolidate_safetensors_files, and load-concatenate-save.

    python benchmarks/merge.py [--mib 4096] [--shards 4] [--repeats 3] [--without torch concatenate]

One JSON line for each cache, warm and cold: medians of alternating runs. `cp_ratio` is our throughput over
that of `cp` on the same bytes; `cp_sync_ratio` over that of `cp` and `sync`, which is what merge-shards does:
what it says is done is on the disk. Memory is the peak resident set above that of importing the same program.
The shards' files are shuffled by name, so that who sorts names gets another table. A table that memory does
not hold: --mib 20480 --without torch concatenate.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
from common import emit, forget, median, run_command

from kgshard.config import TrainConfig
from kgshard.files import write_json, write_text
from kgshard.partition import RowPartition
from kgshard.records import FileInfo, Manifest, PieceInfo, TableInfo
from kgshard.runs import Run
from kgshard.shards import ENTITIES, RELATIONS, header_bytes, sharding_metadata, write_blocks
from kgshard.start import started_run

DIM = 1024

CONSOLIDATE = """
import sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
names = ["entity_embedding.weight", "relation_embedding.weight"]
consolidate_safetensors_files(sys.argv[1], sys.argv[2], dict.fromkeys(names, 1))
"""
CONCATENATE = """
import json, sys
import torch
from safetensors.torch import load_file, save_file
pieces = json.load(open(sys.argv[1] + "/manifest.json"))["tables"]["entity_embedding.weight"]["pieces"]
shards = [load_file(sys.argv[1] + "/" + piece["file"])["entity_embedding.weight"] for piece in pieces]
save_file({"entity_embedding.weight": torch.cat(shards)}, sys.argv[2] + "/model.safetensors")
"""


def make_run(folder: Path, mebibytes: int, shards: int) -> Path:
    """Write folder/run with a table of random numbers of about this size, its shards in no order by name.

    As training would write it, but for the numbers: a table larger than memory is no problem.
    """
    data, num_entities = folder / "data", mebibytes * (1 << 20) // (4 * DIM)
    data.mkdir()
    with (data / "train.tsv").open("w") as file:
        file.writelines(f"e{i}\tnext\te{i + 1}\n" for i in range(0, num_entities - 1, 2))
    with started_run(data, folder / "run", TrainConfig(model="distmult", dim=DIM)) as run:
        write_checkpoint(run, shards)
    return folder / "run"


def write_checkpoint(run: Run, shards: int) -> None:
    """Write step-00000001 and LATEST of a run that has no checkpoint yet."""
    folder, model = run.folder / "checkpoints" / "step-00000001", run.model
    folder.mkdir(parents=True)
    numbers = list(range(shards))
    random.Random(0).shuffle(numbers)
    partition = RowPartition(model.num_entities, shards)
    wanted = [
        (ENTITIES, f"entity-part-{numbers[rank]}", rank, partition.rows_of(rank)) for rank in range(shards)
    ]
    wanted.append((RELATIONS, "relation", 0, range(model.num_relation_rows)))
    tables: dict[str, TableInfo] = {}
    files: dict[str, FileInfo] = {}
    for table, stem, rank, rows in wanted:
        name = f"{stem}.safetensors"
        files[name] = write_shard(folder / name, table, rows)
        pieces = [
            *(tables[table].pieces if table in tables else []),
            PieceInfo(name, rank, (rows.start, rows.stop)),
        ]
        tables[table] = TableInfo("F32", (rows.stop, DIM), pieces)
    manifest = Manifest(
        format="kgshard.checkpoint/1",
        run_id=run.info.id,
        vocabulary_sha256=run.dataset.vocabulary_sha256,
        step=1,
        epoch=1,
        world_size=shards,
        model=model.to_dict(),
        tables=tables,
        files=files,
    )
    write_json(folder / "manifest.json", manifest)
    write_text(run.folder / "LATEST", folder.name + "\n")


def write_shard(path: Path, table: str, rows: range) -> FileInfo:
    """Write some rows of random numbers."""
    source = np.random.default_rng(rows.start)
    header = header_bytes({table: ("F32", (len(rows), DIM))}, sharding_metadata({table: rows.start}))
    blocks = (
        source.random((min(4096, rows.stop - start), DIM), np.float32).data.cast("B")
        for start in range(rows.start, rows.stop, 4096)
    )
    with path.open("wb") as file:
        return FileInfo(*write_blocks(file, chain([header], blocks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=4096, help="size of the entity table")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], help="leave out: torch, concatenate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-", dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        run = make_run(folder, options.mib, options.shards)
        [checkpoint] = (run / "checkpoints").iterdir()
        for is_cold in (False, True):
            compare(folder, run, checkpoint, options, is_cold=is_cold)


def compare(folder: Path, run: Path, checkpoint: Path, options: argparse.Namespace, *, is_cold: bool) -> None:
    """Time everybody in turn; print what it gave."""
    model, merged, out = folder / "model.safetensors", folder / "merged.safetensors", folder / "out"
    python = [sys.executable, "-c"]
    merge = [sys.executable, "-m", "kgshard", "merge-shards", str(run), "-q", "-o"]
    run_command([*merge, str(model)])
    copy = f"cp --reflink=never {model} {out}/copy"
    commands = {
        "kgshard": [*merge, str(merged)],
        "cp": ["sh", "-c", copy],
        "cp, sync": ["sh", "-c", f"{copy} && sync {out}/copy"],
        "torch": [*python, CONSOLIDATE, str(checkpoint), str(out)],
        "concatenate": [*python, CONCATENATE, str(checkpoint), str(out)],
    }
    imports = {
        "kgshard": "import kgshard_tools.merge, kgshard_tools.cli",
        "torch": "import torch.distributed.checkpoint._consolidate_hf_safetensors",
        "concatenate": "import torch, safetensors.torch",
    }
    commands = {who: command for who, command in commands.items() if who not in options.without}
    base = {who: run_command([*python, imports[who]])[0] for who in imports if who in commands}
    costs: dict[str, list[float]] = {who: [] for who in commands}
    peaks: dict[str, float] = {}
    for _ in range(options.repeats):
        for who, command in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            merged.unlink(missing_ok=True)
            os.sync()
            if is_cold:
                forget([model, *checkpoint.iterdir()])
            cost, _ = run_command(command)
            start_up = base[who].seconds if who in base else 0.0
            costs[who].append(max(cost.seconds - start_up, 1e-3))
            peaks[who] = max(peaks.get(who, 0.0), cost.peak_mib)
    size = model.stat().st_size
    shutil.rmtree(out)
    seconds = {who: median(values) for who, values in costs.items()}
    ratios = {f"{who.replace(', ', '_')}_ratio": seconds[who] / seconds["kgshard"] for who in seconds}
    ratios.pop("kgshard_ratio")
    emit(
        f"merge-shards against cp, and against what loads the table; {'cold' if is_cold else 'warm'} cache",
        bytes=size,
        shards=options.shards,
        seconds_less_start_up={who: round(value, 3) for who, value in seconds.items()},
        all_seconds={who: [round(value, 2) for value in values] for who, values in costs.items()},
        **ratios,
        peak_mib_above_import={who: round(peaks[who] - base[who].peak_mib, 1) for who in base},
    )


if __name__ == "__main__":
    main()
