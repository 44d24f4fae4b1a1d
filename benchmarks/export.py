"""`kgshard export` against copying what it wrote: how far each format is from the speed of the disk.

    python benchmarks/export.py [--mib 2048] [--repeats 3] [--formats numpy parquet ...]

One JSON line for each format: medians of alternating runs, warm cache. `cp_sync_ratio` is the median, over
the runs, of the seconds of the export over those of `cp` and `sync` on the files it wrote, `pyarrow_ratio`
(parquet only) over those of pyarrow's writer given the same arrays in memory, without compression. Memory is
the peak resident set above that of importing the same program.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from common import emit, median, run_command
from merge import make_run

PYARROW = """
import sys, os, time
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
folder, out = sys.argv[1:]
table = pq.read_table(folder + "/entities.parquet")
began = time.perf_counter()
pq.write_table(table, out, compression="none", use_dictionary=False, write_statistics=False)
with open(out, "rb") as file:
    os.fsync(file.fileno())
print(time.perf_counter() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the entity table")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--formats", nargs="*", default=["numpy", "safetensors", "parquet", "word2vec-bin"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-", dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        run = make_run(folder, options.mib, 4)
        for format in options.formats:
            compare(folder, run, format, options.repeats)


def compare(folder: Path, run: Path, format: str, repeats: int) -> None:
    """Time one format and the copies of its files in turn; print what it gave."""
    out, copy = folder / "export", folder / "copy"
    command = [sys.executable, "-m", "kgshard", "export", str(run), "--format", format, "-q", "-o", str(out)]
    base, _ = run_command([sys.executable, "-c", "import kgshard_tools.export, kgshard_tools.cli"])
    ours, theirs, pyarrows, peak = [], [], [], 0.0
    for _ in range(repeats):
        clear(out)
        cost, _ = run_command(command)
        ours.append(cost.seconds - base.seconds)
        peak = max(peak, cost.peak_mib)
        clear(copy)
        theirs.append(
            run_command(["sh", "-c", f"cp -r --reflink=never {out} {copy} && sync {copy}/*"])[0].seconds
        )
        if format == "parquet":
            clear(copy)
            pyarrows.append(
                float(run_command([sys.executable, "-c", PYARROW, str(out), str(folder / "pa.parquet")])[1])
            )
            clear(folder / "pa.parquet")
    size = sum(path.stat().st_size for path in out.rglob("*"))
    shutil.rmtree(out)
    emit(
        f"export to {format} against copying what it wrote",
        bytes=size,
        seconds_less_start_up=median(ours),
        megabytes_per_second=size / 1e6 / median(ours),
        cp_sync_seconds=median(theirs),
        cp_sync_ratio=median(our / their for our, their in zip(ours, theirs, strict=True)),
        **(
            {"pyarrow_ratio": median(our / their for our, their in zip(ours, pyarrows, strict=True))}
            if pyarrows
            else {}
        ),
        peak_mib_above_import=round(peak - base.peak_mib, 1),
    )


def clear(path: Path) -> None:
    """Remove a file or folder, and wait until the disk is done with that too."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()
    time.sleep(2)


if __name__ == "__main__":
    main()
