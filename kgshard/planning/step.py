"""What a step, an evaluation and indexes of triples make: bounds. No torch.

The factors were fitted to what torch's profiler saw of real steps, and are upper ends.

Letters: Q questions of a step and q of one rank's, K negatives.
"""

from __future__ import annotations

import math

from kgshard.config import TrainConfig
from kgshard.memory import HALF_BYTES, KEPT_NUMBERS, SLICE_NUMBERS
from kgshard.models.link import LinkModel
from kgshard.partition import RowPartition
from kgshard.planning.stored import GraphSize, held_tables

_SCORES = {"softmax": 2, "margin": 4, "bce": 5, "self-adversarial": 7}
"""Arrays [q, K] that a loss makes, the scores and their gradient included."""
_MORE_SCORES = {"dot": 0, "hyperplane": 5}
"""Arrays [q, K] that a metric makes besides; a distance makes two."""
_ROWS, _QUERIES, _HIDDEN, _SHARED = 5, 4, 6, 5
"""Copies that a step makes of the rows that are asked for, of questions' rows, of hidden layers, and of
shared parameters: gradients, and what autograd keeps."""
_RANKED_AT_ONCE, _BLOCK_QUESTIONS, _BLOCK_ROWS = 8192, 512, 8192
"""Triples of a part of an evaluation; questions and rows that are compared in it."""


def index_bytes(config: TrainConfig, size: GraphSize) -> int:
    """Return what grows with the triples on every rank, while it is built: an epoch's order, indexes."""
    if config.train_type == "kvsall":
        a_triple = 8 + 330  # Questions are sorted in columns of int64.
    else:
        a_triple = (
            8 + 44 * config.filter_negatives + {"degree": 24, "typed": 66}.get(config.negatives_from, 0)
        )
    num_bytes = a_triple * size.triples
    if config.negatives_from == "degree":
        num_bytes += 40 * size.entities
    if config.evaluates:
        # Known links of train and valid; degrees, and labels that are taken to be of 32 bytes.
        num_bytes += 56 * (size.triples + size.valid) + 48 * size.entities
    return num_bytes


def hidden_width(model: LinkModel) -> int:
    """Return the floats of a network's hidden layer: its widest parameter has as many rows."""
    shared = model.scoring.shared_init(model.dim).values()
    return max((math.prod(how.shape) for how in shared), default=0) // model.dim


def ranking_bytes(model: LinkModel, config: TrainConfig) -> int:
    """Return what an evaluation makes: queries and answers in float64, and a block of comparisons."""
    ends = 2 * _RANKED_AT_ONCE * model.dim * (config.value_bytes + 24)
    questions = _BLOCK_QUESTIONS * (model.relation_dim + hidden_width(model)) * 32
    return ends + questions + _BLOCK_ROWS * (model.dim * 16 + _BLOCK_QUESTIONS * 24)


class StepBytes:
    """What a step of one rank makes."""

    def __init__(self, config: TrainConfig, model: LinkModel, world_size: int) -> None:
        self._config = config
        self._model = model
        self._entities, self._relations, *self._shared = held_tables(model, config, world_size)
        sides = 1 if config.train_type == "kvsall" else 2
        items = len(RowPartition(config.batch_size, world_size).rows_of(0))
        self._all_questions = sides * config.batch_size
        self._questions = sides * items
        self._is_full = config.train_type != "negative-sampling"
        if self._is_full:
            self._rows = self._questions * (1 if config.train_type == "kvsall" else 2)
        else:
            chunks = -(-items // config.chunk_size) + 1 if config.chunk_size else 1
            groups = chunks * (2 if config.negatives_from == "typed" else 1)
            self._rows = 2 * self._questions + groups * config.negatives

    def activation_bytes(self) -> int:
        return 4 * (self._row_numbers() + (self._full_numbers() if self._is_full else self._score_numbers()))

    def _row_numbers(self) -> int:
        """Count numbers of rows, queries, gradients of what every rank holds, and a block of an update."""
        config, model, asked = self._config, self._model, self._questions
        rows = self._rows * model.dim
        numbers = _ROWS * rows + _QUERIES * asked * (model.dim + model.relation_dim)
        numbers += _HIDDEN * asked * hidden_width(model)
        numbers += _SHARED * sum(table.rows * table.columns for table in self._shared)
        numbers += 2 * min(self._all_questions, model.num_relation_rows) * model.relation_dim
        if config.n3 or config.l2 or config.l3:
            numbers += 2 * rows
        if config.dropout:
            numbers += 3 * self._all_questions * model.dim
        if config.relation_prediction:
            numbers += 3 * model.num_relation_rows * (asked + model.relation_dim)
        if config.accumulate > 1 and not self._is_full:
            numbers += 3 * min(config.accumulate * rows, self._entities.rows * model.dim)
        if model.metric.name == "moduli":
            numbers += 10 * min(SLICE_NUMBERS, asked * model.dim * config.negatives)
        return numbers

    def _score_numbers(self) -> int:
        metric = _MORE_SCORES.get(self._model.metric.name, 2)
        return (_SCORES[self._config.loss] + metric) * self._questions * self._config.negatives

    def _full_numbers(self) -> int:
        """Count numbers of blocks of scores, of every row's gradient, and of an update of all rows."""
        rows, dim = self._entities.rows, self._model.dim
        a_score = 1 if self._model.metric.name == "dot" else 6
        scored = rows * (self._all_questions * a_score + 2 * dim)
        tables = 2 + 2 * (self._config.accumulate > 1)
        return 3 * min(scored, KEPT_NUMBERS) // 2 + tables * rows * (dim + 1) + 3 * self._all_questions * dim

    def exchange_bytes(self) -> int:
        """Count rows and gradients that others ask for or send, and the memory that ranks share."""
        config, model = self._config, self._model
        value_bytes = 2 * config.value_bytes + 2 * 4
        largest = 4 * self._rows * model.dim
        num_bytes = self._rows * model.dim * value_bytes
        if config.shards_relations(model):
            num_bytes += self._questions * model.relation_dim * value_bytes
        if self._is_full:
            queries = 4 * self._all_questions * model.dim
            largest, num_bytes = max(largest, queries), num_bytes + 3 * queries
        return num_bytes + 2 * min(HALF_BYTES, largest)
