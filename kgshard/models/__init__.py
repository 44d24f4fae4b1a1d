"""Scoring functions. A new model is one file and one line here, or `--model your.module:YourClass`."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module

from kgshard.errors import ConfigError
from kgshard.models.complex import ComplEx
from kgshard.models.conve import ConvE
from kgshard.models.cp import CP
from kgshard.models.distmult import DistMult
from kgshard.models.duale import DualE
from kgshard.models.keci import Keci
from kgshard.models.metric import METRICS, Metric
from kgshard.models.mure import MuRE
from kgshard.models.omult import OMult
from kgshard.models.protate import PRotatE
from kgshard.models.qmult import QMult
from kgshard.models.quate import QuatE
from kgshard.models.rescal import RESCAL
from kgshard.models.rotate import RotatE
from kgshard.models.scoring import Scoring
from kgshard.models.simple import SimplE
from kgshard.models.transe import TransE
from kgshard.models.transh import TransH
from kgshard.models.tucker import TuckER

SCORING: dict[str, Scoring] = {
    # Products of real numbers.
    "distmult": DistMult(),
    "cp": CP(),
    "simple": SimplE(),
    "rescal": RESCAL(),
    "tucker": TuckER(),
    # Products in larger algebras.
    "complex": ComplEx(),
    "qmult": QMult(),
    "quate": QuatE(),
    "duale": DualE(),
    "omult": OMult(),
    "keci": Keci(),
    "ckeci": Keci(learned=False),
    # Distances after a translation.
    "transe": TransE(METRICS["l2"]),
    "transe-l1": TransE(METRICS["l1"]),
    "transh": TransH(),
    "mure": MuRE(),
    # Distances after a rotation.
    "rotate": RotatE(METRICS["l2"]),
    "rotate-moduli": RotatE(METRICS["moduli"]),
    "protate": PRotatE(),
    # Neural networks.
    "conve": ConvE(),
}
"""Every scoring function by the name that `--model` takes."""


@cache
def find_scoring(name: str) -> Scoring:
    """Return the scoring function that a name means.

    Args:
        name: A key of SCORING, such a key and arguments ("keci:1,1"), or "module:Class" where Class is a
            Scoring that takes no arguments and can be imported on every rank.

    Raises:
        ConfigError: There is none.
    """
    family, colon, rest = name.partition(":")
    if family in SCORING:
        try:
            return SCORING[family].configured(rest) if colon else SCORING[family]
        except ConfigError as error:
            raise ConfigError(f"{family} {error}") from None
    close = difflib.get_close_matches(family, SCORING, n=1)
    meant = f", did you mean {close[0]}?" if close else ""
    if colon:
        return _imported(family, rest, unknown=f"unknown scoring function {name!r}{meant}")
    raise ConfigError(f"unknown scoring function {name!r}{meant} (known: {', '.join(SCORING)})")


def _imported(module: str, attribute: str, *, unknown: str) -> Scoring:
    name = f"{module}:{attribute}"
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # Whatever the user's module raises.
        raise ConfigError(f"{unknown}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Scoring)):
        raise ConfigError(f"{name} is no subclass of kgshard.models.scoring.Scoring")
    try:
        scoring = found()
    except TypeError as error:
        raise ConfigError(f"{name} must be complete and take no arguments: {error}") from error
    if not isinstance(getattr(scoring, "metric", None), Metric):
        raise ConfigError(f"{name} has no metric; set one of kgshard.models.metric.METRICS")
    return scoring
