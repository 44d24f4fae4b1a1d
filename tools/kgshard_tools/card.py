"""A model card: what a Hugging Face hub, and whoever gets the files, should know of a run.

YAML between two lines of dashes, then Markdown. https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgshard.errors import RunError
from kgshard.files import read_json, write_text
from kgshard.models.link import SIDES
from kgshard.ranking.protocol import protocol_line
from kgshard_tools.catalogue import formula
from kgshard_tools.stored import Stored
from kgshard_tools.terminal import shown

_START = '---\nlibrary_name: "kgshard"\n'
_METRICS = {"mrr": "filtered MRR", "hits@1": "filtered Hits@1", "hits@3": "filtered Hits@3"}
_METRICS |= {"hits@10": "filtered Hits@10"}


def model_card(
    stored: Stored, *, license: str | None = None, files: Sequence[str] = ("model.safetensors",)
) -> str:
    """Return the text of README.md: how to load the files, what the model is, and how well it did.

    Args:
        stored: A checkpoint. Figures are those of `kgshard evaluate --split test` where it was evaluated.
        files: The names of the model's files beside the card.
        license: An identifier that the hub knows ("cc-by-4.0"); None says nothing of a license.
    """
    result = _test_result(stored)
    return f"{_START}{_front_matter(stored, result, license)}---\n\n{_body(stored, result, files)}"


def write_card(stored: Stored, out: Path, *, license: str | None = None) -> None:
    """Write `model_card` to a file; a card that is there is replaced.

    Raises:
        RunError: Something else is there.
    """
    if out.exists() and not (out.is_file() and out.read_bytes().startswith(_START.encode())):
        raise RunError(f"{out}: exists and is not a card that kgshard wrote; choose another name")
    write_text(out, model_card(stored, license=license))


def _test_result(stored: Stored) -> dict[str, Any] | None:
    """Return the filtered figures of the whole test split, if they are of this very checkpoint."""
    path = stored.run.folder / "eval" / "test-full-filtered.json"
    try:
        result = read_json(path, dict[str, Any])
        known = result["protocol"]["checkpoint"] == stored.checkpoint.folder.name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if known else None


def _front_matter(stored: Stored, result: dict[str, Any] | None, license: str | None) -> str:
    """Return YAML; JSON says values the way YAML reads them."""
    data = stored.run.info.data
    entries: dict[str, object] = {
        "pipeline_tag": "graph-ml",
        **({"license": license} if license is not None else {}),
        "tags": ["knowledge-graph", "knowledge-graph-embeddings", "link-prediction", stored.model.name],
    }
    if result is not None:
        metrics = [
            {"type": name, "value": round(result["metrics"][name], 6), "name": said}
            for name, said in _METRICS.items()
        ]
        described = {
            "task": {"type": "graph-ml", "name": "link prediction"},
            "dataset": {"type": data, "name": data, "split": "test"},
            "metrics": metrics,
        }
        entries["model-index"] = [{"name": f"{stored.model.name} on {data}", "results": [described]}]
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in entries.items())


def _body(stored: Stored, result: dict[str, Any] | None, files: Sequence[str]) -> str:
    model, data = stored.model, shown(stored.run.info.data)
    parts = [
        f"# {model.name} embeddings of {_code(data)}",
        f"{model.num_entities:,} entities and {model.num_relations:,} relations, embedded with kgshard. "
        "Row i of a table is label i of the Parquet file of its name.",
        "## Load it",
        "```python\n" + "\n".join(loading(files)) + "\n```",
        "## The model",
        formula(model.scoring) + ".",
        _table(_facts(stored)),
        "## How well it does",
        _figures(result),
        "## Settings",
        _table({_code(name): _code(value) for name, value in stored.run.info.config.items()}),
    ]
    return "\n\n".join(parts) + "\n"


def loading(files: Sequence[str]) -> list[str]:
    """Return the lines of Python that load a model of these files, and its labels."""
    load = f'safetensors.torch.load_file("{files[0]}")'
    if len(files) > 1:
        each = f"for name in {list(files)} for item in safetensors.torch.load_file(name).items()"
        load = f"dict(item {each})"
    return [
        "import pyarrow.parquet, safetensors.torch",
        f"tables = {load}",
        'labels = pyarrow.parquet.read_table("entities.parquet")["label"].to_pylist()',
    ]


def _facts(stored: Stored) -> dict[str, str]:
    model = stored.model
    heads = (
        "asked by inverse relations of their own" if model.reciprocal else "asked by the model's own query"
    )
    return {
        "entity rows": f"{model.num_entities:,} of {model.dim} floats, `entity_embedding.weight`",
        "relation rows": f"{model.num_relation_rows:,} of {model.relation_dim} floats, "
        "`relation_embedding.weight`" + (", inverses behind" if model.reciprocal else ""),
        "metric": model.metric.name,
        "heads": heads,
        "complex numbers": "real parts first, then imaginary parts",
        "step": f"{stored.checkpoint.step:,}",
    }


def _figures(result: dict[str, Any] | None) -> str:
    if result is None:
        return "This checkpoint was not evaluated on its test split: `kgshard evaluate RUN --split test`."
    names = list(result["metrics"])
    sides: dict[str, dict[str, float]] = {"both": result["metrics"]}
    sides |= {side: result[side] for side in SIDES if result[side]}
    rows: list[list[str]] = [["", *names], ["---"] + ["---:"] * len(names)]
    rows += [[side, *(f"{figures[name]:.4f}" for name in names)] for side, figures in sides.items()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{_code(protocol_line(result['protocol']))}\n\n{table}"


def _table(facts: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())])


def _code(value: object) -> str:
    """Return text that neither Markdown nor HTML reads as anything but itself, in a table too."""
    text = shown(str(value)).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else ""
