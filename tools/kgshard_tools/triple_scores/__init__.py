"""Whole triples, asked of a run: their scores, their ranks on both sides, whether they are known.

ranks    scores and ranks among all entities, by row ids
scorer   the same by name, one triple or a stream of them
files    written as NDJSON, JSON, TSV, Parquet
"""

from kgshard_tools.triple_scores.files import ScoresWritten, ndjson_blocks, write_scores
from kgshard_tools.triple_scores.ranks import Placed, place
from kgshard_tools.triple_scores.scorer import (
    BLOCK_TRIPLES,
    PARTS,
    Outcome,
    TripleBatch,
    TripleScore,
    TripleScorer,
    header,
)

__all__ = [
    "BLOCK_TRIPLES",
    "PARTS",
    "Outcome",
    "Placed",
    "ScoresWritten",
    "TripleBatch",
    "TripleScore",
    "TripleScorer",
    "header",
    "ndjson_blocks",
    "place",
    "write_scores",
]
