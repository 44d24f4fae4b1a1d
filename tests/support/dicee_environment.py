"""An environment with the PyPI package dicee, made once and kept in the folder for temporary files."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DICEE = "dicee==0.3.3"
ITS_IMPORTS = ["pandas", "polars", "psutil", "requests", "lightning", "tiktoken"]
"""What `import dicee` needs; installed by name, since dicee itself asks for numpy 1.26."""
OUR_IMPORTS = ["torch", "numpy", "msgspec", "pyarrow", "safetensors"]
UNREACHABLE = (
    "NewConnectionError",
    "NameResolutionError",
    "ProxyError",
    "ConnectTimeout",
    "Temporary failure",
)


def dicee_python() -> Path:
    """Return an interpreter with dicee, torch and what our core imports; skip where none can be made."""
    constraints = ROOT / "constraints.txt"
    recipe = "\n".join([sys.version, DICEE, *ITS_IMPORTS, *OUR_IMPORTS, constraints.read_text()])
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kgshard-dicee-{key}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        _pip(python, "-c", str(constraints), *OUR_IMPORTS, *ITS_IMPORTS)
        _pip(python, "--no-deps", DICEE)
        complete.touch()
    return python


def _pip(python: Path, *arguments: str) -> None:
    """Install, or skip where no registry answers."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"{DICEE} cannot be installed: the package registry cannot be reached")
    assert done.returncode == 0, done.stderr
