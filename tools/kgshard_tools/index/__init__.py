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

contents     what an index holds        kinds        flat, norm, ivf, hnsw, ... and what can be turned on each
sidecar      index.json                 faiss_files  the one module that imports faiss
build        from shards to files       tuning       recall, measured, and the search that reaches it
flat, norm   exact, mapped              approximate  candidates from all others
tuned        what they have in common       foreign...   files that nobody vouches for, read apart
"""

from __future__ import annotations

from collections.abc import Sequence

from kgshard.shards import StoredTable
from kgshard_tools.index.contents import Contents, contents_of, link_contents, neighbor_contents
from kgshard_tools.index.kinds import KINDS, Kind, Search
from kgshard_tools.index.sidecar import SIDECAR, FoundIndex, find_index
from kgshard_tools.index.tuned import IndexPartFile, TunedIndex
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
    "tuned_class",
]


def open_source(stored: Stored, contents: Contents) -> CandidateSource:
    """Return the index of some contents, or a scan over the shards where none was built; see `find_index`."""
    table, labels = stored.checkpoint.entities, stored.dataset.entities
    found = find_index(stored, contents)
    if found is None:
        return Scan(table, contents.metric, contents.lift, labels=labels)
    if found.info.type == "flat":
        from kgshard_tools.index.flat import FlatIndex

        return FlatIndex(found, table, labels=labels)
    return _open_tuned(found, table, labels)


def _open_tuned(found: FoundIndex, table: StoredTable, labels: Sequence[str]) -> CandidateSource:
    """Open an index as its sidecar says it is searched."""
    info, kind = found.info, KINDS[found.info.type]
    files = [IndexPartFile(found.folder / part.file, range(*part.rows)) for part in info.parts]
    search = Search(info.search.get(kind.parameter, table.num_rows), info.search.get("depth", 1))
    measured = info.recall.measured if info.recall else None
    return tuned_class(kind)(
        files, found.contents, kind, table, search, longest=info.longest, recall=measured, labels=labels
    )


def tuned_class(kind: Kind) -> type[TunedIndex]:
    """Return what opens an index of some kind; faiss is imported only where it is needed."""
    if kind.is_by_norm:
        from kgshard_tools.index.norm import NormIndex

        return NormIndex
    from kgshard_tools.index.approximate import ApproximateIndex

    return ApproximateIndex
