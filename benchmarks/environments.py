"""Environments of their own for the programs that kgshard is measured beside: made once, kept in a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VENVS = Path.home() / ".cache" / "kgshard-benchmarks"
_CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
# Only torch: the others' own requirements differ from ours. An unpinned one would fetch CUDA libraries.
_TORCH = next(line for line in _CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))

_RECIPES = {
    # It imports pyarrow without requiring it.
    "dicee": [[_TORCH, "numpy==1.26.4", "pyarrow<20", "psutil", "dicee==0.3.3"]],
    "pykeen": [[_TORCH, "pykeen==1.11.1"]],
    # It needs the pkg_resources of an older setuptools.
    "pbg": [[_TORCH, "setuptools<81", "torchbiggraph==1.0.0"]],
    # It requires the CUDA build of fbgemm. 1.9.0 does not load beside this torch.
    "torchrec": [
        [_TORCH, "numpy", "tensordict", "torchmetrics", "pyre-extensions", "iopath", "tqdm"],
        ["--no-deps", "torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"],
    ],
}
"""What pip is asked for, call by call."""
_ELSEWHERE = {"libkge": "not on PyPI; installed from its repository only"}
"""Why some cannot be installed."""


class UnavailableError(Exception):
    """A program cannot be installed or run here."""


def environment(peer: str, folder: Path) -> Path:
    """Return the Python of a peer's environment in `folder`, made where there is none yet.

    Raises:
        UnavailableError: It cannot be made; says why.
    """
    if peer in _ELSEWHERE:
        raise UnavailableError(_ELSEWHERE[peer])
    place, recipe = folder / peer, repr((sys.version, _RECIPES[peer]))
    python, installed = place / "bin" / "python", place / "installed"
    if not installed.is_file() or installed.read_text() != recipe:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        for packages in _RECIPES[peer]:
            _pip(python, packages)
        installed.write_text(recipe)
    return python


def _pip(python: Path, packages: list[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(f"pip install {' '.join(packages)}: {' '.join(errors[:1])}")
