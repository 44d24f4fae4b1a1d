"""A model card: what a Hugging Face hub, and whoever gets the files, should know of a run.

YAML between two lines of dashes, then Markdown. https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from kgshard.errors import RunError
from kgshard.files import read_json, write_text
from kgshard.ranking.protocol import protocol_line
from kgshard_tools.catalogue import formula
from kgshard_tools.stored import Stored
from kgshard_tools.terminal import shown

_START = '---\nlibrary_name: "kgshard"\n'
_METRICS = {"mrr": "filtered MRR", "hits@1": "filtered Hits@1", "hits@3": "filtered Hits@3"}
_METRICS |= {"hits@10": "filtered Hits@10"}


class _Result(Struct, frozen=True):
    """What a card says of an evaluation; see `kgshard.evaluate`."""

    protocol: dict[str, Any]
    metrics: dict[str, float]
    head: dict[str, float] | None = None
    tail: dict[str, float] | None = None


def model_card(
    stored: Stored,
    *,
    license: str | None = None,
    files: Sequence[str] = ("model.safetensors",),
    dtype: str | None = None,
) -> str:
    """Return the text of README.md: how to load the files, what the model is, and how well it did.

    Args:
        stored: A checkpoint. Figures are those of `kgshard evaluate --split test` where it was evaluated.
        license: An identifier that the hub knows ("cc-by-4.0"); None says nothing of a license.
        files: The names of the model's files beside the card.
        dtype: What the tables in those files were written as; None is as stored.
    """
    result = _test_result(stored)
    front = _front_matter(stored, result, license)
    return f"{_START}{front}---\n\n{_body(stored, result, files, dtype)}"


def write_card(stored: Stored, out: Path, *, license: str | None = None) -> None:
    """Write `model_card` to a file; a card that is there is replaced.

    Raises:
        RunError: Something else is there.
    """
    if out.exists() and not (out.is_file() and out.read_bytes().startswith(_START.encode())):
        raise RunError(f"{out}: exists and is not a card that kgshard wrote; choose another name")
    write_text(out, model_card(stored, license=license))


def _test_result(stored: Stored) -> _Result | None:
    """Return the filtered figures of the whole test split, if they are of this very checkpoint."""
    name = stored.checkpoint.folder.name
    for part in ("", f"-{name}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = stored.run.folder / "eval" / f"test-full-filtered{part}.json"
            result = read_json(path, _Result)
            protocol_line(result.protocol)
            if result.protocol["checkpoint"] == name and set(_METRICS) <= set(result.metrics):
                return result
    return None


def _front_matter(stored: Stored, result: _Result | None, license: str | None) -> str:
    """Return YAML, which reads JSON, but for what lies beyond 16 bits."""
    data = stored.run.info.data
    entries: dict[str, object] = {
        "pipeline_tag": "graph-ml",
        **({"license": license} if license is not None else {}),
        "tags": ["knowledge-graph", "knowledge-graph-embeddings", "link-prediction", stored.model.name],
    }
    if result is not None:
        metrics = [
            {"type": name, "value": round(result.metrics[name], 6), "name": said}
            for name, said in _METRICS.items()
        ]
        described = {
            "task": {"type": "graph-ml", "name": "link prediction"},
            "dataset": {"type": data, "name": data, "split": "test"},
            "metrics": metrics,
        }
        entries["model-index"] = [{"name": f"{stored.model.name} on {data}", "results": [described]}]
    return "".join(f"{key}: {_yaml(value)}\n" for key, value in entries.items())


def _yaml(value: object) -> str:
    def whole(pair: re.Match[str]) -> str:
        character = json.loads('"' + pair[0] + '"')
        return f"\\U{ord(character):08X}"

    return re.sub(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}", whole, json.dumps(value))


def _body(stored: Stored, result: _Result | None, files: Sequence[str], dtype: str | None) -> str:
    model, data = stored.model, shown(stored.run.info.data)
    parts = [
        f"# {model.name} embeddings of {_code(data)}",
        f"{model.num_entities:,} entities and {model.num_relations:,} relations, embedded with kgshard. "
        "Row i of a table is label i of the Parquet file of its name.",
        "## Load it",
        "```python\n" + "\n".join(loading(files)) + "\n```",
        "## The model",
        formula(model.scoring) + ".",
        _table(_facts(stored, dtype)),
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


def _facts(stored: Stored, dtype: str | None) -> dict[str, str]:
    model, kept = stored.model, stored.config()["torch_dtype"]
    same = dtype in (None, kept)
    heads = "inverse relations of their own" if model.reciprocal else "the model's own query"
    return {
        "entity rows": f"{model.num_entities:,} of {model.dim} floats, `entity_embedding.weight`",
        "relation rows": f"{model.num_relation_rows:,} of {model.relation_dim} floats, "
        "`relation_embedding.weight`" + (", inverses behind" if model.reciprocal else ""),
        "numbers": kept if same else f"{dtype} in these files, {kept} where it was evaluated",
        "metric": model.metric.name,
        "heads": f"asked by {heads}",
        "complex numbers": "real parts first, then imaginary parts",
        "step": f"{stored.checkpoint.step:,}",
    }


def _figures(result: _Result | None) -> str:
    if result is None:
        return "This checkpoint was not evaluated on its test split: `kgshard evaluate RUN --split test`."
    names = list(result.metrics)
    every = {"both": result.metrics, "head": result.head, "tail": result.tail}
    sides = {side: figures for side, figures in every.items() if figures}
    rows: list[list[str]] = [["", *names], ["---"] + ["---:"] * len(names)]
    rows += [[side, *(f"{figures[name]:.4f}" for name in names)] for side, figures in sides.items()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{_code(protocol_line(result.protocol))}\n\n{table}"


def _table(facts: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())])


def _code(value: object) -> str:
    """Return text that neither Markdown nor HTML reads as anything but itself, in a table too."""
    text = shown(str(value)).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else ""
