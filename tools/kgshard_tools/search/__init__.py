"""Exact search over the rows of a stored table, and the seam for approximate indexes.

source      what finds candidates: rows with float32 comparison values
scan        candidates from one pass over all rows, in blocks of matrix products
best        the best rows so far, while blocks come by
exclusions  rows that are no answers to a query
certified   `search`: candidates scored in float64, accepted when rounding cannot have hidden a better row
"""

from kgshard_tools.search.certified import Found, search
from kgshard_tools.search.exclusions import Exclusions, Ids
from kgshard_tools.search.scan import Scan
from kgshard_tools.search.source import CandidateSource, Fetched, Scores

__all__ = ["CandidateSource", "Exclusions", "Fetched", "Found", "Ids", "Scan", "Scores", "search"]
