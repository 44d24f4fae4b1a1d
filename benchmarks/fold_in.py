"""Entities folded in from their train triples against their trained rows, on the same test triples.

    python benchmarks/fold_in.py [--run RUN] [--entities 200] [--steps 100] [--seed 0]

One JSON line. Without --run a model of FB15k-237 is trained first. Some entities that test names are folded
in as new ones from their train triples. Their own trained rows are no candidates meanwhile, neither as rivals
nor in the ranks. Their test triples are then ranked, filtered, with the new row as the given end and as the
answer, the latter beside all trained rows but its own.

`ratio` is the MRR over that of the trained rows on the same questions, of the folded rows, of means of
neighbours and of random trained rows. A row that answers everything would look good there, so `others` is the
MRR of other test questions once these rows stand in for the trained ones, and `intrusions` how many of them
are then above the answer of such a question, on average; both also over what it was, where 1 is no harm.

The rest of the model was trained with the triples of these entities, whose neighbours know them; only
training again without them, which nobody does to add an entity, could tell how much that helps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import emit, real_graph, run_command
from kgshard_tools.stored import Stored, open_stored

from kgshard.config import TrainConfig
from kgshard.folding import FoldedRows, FrozenModel, fold_in
from kgshard.known import KnownLinks, anchors_of, targets_of
from kgshard.models.link import SIDES, Side

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
_QUESTIONS = 512
_OTHERS = 2000


@dataclass(frozen=True)
class Experiment:
    """A run, and which of its entities are treated as new."""

    stored: Stored
    rows: Rows
    """float32[N, dim]: all trained rows."""
    held: Ids
    """Ascending."""
    known: dict[Side, KnownLinks]

    def ranks(self, triples: Ids, stand_ins: Rows) -> dict[str, npt.NDArray[np.float64]]:
        """Rank both sides of triples with rows that stand in for those of `held`.

        Returns:
            By the role that a held entity has ("anchor", "answer", or "neither") float64[questions, 2]: the
            reciprocal rank, and how many held entities are above the answer.
        """
        rows = self.rows.copy()
        rows[self.held] = stand_ins
        found: dict[str, list[npt.NDArray[np.float64]]] = {"anchor": [], "answer": [], "neither": []}
        for side in SIDES:
            given, asked = anchors_of(side, triples), targets_of(side, triples)
            is_given, is_asked = np.isin(given, self.held), np.isin(asked, self.held)
            roles = {"anchor": is_given & ~is_asked, "answer": is_asked & ~is_given}
            roles["neither"] = ~is_given & ~is_asked
            for role, chosen in roles.items():
                found[role].append(self._ranks(side, triples[chosen], rows))
        return {role: np.concatenate(parts) for role, parts in found.items()}

    def _ranks(self, side: Side, triples: Ids, rows: Rows) -> npt.NDArray[np.float64]:
        model, relations = self.stored.model, self.stored.checkpoint.relations
        candidates = model.candidates(side, rows)
        found = []
        for start in range(0, len(triples), _QUESTIONS):
            part = triples[start : start + _QUESTIONS]
            anchors, answers = anchors_of(side, part), targets_of(side, part)
            asked = relations.gather(model.relation_row(side, part[:, 1]))
            queries = model.queries(side, rows[anchors], asked, self.stored.checkpoint.shared)
            scores = model.metric.score_all(queries, candidates)
            true = scores[np.arange(len(part)), answers][:, None].copy()
            which, known = self.known[side].answers(anchors, part[:, 1])
            scores[which, known] = -np.inf
            higher, equal = (scores > true).sum(axis=1), (scores == true).sum(axis=1)
            intruders = (scores[:, self.held] > true).sum(axis=1)
            found.append(np.stack([1 / (1 + higher + equal / 2), intruders], axis=1))
        return np.concatenate(found or [np.empty((0, 2))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--entities", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as folder:
        run = options.run or _train(Path(folder))
        experiment = _experiment(open_stored(run), options.entities, options.seed)
        _measure(experiment, options.steps, options.seed)


def _train(folder: Path) -> Path:
    recipe = Path(__file__).parents[1] / "recipes" / "fb15k-237.toml"
    command = [sys.executable, "-m", "kgshard", "train", str(real_graph("FB15k-237")), "-q"]
    run_command([*command, "-o", f"{folder}/run", "--config", str(recipe), "--nproc-per-node", "2"])
    return folder / "run"


def _experiment(stored: Stored, num_entities: int, seed: int) -> Experiment:
    dataset, draw = stored.dataset, np.random.default_rng(seed)
    tested = np.unique(dataset.triples("test")[:, [0, 2]])
    able = tested[dataset.entities.degrees[tested] > 0]
    held = np.sort(draw.choice(able, min(num_entities, len(able)), replace=False)).astype(np.int64)
    everything, relations = dataset.known_triples().astype(np.int64), dataset.num_relations
    known = {side: KnownLinks(everything, side, num_relations=relations) for side in SIDES}
    return Experiment(
        stored, np.array(stored.checkpoint.entities.read(range(dataset.num_entities))), held, known
    )


def _fold(experiment: Experiment, steps: int, seed: int) -> tuple[FoldedRows, Ids]:
    """Fold the held entities in; return what came of it, and the triples with the new ids."""
    stored, held = experiment.stored, experiment.held
    train = stored.dataset.triples("train").astype(np.int64)
    new = np.arange(stored.model.num_entities)
    new[held] = stored.model.num_entities + np.arange(len(held))
    is_one, is_other = (np.isin(train[:, end], held) for end in (0, 2))
    mine = np.stack([new[train[:, 0]], train[:, 1], new[train[:, 2]]], axis=1)[is_one | is_other]
    frozen = FrozenModel(
        model=stored.model,
        entities=stored.checkpoint.entities,
        relations=stored.checkpoint.relations,
        shared=stored.checkpoint.shared,
        train=train[~(is_one | is_other)],
        config=TrainConfig.from_dict(stored.run.info.config | {"device": "auto", "optimizer_device": "auto"}),
    )
    rivals = np.setdiff1d(np.arange(stored.model.num_entities), held)
    return fold_in(frozen, mine, len(held), steps=steps, seed=seed, rivals=rivals), mine


def _means_of_neighbours(experiment: Experiment, triples: Ids) -> Rows:
    first, rows = experiment.stored.model.num_entities, experiment.rows
    total, uses = np.zeros((len(experiment.held), rows.shape[1])), np.zeros(len(experiment.held))
    for end, other in ((0, 2), (2, 0)):
        part = triples[(triples[:, end] >= first) & (triples[:, other] < first)]
        np.add.at(total, part[:, end] - first, rows[part[:, other]])
        np.add.at(uses, part[:, end] - first, 1)
    means: Rows = (total / np.maximum(uses, 1)[:, None]).astype(np.float32)
    return means


def _measure(experiment: Experiment, steps: int, seed: int) -> None:
    began = time.perf_counter()
    folded, triples = _fold(experiment, steps, seed)
    seconds = time.perf_counter() - began
    held, rows = experiment.held, experiment.rows
    draw = np.random.default_rng(seed + 1)
    random = rows[draw.choice(np.setdiff1d(np.arange(len(rows)), held), len(held))]
    tested = experiment.stored.dataset.triples("test").astype(np.int64)
    own = np.isin(tested[:, 0], held) | np.isin(tested[:, 2], held)
    others = tested[~own][draw.permutation((~own).sum())[:_OTHERS]]
    figures: dict[str, Any] = {}
    for name, stand_ins in (
        ("trained", rows[held]),
        ("folded", folded.rows),
        ("mean_of_neighbours", _means_of_neighbours(experiment, triples)),
        ("random_rows", random),
    ):
        own_ranks = experiment.ranks(tested[own], stand_ins)
        other_ranks = experiment.ranks(others, stand_ins)["neither"].mean(axis=0)
        both = np.concatenate([own_ranks["anchor"], own_ranks["answer"]])[:, 0]
        figures[name] = {
            "mrr": float(both.mean()),
            "as_anchor": float(own_ranks["anchor"][:, 0].mean()),
            "as_answer": float(own_ranks["answer"][:, 0].mean()),
            "others": float(other_ranks[0]),
            "intrusions": float(other_ranks[1]),
        }
    figures["questions"] = len(both)
    for name in ("folded", "mean_of_neighbours", "random_rows"):
        for figure, value in list(figures[name].items()):
            figures[name][f"{figure}_ratio"] = value / figures["trained"][figure]
    emit(
        "entities folded in against their trained rows",
        run=experiment.stored.run.info.data,
        model=experiment.stored.model.name,
        dim=experiment.stored.model.dim,
        entities=len(held),
        triples=len(triples),
        ratio=figures["folded"]["mrr_ratio"],
        **{
            name: {key: round(value, 4) for key, value in each.items()} if isinstance(each, dict) else each
            for name, each in figures.items()
        },
        median_norm=float(np.median(np.linalg.norm(folded.rows, axis=1))),
        typical_norm=folded.typical_norm,
        loss_before=float(folded.loss_before.mean()),
        loss_after=float(folded.loss_after.mean()),
        converged=int(folded.converged.sum()),
        median_steps=float(np.median(folded.steps)),
        rivals=folded.num_rivals,
        train_questions=folded.num_train_questions,
        regulariser=folded.regulariser,
        seconds=seconds,
        seconds_an_entity=seconds / len(held),
    )


if __name__ == "__main__":
    main()
