"""Flags are counted and found as numpy does it, whatever their number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kgshard.ranking.flags import count_true, find_true, no_flags


@pytest.mark.parametrize("density", [0.0, 1e-3, 0.5, 1.0])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (3, 7), (5, 1024), (4, 1025), (2, 9000)])
def test_count_and_places_are_numpys(num_rows: int, num_columns: int, density: float) -> None:
    random = np.random.default_rng(num_columns)
    drawn = random.random((num_rows, num_columns)) < density
    flags = no_flags(num_rows, num_columns, torch.device("cpu"))
    flags[:, :num_columns] = torch.from_numpy(drawn)
    assert count_true(flags).tolist() == np.count_nonzero(drawn, axis=1).tolist()
    found = [places.tolist() for places in find_true(flags)]
    assert found == [places.tolist() for places in np.nonzero(drawn)]


def test_no_flags_are_false_and_wide_enough() -> None:
    flags = no_flags(3, 1030, torch.device("cpu"))
    assert flags.shape[0] == 3
    assert flags.shape[1] >= 1030
    assert not flags.any()
