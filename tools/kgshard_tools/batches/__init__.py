"""Batches of questions: read from a file or a stream, answered in blocks, written as a file or a stream.

    streams    lines of files and pipes, as they come
    reading    questions of TSV, NDJSON, JSON and Parquet files, of stdin, and names
    askers     what is asked of a run
    answering  block by block; what to do about questions that cannot be answered
    writing    answers as NDJSON, JSON, TSV, Parquet

Memory depends on the answers to one block, not on the number of questions; only a .json file of questions
is read whole.
"""

from kgshard_tools.batches.answering import (
    AnswersWritten,
    Batch,
    OnError,
    Tally,
    answer_to_file,
    block_size,
)
from kgshard_tools.batches.askers import Asker, LinkAsker, SimilarityAsker, read_candidates
from kgshard_tools.batches.reading import Entry, one_question, read_entries, read_names
from kgshard_tools.batches.writing import ndjson_blocks

__all__ = [
    "AnswersWritten",
    "Asker",
    "Batch",
    "Entry",
    "LinkAsker",
    "OnError",
    "SimilarityAsker",
    "Tally",
    "answer_to_file",
    "block_size",
    "ndjson_blocks",
    "one_question",
    "read_candidates",
    "read_entries",
    "read_names",
]
