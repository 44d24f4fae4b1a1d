"""Labels found by what somebody remembers of them: `kgshard search`, completion, `model.entities`.

    RUN/index/labels.sqlite      format "kgshard.labels/1"; of the entities, and the same of the relations:
        meta                     format, vocabulary_sha256, entity and relation (counts)
        entity_labels            n, id, degree, label
        entity_keys              key (UTF-8 of `fold(label)`, its first KEY_LENGTH characters), n
        entity_words             FTS5 without content or detail: the words of each key; rowid is n
        entity_grams             block, bucket, code, rows: which of BLOCK labels of about one length hold a
                                 trigram; see `kgshard_tools.labels.grams`

n counts from 1 in the order of matches of one kind: higher degree first, then lower id. So whatever FTS5 or a
list of rows yields first is the better answer, and nothing needs sorting.

rules     what matches, and how well        grams    trigrams, in numpy
matching  the stages of a search            build    labels.sqlite from a dataset
store     labels.sqlite                     scan     the same answers with nothing built
found     the labels of a run, what was found
"""

from __future__ import annotations

from kgshard_tools.labels.matching import KINDS, Kind, LabelMatch, LabelSource
from kgshard_tools.labels.store import LABELS_FILE, LabelStore, labels_path

__all__ = ["KINDS", "LABELS_FILE", "Kind", "LabelMatch", "LabelSource", "LabelStore", "labels_path"]
