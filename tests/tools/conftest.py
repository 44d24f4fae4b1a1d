"""Lets these tests import the papers' formulas, which lie beside the tests of the models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "core" / "models"))
