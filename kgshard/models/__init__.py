"""Scoring functions. A new model is one file and one line here."""

from kgshard.models.complex import ComplEx
from kgshard.models.distmult import DistMult
from kgshard.models.rotate import RotatE
from kgshard.models.scoring import Scoring
from kgshard.models.transe import TransE

SCORING: dict[str, Scoring] = {
    "distmult": DistMult(),
    "complex": ComplEx(),
    "transe": TransE("l2"),
    "transe-l1": TransE("l1"),
    "rotate": RotatE(),
}
"""Every scoring function by the name that `--model` takes."""
