"""Names of entities and relations as arguments: a shell completes them from RUN's labels.sqlite."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from kgshard_tools.labels.matching import Kind

_MOST_SHOWN = 30
# "a/b:c" and the like mean themselves to a shell.
_QUOTED = re.compile(r"[^\w/.:+@%=-]")


class Name(click.ParamType[str]):
    """A label, or #ROW. Completed with labels that begin so, the most frequent first."""

    name = "name"

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        # Behind an option that lacks its value, click has not come to the arguments yet.
        run = ctx.params.get("run") or next(iter(ctx.args), None)
        try:
            labels = _labels_beginning(Path(run), incomplete, self.kind) if run else []
        except Exception:  # Whatever it is, a prompt that somebody types at is no place to say it.
            return []
        return [CompletionItem(_as_typed(label)) for label in labels if label.isprintable()]


ENTITY_NAME = Name("entity")
RELATION_NAME = Name("relation")


def _labels_beginning(run: Path, text: str, kind: Kind) -> list[str]:
    """Return labels of a run, or of the run that a checkpoint folder lies in."""
    from kgshard_tools.labels.store import LabelStore, labels_path

    paths = [labels_path(folder) for folder in (run, run.absolute().parent.parent)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return []
    with LabelStore(path) as store:
        return store.complete(text, _MOST_SHOWN, kind)


def _as_typed(label: str) -> str:
    """Return what a shell puts on its line for a label.

    zsh and fish quote it; bash puts it there as it is, after the script's `read` has taken every first
    backslash away, and a comma at the end.
    """
    if os.environ.get("_KGSHARD_COMPLETE", "").startswith("bash"):
        return _QUOTED.sub(_quoted_for_bash, label)
    return label


def _quoted_for_bash(match: re.Match[str]) -> str:
    char = match[0]
    if char == ",":
        return "\\,"
    return 2 * "\\" + (2 * char if char == "\\" else char)
