"""Missing tails and heads beside dicee's `predict_topk`, on one model: dicee trains it, kgshard imports it.

    python benchmarks/reference_answers.py DICEE_PYTHON [--graph FB15k-237] [--questions 200] [--repeats 3]

DICEE_PYTHON is an interpreter that has dicee 0.3.3. One JSON line for each side: queries a second one by one
and in a batch (dicee's batches are of its own questions' product, so it is asked one by one), with the share
of its ten best that are ours too. Ties and dicee's float32 may order the last ones otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import emit, median, real_graph, run_command
from kgshard_tools.answers import TrainedModel, load
from kgshard_tools.questions import Question, Wanted
from kgshard_tools.stored import open_stored

from kgshard.models.link import SIDES, Side

K = 10
TRAIN = """
import sys
from importlib import import_module
import torch
class NoTokens:
    n_vocab, eot_token = 50257, 50256
    def encode(self, *_, **__):
        return [0]
import_module("tiktoken").get_encoding = lambda *_, **__: NoTokens()
namespace = import_module("dicee.config").Namespace()
given = dict(dataset_dir=sys.argv[1], path_to_store_single_run=sys.argv[2], separator="\\t", model="ComplEx",
             embedding_dim=128, num_epochs=1, batch_size=1024, lr=0.01,
             scoring_technique="NegSample", neg_ratio=10, trainer="torchCPUTrainer", eval_model="None",
             num_core=0, random_seed=1)
for name, value in given.items():
    setattr(namespace, name, value)
import_module("dicee.executer").Execute(namespace).start()
"""
ASK = """
import json, sys, time
from importlib import import_module
class NoTokens:
    n_vocab, eot_token = 50257, 50256
    def encode(self, *_, **__):
        return [0]
import_module("tiktoken").get_encoding = lambda *_, **__: NoTokens()
model = import_module("dicee").KGE(path=sys.argv[1])
questions, answers, seconds = json.loads(open(sys.argv[2]).read()), [], []
for question in questions[:2] + questions:
    began = time.perf_counter()
    found = model.predict_topk(**question, topk=10)
    seconds.append(time.perf_counter() - began)
    answers.append([label for label, _ in found[0]])
print("ANSWERS" + json.dumps([answers[2:], sum(seconds[2:])]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dicee")
    parser.add_argument("--graph", default="FB15k-237")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    graph = real_graph(options.graph)
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as name:
        folder = Path(name)
        run_command([options.dicee, "-c", TRAIN, str(_as_dicee_reads(graph, folder)), str(folder / "dicee")])
        command = ["import", str(folder / "dicee"), "-o", str(folder / "run"), "--data", str(graph), "-q"]
        run_command([sys.executable, "-m", "kgshard", *command])
        for side in SIDES:
            _compare(folder, side, options)


def _as_dicee_reads(graph: Path, folder: Path) -> Path:
    """Copy the splits under the names that dicee knows."""
    (folder / "graph").mkdir()
    for split in ("train", "valid", "test"):
        [source] = graph.glob(f"{split}.t*")
        (folder / "graph" / f"{split}.txt").write_bytes(source.read_bytes())
    return folder / "graph"


def _compare(folder: Path, side: Side, options: argparse.Namespace) -> None:
    """Ask both the same, and print what it took."""
    model = load(folder / "run")
    given = _given(model, side, options.questions)
    asked = [Question(**question) for question in given]
    wanted = Wanted(K, known=True)
    batched, single = [], []
    for _ in range(options.repeats):
        began = time.perf_counter()
        ours = model.predict(asked, wanted)
        batched.append(time.perf_counter() - began)
        began = time.perf_counter()
        for question in asked:
            model.predict([question], wanted)
        single.append(time.perf_counter() - began)
    letters = {"head": "h", "relation": "r", "tail": "t"}
    questions = [{letters[part]: [label] for part, label in question.items()} for question in given]
    (folder / "questions.json").write_text(json.dumps(questions))
    theirs = []
    for _ in range(options.repeats):
        _, text = run_command(
            [options.dicee, "-c", ASK, str(folder / "dicee"), str(folder / "questions.json")]
        )
        answers, seconds = json.loads(text.rpartition("ANSWERS")[2])
        theirs.append(seconds)
    same = [len(set(mine.labels) & set(its)) / K for mine, its in zip(ours, answers, strict=True)]
    emit(
        f"missing {side}s by name, beside dicee's predict_topk on the same model",
        questions=len(given),
        entities=len(model),
        same_of_ten=float(np.mean(same)),
        dicee_queries_per_second=len(given) / median(theirs),
        queries_per_second_one_by_one=len(given) / median(single),
        queries_per_second=len(given) / median(batched),
        one_by_one_ratio=median(theirs) / median(single),
        ratio=median(theirs) / median(batched),
    )


def _given(model: TrainedModel, side: Side, count: int) -> list[dict[str, Any]]:
    """Return what questions of test triples give, by name."""
    given, place = ("head", 0) if side == "tail" else ("tail", 2)
    test = open_stored(model).dataset.triples("test")
    chosen = np.random.default_rng(0).permutation(len(test))[:count]
    return [
        {given: model.entities[int(triple[place])], "relation": model.relations[int(triple[1])]}
        for triple in test[chosen]
    ]


if __name__ == "__main__":
    main()
