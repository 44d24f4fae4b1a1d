"""Published RotatE checkpoints rank as their authors' own evaluation logged it, once imported.

They were trained on UMLS and Kinship with the code of Sun et al. (2019).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kgshard_tools.answers import load
from kgshard_tools.importers import import_run

MRR = {
    ("umls", 50): 0.344034,
    ("umls", 500): 0.725813,
    ("umls", 1000): 0.739568,
    ("umls", 2000): 0.745872,
    ("kinship", 50): 0.058540,
    ("kinship", 500): 0.622616,
    ("kinship", 2000): 0.652190,
}
"""Filtered, both sides, test."""


def logged(folder: Path) -> dict[str, float]:
    """Return the last test metrics of a training log, six decimals each."""
    text = (folder / "train.log").read_text()
    return {
        name.lower(): float(value) for name, value in re.findall(r"Test (\S+) at step \d+: ([\d.]+)", text)
    }


@pytest.mark.parametrize(
    ("graph", "dim"),
    [pytest.param(*key, marks=pytest.mark.nightly) if key[1] == 2000 else key for key in MRR],
)
def test_a_published_checkpoint_has_its_logged_metrics(
    shared_data: Path, tmp_path: Path, here: None, graph: str, dim: int
) -> None:
    folder = shared_data / f"rotate-{graph}" / f"RotatE_{dim}"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    run = import_run(folder, tmp_path / "run")
    assert (run.model.name, run.model.dim, run.model.reciprocal) == ("rotate-moduli", 2 * dim, False)
    found, expected = load(run).evaluate("test").to_dict()["metrics"], logged(folder)
    assert found["mrr"] == pytest.approx(MRR[graph, dim], abs=1e-6)
    assert expected.keys() == {"mrr", "mr", "hits@1", "hits@3", "hits@10"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6)
