"""Queries of several links and variables: 1p 2p 3p 2i 3i ip pi 2u up, with negations, and any other tree.

language     ?x: (Austria, speaks, ?y) & (?z, speaks, ?y), from text to formulas
shaping      formulas as trees of row ids
rendering    trees as text
nested       queries as nested lists
trees        what a query is, by row ids
truth        degrees of truth and t-norms
scales       from scores to degrees
facts        links that triples state
blocks       links between entities and rows: bounds for many, exact for a few
evaluators   how true a tree is, over beams
picking      the best rows, and whether they are so for certain
building     from trees to evaluators
graph        what the triples yield by themselves
explanation  the entities and links that make an answer true
asking       `ask`
"""

from kgshard_tools.multi_hop.asking import DEFAULT_BEAM, DEFAULT_SCORES, MultiHop, Query, Reasoning, ask
from kgshard_tools.multi_hop.results import HopAnswer, HopAnswers, LinkUsed, NamedEntity
from kgshard_tools.multi_hop.scales import SCALES, Calibrated, Scale
from kgshard_tools.multi_hop.truth import T_NORMS

__all__ = [
    "DEFAULT_BEAM",
    "DEFAULT_SCORES",
    "SCALES",
    "T_NORMS",
    "Calibrated",
    "HopAnswer",
    "HopAnswers",
    "LinkUsed",
    "MultiHop",
    "NamedEntity",
    "Query",
    "Reasoning",
    "Scale",
    "ask",
]
