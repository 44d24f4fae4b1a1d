"""Environments with a program from PyPI, made once and kept in the folder for temporary files."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
UNREACHABLE = (
    "NewConnectionError",
    "NameResolutionError",
    "ProxyError",
    "ConnectTimeout",
    "Temporary failure",
)


def dicee_python() -> Path:
    """Return an interpreter with dicee, torch and what our core imports; skip where none can be made."""
    # What `import dicee` needs is installed by name, since dicee itself asks for numpy 1.26.
    its_imports = ["pandas", "polars", "psutil", "requests", "lightning", "tiktoken"]
    our_imports = ["torch", "numpy", "msgspec", "pyarrow", "safetensors"]
    return python_with("dicee==0.3.3", beside=[*its_imports, *our_imports], alone=True)


def python_with(package: str, *, beside: Sequence[str] = (), alone: bool = False) -> Path:
    """Return an interpreter with a package; skip where none can be made.

    Args:
        package: What pip is asked for, with its version.
        beside: More packages.
        alone: Leave out what `package` says it depends on.
    """
    recipe = "\n".join([sys.version, package, *beside, CONSTRAINTS.read_text()])
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kgshard-{package.partition('=')[0]}-{key}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        together = [*beside, *([] if alone else [package])]
        _pip(python, package, "-c", str(CONSTRAINTS), *together)
        if alone:
            _pip(python, package, "--no-deps", package)
        complete.touch()
    return python


def _pip(python: Path, package: str, *arguments: str) -> None:
    """Install, or skip where no registry answers."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"{package} cannot be installed: the package registry cannot be reached")
    assert done.returncode == 0, done.stderr
