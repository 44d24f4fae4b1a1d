"""merge-shards against `cp`, torch's consolidate_safetensors_files, and load-concatenate-save.

    python benchmarks/merge.py [--mib 4096] [--shards 4] [--repeats 3] [--without torch concatenate]

One JSON line for each cache, warm and cold: medians of alternating runs. `cp_ratio` is our throughput over
that of `cp` on the same bytes; `cp_sync_ratio` over that of `cp` and `sync`, which is what merge-shards does:
what it says is done is on the disk. Memory is the peak resident set above that of importing the same program.
The shards' files are shuffled by name, so that who sorts names gets another table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from common import emit, forget, median, run_command

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
    """Train a chain graph for one step, so that a real checkpoint of the wanted size is there."""
    data, num_entities = folder / "data", mebibytes * (1 << 20) // (4 * DIM)
    data.mkdir()
    with (data / "train.tsv").open("w") as file:
        file.writelines(f"e{i}\tnext\te{i + 1}\n" for i in range(0, num_entities - 1, 2))
    command = [sys.executable, "-m", "kgshard", "train", str(data), "-o", str(folder / "run"), "-q"]
    settings = f"--model distmult --dim {DIM} --epochs 1 --batch-size 20000 --negatives 8 --no-save-optimizer"
    run_command([*command, *settings.split()])
    cut = ["reshard", str(folder / "run"), "-o", str(folder / "cut"), "--world-size", str(shards), "-q"]
    run_command([sys.executable, "-m", "kgshard", *cut])
    shutil.rmtree(folder / "run")
    return folder / "cut"


def shuffle_names(checkpoint: Path) -> None:
    """Give shards names whose order is not that of their rows."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("seal", None)
    pieces = manifest["tables"]["entity_embedding.weight"]["pieces"]
    numbers = list(range(len(pieces)))
    random.Random(0).shuffle(numbers)
    for piece, number in zip(pieces, numbers, strict=True):
        name = f"entity-part-{number}.safetensors"
        (checkpoint / piece["file"]).rename(checkpoint / name)
        manifest["files"][name] = manifest["files"].pop(piece["file"])
        piece["file"] = name
    path.write_text(json.dumps(manifest))


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
        shuffle_names(checkpoint)
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
