"""Classes of the PyPI package dicee, made sharded, train on two gloo ranks. Nightly: installs dicee.

The first run makes an environment of 1.5 GB in the folder for temporary files (a minute); later ones use it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import environments
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def dicee_python() -> Path:
    return environments.dicee_python()


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
