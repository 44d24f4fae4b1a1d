"""Every question answered from exported arrays, the text of the graph and the paper's formula alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from graphs import Triple
from papers import PAPER

Array = npt.NDArray[Any]


def random_graph(seed: int, num_entities: int, num_relations: int) -> dict[str, list[Triple]]:
    """Return splits of random links from twelve entities, and a ring in train through all of them."""
    draw = np.random.default_rng(seed)
    splits = {
        name: [
            (f"e{h}", f"r{r}", f"e{t}")
            for h, r, t in zip(
                draw.integers(0, 12, size).tolist(),
                draw.integers(0, num_relations, size).tolist(),
                draw.integers(0, num_entities, size).tolist(),
                strict=True,
            )
        ]
        for name, size in (("train", 2 * num_entities), ("valid", 60), ("test", 60))
    }
    splits["train"] += [
        (f"e{i}", f"r{i % num_relations}", f"e{(i + 1) % num_entities}") for i in range(num_entities)
    ]
    return splits


class BruteForce:
    """The answers of one exported run."""

    def __init__(self, folder: Path, model: str, graph: dict[str, list[Triple]]) -> None:
        """Read an export to numpy of a run of `model` on `graph`."""
        arrays = {path.stem: np.load(path).astype(np.float64) for path in folder.glob("*.npy")}
        self.entities, self.relations = arrays["entities"], arrays["relations"]
        self.inverses = arrays.get("inverse_relations")
        self.shared = {
            name.removeprefix("shared-"): array
            for name, array in arrays.items()
            if name.startswith("shared-")
        }
        self.paper, self.graph = PAPER[model], graph
        self.labels = (folder / "entities.txt").read_text().split("\n")[:-1]
        self.relation_labels = (folder / "relations.txt").read_text().split("\n")[:-1]
        self._scores: dict[tuple[str, str, str], Array] = {}

    def scores(self, side: str, anchor: str, relation: str) -> Array:
        """Return float64[entities]: the score of every entity as the missing one."""
        question = side, anchor, relation
        if question not in self._scores:
            self._scores[question] = np.array([self._score(*question, row) for row in self.entities])
        return self._scores[question]

    def _score(self, side: str, anchor: str, relation: str, candidate: Array) -> float:
        row, r = self.entities[self.labels.index(anchor)], self.relation_labels.index(relation)
        if side == "tail":
            return self.paper(row, self.relations[r], candidate, self.shared)
        if self.inverses is not None:
            return self.paper(row, self.inverses[r], candidate, self.shared)
        return self.paper(candidate, self.relations[r], row, self.shared)

    def known(self, side: str, anchor: str, relation: str) -> dict[str, str]:
        """Return known answers with the first split that holds them."""
        found: dict[str, str] = {}
        for split, triples in self.graph.items():
            for h, r, t in triples:
                given, asked = (h, t) if side == "tail" else (t, h)
                if (given, r) == (anchor, relation):
                    found.setdefault(asked, split)
        return found

    def best(self, side: str, anchor: str, relation: str, k: int, *, known: bool) -> list[tuple[str, float]]:
        """Return labels and scores of the k best, those of equal score by row."""
        scores = self.scores(side, anchor, relation)
        hidden = set() if known else set(self.known(side, anchor, relation))
        order = [i for i in np.argsort(-scores, kind="stable").tolist() if self.labels[i] not in hidden]
        return [(self.labels[i], float(scores[i])) for i in order[:k]]


def ask(model: Any, side: str, anchor: str, relation: str, k: int, *, known: bool = False) -> Any:
    """Ask a TrainedModel for one side."""
    if side == "tail":
        return model.predict_tails(anchor, relation, k, known=known)
    return model.predict_heads(relation, anchor, k, known=known)


def assert_answers(answers: Any, wanted: list[tuple[str, float]], *, rtol: float = 1e-12) -> None:
    """Check labels, their order, scores and ranks."""
    assert [answer.label for answer in answers] == [label for label, _ in wanted]
    np.testing.assert_allclose(
        [answer.score for answer in answers], [score for _, score in wanted], rtol=rtol, atol=rtol
    )
    assert [answer.rank for answer in answers] == list(range(1, len(wanted) + 1))
