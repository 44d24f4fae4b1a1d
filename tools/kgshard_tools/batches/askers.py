"""What can be asked of a run in batches: the missing part of triples, the entities most like others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kgshard.errors import DataError, UnknownEntityError, UnknownNameError, UnknownRelationError
from kgshard.vocabulary import Vocabulary
from kgshard_tools.answers import Similarity, TrainedModel
from kgshard_tools.batches.reading import Given
from kgshard_tools.batches.streams import read_lines
from kgshard_tools.questions import Question, Wanted
from kgshard_tools.results import Answers
from kgshard_tools.search import Ids


class Asker(Protocol):
    """What is asked, of which run."""

    columns: tuple[str, ...]
    """What a question may name."""
    k: int

    def answer(self, questions: Sequence[Given]) -> list[Answers]:
        """Answer questions together. Raises UsageError where one cannot be answered."""

    def check(self, question: Given, *, suggest: bool) -> None:
        """Raise UsageError where this very question cannot be answered; `suggest` names that are near."""


class LinkAsker:
    """Asks for the missing part of triples."""

    columns: tuple[str, ...] = ("head", "relation", "tail")

    def __init__(self, model: TrainedModel, wanted: Wanted) -> None:
        self._model = model
        self._wanted = wanted
        self.k = wanted.k

    def answer(self, questions: Sequence[Given]) -> list[Answers]:
        return self._model.predict([Question(**given) for given in questions], self._wanted)

    def check(self, question: Given, *, suggest: bool) -> None:
        self._wanted.check(Question(**question).asked)
        for part, name in question.items():
            labels = self._model.relations if part == "relation" else self._model.entities
            _check_name(labels, name, suggest=suggest)


class SimilarityAsker:
    """Asks for the entities most like others."""

    columns: tuple[str, ...] = ("entity",)

    def __init__(self, model: TrainedModel, k: int, *, metric: Similarity, exact: bool) -> None:
        self._model = model
        self._metric: Similarity = metric
        self._exact = exact
        self.k = k

    def answer(self, questions: Sequence[Given]) -> list[Answers]:
        names = [self._name(given) for given in questions]
        return self._model.most_similar_many(names, self.k, metric=self._metric, exact=self._exact)

    def check(self, question: Given, *, suggest: bool) -> None:
        _check_name(self._model.entities, self._name(question), suggest=suggest)

    def _name(self, given: Given) -> str:
        if "entity" not in given:
            raise DataError("a question gives an entity; this one gives nothing")
        return given["entity"]


def _check_name(labels: Vocabulary, name: str, *, suggest: bool) -> None:
    # To find near names takes a thousand times as long as to find none. What begins with # may be a row.
    if not suggest and not name.startswith("#") and name not in labels:
        raise (UnknownRelationError if labels.kind == "relation" else UnknownEntityError)(name)
    labels.id_of(name)


def read_candidates(path: Path, model: TrainedModel) -> Ids:
    """Return int64, ascending: the rows of the entities that a file names, one a line.

    Raises:
        DataError: It cannot be read, names none, or a line names no entity.
    """
    rows = []
    for number, line in read_lines(path):
        try:
            rows.append(model.entities.id_of(line.decode()))
        except (UnicodeDecodeError, UnknownNameError) as error:
            problem = str(error) if isinstance(error, UnknownNameError) else "expected UTF-8"
            raise DataError(f"{path}:{number}: {problem}") from error
    if not rows:
        raise DataError(f"{path}: names no entity, so that none could answer")
    return np.unique(np.array(rows, np.int64))
