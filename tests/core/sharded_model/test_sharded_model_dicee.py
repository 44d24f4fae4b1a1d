"""Classes of the PyPI package dicee, made sharded, train on two gloo ranks. Nightly: installs dicee.

The first run makes an environment of 1.5 GB in the folder for temporary files (a minute); later ones use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
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


def pip(python: Path, *arguments: str) -> None:
    """Install, or skip where no registry answers."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"{DICEE} cannot be installed: the package registry cannot be reached")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dicee_python() -> Path:
    """An interpreter that has dicee, torch and what kgshard's core imports, in an environment of its own."""
    constraints = ROOT / "constraints.txt"
    recipe = "\n".join([sys.version, DICEE, *ITS_IMPORTS, *OUR_IMPORTS, constraints.read_text()])
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kgshard-dicee-{key}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip(python, "-c", str(constraints), *OUR_IMPORTS, *ITS_IMPORTS)
        pip(python, "--no-deps", DICEE)
        complete.touch()
    return python


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("name", ["ComplEx", "Keci", "RotatE"])
def test_dicees_classes_train_as_they_do_alone(name: str, dicee_python: Path, tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    script = ROOT / "tests" / "support" / "dicee_ranks.py"
    ranks = [
        subprocess.Popen(
            [str(dicee_python), str(script), name, str(report_path)],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "KGSHARD_RENDEZVOUS": str(tmp_path / "meeting")}
            | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    words = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(words)
    report = json.loads(report_path.read_text())
    print(json.dumps(report))
    assert report["class"] == f"FSDP{name}"
    assert report["started"] == [41, 41]
    assert report["gathered"] == [41, 24]
    for trained in ("losses", "trainer losses"):
        first, last = report[trained]
        assert last < first / 3, trained
    for compared in ("entity gap", "relation gap", "score gap"):
        assert report[compared] <= 5e-5, compared
