"""PyTorch-BigGraph: its own training loop, two HOGWILD processes of one thread, row-wise Adagrad.

An epoch is a step of the window: it ends with a checkpoint, whose writing is measured too (some hundredths
of a second of several).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Optional

import h5py
from measuring import Window, main, triples_of
from torchbiggraph import schema
from torchbiggraph.config import ConfigSchema
from torchbiggraph.train import train_and_report_stats


def _unpack_optional(kind: Any) -> Any:
    """Return T of Optional[T], as the original does where `typing` hands out one object for equal types."""
    [inner, *_] = getattr(kind, "__args__", ()) or [None]
    if inner is None or kind != Optional[inner]:  # noqa: UP045  The point of it.
        raise TypeError("Not an optional type")
    return inner


def training(given: dict[str, Any]) -> dict[str, Any]:
    """Train ComplEx; `negatives` a side, half of the batch and half drawn evenly."""
    schema.unpack_optional = _unpack_optional
    triples, num_entities, num_relations = triples_of(given)
    window = Window(given)
    with tempfile.TemporaryDirectory(prefix="kgshard-bench-") as name:
        folder = Path(name)
        (folder / "entity_count_all_0.txt").write_text(str(num_entities))
        (folder / "dynamic_rel_count.txt").write_text(str(num_relations))
        (folder / "train").mkdir()
        with h5py.File(folder / "train" / "edges_0_0.h5", "w") as edges:
            edges.attrs["format_version"] = 1
            for column, part in enumerate(("lhs", "rel", "rhs")):
                edges[part] = triples[:, column].astype("int64")
        config = _config(folder, given)
        for _ in train_and_report_stats(config):
            window.step()
    figures = window.figures(items_a_step=len(triples))
    return figures | {"steps": figures["steps"] * -(-len(triples) // given["batch_size"])}


def _config(folder: Path, given: dict[str, Any]) -> ConfigSchema:
    relation = {"name": "all", "lhs": "all", "rhs": "all", "operator": "complex_diagonal"}
    settings = {
        "entity_path": str(folder),
        "edge_paths": [str(folder / "train")],
        "checkpoint_path": str(folder / "model"),
        "entities": {"all": {"num_partitions": 1}},
        "relations": [relation],
        "dynamic_relations": True,
        "dimension": given["dim"],
        "comparator": "dot",
        "loss_fn": "softmax",
        "global_emb": False,
        "num_epochs": given["warm_up"] + given["steps"],
        "num_batch_negs": given["negatives"] // 2,
        "num_uniform_negs": given["negatives"] // 2,
        "batch_size": given["batch_size"],
        "workers": 2,
        "eval_fraction": 0,
        "lr": 0.1,
    }
    return ConfigSchema.from_dict(settings)


if __name__ == "__main__":
    main({"training": training}, "torchbiggraph", "torch")
