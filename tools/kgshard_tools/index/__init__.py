"""FAISS indexes of a run: built from its shards, opened by what their sidecar says.

    RUN/index/
        links.faiss        what the model's queries are compared with, under the model's metric: entity rows,
                           or what the model makes of them; answers (h, r, ?) and (?, r, t)
        links-head.faiss, links-tail.faiss    instead, where the model makes something else of the candidates
                           for heads than of those for tails
        neighbors.faiss    entity rows of length 1 under inner product: cosine
        NAME-00001-of-00004.faiss, ...        instead, where each shard has a file of its own
        index.json         format "kgshard.index/1"; one entry an index: type, metric, transform, rows, dim,
                           longest row, run, step, vocabulary hash, files with bytes and SHA-256; of an
                           approximate one also how it was built and is searched, and its measured recall

An index answers only for the checkpoint and vocabulary it was built from; others refuse it.

contents     what an index holds        kinds        flat, ivf, hnsw, ... and what can be turned on each
sidecar      index.json                 faiss_files  the one module that imports faiss
build        from shards to files       tuning       recall, measured, and the search that reaches it
flat         exact, mapped              approximate  candidates from all others
"""

from __future__ import annotations

from kgshard_tools.index.contents import Contents, contents_of, link_contents, neighbor_contents
from kgshard_tools.index.sidecar import SIDECAR, FoundIndex, find_index
from kgshard_tools.search import CandidateSource, Scan
from kgshard_tools.stored import Stored

__all__ = [
    "SIDECAR",
    "Contents",
    "FoundIndex",
    "contents_of",
    "find_index",
    "link_contents",
    "neighbor_contents",
    "open_source",
]


def open_source(stored: Stored, contents: Contents) -> CandidateSource:
    """Return the index of some contents, or a scan over the shards where none was built; see `find_index`."""
    table, labels = stored.checkpoint.entities, stored.dataset.entities
    found = find_index(stored, contents)
    if found is None:
        return Scan(table, contents.metric, contents.lift, labels=labels)
    if found.info.exact:
        from kgshard_tools.index.flat import FlatIndex

        return FlatIndex(found, table, labels=labels)
    from kgshard_tools.index.approximate import open_approximate  # faiss: only where it is needed

    return open_approximate(found, table, labels=labels)
