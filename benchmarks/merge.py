"""merge-shards against `cp`, torch's consolidate_safetensors_files, and load-concatenate-save.

    python benchmarks/merge.py [--mib 1024] [--shards 4] [--repeats 3]

One JSON line: medians of alternating runs, warm cache. `cp_ratio` is our throughput over that of `cp` on
the same bytes, `cp_sync_ratio` over that of `cp` and `sync`, which is what merge-shards does; memory is the
peak resident set above that of importing the same program.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from common import emit, median, run_command

DIM = 256

CONSOLIDATE = """
import sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
names = ["entity_embedding.weight", "relation_embedding.weight"]
consolidate_safetensors_files(sys.argv[1], sys.argv[2], dict.fromkeys(names, 1))
"""
CONCATENATE = """
import sys, glob
import torch
from safetensors.torch import load_file, save_file
shards = [load_file(path)["entity_embedding.weight"] for path in sorted(glob.glob(sys.argv[1] + "/entity-*"))]
save_file({"entity_embedding.weight": torch.cat(shards)}, sys.argv[2] + "/model.safetensors")
"""


def make_run(folder: Path, num_entities: int, shards: int) -> Path:
    """Train a chain graph for one step, so that a real checkpoint of the wanted size is there."""
    data = folder / "data"
    data.mkdir()
    with (data / "train.tsv").open("w") as file:
        file.writelines(f"e{i}\tnext\te{i + 1}\n" for i in range(0, num_entities - 1, 2))
    command = [sys.executable, "-m", "kgshard", "train", str(data), "-o", str(folder / "run"), "-q"]
    settings = f"--model distmult --dim {DIM} --epochs 1 --batch-size 100000 --negatives 8"
    run_command([*command, *settings.split(), "--nproc-per-node", str(shards)])
    return folder / "run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the entity table")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as name:
        folder = Path(name)
        run = make_run(folder, options.mib * (1 << 20) // (4 * DIM), options.shards)
        [checkpoint] = (run / "checkpoints").iterdir()
        model, out = folder / "merged.safetensors", folder / "out"
        python = [sys.executable, "-c"]
        commands = {
            "kgshard": [sys.executable, "-m", "kgshard", "merge-shards", str(run), "-o", str(model), "-q"],
            "cp": ["cp", "--reflink=never", str(model), str(out / "copy")],
            "cp, sync": ["sh", "-c", f"cp --reflink=never {model} {out}/copy && sync {out}/copy"],
            "torch": [*python, CONSOLIDATE, str(checkpoint), str(out)],
            "concatenate": [*python, CONCATENATE, str(checkpoint), str(out)],
        }
        imports = {
            "kgshard": "import kgshard_tools.merge, kgshard_tools.cli",
            "torch": "import torch.distributed.checkpoint._consolidate_hf_safetensors",
            "concatenate": "import torch, safetensors.torch",
        }
        base = {who: run_command([*python, what])[0] for who, what in imports.items()}
        costs: dict[str, list[float]] = {who: [] for who in commands}
        peaks: dict[str, float] = {}
        for _ in range(options.repeats):
            for who, command in commands.items():
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                cost, _ = run_command(command)
                start_up = base[who].seconds if who in base else 0.0
                costs[who].append(max(cost.seconds - start_up, 1e-3))
                peaks[who] = max(peaks.get(who, 0.0), cost.peak_mib)
        size = model.stat().st_size
    seconds = {who: median(values) for who, values in costs.items()}
    emit(
        "merge-shards against cp, and against what loads the table",
        bytes=size,
        shards=options.shards,
        seconds_less_start_up={who: round(value, 3) for who, value in seconds.items()},
        cp_ratio=seconds["cp"] / seconds["kgshard"],
        cp_sync_ratio=seconds["cp, sync"] / seconds["kgshard"],
        torch_ratio=seconds["torch"] / seconds["kgshard"],
        concatenate_ratio=seconds["concatenate"] / seconds["kgshard"],
        peak_mib_above_import={who: round(peaks[who] - base[who].peak_mib, 1) for who in imports},
    )


if __name__ == "__main__":
    main()
